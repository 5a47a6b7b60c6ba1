mlpo_test(checksum_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/checksum_test.cc)
