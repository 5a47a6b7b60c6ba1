// Structs of the C API that begin with struct_size: callers built against an older or newer header go on working.
#pragma once

#include <errno.h>
#include <string.h>

#include <cstddef>

#include "client/src/error.h"

namespace mlpo::client {

// Lays the caller's fields over the defaults in *options. A newer caller's extra fields must be 0: what this library
// does not know it cannot honour.
template <class T>
int TakeStruct(const T* given, T* options, const char* name) {
  const size_t size = given->struct_size;
  if (size < sizeof(size_t)) return Fail(-EINVAL, "%s.struct_size is %zu: set it to sizeof the struct", name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0)
      return Fail(-EINVAL, "%s has a field at byte %zu that this library (%s) does not know", name, i, "0.1.0");
  }
  memcpy(options, given, size < sizeof(T) ? size : sizeof(T));
  return 0;
}

// Gives the caller as much of `full` as its struct holds.
template <class T>
int GiveStruct(const T& full, T* out, const char* name) {
  if (out == nullptr) return Fail(-EINVAL, "%s is NULL", name);
  const size_t size = out->struct_size;
  if (size < sizeof(size_t)) return Fail(-EINVAL, "%s.struct_size is %zu: set it to sizeof the struct", name, size);
  memcpy(out, &full, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = size;
  return 0;
}

}  // namespace mlpo::client
