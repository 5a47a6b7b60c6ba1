#include "daemon/session/ring_reader.h"

#include <cmath>

#include "daemon/base/client_memory.h"

namespace mlpo {
namespace {

bool Inside(uint64_t first, uint64_t count, uint64_t size) { return first <= size && count <= size - first; }

std::string Range(const mlpo_submission& submission) {
  return "elements [" + std::to_string(submission.first) + ", +" + std::to_string(submission.count) + ")";
}

std::string Named(const mlpo_submission& submission) { return "operation " + std::to_string(submission.op) + ": "; }

bool NeedsSubgroup(const mlpo_submission& submission) {
  switch (submission.op) {
    case MLPO_OP_GRAD:
    case MLPO_OP_UPDATE:
    case MLPO_OP_READ_STATE:
    case MLPO_OP_WRITE_STATE:
    case MLPO_OP_STAT:
      return true;
    case MLPO_OP_DISCARD:
      return submission.subgroup != MLPO_ALL_SUBGROUPS;
    default:
      return false;
  }
}

uint32_t KnownFlags(uint16_t op) {
  if (op == MLPO_OP_GRAD) return MLPO_GRAD_KEEP;
  return op == MLPO_OP_UPDATE ? MLPO_UPDATE_APPLY_NONFINITE | MLPO_UPDATE_OUTPUT : 0;
}

bool IsObjectOp(uint16_t op) { return op == MLPO_OP_FETCH || op == MLPO_OP_FLUSH || op == MLPO_OP_DELETE; }

bool NamesObject(const mlpo_submission& submission) {
  return submission.op == MLPO_OP_DELETE ||
         (IsObjectOp(submission.op) && (submission.arg == MLPO_OBJECT_OPEN || submission.arg == MLPO_OBJECT_SIZE));
}

}  // namespace

RingReader::RingReader(SessionId session, const Areas* areas)
    : session_(session),
      areas_(areas),
      ring_(areas->submissions(), areas->entries(), &areas->client_lines()->submission_tail,
            &areas->daemon_lines()->submission_head) {}

void RingReader::AddSubgroup(const SubgroupSpec& spec) {
  subgroups_[spec.id] = {spec.numel, spec.tensors.size(), spec.slot_bytes, spec.lent_bytes};
}

std::string RingReader::Next(Request* request) {
  request->session = session_;
  const mlpo_hyper* hyper = &areas_->hyper()[ring_.next_place()];
  request->submission = ring_.Pop();
  request->name.clear();
  std::string wrong = Check(request->submission);
  if (wrong.empty() && NamesObject(request->submission)) {  // copied once: whatever the client does to it meanwhile
    request->name.resize(request->submission.first);
    CopyClientMemory(request->name.data(), staging_ + request->submission.staging_offset, request->name.size());
  }
  if (wrong.empty() && request->submission.op == MLPO_OP_UPDATE) {
    request->hyper = CopyOut<mlpo_hyper>(hyper);
    wrong = CheckHyper(request->hyper);
  }
  return wrong;
}

std::string RingReader::Check(const mlpo_submission& submission) const {
  if (submission.reserved[0] != 0 || submission.reserved[1] != 0)
    return Named(submission) + "a reserved field is not 0";
  if (submission.flags & ~KnownFlags(submission.op))
    return Named(submission) + "unknown flag in " + std::to_string(submission.flags);
  if (IsObjectOp(submission.op)) return CheckObject(submission);
  const bool checkpoint = submission.op == MLPO_OP_SNAPSHOT || submission.op == MLPO_OP_RESTORE;
  if (checkpoint && (submission.count != 0 || submission.staging_offset != 0 || submission.epoch != 0))
    return "SNAPSHOT or RESTORE: a field that has no meaning for it is not 0";
  if (!NeedsSubgroup(submission)) return "";
  auto it = subgroups_.find(submission.subgroup);
  if (it == subgroups_.end())
    return Named(submission) + "no subgroup has handle " + std::to_string(submission.subgroup);
  const Limits& limits = it->second;
  switch (submission.op) {
    case MLPO_OP_GRAD:
      if (submission.arg < MLPO_PIECE_VALUE || submission.arg > MLPO_PIECE_SKIP) {
        return "GRAD: unknown kind of piece " + std::to_string(submission.arg);
      }
      if (!Inside(submission.first, submission.count, limits.numel)) {
        return "GRAD: " + Range(submission) + " of a subgroup of " + std::to_string(limits.numel);
      }
      return CheckLent(submission, limits);
    case MLPO_OP_UPDATE:
      return CheckLent(submission, limits);
    case MLPO_OP_DISCARD:
      return submission.arg > MLPO_DISCARD_OVERFLOW ? "DISCARD: unknown reason" : "";
    case MLPO_OP_READ_STATE:
    case MLPO_OP_WRITE_STATE:
      return CheckState(submission, limits);
    default:
      return "";
  }
}

// That a slot is named exactly where the subgroup has none, and where.
std::string RingReader::CheckLent(const mlpo_submission& submission, const Limits& limits) const {
  const uint16_t flag = submission.op == MLPO_OP_GRAD ? MLPO_GRAD_KEEP : MLPO_UPDATE_OUTPUT;
  const bool names = submission.flags & flag;
  if (limits.slot_bytes == 0) return names ? "GRAD or UPDATE: a lent slot for a subgroup that has its own" : "";
  if (!names) return "GRAD or UPDATE: no slot for a subgroup that has none of its own";
  if (!Inside(submission.staging_offset, limits.slot_bytes, limits.lent_bytes)) {
    return "GRAD or UPDATE: slot outside the lent area of " + std::to_string(limits.lent_bytes) + " bytes";
  }
  if (submission.staging_offset % MLPO_SLOT_ALIGN != 0) {
    return "GRAD or UPDATE: the slot's offset is not a multiple of " + std::to_string(MLPO_SLOT_ALIGN);
  }
  return "";
}

std::string RingReader::CheckState(const mlpo_submission& submission, const Limits& limits) const {
  const bool steps = submission.arg == MLPO_PART_STEP;
  if (!steps && (submission.arg == 0 || submission.arg > MLPO_PART_STATE)) {
    return "READ_STATE or WRITE_STATE: unknown parts " + std::to_string(submission.arg);
  }
  const uint64_t size = steps ? limits.tensors : limits.numel;
  if (!Inside(submission.first, submission.count, size)) {
    return "READ_STATE or WRITE_STATE: " + Range(submission) + " of " + std::to_string(size);
  }
  // count is at most numel now, and a registered numel * 12 does not overflow.
  const uint64_t parts = steps ? 2 : static_cast<uint64_t>(__builtin_popcount(submission.arg));
  if (!Inside(submission.staging_offset, submission.count * parts * 4, staging_bytes_)) {
    return "READ_STATE or WRITE_STATE: range outside the staging area of " + std::to_string(staging_bytes_) + " bytes";
  }
  if (submission.staging_offset % 8 != 0) return "READ_STATE or WRITE_STATE: staging offset is not a multiple of 8";
  return "";
}

std::string RingReader::CheckObject(const mlpo_submission& submission) const {
  const uint32_t step = submission.arg;
  const bool known = submission.op == MLPO_OP_DELETE ? step == 0
                     : submission.op == MLPO_OP_FETCH
                         ? step >= MLPO_OBJECT_OPEN && step <= MLPO_OBJECT_SIZE && step != MLPO_OBJECT_COMMIT
                         : step >= MLPO_OBJECT_OPEN && step <= MLPO_OBJECT_CLOSE;
  if (!known) return "FETCH, FLUSH or DELETE: unknown step " + std::to_string(step);
  const bool named = NamesObject(submission);
  if (step != 0 && step != MLPO_OBJECT_SIZE && submission.subgroup == 0) return "FETCH or FLUSH: handle 0";
  if (named && (submission.first == 0 || submission.first > MLPO_MAX_OBJECT_NAME)) {
    return "FETCH, FLUSH or DELETE: a name of " + std::to_string(submission.first) + " bytes";
  }
  if (!named && step != MLPO_OBJECT_PIECE) return "";
  if (!Inside(submission.staging_offset, named ? submission.first : submission.count, staging_bytes_)) {
    return "FETCH, FLUSH or DELETE: range outside the staging area of " + std::to_string(staging_bytes_) + " bytes";
  }
  if (submission.staging_offset % 8 != 0) return "FETCH, FLUSH or DELETE: staging offset is not a multiple of 8";
  return "";
}

std::string CheckHyper(const mlpo_hyper& hyper) {
  const auto not_negative = [](double value) { return std::isfinite(value) && value >= 0; };
  const auto beta = [](double value) { return value >= 0 && value < 1; };
  if (!not_negative(hyper.lr)) return "UPDATE: lr is not finite or negative";
  if (!beta(hyper.beta1)) return "UPDATE: beta1 is not in [0, 1)";
  if (!beta(hyper.beta2)) return "UPDATE: beta2 is not in [0, 1)";
  if (!not_negative(hyper.eps)) return "UPDATE: eps is not finite or negative";
  if (!not_negative(hyper.weight_decay)) return "UPDATE: weight_decay is not finite or negative";
  if (!std::isfinite(hyper.grad_scale)) return "UPDATE: grad_scale is not finite";
  if (hyper.mode != MLPO_ADAMW && hyper.mode != MLPO_ADAM) return "UPDATE: unknown mode";
  if (hyper.flags & ~MLPO_HYPER_NO_BIAS_CORRECTION || hyper.reserved != 0) return "UPDATE: unknown flag";
  return "";
}

}  // namespace mlpo
