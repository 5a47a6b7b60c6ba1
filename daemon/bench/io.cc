// "mlpo-bench io": each path's engine, which is the daemon's own queue and pool, beside fio with the same size of
// requests, depth and mix, taking turns. Each path is measured alone, in a folder of our own on it. What is read was
// written before and is random; the first pass over a file is not timed.
#include "daemon/io/io.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "daemon/bench/bench.h"
#include "daemon/bench/fio.h"
#include "daemon/bench/own_daemon.h"
#include "daemon/bench/ping_pong.h"
#include "proto/abi.h"

namespace mlpo::bench {
namespace {

constexpr int kDeadlineMs = 60'000;
constexpr uint32_t kPieceDepth = 64;  // as the daemon has it

// One path as the daemon opens it, with a file of `blocks` blocks.
class Engine {
 public:
  Engine(const std::string& directory, const IoOptions& options)
      : depth_(options.depth), block_bytes_(options.block_bytes), blocks_(options.file_bytes / options.block_bytes) {
    PathConfig config;
    config.directory = directory;
    path_ = Taken(Path::Open(config, "bench", "bench"));
    BufferPool::Options pool;
    pool.buffer_bytes = block_bytes_;
    pool.pool_bytes = std::max<uint64_t>(2 * depth_, 3) * block_bytes_;
    pool_ = Taken(BufferPool::Create(pool));
    std::mt19937_64 random(1);
    for (uint32_t buffer = 0; buffer < pool_->count(); ++buffer) {
      for (uint64_t at = 0; at < block_bytes_; at += 8) {
        const uint64_t word = random();
        std::memcpy(pool_->data(buffer) + at, &word, sizeof word);
      }
    }
    PathQueue::Options queue;
    queue.piece_bytes = options.piece_bytes;
    queue.depth = kPieceDepth;
    queue_ = Taken(PathQueue::Start(queue, path_.get(), pool_.get(), &results_));
    file_ = Taken(path_->CreateFile({0, "bench", 0, 1}));
    const Status reserved = path_->Reserve(file_, blocks_ * block_bytes_, /*unused=*/true);
    if (!reserved.ok()) throw BenchError(reserved.message());
    Run(false, true, 0);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const char* name() const { return queue_->engine(); }
  bool direct() const { return path_->direct_io(); }

  // Keeps `depth` blocks in flight in each direction asked for, round and round through the file, for so long; 0: one
  // pass. Bytes a second.
  double Run(bool read, bool write, double seconds) {
    const int64_t start_ns = NowNs();
    const int64_t until_ns = start_ns + static_cast<int64_t>(seconds * 1e9);
    uint64_t started = 0;
    bytes_ = 0;
    const auto goes_on = [&] { return seconds > 0 ? NowNs() < until_ns : started < blocks_; };
    const auto start = [&](Direction direction, BufferIndex buffer) {
      // Reads are half a file ahead of writes.
      const uint64_t place = direction == Direction::kRead ? reads_++ + blocks_ / 2 : writes_++;
      ++started;
      ++in_flight_;
      Transfer transfer;
      transfer.id = buffer;
      transfer.direction = direction;
      transfer.file = file_;
      transfer.buffer = buffer;
      transfer.offset = Path::kFileHeaderBytes + place % blocks_ * block_bytes_;
      transfer.bytes = block_bytes_;
      queue_->Submit(transfer);
    };
    for (BufferIndex i = 0; i < depth_; ++i) {
      if (read) start(Direction::kRead, i);
      if (write) start(Direction::kWrite, depth_ + i);
    }
    while (in_flight_ > 0) {
      for (const BufferIndex buffer : Reap()) {
        if (goes_on()) start(buffer < depth_ ? Direction::kRead : Direction::kWrite, buffer);
      }
    }
    return static_cast<double>(bytes_) * 1e9 / static_cast<double>(NowNs() - start_ns);
  }

 private:
  // Buffers whose transfer has ended.
  std::vector<BufferIndex> Reap() {
    pollfd wait = {results_.event_fd(), POLLIN, 0};
    if (::poll(&wait, 1, kDeadlineMs) == 0) throw BenchError("a transfer on " + path_->directory() + " does not end");
    std::vector<TransferResult> ended;
    results_.TakeAll(&ended);
    std::vector<BufferIndex> buffers;
    in_flight_ -= static_cast<uint32_t>(ended.size());
    for (const TransferResult& result : ended) {
      if (result.error != 0) {
        throw BenchError("a transfer on " + path_->directory() + " failed: " + std::strerror(result.error));
      }
      bytes_ += result.bytes;
      buffers.push_back(static_cast<BufferIndex>(result.id));
    }
    CheckInterrupted();
    return buffers;
  }

  const uint32_t depth_;
  const uint64_t block_bytes_, blocks_;
  std::unique_ptr<Path> path_;
  std::unique_ptr<BufferPool> pool_;
  TransferResults results_;
  std::unique_ptr<PathQueue> queue_;
  FileId file_ = 0;
  uint64_t reads_ = 0, writes_ = 0;
  uint32_t in_flight_ = 0;
  uint64_t bytes_ = 0;
};

struct Kind {
  const char* name;
  bool read, write;
  const char* mix;  // fio's word
};
constexpr Kind kKinds[] = {{"write_bytes_per_s", false, true, "write"},
                           {"read_bytes_per_s", true, false, "read"},
                           {"mixed_bytes_per_s", true, true, "readwrite"}};

nlohmann::json MeasurePath(const std::string& directory, const IoOptions& options, bool with_fio) {
  const ScratchFolder folder(directory);
  Engine engine(folder.path(), options);
  FioRun fio;
  fio.files = {folder.path() + "/fio"};
  fio.file_bytes = options.file_bytes / options.block_bytes * options.block_bytes;
  fio.block_bytes = options.piece_bytes;
  fio.direct = engine.direct();
  const auto pieces = static_cast<uint32_t>((options.block_bytes + options.piece_bytes - 1) / options.piece_bytes);
  fio.depth = options.depth * pieces;
  fio.mix = "write";
  if (with_fio) RunFio(fio);
  fio.seconds = options.seconds;
  nlohmann::json result = {{"directory", directory}, {"engine", engine.name()}, {"direct_io", engine.direct()}};
  for (const Kind& kind : kKinds) {
    std::vector<double> ours, theirs, ratios;
    fio.mix = kind.mix;
    fio.depth = options.depth * pieces * (kind.read && kind.write ? 2 : 1);
    const auto run_fio = [&] {
      const FioSpeed speed = RunFio(fio).front();
      theirs.push_back(speed.read_bytes_per_s + speed.write_bytes_per_s);
    };
    for (uint32_t round = 0; round < options.rounds; ++round) {
      // Devices with a quota are faster after a pause: each goes first in turn.
      if (with_fio && round % 2 == 1) run_fio();
      ours.push_back(engine.Run(kind.read, kind.write, options.seconds));
      if (with_fio && round % 2 == 0) run_fio();
      if (with_fio) ratios.push_back(ours.back() / theirs.back());
    }
    const std::string name = kind.name;
    result[name] = Median(ours);
    result["fio_" + name] = with_fio ? nlohmann::json(Median(theirs)) : nlohmann::json();
    result[name.substr(0, name.find('_')) + "_ratio"] = with_fio ? nlohmann::json(Median(ratios)) : nlohmann::json();
  }
  return result;
}

}  // namespace

int Io(const IoOptions& options) {
  if (options.block_bytes % MLPO_ALIGN != 0 || options.file_bytes / options.block_bytes < 4 * options.depth) {
    throw BenchError("blocks of a multiple of " + std::to_string(MLPO_ALIGN) +
                     " bytes are needed, and a file of at least four times as many as --depth");
  }
  const bool with_fio = FioIsThere();
  if (!with_fio) std::cerr << "mlpo-bench: fio is not installed: nothing to compare with (apt-get install fio)\n";
  const CatchInterrupts catching;
  nlohmann::json result;
  result["block_bytes"] = options.block_bytes;
  result["piece_bytes"] = options.piece_bytes;
  result["depth"] = options.depth;
  for (const std::string& path : options.paths) result["paths"].push_back(MeasurePath(path, options, with_fio));
  Print(result, options.json);
  return 0;
}

}  // namespace mlpo::bench
