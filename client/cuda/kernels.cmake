# Finds the CUDA toolkit, and sets mlpo_cuda_lacks to why the CUDA side cannot be built: "" if it can. Shared with
# python/CMakeLists.txt.
#
# 12.8 is the first that knows all of the architectures below, and has cudaGetDriverEntryPointByVersion (12.5).
set(MLPO_CUDA_ARCHITECTURES "80;90;100" CACHE STRING "Compute capabilities that libmlpo_cuda has kernels for")
set(mlpo_cuda_folder ${CMAKE_CURRENT_LIST_DIR})
set(mlpo_cuda_lacks "")
find_package(CUDAToolkit 12.8 QUIET)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE OR NOT TARGET CUDA::cudart)
  set(mlpo_cuda_lacks "no CUDA toolkit from 12.8 on with nvcc and libcudart was found (CUDAToolkit_ROOT says where)")
else()
  # A compiler may be newer than nvcc takes.
  set(pair "${CUDAToolkit_NVCC_EXECUTABLE} ${CUDAToolkit_VERSION} ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION}")
  if(NOT MLPO_CUDA_TRIED STREQUAL pair)
    set(try ${CMAKE_CURRENT_BINARY_DIR}/try_nvcc)
    file(WRITE ${try}.cu "")
    execute_process(COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -c ${try}.cu -o ${try}.o -std=c++20 -ccbin
                            ${CMAKE_CXX_COMPILER} RESULT_VARIABLE tried OUTPUT_FILE ${try}.log ERROR_FILE ${try}.log)
    if(tried EQUAL 0)
      set(MLPO_CUDA_TRIED "${pair}" CACHE INTERNAL "nvcc works with this compiler")
    else()
      set(mlpo_cuda_lacks "nvcc ${CUDAToolkit_VERSION} does not work with ${CMAKE_CXX_COMPILER}, see ${try}.log")
    endif()
  endif()
endif()

# mlpo_cuda_kernels(OUTPUT): the object of kernels.cu, by nvcc itself. One file: CMake's own support of CUDA would compile
# test programs for each build folder, which takes longer.
function(mlpo_cuda_kernels output)
  cmake_path(GET mlpo_cuda_folder PARENT_PATH client)
  cmake_path(GET client PARENT_PATH root)
  set(code)
  foreach(architecture ${MLPO_CUDA_ARCHITECTURES})
    list(APPEND code -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  # For what comes after the newest of them.
  list(GET MLPO_CUDA_ARCHITECTURES -1 newest)
  list(APPEND code -gencode arch=compute_${newest},code=compute_${newest})
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -c ${mlpo_cuda_folder}/kernels.cu -o ${output} -std=c++20 -O3 -fmad=false
            ${code} -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler -fPIC,-fvisibility=hidden,-Wall -I${root}
    DEPENDS ${mlpo_cuda_folder}/kernels.cu ${mlpo_cuda_folder}/kernels.h
    COMMENT "Building CUDA object kernels.o"
    VERBATIM)
endfunction()
