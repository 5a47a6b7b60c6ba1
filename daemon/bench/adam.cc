// "mlpo-bench adam": the update kernel on all workers, beside a plain loop that moves the same bytes, taking turns, so
// that both see the same machine. State lies in blocks as the daemon keeps it, far more than the caches hold; each turn
// takes another block for the kernel and one half of all blocks further on for the loop. And the kernel as the daemon
// runs it on blocks from paths: each piece's checksums compared before, and formed behind.
#include "daemon/adam/kernel.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/adam/worker_pool.h"
#include "daemon/base/checksum.h"
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

enum class What { kFill, kGradient, kKernel, kChecked, kLoop, kStatistics };

// Of p, m and v of each piece of each block; those of a piece belong to who has it.
using Checksums = std::vector<std::array<uint64_t, 3>>;

class Turn : public Job {
 public:
  Turn(What what, const Arrays& arrays, size_t first_block, size_t blocks, mlpo_dtype grad, mlpo_dtype dtype,
       Checksums* checksums)
      : what_(what),
        arrays_(arrays),
        first_(first_block),
        grad_(grad),
        dtype_(dtype),
        loop_(ChooseLoop(grad, dtype)),
        checksums_(checksums) {
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
      case What::kKernel:
        return Update(p, m, v, grad, param);
      case What::kChecked: {
        std::array<uint64_t, 3>& known = (*checksums_)[block * (kBlock / kPiece) + at / kPiece];
        if (ChecksumsOf(p, m, v) != known) wrong_.fetch_add(1, std::memory_order_relaxed);
        Update(p, m, v, grad, param);
        known = ChecksumsOf(p, m, v);
        return;
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
  // Pieces that were not as the last turn that compared had left them: others change what they take.
  uint32_t wrong() const { return wrong_.load(std::memory_order_relaxed); }

 private:
  void Update(float* p, float* m, float* v, const std::byte* grad, std::byte* param) const {
    AdamRange range;
    range.p = p;
    range.m = m;
    range.v = v;
    range.grad = grad;
    range.param = param;
    range.n = kPiece;
    range.grad_dtype = grad_;
    range.dtype = dtype_;
    AdamUpdate(scalars_, range);
  }
  static std::array<uint64_t, 3> ChecksumsOf(const float* p, const float* m, const float* v) {
    constexpr size_t kBytes = kPiece * sizeof(float);
    return {Checksum(p, kBytes), Checksum(m, kBytes), Checksum(v, kBytes)};
  }
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
  Checksums* const checksums_;
  std::atomic<uint32_t> wrong_{0};
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
    checksums_.resize(blocks * (kBlock / kPiece));
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
    CompareWhatNobodyChanged(grad, dtype);
    std::vector<double> kernel, ratios, checked, checked_ratios, loop, statistics;
    double spent_s = 0;
    const size_t half = arrays_.blocks / 2, quarter = arrays_.blocks / 4;
    for (size_t at = 0; spent_s < seconds || kernel.size() < 5; at = (at + kBlocksPerTurn) % arrays_.blocks) {
      const double kernel_s = Seconds(What::kKernel, at, kBlocksPerTurn, grad, dtype);
      const double checked_s = Seconds(What::kChecked, at + 3 * quarter, kBlocksPerTurn, grad, dtype);
      const double loop_s = Seconds(What::kLoop, at + half, kBlocksPerTurn, grad, dtype);
      Seconds(What::kGradient, at, kBlocksPerTurn, grad, dtype);  // over the parameters, as a trainer does
      const double statistics_s = Seconds(What::kStatistics, at + quarter, kBlocksPerTurn, grad, dtype);
      constexpr double kParameters = kBlocksPerTurn * kBlock;
      kernel.push_back(kParameters / kernel_s);
      loop.push_back(kParameters / loop_s);
      statistics.push_back(kParameters / statistics_s);
      ratios.push_back(loop_s / kernel_s);
      checked.push_back(kParameters / checked_s);
      checked_ratios.push_back(kernel_s / checked_s);
      spent_s += kernel_s + checked_s + loop_s + statistics_s;
    }
    // Seconds of all workers for 10^9 parameters.
    const auto core_seconds = [this](double parameters_per_s) { return 1e9 * workers() / parameters_per_s; };
    return {{"grad", NameOf(grad)},
            {"dtype", NameOf(dtype)},
            {"parameters_per_s", Median(kernel)},
            {"loop_parameters_per_s", Median(loop)},
            {"ratio", Median(ratios)},
            {"core_s_per_1e9", core_seconds(Median(kernel))},
            {"checked_parameters_per_s", Median(checked)},
            {"checked_ratio", Median(checked_ratios)},
            {"checked_core_s_per_1e9", core_seconds(Median(checked))},
            {"statistics_elements_per_s", Median(statistics)}};
  }

 private:
  // The checksums that one turn forms are those that the next one finds.
  void CompareWhatNobodyChanged(mlpo_dtype grad, mlpo_dtype dtype) {
    Seconds(What::kChecked, 0, kBlocksPerTurn, grad, dtype);
    Turn again(What::kChecked, arrays_, 0, kBlocksPerTurn, grad, dtype, &checksums_);
    SecondsOf(again, *workers_, done_);
    if (again.wrong() > 0) throw BenchError("checksums differ of memory that nobody has changed");
  }
  double Seconds(What what, size_t first, size_t blocks, mlpo_dtype grad, mlpo_dtype dtype) {
    Turn turn(what, arrays_, first, blocks, grad, dtype, &checksums_);
    return SecondsOf(turn, *workers_, done_);
  }

  std::unique_ptr<BufferPool> pool_;
  std::unique_ptr<BufferPool> slots_;
  Arrays arrays_ = {};
  Checksums checksums_;
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
  for (const char* key : {"parameters_per_s", "loop_parameters_per_s", "ratio", "core_s_per_1e9",
                          "checked_parameters_per_s", "checked_ratio", "checked_core_s_per_1e9"}) {
    result[key] = result["types"][0][key];
  }
  result["target"] = ActiveTarget();
  result["workers"] = bench.workers();
  Print(result, options.json);
  return 0;
}

}  // namespace mlpo::bench
