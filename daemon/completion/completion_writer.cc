#include "daemon/completion/completion_writer.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "daemon/base/check.h"

namespace mlpo {
namespace {

mlpo_error_record MakeRecord(const Completion& completion) {
  const Failure& failure = completion.failure;
  mlpo_error_record record = {};
  record.status = failure.status;
  record.os_errno = failure.os_errno;
  record.subgroup = completion.subgroup;
  record.tensor = failure.tensor;
  record.block = failure.block;
  record.path = failure.path;
  record.first = failure.first;
  record.count = failure.count;
  failure.text.copy(record.text, sizeof record.text - 1);
  return record;
}

}  // namespace

CompletionWriter::CompletionWriter(uint32_t entries, mlpo_completion* completions, mlpo_error_record* errors,
                                   mlpo_daemon_lines* daemon, const mlpo_client_lines* client)
    : ring_(completions, entries, &daemon->completion_tail, &client->completion_head),
      errors_(errors),
      daemon_(daemon),
      client_(client) {}

int64_t CompletionWriter::Room(int64_t wanted) {
  const int64_t free = ring_.FreeFor(unanswered_ + wanted);
  return free < 0 ? -1 : std::max<int64_t>(free - unanswered_, 0);
}

void CompletionWriter::Write(const Completion& completion) {
  MLPO_CHECK(unanswered_ > 0);
  --unanswered_;
  mlpo_completion entry = {};
  entry.user_data = completion.user_data;
  entry.status = completion.failure.status;
  entry.flags = completion.flags;
  entry.value = completion.value;
  entry.detail = completion.detail;
  if (completion.failure.status != 0) {
    entry.flags |= MLPO_COMPLETION_ERROR_RECORD;
    entry.detail = ring_.next_place();
    CopyIn(&errors_[entry.detail], MakeRecord(completion));
  }
  ring_.Push(entry);
  written_ = true;
}

void CompletionWriter::Publish() {
  if (!written_) return;
  written_ = false;
  ring_.Publish();
  if (SpscProducer<mlpo_completion>::ConsumerSleeps(&client_->completion_sleepers)) Wake();
}

void CompletionWriter::SetState(uint32_t state) {
  SharedWords::Store(&daemon_->state, state, std::memory_order_seq_cst);
  Wake();
}

void CompletionWriter::AskForCheckpoint() {
  SharedWords::Store(&daemon_->checkpoint_requests, ++checkpoint_requests_, std::memory_order_relaxed);
}

void CompletionWriter::Wake() {
  // Cannot block; nobody waiting is fine.
  ::syscall(SYS_futex, &daemon_->completion_tail, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace mlpo
