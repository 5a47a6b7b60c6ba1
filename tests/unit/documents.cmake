# Man pages, completion, the example configuration and the pages for users against the programs themselves.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(NOT MLPO_SANITIZE)
  foreach(name documents pages)
    add_test(NAME ${name}_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/unit/${name}_test.py
                                       ${PROJECT_BINARY_DIR}/bin ${PROJECT_SOURCE_DIR})
    set_tests_properties(${name}_test PROPERTIES TIMEOUT 120)
  endforeach()
endif()

# The measuring programs, without measuring.
add_test(NAME compare_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/unit/compare_test.py ${PROJECT_SOURCE_DIR})
set_tests_properties(compare_test PROPERTIES TIMEOUT 120)
