// ElementBytes: the size of one element of a tensor. TypeNamed: its type, by the name that flags have for it.
#pragma once

#include <cstddef>
#include <string_view>

#include "proto/tensor.h"

namespace mlpo {

inline size_t ElementBytes(mlpo_dtype dtype) { return dtype == MLPO_FLOAT32 ? 4 : 2; }

// float32, float16, else bfloat16.
inline mlpo_dtype TypeNamed(std::string_view name) {
  return name == "float32" ? MLPO_FLOAT32 : name == "float16" ? MLPO_FLOAT16 : MLPO_BFLOAT16;
}

}  // namespace mlpo
