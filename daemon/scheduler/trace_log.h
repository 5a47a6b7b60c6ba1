// TraceLog: records what happens into a bounded ring, while it is on; off it costs one look at a flag. What came first
// is dropped first, of steps, too.
//
// Owner: the data thread.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/types/trace.h"
#include "daemon/types/transfer.h"

namespace mlpo {

class TraceLog {
 public:
  static constexpr size_t kRecords = size_t{1} << 18;  // 64 bytes each
  static constexpr size_t kSteps = 4096;
  static constexpr size_t kNames = 65536;  // of subgroups

  bool on() const { return on_; }
  int64_t began_ns() const { return trace_.began_ns; }
  // Begins anew. What is in flight is to be told by TransferBegins at once.
  void Start(size_t paths, int64_t now_ns);
  Trace Stop(int64_t now_ns);

  void Name(SessionId session, const std::string& job, uint32_t rank, uint32_t uid);
  void Name(SessionId session, SubgroupId subgroup, const std::string& key);

  // Takes the lowest free slot of its path and direction.
  void TransferBegins(const Transfer& transfer, int64_t now_ns);
  void TransferEnds(const Transfer& transfer, SessionId session, SubgroupId subgroup, uint32_t block,
                    const TransferResult& result, int64_t now_ns);
  void Add(const TraceRecord& record);
  void Step(SessionId session, const StepRecord& step);

 private:
  struct Slot {
    uint16_t number = 0;
    int64_t begin_ns = 0;
  };
  std::vector<bool>& SlotsOf(const Transfer& transfer);
  void IndexSteps();

  bool on_ = false;
  Trace trace_;
  size_t next_ = 0;                       // where the ring goes on once it is full
  uint64_t steps_ = 0;                    // since the start
  std::vector<std::vector<bool>> slots_;  // in use; by path and direction
  std::unordered_map<uint64_t, Slot> in_flight_;
};

}  // namespace mlpo
