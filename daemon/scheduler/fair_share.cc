#include "daemon/scheduler/fair_share.h"

#include "daemon/scheduler/session.h"

namespace mlpo {
namespace {

bool Begins(Share* share, uint64_t bytes) {
  share->waiting_bytes += bytes;
  return ++share->waiting_blocks == 1;
}

}  // namespace

FairShare::FairShare(size_t queues) {
  for (size_t queue = 0; queue < queues; ++queue) jobs_.emplace_back(queue);
}

void FairShare::Wait(Session& session, size_t queue, uint64_t bytes) {
  TrainingJob& job = *session.job;
  if (Begins(&job.share, bytes)) job.share.used = std::max(job.share.used, job_now_);
  if (Begins(&session.share, bytes)) {
    session.share.used = std::max(session.share.used, job.session_now);
    ++job.waiting_sessions;
  }
  while (job.sessions_waiting.size() <= queue) job.sessions_waiting.emplace_back(job.sessions_waiting.size());
  job.sessions_waiting[queue].Add(&session);
  jobs_[queue].Add(&job);
}

void FairShare::Leave(Session& session, uint64_t bytes) {
  TrainingJob& job = *session.job;
  job.share.waiting_bytes -= bytes;
  --job.share.waiting_blocks;
  session.share.waiting_bytes -= bytes;
  if (--session.share.waiting_blocks == 0) --job.waiting_sessions;
}

void FairShare::Grant(Session& session, uint64_t bytes) {
  TrainingJob& job = *session.job;
  const double equal = static_cast<double>(job.share.waiting_bytes) / job.waiting_sessions;
  const double weight = std::max(static_cast<double>(session.share.waiting_bytes), equal / 4);
  job.session_now = session.share.used;
  job_now_ = job.share.used;
  session.share.used += static_cast<double>(bytes) / weight;
  job.share.used += static_cast<double>(bytes);
}

Session* FairShare::Next(size_t queue) {
  const auto first = [queue](TrainingJob& job) {
    return job.sessions_waiting[queue].Front([queue](const Session& s) { return !s.pending[queue].empty(); });
  };
  TrainingJob* const job = jobs_[queue].Front([&](TrainingJob& candidate) { return first(candidate) != nullptr; });
  return job == nullptr ? nullptr : first(*job);
}

bool FairShare::Before(const Session& a, const Session& b) {
  return a.job == b.job ? a.share.used < b.share.used : a.job->share.used < b.job->share.used;
}

void FairShare::Forget(const Session& session) {
  for (LeastUsed<Session>& queue : session.job->sessions_waiting) queue.Forget(&session);
}

void FairShare::Forget(const TrainingJob& job) {
  for (LeastUsed<TrainingJob>& queue : jobs_) queue.Forget(&job);
}

}  // namespace mlpo
