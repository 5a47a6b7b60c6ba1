add_library(mlpo_daemon_process STATIC support/daemon_process.cc)
target_include_directories(mlpo_daemon_process PUBLIC ${PROJECT_SOURCE_DIR})
target_compile_definitions(mlpo_daemon_process PRIVATE MLPO_TEST_DAEMON="$<TARGET_FILE:mlpo-daemon>")
add_dependencies(mlpo_daemon_process mlpo-daemon)

mlpo_test(training_test LIBS mlpo_daemon_process mlpo_client_static mlpo_adam
  SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/integration/training_test.cc)

add_test(NAME bench_test COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/integration/bench_test.sh ${PROJECT_BINARY_DIR}/bin)
set_tests_properties(bench_test PROPERTIES TIMEOUT 300)
# Programs under sanitizers are tested by the other tests.
if(NOT MLPO_SANITIZE)
  add_test(NAME compare_smoke_test COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/integration/compare_test.sh ${PROJECT_BINARY_DIR}/bin)
  set_tests_properties(compare_smoke_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
endif()

# Looking into daemons: bench, counters, metrics, trace, top, doctor. Under sanitizers other tests run the same daemons, with
# their counters; these would only take longer.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(NOT MLPO_SANITIZE)
  foreach(name bench counters metrics trace top doctor)
    add_test(NAME inspect_${name}_test
             COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/integration/inspect_${name}_test.py
                     ${PROJECT_BINARY_DIR}/bin)
    set_tests_properties(inspect_${name}_test PROPERTIES TIMEOUT 300)
  endforeach()
endif()
