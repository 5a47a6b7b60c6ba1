# What an installation has besides programs: each test in a node of its own (deploy/node.py).
# They install what is built; programs under sanitizers need what the units' limits and filters do not leave them.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
if(NOT MLPO_SANITIZE)
  foreach(name sandbox package slurm jobs watchdog manifests)
    add_test(NAME deploy_${name}_test COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/deploy/${name}_test.py
                                              ${PROJECT_BINARY_DIR})
    set_tests_properties(deploy_${name}_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
  endforeach()
endif()
