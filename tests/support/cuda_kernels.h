// What the kernels of client/cuda/kernels.cu do, on the host, by the scalar reference of the daemon's arithmetic.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mlpo/cuda.h"

// For a stand-in runtime: what a launch of the kernel with these arguments does; nullptr for an unknown kernel.
std::function<void()> KernelWork(const std::string& kernel, void** arguments, unsigned grid, unsigned block);

// out[i] = round(f32(x[i]) * f32(scale)), tensors in host memory one after another.
void ReferencePack(const std::vector<mlpo_cuda_tensor>& tensors, void* out, int32_t out_dtype, double scale);
// As proto/FORMAT.md, section 5, has it.
void ReferenceNorm(const std::vector<mlpo_cuda_tensor>& tensors, double* sum_of_squares, bool* all_finite);
