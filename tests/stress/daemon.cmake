# The real daemon under attack and under kills. Long forms with MLPO_LONG=1 in the environment.
find_package(nlohmann_json REQUIRED)
add_library(mlpo_raw_session STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/raw_session.cc)
target_include_directories(mlpo_raw_session PUBLIC ${PROJECT_SOURCE_DIR})
add_executable(training_client ${CMAKE_CURRENT_SOURCE_DIR}/support/training_client.cc)
target_link_libraries(training_client PRIVATE mlpo_client_static mlpo_adam)

function(mlpo_daemon_test name source)
  mlpo_test(${name} LIBS mlpo_daemon_process mlpo_raw_session mlpo_client_static mlpo_adam nlohmann_json::nlohmann_json
            SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/${source} ${ARGN} TIMEOUT 900)
  target_compile_definitions(${name} PRIVATE MLPO_TRAINING_CLIENT="$<TARGET_FILE:training_client>")
  add_dependencies(${name} training_client)
endfunction()

mlpo_daemon_test(kill_clients stress/kill_clients.cc)
mlpo_daemon_test(hostile_handshake stress/hostile_handshake.cc)
mlpo_daemon_test(hostile_ring stress/hostile_ring.cc)
mlpo_daemon_test(multi_rank stress/multi_rank.cc)
mlpo_daemon_test(random_operations stress/random_operations.cc)
mlpo_daemon_test(bad_input_test integration/bad_input_test.cc)
mlpo_daemon_test(full_path_test integration/full_path_test.cc)
mlpo_daemon_test(objects_test integration/objects_test.cc)
mlpo_daemon_test(integrity_test integration/integrity_test.cc)
