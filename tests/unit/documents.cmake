# Man pages, completion and the example configuration against the programs themselves.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(NOT MLPO_SANITIZE)
  add_test(NAME documents_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/unit/documents_test.py
                                       ${PROJECT_BINARY_DIR}/bin ${PROJECT_SOURCE_DIR})
  set_tests_properties(documents_test PROPERTIES TIMEOUT 120)
endif()

# The measuring programs, without measuring.
add_test(NAME compare_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/unit/compare_test.py ${PROJECT_SOURCE_DIR})
set_tests_properties(compare_test PROPERTIES TIMEOUT 120)
