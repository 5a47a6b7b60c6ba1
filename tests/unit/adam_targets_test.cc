// Choosing the instruction set.
#include <algorithm>

#include "tests/unit/adam_arrays.h"

namespace mlpo::testing {
namespace {

bool Has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST_CASE("C32_EachSetOfTheCpuCanBeForced", "[adam]") {
  const std::vector<std::string> names = RunnableTargets();
  REQUIRE(names.back() == "scalar");
  for (const std::string& name : names) {
    REQUIRE(SetTarget(name).ok());
    CHECK(ActiveTarget() == name);
  }
  REQUIRE(SetTarget("auto").ok());
  CHECK(ActiveTarget() == names.front());
}

TEST_CASE("C32_WhatTheCpuHasIsCompiled", "[adam]") {
#if defined(__x86_64__)
  const std::vector<std::string> names = RunnableTargets();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  CHECK(Has(names, "avx2") == avx2);
  CHECK(Has(names, "avx512") == avx512);
  CHECK(Has(names, "sse4") == (__builtin_cpu_supports("sse4.2") != 0));
#else
  WARN("skipped: this CPU is not an x86-64");
#endif
}

TEST_CASE("C32_ASetThatTheCpuLacksIsRefusedByName", "[adam]") {
  const std::vector<std::string> names = RunnableTargets();
  bool refused = false;
  for (const std::string name : {"avx512", "avx2", "sse4", "neon"}) {
    if (Has(names, name)) continue;
    const std::string before = ActiveTarget();
    const Status status = SetTarget(name);
    CHECK(status.code() == -ENOTSUP);
    CHECK(status.message().find("'" + name + "'") != std::string::npos);
    CHECK(status.message().find(names.front()) != std::string::npos);
    CHECK(ActiveTarget() == before);
    refused = true;
  }
  CHECK(refused);  // no CPU has both NEON and SSE4
}

TEST_CASE("Targets.AnUnknownNameIsInvalid", "[adam]") {
  for (const std::string name : {"", "AVX2", "avx1024", "mmx"}) {
    const Status status = SetTarget(name);
    CHECK(status.code() == -EINVAL);
    CHECK(status.message().find("scalar") != std::string::npos);
  }
}

}  // namespace
}  // namespace mlpo::testing
