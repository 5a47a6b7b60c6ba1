# The Adam kernels and their workers.
mlpo_test(adam_test LIBS mlpo_adam SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_kernel_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_values_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_convert_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_stats_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/adam_targets_test.cc)
