mlpo_test(base_thread_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/base_thread_test.cc)
