# The Adam kernels and their workers.
# The long form (MLPO_LONG=1) goes through all 2^32 values.
mlpo_test(adam_test TIMEOUT 3600 LIBS mlpo_adam SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_kernel_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_values_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_convert_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_stats_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_targets_test.cc)
mlpo_test(adam_worker_pool_test LIBS mlpo_adam SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_cores_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_worker_pool_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_cpu_quota_test.cc)
add_test(NAME adam_dispatch_test COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_dispatch_test.sh $<TARGET_FILE:mlpo_adam>)
set_tests_properties(adam_dispatch_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 120)
