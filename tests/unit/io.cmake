mlpo_test(io_pool_test LIBS mlpo_io SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_memory_limit_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_buffer_pool_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_pool_growth_test.cc)
mlpo_test(io_path_test LIBS mlpo_io SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_files_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_probe_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_scratch_cleanup_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_distinct_paths_test.cc)
mlpo_test(io_path_keeper_test LIBS mlpo_io SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_keeper_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_extent_store_test.cc)
mlpo_test(io_queue_test TIMEOUT 3600 LIBS mlpo_io SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_piece_table_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_queue_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_pool_rings_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_path_faults_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/io_file_systems_test.cc)
