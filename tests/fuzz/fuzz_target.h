// A fuzz target: one function that takes any bytes, and the inputs to begin with. Linked with replay_main.cc (under
// AddressSanitizer), or with clang's libFuzzer (MLPO_FUZZ).
//
// What must hold is said by FUZZ_CHECK, whatever the build; sanitizers see the rest. A target keeps nothing from one
// input to the next but what is expensive to make and the same for all. One thread, unless the target has its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace mlpo::test {

// Inputs that get far. Texts are in corpus/<target> instead.
std::vector<std::string> FuzzSeeds();

#define FUZZ_CHECK(condition, what)                                                     \
  do {                                                                                  \
    if (!(condition)) ::mlpo::test::FuzzFailed(__FILE__, __LINE__, #condition, (what)); \
  } while (false)

[[noreturn]] inline void FuzzFailed(const char* file, int line, const char* condition, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s does not hold: %s\n", file, line, condition, what.c_str());
  std::abort();
}

// Takes choices off the front of an input; zeros once it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : left_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return left_.empty(); }
  template <class T>
  T Take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value = {};
    const size_t count = std::min(sizeof value, left_.size());
    std::memcpy(&value, left_.data(), count);
    left_.remove_prefix(count);
    return value;
  }
  uint8_t Byte() { return Take<uint8_t>(); }
  // Fewer at its end.
  std::string_view Bytes(size_t count) {
    const std::string_view bytes = left_.substr(0, count);
    left_.remove_prefix(bytes.size());
    return bytes;
  }
  std::string_view Rest() { return Bytes(left_.size()); }

 private:
  std::string_view left_;
};

// For seeds: the bytes of a value behind what is there.
template <class T>
void Put(std::string* input, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  input->append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace mlpo::test
