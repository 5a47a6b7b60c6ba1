#include "daemon/scheduler/trace_log.h"

#include <algorithm>
#include <utility>

namespace mlpo {

void TraceLog::Start(size_t paths, int64_t now_ns) {
  trace_ = Trace();
  trace_.began_ns = now_ns;
  trace_.records.reserve(kRecords);
  next_ = 0;
  steps_ = 0;
  slots_.assign(2 * paths, {});
  in_flight_.clear();
  on_ = true;
}

Trace TraceLog::Stop(int64_t now_ns) {
  on_ = false;
  trace_.ended_ns = now_ns;
  std::rotate(trace_.records.begin(), trace_.records.begin() + static_cast<ptrdiff_t>(next_), trace_.records.end());
  IndexSteps();
  slots_.clear();
  in_flight_.clear();
  next_ = 0;
  return std::exchange(trace_, Trace());
}

void TraceLog::Name(SessionId session, const std::string& job, uint32_t rank, uint32_t uid) {
  if (!trace_.sessions.contains(session)) trace_.sessions[session] = {job, rank, uid};
}

void TraceLog::Name(SessionId session, SubgroupId subgroup, const std::string& key) {
  if (trace_.subgroups.size() < kNames) trace_.subgroups.try_emplace({session, subgroup}, key);
}

std::vector<bool>& TraceLog::SlotsOf(const Transfer& transfer) {
  return slots_[2 * transfer.path + (transfer.direction == Direction::kWrite ? 1 : 0)];
}

void TraceLog::TransferBegins(const Transfer& transfer, int64_t now_ns) {
  if (!on_) return;
  std::vector<bool>& slots = SlotsOf(transfer);
  const auto free = std::find(slots.begin(), slots.end(), false);
  const auto number = static_cast<uint16_t>(free - slots.begin());
  if (free == slots.end()) {
    slots.push_back(true);
  } else {
    *free = true;
  }
  in_flight_[transfer.id] = {number, now_ns};
}

void TraceLog::TransferEnds(const Transfer& transfer, SessionId session, SubgroupId subgroup, uint32_t block,
                            const TransferResult& result, int64_t now_ns) {
  if (!on_) return;
  const auto found = in_flight_.find(transfer.id);
  if (found == in_flight_.end()) return;
  TraceRecord record;
  record.kind = transfer.direction == Direction::kRead ? TraceKind::kRead : TraceKind::kWrite;
  record.slot = found->second.number;
  record.place = transfer.path;
  record.error = result.error;
  record.session = session;
  record.subgroup = subgroup;
  record.block = block;
  record.begin_ns = found->second.begin_ns;
  record.end_ns = std::max(now_ns, record.begin_ns);
  record.bytes = result.bytes;
  SlotsOf(transfer)[record.slot] = false;
  in_flight_.erase(found);
  Add(record);
}

void TraceLog::Add(const TraceRecord& record) {
  if (!on_) return;
  if (trace_.records.size() < kRecords) {
    trace_.records.push_back(record);
    return;
  }
  trace_.records[next_] = record;
  next_ = (next_ + 1) % kRecords;
  ++trace_.dropped;
}

void TraceLog::Step(SessionId session, const StepRecord& step) {
  if (!on_) return;
  TraceRecord record;
  record.kind = TraceKind::kStep;
  record.session = session;
  record.begin_ns = std::max(step.began_ns, trace_.began_ns);
  record.end_ns = std::max(step.ended_ns, record.begin_ns);
  record.bytes = steps_;
  if (steps_ < kSteps) {
    trace_.steps.push_back(step);
  } else {
    trace_.steps[steps_ % kSteps] = step;
  }
  ++steps_;
  Add(record);
}

// While it records, a step's record has its number, and the steps are a ring.
void TraceLog::IndexSteps() {
  const uint64_t gone = steps_ - trace_.steps.size();
  if (gone == 0) return;
  const auto is_step = [](const TraceRecord& record) { return record.kind == TraceKind::kStep; };
  trace_.dropped +=
      std::erase_if(trace_.records, [&](const TraceRecord& record) { return is_step(record) && record.bytes < gone; });
  for (TraceRecord& record : trace_.records) {
    if (is_step(record)) record.bytes -= gone;
  }
  std::rotate(trace_.steps.begin(), trace_.steps.begin() + static_cast<ptrdiff_t>(gone % kSteps), trace_.steps.end());
}

}  // namespace mlpo
