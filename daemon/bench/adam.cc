// "mlpo-bench adam": the update kernel on all workers, beside a plain loop that moves the same bytes, taking turns, so
// that both see the same machine. State lies in blocks as the daemon keeps it, far more than the caches hold; each turn
// takes another block for the kernel and one half of all blocks further on for the loop.
#include "daemon/adam/kernel.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/adam/worker_pool.h"
#include "daemon/bench/bench.h"
#include "daemon/bench/ping_pong.h"
#include "daemon/bench/timed_job.h"
#include "daemon/io/buffer_pool.h"

namespace mlpo::bench {
namespace {

constexpr size_t kBlock = size_t{1} << 20;  // parameters
constexpr size_t kPiece = size_t{64} << 10;
constexpr size_t kBlocksPerTurn = 4;  // so that waking the workers does not count
constexpr mlpo_dtype kTypes[] = {MLPO_BFLOAT16, MLPO_FLOAT16, MLPO_FLOAT32};

const char* NameOf(mlpo_dtype dtype) {
  return dtype == MLPO_FLOAT32 ? "float32" : dtype == MLPO_FLOAT16 ? "float16" : "bfloat16";
}

// ---- The loop

// Reads the gradient, reads and writes p, m and v, writes the parameter, with nearly no arithmetic, vectorised by the
// compiler: the most that a loop over this memory does here. Gradient and parameter are one array if their types have
// one size, as in a slot.
template <class Grad, class Param>
inline __attribute__((always_inline)) void LoopBody(float* p, float* m, float* v, const void* grad, void* param) {
  const auto* g = static_cast<const Grad*>(grad);
  auto* out = static_cast<Param*>(param);
#pragma GCC ivdep
  for (size_t i = 0; i < kPiece; ++i) {
    p[i] = p[i] * 0.999f;
    m[i] = m[i] * 0.999f;
    v[i] = v[i] * 0.999f;
    out[i] = static_cast<Param>(g[i] ^ 1);
  }
}

#define MLPO_LOOP __attribute__((noinline, optimize("O3")))
template <class Grad, class Param>
MLPO_LOOP void BaselineLoop(float* p, float* m, float* v, const void* grad, void* param) {
  LoopBody<Grad, Param>(p, m, v, grad, param);
}

#if defined(__x86_64__) && !defined(__clang__)
template <class Grad, class Param>
MLPO_LOOP __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))) void WideLoop(float* p, float* m,
                                                                                                     float* v,
                                                                                                     const void* grad,
                                                                                                     void* param) {
  LoopBody<Grad, Param>(p, m, v, grad, param);
}
bool CpuIsWide() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"); }
#else
template <class Grad, class Param>
void WideLoop(float* p, float* m, float* v, const void* grad, void* param) {
  LoopBody<Grad, Param>(p, m, v, grad, param);
}
bool CpuIsWide() { return false; }
#endif

using Loop = void (*)(float*, float*, float*, const void*, void*);

template <class Grad, class Param>
Loop Choose() {
  return CpuIsWide() ? WideLoop<Grad, Param> : BaselineLoop<Grad, Param>;
}

Loop ChooseLoop(mlpo_dtype grad, mlpo_dtype dtype) {
  if (ElementBytes(grad) == 2) {
    return ElementBytes(dtype) == 2 ? Choose<uint16_t, uint16_t>() : Choose<uint16_t, uint32_t>();
  }
  return ElementBytes(dtype) == 2 ? Choose<uint32_t, uint16_t>() : Choose<uint32_t, uint32_t>();
}

// ---- What the workers do

struct Arrays {
  const BufferPool* pool;
  const BufferPool* slots;  // 8 bytes a parameter
  size_t blocks;

  float* Part(size_t block, int part) const {
    return reinterpret_cast<float*>(pool->data(static_cast<BufferIndex>(block))) + static_cast<size_t>(part) * kBlock;
  }
  // Behind the gradients of a block, or at their place where both have one size.
  std::byte* Grad(size_t block) const { return slots->data(static_cast<BufferIndex>(block)); }
  std::byte* Param(size_t block, mlpo_dtype grad, mlpo_dtype dtype) const {
    return Grad(block) + (ElementBytes(grad) == ElementBytes(dtype) ? 0 : kBlock * ElementBytes(grad));
  }
};

enum class What { kFill, kGradient, kKernel, kLoop, kStatistics };

class Turn : public Job {
 public:
  Turn(What what, const Arrays& arrays, size_t first_block, size_t blocks, mlpo_dtype grad, mlpo_dtype dtype)
      : what_(what), arrays_(arrays), first_(first_block), grad_(grad), dtype_(dtype), loop_(ChooseLoop(grad, dtype)) {
    pieces = static_cast<uint32_t>(blocks * (kBlock / kPiece));
    mlpo_hyper hyper = {1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, MLPO_ADAMW, 0, 0};
    scalars_ = MakeScalars(hyper, 100);
  }

  void RunPiece(uint32_t piece) override {
    const size_t block = (first_ + piece / (kBlock / kPiece)) % arrays_.blocks;
    const size_t at = piece % (kBlock / kPiece) * kPiece;
    float* p = arrays_.Part(block, 0) + at;
    float* m = arrays_.Part(block, 1) + at;
    float* v = arrays_.Part(block, 2) + at;
    std::byte* grad = arrays_.Grad(block) + at * ElementBytes(grad_);
    std::byte* param = arrays_.Param(block, grad_, dtype_) + at * ElementBytes(dtype_);
    switch (what_) {
      case What::kFill:
        Fill(p, m, v, block * kBlock + at);
        return WriteGradient(grad);
      case What::kGradient:
        return WriteGradient(grad);
      case What::kKernel: {
        AdamRange range;
        range.p = p;
        range.m = m;
        range.v = v;
        range.grad = grad;
        range.param = param;
        range.n = kPiece;
        range.grad_dtype = grad_;
        range.dtype = dtype_;
        return AdamUpdate(scalars_, range);
      }
      case What::kLoop:
        return loop_(p, m, v, grad, param);
      case What::kStatistics:
        for (size_t chunk = 0; chunk < kPiece; chunk += MLPO_STAT_CHUNK_ELEMENTS) {
          StatLanes lanes;
          AccumulateStats(grad + chunk * ElementBytes(grad_), grad_, 0, MLPO_STAT_CHUNK_ELEMENTS, &lanes);
        }
        return;
    }
  }

 private:
  // Numbers as training has them, none denormal.
  static void Fill(float* p, float* m, float* v, size_t seed) {
    uint32_t x = static_cast<uint32_t>(seed) * 2654435761u + 1;
    for (size_t i = 0; i < kPiece; ++i) {
      x = x * 1664525 + 1013904223;
      p[i] = static_cast<float>(x) * 0x1p-32f + 0x1p-10f;
      m[i] = p[i] * 0.1f;
      v[i] = p[i] * p[i] * 0.01f + 1e-6f;
    }
  }
  void WriteGradient(std::byte* grad) const {
    std::vector<float> values(kPiece);
    for (size_t i = 0; i < kPiece; ++i) values[i] = static_cast<float>(i % 1000 + 1) * 1e-4f;
    RoundTo(grad_, values.data(), grad, kPiece);
  }

  const What what_;
  const Arrays& arrays_;
  const size_t first_;
  const mlpo_dtype grad_, dtype_;
  const Loop loop_;
  AdamScalars scalars_;
};

class Bench {
 public:
  explicit Bench(const AdamOptions& options) {
    const uint64_t blocks = std::max<uint64_t>(options.parameters / kBlock, 2 * kBlocksPerTurn);
    BufferPool::Options pool;
    pool.buffer_bytes = 12 * kBlock;
    pool.pool_bytes = blocks * pool.buffer_bytes;
    pool.lock = false;
    pool_ = Taken(BufferPool::Create(pool));
    pool.buffer_bytes = 8 * kBlock;
    pool.pool_bytes = blocks * pool.buffer_bytes;
    pool.huge_pages = BufferPool::HugePages::kNever;  // an arena has none
    slots_ = Taken(BufferPool::Create(pool));
    workers_ = Taken(WorkerPool::Start({options.workers, true}, &done_));
    arrays_ = {pool_.get(), slots_.get(), blocks};
  }

  uint32_t workers() const { return workers_->workers(); }

  // Of the kernel alone.
  double ParametersPerSecond(mlpo_dtype dtype) {
    Seconds(What::kFill, 0, arrays_.blocks, dtype, dtype);
    std::vector<double> speeds;
    for (size_t at = 0; at < 2 * arrays_.blocks; at += kBlocksPerTurn) {
      const double seconds = Seconds(What::kKernel, at % arrays_.blocks, kBlocksPerTurn, dtype, dtype);
      speeds.push_back(kBlocksPerTurn * kBlock / seconds);
    }
    return Median(speeds);
  }

  nlohmann::json Measure(mlpo_dtype grad, mlpo_dtype dtype, double seconds) {
    Seconds(What::kFill, 0, arrays_.blocks, grad, dtype);
    std::vector<double> kernel, ratios, loop, statistics;
    double spent_s = 0;
    const size_t half = arrays_.blocks / 2;
    for (size_t at = 0; spent_s < seconds || kernel.size() < 5; at = (at + kBlocksPerTurn) % arrays_.blocks) {
      const double kernel_s = Seconds(What::kKernel, at, kBlocksPerTurn, grad, dtype);
      const double loop_s = Seconds(What::kLoop, at + half, kBlocksPerTurn, grad, dtype);
      Seconds(What::kGradient, at, kBlocksPerTurn, grad, dtype);  // over the parameters, as a trainer does
      const double statistics_s = Seconds(What::kStatistics, at + half / 2, kBlocksPerTurn, grad, dtype);
      constexpr double kParameters = kBlocksPerTurn * kBlock;
      kernel.push_back(kParameters / kernel_s);
      loop.push_back(kParameters / loop_s);
      statistics.push_back(kParameters / statistics_s);
      ratios.push_back(loop_s / kernel_s);
      spent_s += kernel_s + loop_s + statistics_s;
    }
    return {{"grad", NameOf(grad)},
            {"dtype", NameOf(dtype)},
            {"parameters_per_s", Median(kernel)},
            {"loop_parameters_per_s", Median(loop)},
            {"ratio", Median(ratios)},
            {"statistics_elements_per_s", Median(statistics)}};
  }

 private:
  double Seconds(What what, size_t first, size_t blocks, mlpo_dtype grad, mlpo_dtype dtype) {
    Turn turn(what, arrays_, first, blocks, grad, dtype);
    return SecondsOf(turn, *workers_, done_);
  }

  std::unique_ptr<BufferPool> pool_;
  std::unique_ptr<BufferPool> slots_;
  Arrays arrays_ = {};
  DoneJobs done_;
  std::unique_ptr<WorkerPool> workers_;  // ends before what it works on
};

}  // namespace

double AdamParametersPerSecond(mlpo_dtype dtype, uint32_t workers) {
  AdamOptions options;
  options.parameters = 16 * kBlock;
  options.workers = workers;
  return Bench(options).ParametersPerSecond(dtype);
}

int Adam(const AdamOptions& options) {
  if (const Status chosen = SetTarget(options.target); !chosen.ok()) throw BenchError(chosen.message());
  Bench bench(options);
  nlohmann::json result;
  for (const mlpo_dtype grad : kTypes) {
    for (const mlpo_dtype dtype : kTypes) {
      result["types"].push_back(bench.Measure(grad, dtype, options.seconds));
    }
  }
  // BF16 both ways is what most train with.
  for (const char* key : {"parameters_per_s", "loop_parameters_per_s", "ratio"}) result[key] = result["types"][0][key];
  result["target"] = ActiveTarget();
  result["workers"] = bench.workers();
  Print(result, options.json);
  return 0;
}

}  // namespace mlpo::bench
