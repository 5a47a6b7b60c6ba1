if(MLPO_SANITIZE STREQUAL "thread")  # these have one thread
  return()
endif()
mlpo_test(config_test LIBS mlpo_config
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/config_units_test.cc ${CMAKE_CURRENT_SOURCE_DIR}/unit/config_load_test.cc
                  ${CMAKE_CURRENT_SOURCE_DIR}/unit/config_errors_test.cc)
