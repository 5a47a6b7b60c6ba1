# mlpo_cuda_kernels(OUTPUT): the object of kernels.cu, by nvcc itself. One file: CMake's own support of CUDA would compile
# test programs for each build folder, which takes longer. Shared with python/CMakeLists.txt. Needs CUDAToolkit.
set(MLPO_CUDA_ARCHITECTURES "80;90;100" CACHE STRING "Compute capabilities that libmlpo_cuda has kernels for")
set(mlpo_cuda_folder ${CMAKE_CURRENT_LIST_DIR})
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
