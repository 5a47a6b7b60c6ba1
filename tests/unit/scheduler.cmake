mlpo_test(scheduler_test LIBS mlpo_scheduler SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_buffers_test.cc)
mlpo_test(scheduler_objects_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_objects_test.cc)
mlpo_test(window_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/window_test.cc)
