add_library(mlpo_fake_daemon STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/fake_daemon.cc)
target_include_directories(mlpo_fake_daemon PUBLIC ${PROJECT_SOURCE_DIR})
target_link_libraries(mlpo_fake_daemon PUBLIC Threads::Threads)
foreach(part control deferred handshake lifetime registration requests state)
  mlpo_test(client_${part}_test LIBS mlpo_client_static mlpo_fake_daemon
            SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/client_${part}_test.cc)
endforeach()
