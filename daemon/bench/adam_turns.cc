// "mlpo-bench adam-turns": the update kernel on memory that another program has mapped too, one update for each line
// that it writes: so tests/bench/adam_peer lets it and another kernel take turns on the same numbers.
//
// The file holds p, m and v, FP32 arrays one after another, then the gradient, then the parameter, which has the
// gradient's place if both have one size. Prints {"workers", "target"}, and for each line, a step counted from 1, the
// seconds that the update took. Ends with its input.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/adam/kernel.h"
#include "daemon/adam/worker_pool.h"
#include "daemon/base/mapped_region.h"
#include "daemon/base/unique_fd.h"
#include "daemon/bench/bench.h"
#include "daemon/bench/timed_job.h"
#include "daemon/types/element_bytes.h"

namespace mlpo::bench {
namespace {

constexpr size_t kPiece = size_t{64} << 10;  // parameters

class Update : public Job {
 public:
  explicit Update(const AdamTurnsOptions& options)
      : n_(options.parameters), grad_dtype_(TypeNamed(options.grad)), dtype_(TypeNamed(options.dtype)) {
    const UniqueFd file(::open(options.memory.c_str(), O_RDWR | O_CLOEXEC));
    if (!file) throw BenchError("opening " + options.memory + ": " + std::strerror(errno));
    const size_t grad_bytes = n_ * ElementBytes(grad_dtype_), param_bytes = n_ * ElementBytes(dtype_);
    param_at_ = 12 * n_ + (grad_bytes == param_bytes ? 0 : grad_bytes);
    memory_ = Taken(MappedRegion::Map(file.get(), param_at_ + param_bytes, Access::kReadWrite));
    pieces = static_cast<uint32_t>((n_ + kPiece - 1) / kPiece);
  }

  void SetStep(int64_t step) { scalars_ = MakeScalars({1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, MLPO_ADAMW, 0, 0}, step); }

  void RunPiece(uint32_t piece) override {
    const size_t at = piece * kPiece;
    auto* state = reinterpret_cast<float*>(memory_.data());
    AdamRange range;
    range.p = state + at;
    range.m = state + n_ + at;
    range.v = state + 2 * n_ + at;
    range.grad = memory_.data() + 12 * n_ + at * ElementBytes(grad_dtype_);
    range.param = memory_.data() + param_at_ + at * ElementBytes(dtype_);
    range.n = std::min(kPiece, n_ - at);
    range.grad_dtype = grad_dtype_;
    range.dtype = dtype_;
    AdamUpdate(scalars_, range);
  }

 private:
  const size_t n_;
  const mlpo_dtype grad_dtype_, dtype_;
  MappedRegion memory_;
  size_t param_at_;
  AdamScalars scalars_;
};

}  // namespace

int AdamTurns(const AdamTurnsOptions& options) {
  Update update(options);
  DoneJobs done;
  const std::unique_ptr<WorkerPool> workers = Taken(WorkerPool::Start({options.workers, true}, &done));
  std::cout << nlohmann::json{{"workers", workers->workers()}, {"target", ActiveTarget()}}.dump() << std::endl;
  for (int64_t step; std::cin >> step;) {
    if (step < 1) throw BenchError("a step counts from 1");
    update.SetStep(step);
    std::cout << SecondsOf(update, *workers, done) << std::endl;
  }
  return 0;
}

}  // namespace mlpo::bench
