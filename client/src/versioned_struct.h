// Structs of the C API that begin with struct_size: callers built against an older or newer header go on working.
#pragma once

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cstddef>

#include "mlpo/client.h"

namespace mlpo::client {

// Its text through the C API: the libraries on top of this one use this header too.
__attribute__((format(printf, 1, 2))) inline int FailStruct(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return mlpo_fail(-EINVAL, text);
}

// Lays the caller's fields over the defaults in *options. A newer caller's extra fields must be 0: what this library
// does not know it cannot honour.
template <class T>
int TakeStruct(const T* given, T* options, const char* name) {
  const size_t size = given->struct_size;
  if (size < sizeof(size_t)) return FailStruct("%s.struct_size is %zu: set it to sizeof the struct", name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return FailStruct("%s has a field at byte %zu that this library (%s) does not know", name, i,
                      mlpo_client_version());
  }
  memcpy(options, given, size < sizeof(T) ? size : sizeof(T));
  return 0;
}

// Gives the caller as much of `full` as its struct holds.
template <class T>
int GiveStruct(const T& full, T* out, const char* name) {
  if (out == nullptr) return FailStruct("%s is NULL", name);
  const size_t size = out->struct_size;
  if (size < sizeof(size_t)) return FailStruct("%s.struct_size is %zu: set it to sizeof the struct", name, size);
  memcpy(out, &full, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = size;
  return 0;
}

}  // namespace mlpo::client
