if(MLPO_SANITIZE STREQUAL "thread")  # these have one thread
  return()
endif()
mlpo_test(quota_book_test LIBS mlpo_session SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/quota_book_test.cc)
mlpo_test(session_server_test LIBS mlpo_session SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/session_server_test.cc)
mlpo_test(registration_test LIBS mlpo_session SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/registration_test.cc)
