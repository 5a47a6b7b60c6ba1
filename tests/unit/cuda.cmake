# The CUDA side's host logic, on a stand-in for the CUDA runtime. Without the CUDA side there is nothing to test.
if(NOT TARGET mlpo_cuda)
  return()
endif()
find_package(CUDAToolkit QUIET)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_library(mlpo_cuda_reference STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/cuda_kernels.cc
                                       ${PROJECT_SOURCE_DIR}/daemon/adam/reference.cc)
target_include_directories(mlpo_cuda_reference PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/client/include)
target_include_directories(mlpo_cuda_reference SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})

# Named as the runtime is, so that libmlpo_cuda.so, unchanged, gets this one from a program that links it first.
add_library(fake_cudart SHARED ${CMAKE_CURRENT_SOURCE_DIR}/support/fake_cuda.cc)
target_link_libraries(fake_cudart PUBLIC Threads::Threads PRIVATE mlpo_cuda_reference)
target_include_directories(fake_cudart SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
set_target_properties(
  fake_cudart
  PROPERTIES OUTPUT_NAME cudart SOVERSION ${CUDAToolkit_VERSION_MAJOR} LIBRARY_OUTPUT_DIRECTORY
                                                                       ${PROJECT_BINARY_DIR}/tests/fake_cuda)
configure_file(${CMAKE_CURRENT_SOURCE_DIR}/support/fake_cuda.map.in ${CMAKE_CURRENT_BINARY_DIR}/fake_cuda.map @ONLY)
target_link_options(fake_cudart PRIVATE -Wl,--version-script=${CMAKE_CURRENT_BINARY_DIR}/fake_cuda.map)

mlpo_test(cuda_copies_test LIBS fake_cudart mlpo_cuda mlpo_fake_daemon
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/cuda_copies_test.cc)
mlpo_test(cuda_writes_test LIBS fake_cudart mlpo_cuda mlpo_fake_daemon
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/cuda_writes_test.cc)
mlpo_test(cuda_kernels_test LIBS fake_cudart mlpo_cuda mlpo_cuda_reference
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/cuda_kernels_test.cc)
add_test(NAME cuda_library_test
         COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/unit/cuda_library_test.py $<TARGET_FILE:mlpo_cuda>
                 ${PROJECT_SOURCE_DIR} ${MLPO_CUDA_ARCHITECTURES})
set_tests_properties(cuda_library_test PROPERTIES TIMEOUT 60)

# On a GPU, with the real runtime; tests/device/check runs it with what belongs to it. CUDA and sanitizers do not mix.
if(MLPO_SANITIZE)
  return()
endif()
add_executable(cuda_device_test ${CMAKE_CURRENT_SOURCE_DIR}/device/cuda_device_test.cc)
target_link_libraries(cuda_device_test PRIVATE mlpo_cuda CUDA::cudart mlpo_cuda_reference mlpo_daemon_process)
add_test(NAME cuda_device_test COMMAND cuda_device_test)
set_tests_properties(cuda_device_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
