# Storage that fails under a daemon that trains: all of it by tests/stress/faults, a little in every run of the tests.
add_library(mlpo_storage_fault STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/storage_fault.cc)
target_link_libraries(mlpo_storage_fault PUBLIC mlpo_fault_fs)
add_library(mlpo_long_run STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/long_run.cc)
target_include_directories(mlpo_long_run PUBLIC ${PROJECT_SOURCE_DIR})
target_compile_definitions(mlpo_long_run PRIVATE MLPO_SOURCE_FOLDER="${PROJECT_SOURCE_DIR}")
target_link_libraries(mlpo_long_run PUBLIC nlohmann_json::nlohmann_json)
add_executable(long_forms ${CMAKE_CURRENT_SOURCE_DIR}/stress/long_forms.cc)
target_link_libraries(long_forms PRIVATE mlpo_long_run)
mlpo_test(long_run_test LIBS mlpo_long_run mlpo_client_static
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/long_run_test.cc)
target_compile_definitions(long_run_test PRIVATE MLPO_LONG_FORMS="$<TARGET_FILE:long_forms>")
add_dependencies(long_run_test long_forms)
add_executable(fault_matrix ${CMAKE_CURRENT_SOURCE_DIR}/stress/fault_matrix.cc)
target_link_libraries(fault_matrix PRIVATE mlpo_storage_fault mlpo_long_run mlpo_daemon_process mlpo_client_static
                                           mlpo_adam nlohmann_json::nlohmann_json)
# What CI runs is short, and shorter under a sanitizer, which is there for the daemon's threads and memory. Each takes
# another part: the seed draws it.
if(MLPO_SANITIZE STREQUAL "address")
  set(short_faults --sample 4 --seed 2)
elseif(MLPO_SANITIZE)
  set(short_faults --sample 4 --seed 3)
else()
  set(short_faults --sample 14 --seed 1)
endif()
add_test(NAME fault_matrix COMMAND fault_matrix ${short_faults})
set_tests_properties(fault_matrix PROPERTIES TIMEOUT 900 SKIP_RETURN_CODE 77 LABELS stress)
# Two segments, so that what comes back is compared once; an hour of it by tests/stress/soak.
add_executable(soak ${CMAKE_CURRENT_SOURCE_DIR}/stress/soak.cc)
target_link_libraries(soak PRIVATE mlpo_fault_fs mlpo_long_run mlpo_raw_session mlpo_daemon_process mlpo_client_static
                                   mlpo_adam nlohmann_json::nlohmann_json)
target_compile_definitions(soak PRIVATE MLPO_TRAINING_CLIENT="$<TARGET_FILE:training_client>")
add_dependencies(soak training_client)
add_test(NAME soak COMMAND soak --segments 2 --segment 3)
set_tests_properties(soak PROPERTIES TIMEOUT 900 LABELS stress)
# kill -9 of ranks, daemon or both while states are saved and restored; 500 moments by tests/stress/kills. With seed 1,
# the default, one path is copied and the other one cloned or handed over.
add_executable(kills ${CMAKE_CURRENT_SOURCE_DIR}/stress/kills.cc)
target_link_libraries(kills PRIVATE mlpo_long_run mlpo_daemon_process mlpo_client_static nlohmann_json::nlohmann_json)
target_compile_definitions(kills PRIVATE MLPO_TRAINING_CLIENT="$<TARGET_FILE:training_client>")
add_dependencies(kills training_client)
if(MLPO_SANITIZE)
  set(short_kills 5)
else()
  set(short_kills 10)
endif()
add_test(NAME kills COMMAND kills --moments ${short_kills})
set_tests_properties(kills PROPERTIES TIMEOUT 900 LABELS stress)
