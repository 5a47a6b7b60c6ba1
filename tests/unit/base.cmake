mlpo_test(checksum_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/checksum_test.cc)
mlpo_test(loose_threads_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/loose_threads_test.cc)
mlpo_test(base_thread_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/base_thread_test.cc)
mlpo_test(base_log_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/base_log_test.cc)
