mlpo_test(io_queue_test LIBS mlpo_io SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_queue_test.cc)
