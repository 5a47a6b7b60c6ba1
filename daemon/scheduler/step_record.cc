#include "daemon/scheduler/step_record.h"

#include <algorithm>
#include <utility>

namespace mlpo {
namespace {

int64_t& PartOf(StepSums& sums, StepPart part) { return sums.parts_ns[static_cast<size_t>(part)]; }

void Add(StepSums& to, const StepSums& what, int sign) {
  for (size_t i = 0; i < kStepParts; ++i) to.parts_ns[i] += sign * what.parts_ns[i];
  for (auto field : {&StepSums::grads, &StepSums::updates, &StepSums::blocks, &StepSums::cached_blocks,
                     &StepSums::prefetched_blocks, &StepSums::read_blocks}) {
    to.*field += static_cast<uint64_t>(sign) * what.*field;  // modulo 2^64: right for either sign
  }
}

}  // namespace

void PathClock::Begin(Direction direction, int64_t now_ns) {
  (direction == Direction::kRead ? read_ : write_).Begin(now_ns);
  any_.Begin(now_ns);
}

void PathClock::End(Direction direction, uint64_t bytes, int64_t now_ns) {
  const bool read = direction == Direction::kRead;
  (read ? read_ : write_).End(now_ns);
  any_.End(now_ns);
  (read ? read_bytes_ : written_bytes_) += bytes;
}

PathUse PathClock::At(int64_t now_ns) const {
  return {read_bytes_, written_bytes_, read_.At(now_ns), write_.At(now_ns), any_.At(now_ns)};
}

// ---- Time ----

void StepBook::Settle(int64_t now_ns, bool buffer_free) {
  if (std::exchange(buffer_free_, buffer_free) != buffer_free) {
    for (SessionSteps* session : by_buffers_) {
      Touch(*session);
      session->by_buffers_ = false;
    }
    by_buffers_.clear();
  }
  for (SessionSteps* session : touched_) {
    Touch(*session);
    session->part_ = Judge(*session, buffer_free);
    session->touched_ = false;
    const bool depends = Judge(*session, !buffer_free) != session->part_;
    if (depends && !std::exchange(session->by_buffers_, true)) by_buffers_.push_back(session);
  }
  touched_.clear();
  now_ns_ = std::max(now_ns_, now_ns);
}

// Counts what has been until now, and has the session looked at again.
void StepBook::Touch(SessionSteps& session) {
  PartOf(session.total_, session.part_) += now_ns_ - session.total_.ended_ns;
  session.total_.ended_ns = now_ns_;
  if (!std::exchange(session.touched_, true)) touched_.push_back(&session);
}

StepPart StepBook::Judge(const SessionSteps& session, bool buffer_free) {
  if (session.adam_ > 0) return StepPart::kAdam;
  if (session.copies_ > 0) return StepPart::kCopy;
  if (session.ops_ > 0) {
    const bool turn = session.waiting_ > 0 && buffer_free;
    return session.reads_ > 0 || turn ? StepPart::kFetchWait : StepPart::kFlushWait;
  }
  return session.grads_ > 0 ? StepPart::kGrad : StepPart::kIdle;
}

void StepBook::Forget(SessionSteps& session) {
  std::erase(touched_, &session);
  std::erase(by_buffers_, &session);
}

// ---- What happens ----

void StepBook::TransferBegins(SessionSteps& session, const Transfer& transfer) {
  Touch(session);
  if (transfer.direction == Direction::kRead) ++session.reads_;
  session.paths_[transfer.path].Begin(transfer.direction, now_ns_);
  paths_[transfer.path].Begin(transfer.direction, now_ns_);
}

void StepBook::TransferEnds(SessionSteps& session, const Transfer& transfer, uint64_t bytes) {
  Touch(session);
  if (transfer.direction == Direction::kRead) --session.reads_;
  session.paths_[transfer.path].End(transfer.direction, bytes, now_ns_);
  paths_[transfer.path].End(transfer.direction, bytes, now_ns_);
}

void StepBook::BlockWaits(SessionSteps& session) {
  Touch(session);
  ++session.waiting_;
}

void StepBook::BlockWaitsNoMore(SessionSteps& session) {
  Touch(session);
  --session.waiting_;
}

void StepBook::WorkBegins(SessionSteps& session, bool adam) {
  Touch(session);
  ++(adam ? session.adam_ : session.copies_);
  workers_.Begin(now_ns_);
}

void StepBook::WorkEnds(SessionSteps& session, bool adam) {
  Touch(session);
  --(adam ? session.adam_ : session.copies_);
  workers_.End(now_ns_);
}

void StepBook::GradBegins(SessionSteps& session, SubgroupSteps& subgroup) {
  Join(session, subgroup);
  ++session.grads_;
  ++session.total_.grads;
  workers_.Begin(now_ns_);
}

void StepBook::GradEnds(SessionSteps& session) {
  Touch(session);
  --session.grads_;
  workers_.End(now_ns_);
}

void StepBook::OpBegins(SessionSteps& session) {
  Touch(session);
  ++session.ops_;
}

void StepBook::OpEnds(SessionSteps& session) {
  Touch(session);
  --session.ops_;
}

void StepBook::UpdateAccepted(SessionSteps& session, SubgroupSteps& subgroup) {
  Join(session, subgroup);
  ++(subgroup.step == session.number_ ? session.updating_ : session.next_updating_);
}

void StepBook::UpdateWants(SessionSteps& session, Found found) {
  StepRecord& total = session.total_;
  ++total.blocks;
  if (found == Found::kCached) ++total.cached_blocks;
  if (found == Found::kPrefetched) ++total.prefetched_blocks;
  if (found == Found::kAway) ++total.read_blocks;
}

void StepBook::UpdateEnds(SessionSteps& session, SubgroupSteps& subgroup, uint64_t epoch, uint64_t subgroups) {
  Touch(session);
  if (subgroup.step < session.number_) {  // of a step that was closed without it
    if (epoch == 0) return;
    ++session.total_.updates;
    session.total_.epoch = std::max(session.total_.epoch, epoch);
    subgroup.updated = subgroup.step;
    return;
  }
  const bool next = subgroup.step != session.number_;
  --(next ? session.next_updating_ : session.updating_);
  if (epoch > 0) {
    ++session.total_.updates;
    session.total_.epoch = std::max(session.total_.epoch, epoch);
    subgroup.updated = subgroup.step;
    ++(next ? session.next_updated_ : session.updated_);
    if (!next) {
      Sum(session);
      session.at_update_ = session.total_;
      session.at_update_.number = session.number_;
    }
  }
  CloseIfDone(session, subgroups);
}

void StepBook::AllDiscarded(SessionSteps& session) {
  if (!session.open_ || session.updating_ > 0 || session.updated_ > 0) return;
  Touch(session);
  Close(session, /*skipped=*/true);
}

// ---- Steps ----

// A subgroup is given a gradient or an UPDATE: which step that is of.
void StepBook::Join(SessionSteps& session, SubgroupSteps& subgroup) {
  Touch(session);
  // It is two steps ahead of one that others have not ended: that one is over for the account.
  if (subgroup.updated > session.number_) Close(session);
  subgroup.step = subgroup.updated == session.number_ ? session.number_ + 1 : session.number_;
  if (subgroup.step > session.number_) {
    session.next_begun_ = true;
    if (session.updating_ == 0) Close(session);
  } else if (!session.open_) {
    Open(session);
  }
}

void StepBook::Open(SessionSteps& session) {
  session.open_ = true;
  Sum(session);
  session.at_begin_ = session.total_;
  if (session.number_ == 1) session.at_end_ = session.total_;
}

// Ends at its last UPDATE's end, if there was one; the step after begins at once if a subgroup has begun with it.
void StepBook::Close(SessionSteps& session, bool skipped) {
  Sum(session);
  const StepRecord& end = session.at_update_.number == session.number_ ? session.at_update_ : session.total_;
  StepRecord record = Difference(session, end);
  record.skipped = skipped;
  trace_->Step(session.id, record);
  Add(totals_, record, 1);
  ++totals_.ended;
  totals_.skipped += skipped;
  totals_.time_ns += record.ended_ns - record.began_ns;
  totals_.times.Add(record.ended_ns - record.began_ns);
  totals_.fetch_waits.Add(record.part_ns(StepPart::kFetchWait));
  totals_.flush_waits.Add(record.part_ns(StepPart::kFlushWait));
  session.at_end_ = end;
  if (session.history_.size() == kHistory) session.history_.pop_front();
  session.history_.push_back(std::move(record));
  session.open_ = false;
  ++session.number_;
  session.updating_ = std::exchange(session.next_updating_, 0);
  session.updated_ = std::exchange(session.next_updated_, 0);
  if (std::exchange(session.next_begun_, false)) Open(session);
}

void StepBook::CloseIfDone(SessionSteps& session, uint64_t subgroups) {
  while (session.open_ && session.updating_ == 0 && (session.updated_ >= subgroups || session.next_begun_)) {
    Close(session);
  }
}

// Brings the paths' use in total_ up to now.
void StepBook::Sum(SessionSteps& session) {
  for (size_t i = 0; i < session.paths_.size(); ++i) session.total_.paths[i] = session.paths_[i].At(now_ns_);
}

StepRecord StepBook::Difference(const SessionSteps& session, const StepRecord& end) {
  StepRecord record = end;
  Add(record, session.at_begin_, -1);
  record.number = session.number_;
  if (end.updates == session.at_begin_.updates) record.epoch = 0;
  record.began_ns = session.at_begin_.ended_ns;
  record.period_ns = end.ended_ns - session.at_end_.ended_ns;
  for (size_t i = 0; i < record.paths.size(); ++i) {
    PathUse& use = record.paths[i];
    const PathUse& before = session.at_end_.paths[i];
    use.read_bytes -= before.read_bytes;
    use.written_bytes -= before.written_bytes;
    use.read_busy_ns -= before.read_busy_ns;
    use.write_busy_ns -= before.write_busy_ns;
    use.busy_ns -= before.busy_ns;
  }
  return record;
}

// ---- Telling ----

void StepBook::Fill(const SessionSteps& session, SessionSnapshot* snapshot, int64_t now_ns, bool buffer_free) const {
  snapshot->steps.assign(session.history_.begin(), session.history_.end());
  snapshot->step.reset();
  if (!session.open_) return;
  StepRecord now = session.total_;
  PartOf(now, session.part_) += now_ns_ - now.ended_ns;
  PartOf(now, Judge(session, buffer_free)) += now_ns - now_ns_;
  now.ended_ns = now_ns;
  for (size_t i = 0; i < session.paths_.size(); ++i) now.paths[i] = session.paths_[i].At(now_ns);
  snapshot->step = Difference(session, now);
}

void StepBook::Fill(PathIndex path, PathSnapshot* snapshot, int64_t now_ns) const {
  const PathUse use = paths_[path].At(now_ns);
  snapshot->read_busy_ns = use.read_busy_ns;
  snapshot->write_busy_ns = use.write_busy_ns;
  snapshot->busy_ns = use.busy_ns;
}

}  // namespace mlpo
