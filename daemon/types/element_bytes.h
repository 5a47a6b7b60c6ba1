// ElementBytes: the size of one element of a tensor.
#pragma once

#include <cstddef>

#include "proto/tensor.h"

namespace mlpo {

inline size_t ElementBytes(mlpo_dtype dtype) { return dtype == MLPO_FLOAT32 ? 4 : 2; }

}  // namespace mlpo
