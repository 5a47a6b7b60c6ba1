mlpo_test(unix_socket_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/control_unix_socket_test.cc)
find_package(nlohmann_json REQUIRED)
mlpo_test(control_server_test LIBS mlpo_control nlohmann_json::nlohmann_json Boost::headers
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/control_server_test.cc)
