mlpo_test(unix_socket_test LIBS mlpo_base SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/control_unix_socket_test.cc)
