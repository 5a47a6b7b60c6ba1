find_package(nlohmann_json REQUIRED)
mlpo_test(unix_socket_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/control_unix_socket_test.cc)
mlpo_test(control_server_test LIBS mlpo_control nlohmann_json::nlohmann_json Boost::headers
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/control_server_test.cc)

# mlpo-ctl as a program, with a stand-in for the daemon that it starts.
add_executable(stand_in_daemon ${CMAKE_CURRENT_SOURCE_DIR}/support/stand_in_daemon.cc)
target_link_libraries(stand_in_daemon PRIVATE mlpo_control Boost::headers)
mlpo_test(ctl_test LIBS mlpo_control nlohmann_json::nlohmann_json Boost::headers
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/control_ctl_test.cc)
target_compile_definitions(ctl_test PRIVATE MLPO_CTL="$<TARGET_FILE:mlpo-ctl>"
                                            MLPO_STAND_IN="$<TARGET_FILE:stand_in_daemon>")
add_dependencies(ctl_test mlpo-ctl mlpo-daemon stand_in_daemon)
