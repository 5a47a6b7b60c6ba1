// adam_bench [SECONDS]: parameters per second of the kernel, and of a plain read-modify-write loop that moves the same
// bytes, on one thread, taking turns, so that both see the same machine. Arrays are far larger than the caches.
//
// Prints one JSON line for each instruction set: BF16 gradient and parameter, 28 bytes a parameter; medians.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/adam/kernel.h"

namespace mlpo {
namespace {

constexpr size_t kBlock = 1 << 20;
constexpr size_t kBlocks = 16;

struct Arrays {
  std::vector<float> p, m, v;
  std::vector<uint16_t> slot;
  Arrays() : p(kBlock * kBlocks), m(p.size()), v(p.size()), slot(p.size()) {
    uint32_t x = 1;
    for (size_t i = 0; i < p.size(); ++i) {
      x = x * 1664525 + 1013904223;
      p[i] = static_cast<float>(x) * 0x1p-32f;
      m[i] = p[i] * 0.1f;
      v[i] = p[i] * p[i] * 0.01f + 1e-6f;
    }
  }
};

// Reads and writes p, m, v and the slot with nearly no arithmetic, vectorised by the compiler: the most that a loop
// over this memory does here.
inline __attribute__((always_inline)) void LoopBody(float* p, float* m, float* v, uint16_t* slot, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    p[i] = p[i] * 0.999f;
    m[i] = m[i] * 0.999f;
    v[i] = v[i] * 0.999f;
    slot[i] = static_cast<uint16_t>(slot[i] ^ 1);
  }
}

#define MLPO_LOOP __attribute__((noinline, optimize("O3")))
MLPO_LOOP void BaselineLoop(float* p, float* m, float* v, uint16_t* slot, size_t n) { LoopBody(p, m, v, slot, n); }

#if defined(__x86_64__) && !defined(__clang__)
MLPO_LOOP __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))) void WideLoop(float* p, float* m,
                                                                                                     float* v,
                                                                                                     uint16_t* slot,
                                                                                                     size_t n) {
  LoopBody(p, m, v, slot, n);
}
bool CpuIsWide() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"); }
#else
void WideLoop(float* p, float* m, float* v, uint16_t* slot, size_t n) { LoopBody(p, m, v, slot, n); }
bool CpuIsWide() { return false; }
#endif

void PlainLoop(float* p, float* m, float* v, uint16_t* slot, size_t n) {
  (CpuIsWide() ? WideLoop : BaselineLoop)(p, m, v, slot, n);
}

template <class Function>
double Seconds(Function function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void Measure(const std::string& target, double seconds, Arrays* a) {
  mlpo_hyper hyper = {};
  hyper.lr = 1e-3;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.999;
  hyper.eps = 1e-8;
  hyper.weight_decay = 0.01;
  hyper.grad_scale = 1;
  hyper.mode = MLPO_ADAMW;
  const AdamScalars scalars = MakeScalars(hyper, 100);
  std::vector<double> kernel, loop, stats;
  double spent = 0;
  for (size_t round = 0; spent < seconds || kernel.size() < 3 * kBlocks; ++round) {
    const size_t at = round % kBlocks * kBlock;
    AdamRange range;
    range.p = a->p.data() + at;
    range.m = a->m.data() + at;
    range.v = a->v.data() + at;
    range.grad = range.param = a->slot.data() + at;
    range.grad_dtype = range.dtype = MLPO_BFLOAT16;
    range.n = kBlock;
    kernel.push_back(Seconds([&] { AdamUpdate(scalars, range); }));
    const size_t other = (round + kBlocks / 2) % kBlocks * kBlock;  // far from what the kernel left in the caches
    loop.push_back(Seconds([&] {
      PlainLoop(a->p.data() + other, a->m.data() + other, a->v.data() + other, a->slot.data() + other, kBlock);
    }));
    stats.push_back(Seconds([&] {
      for (size_t chunk = 0; chunk < kBlock; chunk += MLPO_STAT_CHUNK_ELEMENTS) {
        StatLanes lanes;
        AccumulateStats(a->slot.data() + other + chunk, MLPO_BFLOAT16, 0, MLPO_STAT_CHUNK_ELEMENTS, &lanes);
      }
    }));
    spent += kernel.back() + loop.back() + stats.back();
  }
  const double adam_per_s = kBlock / Median(kernel), loop_per_s = kBlock / Median(loop);
  std::printf(
      "{\"target\": \"%s\", \"parameters_per_s\": %.4g, \"loop_parameters_per_s\": %.4g, \"ratio\": %.3f, "
      "\"stats_elements_per_s\": %.4g}\n",
      target.c_str(), adam_per_s, loop_per_s, adam_per_s / loop_per_s, kBlock / Median(stats));
}

int Main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2;
  if (!(seconds > 0)) {
    std::fprintf(stderr, "usage: adam_bench [SECONDS]\n");
    return 64;
  }
  Arrays arrays;
  for (const std::string& target : RunnableTargets()) {
    const Status status = SetTarget(target);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      return 70;
    }
    Measure(target, seconds, &arrays);
  }
  return 0;
}

}  // namespace
}  // namespace mlpo

int main(int argc, char** argv) { return mlpo::Main(argc, argv); }
