// Scheduler: what it tells the trace.
#include <algorithm>

#include "daemon/scheduler/object.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/scheduler/session.h"

namespace mlpo {

void Scheduler::StartTrace(int64_t now_ns) {
  trace_.Start(paths_.size(), now_ns);
  for (const auto& [id, in_flight] : transfers_) trace_.TransferBegins(in_flight.transfer, now_ns);
  TracePool(now_ns);
}

Trace Scheduler::StopTrace(int64_t now_ns) {
  TracePool(now_ns);
  Trace trace = trace_.Stop(now_ns);
  trace.paths = options_.path_names;
  return trace;
}

// Sessions may have gone when the trace is told.
void Scheduler::NameForTrace(const BlockOwner& owner, Session& session) {
  if (IsStore(session.id)) {
    const auto& store = static_cast<const ObjectStore&>(session);
    return trace_.Name(session.id, store.job_name, kNone, store.uid);
  }
  if (session.job != nullptr) trace_.Name(session.id, session.job->name, session.rank, session.job->uid);
  const auto* subgroup = dynamic_cast<const Subgroup*>(&owner);
  if (subgroup != nullptr) trace_.Name(session.id, subgroup->spec.id, subgroup->spec.key);
}

void Scheduler::TraceTransfer(const InFlight& in_flight, const TransferResult& result) {
  BlockOwner& owner = *in_flight.block->owner;
  NameForTrace(owner, *owner.session);
  const Subgroup* subgroup = owner.subgroup();
  trace_.TransferEnds(in_flight.transfer, owner.session->id, subgroup == nullptr ? 0 : subgroup->spec.id,
                      in_flight.block->index, result, now_ns_);
}

// An UPDATE that has ended, and the window that it ended.
void Scheduler::TraceOp(const Op& op, int status) {
  TraceRecord record = TraceLabel(op, 0);
  record.error = status;
  if (op.window_ns != 0) {
    record.kind = TraceKind::kWindow;
    record.begin_ns = std::max(op.window_ns, trace_.began_ns());
    record.end_ns = std::max(op.accepted_ns, record.begin_ns);
    trace_.Add(record);
  }
  record.kind = TraceKind::kUpdate;
  record.begin_ns = std::max(op.accepted_ns, trace_.began_ns());
  record.end_ns = std::max(now_ns_, record.begin_ns);
  trace_.Add(record);
}

TraceRecord Scheduler::TraceLabel(const Op& op, uint32_t block) {
  NameForTrace(*op.owner, *op.session);
  TraceRecord record;
  record.kind = TraceKind::kWork;
  record.op = static_cast<uint8_t>(op.kind());
  record.session = op.session->id;
  record.subgroup = op.request.submission.subgroup;
  record.block = block;
  return record;
}

TraceRecord Scheduler::TraceLabel(const Block& block) {
  Session& session = *block.owner->session;
  NameForTrace(*block.owner, session);
  const Subgroup* subgroup = block.owner->subgroup();
  TraceRecord record;
  record.kind = TraceKind::kWork;
  record.session = session.id;
  record.subgroup = subgroup == nullptr ? 0 : subgroup->spec.id;
  record.block = block.index;
  return record;
}

void Scheduler::TraceWork(const TraceRecord& record) { trace_.Add(record); }

void Scheduler::TracePool(int64_t now_ns) {
  PoolSnapshot pool;
  Fill(&pool);
  TraceRecord record;
  record.begin_ns = record.end_ns = now_ns;
  record.block = static_cast<uint32_t>(pool.free_blocks);
  record.place = static_cast<uint32_t>(pool.cached_blocks - pool.dirty_blocks);
  record.bytes = pool.dirty_blocks;
  trace_.Add(record);
}

}  // namespace mlpo
