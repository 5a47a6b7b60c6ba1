# The project about itself: who includes whom, how results are counted, where each kind of fault is tested.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
foreach(name structure count_results cases)
  add_test(NAME ${name}_test COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/unit/${name}_test.py)
  set_tests_properties(${name}_test PROPERTIES TIMEOUT 60)
endforeach()

add_test(NAME readme_test COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/unit/readme_test.sh ${PROJECT_BINARY_DIR}
                                  ${PROJECT_SOURCE_DIR} "${MLPO_SANITIZE}")
set_tests_properties(readme_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
