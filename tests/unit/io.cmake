mlpo_test(io_queue_test LIBS mlpo_io SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_piece_table_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_queue_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_faults_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_file_systems_test.cc)
