#include "tests/support/fake_tier.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "daemon/scheduler/failure.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kGarbage = ~uint64_t{0};
constexpr uint64_t kPartWrites = uint64_t{1} << 60;  // ids of transfers from here on are writes to parts

int64_t RealNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

FileId FileOf(SessionId session) {
  return static_cast<FileId>(IsStore(session) ? 1'000'000 + (session & ~kStoreBit) : session);
}

bool Overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

}  // namespace

// The tier's own time within a call of the scheduler.
class FakeTier::Outside {
 public:
  explicit Outside(FakeTier* tier) : tier_(tier), from_ns_(tier->measured_ ? RealNs() : 0) {}
  ~Outside() {
    if (tier_->measured_) tier_->scheduler_ns_ -= RealNs() - from_ns_;
  }

 private:
  FakeTier* const tier_;
  const int64_t from_ns_;
};

template <class F>
void FakeTier::Call(F&& f) {
  if (!measured_) return f();
  const int64_t from_ns = RealNs();
  f();
  scheduler_ns_ += RealNs() - from_ns;
}

FakeTier::FakeTier(Scheduler::Options options, std::vector<PathSpeed> speeds, int64_t block_ns)
    : FakeTier(std::move(options), std::move(speeds), Work{block_ns, 0, 1}) {}

FakeTier::FakeTier(Scheduler::Options options, std::vector<PathSpeed> speeds, Work work)
    : options_(std::move(options)), work_(work) {
  for (const PathSpeed& speed : speeds) paths_.push_back({SimulatedPath(speed), {}, nullptr, nullptr});
  options_.path_names.resize(options_.paths.size(), "path");
  scheduler_ = std::make_unique<Scheduler>(options_, this);
  buffers_.resize(options_.buffers);
}

void FakeTier::AddBuffers(uint32_t count, int node) {
  const auto first = static_cast<BufferIndex>(buffers_.size());
  buffers_.resize(first + count);
  Call([&] { scheduler_->AddBuffers(first, count, node, now_ns_); });
}

// ---- Sessions ----

void FakeTier::AddSession(SessionId session, const std::string& job, uint32_t uid) {
  SessionIdentity identity;
  identity.uid = uid;
  identity.id = session;
  identity.job = job;
  identity.features = MLPO_FEATURES_HERE | MLPO_FEATURE_SNAPSHOT;
  scheduler_->AddSession(identity);
  known_[session] = false;
}

void FakeTier::AddSubgroup(SessionId session, SubgroupId id, std::vector<uint64_t> tensor_counts,
                           std::optional<mlpo_dtype> kept_as) {
  SubgroupSpec spec;
  spec.id = id;
  spec.kept_as = kept_as;
  Add(session, std::move(spec), tensor_counts);
}

void FakeTier::AddLentSubgroup(SessionId session, SubgroupId id, std::vector<uint64_t> tensor_counts,
                               mlpo_dtype kept_as) {
  static std::byte never_touched;
  SubgroupSpec spec;
  spec.id = id;
  spec.kept_as = kept_as;
  spec.lent = &never_touched;
  spec.slot_bytes = MLPO_SLOT_HEADER_BYTES;
  for (const uint64_t count : tensor_counts) spec.slot_bytes += count * (kept_as == MLPO_FLOAT32 ? 4 : 2);
  Add(session, std::move(spec), tensor_counts);
}

void FakeTier::Add(SessionId session, SubgroupSpec spec, const std::vector<uint64_t>& tensor_counts) {
  if (!known_.contains(session)) AddSession(session);
  if (!std::exchange(known_[session], true)) {
    scheduler_->SetFiles(session, std::vector<FileId>(paths_.size(), FileOf(session)));
  }
  spec.key = key + std::to_string(spec.id);
  for (uint64_t count : tensor_counts) {
    spec.tensors.push_back({"tensor" + std::to_string(spec.tensors.size()), spec.numel, count, 0});
    spec.numel += count;
  }
  scheduler_->AddSubgroup(session, spec);
}

void FakeTier::EndSession(SessionId session) {
  Call([&] { scheduler_->EndSession(session, now_ns_); });
}

uint64_t FakeTier::Submit(SessionId session, uint16_t op, SubgroupId subgroup, uint32_t epoch, uint32_t arg,
                          uint64_t first, uint64_t count, const std::string& name) {
  Request request;
  request.name = name;
  request.session = session;
  request.submission.op = op;
  request.submission.subgroup = subgroup;
  request.submission.epoch = epoch;
  request.submission.arg = arg;
  request.submission.first = first;
  request.submission.count = count;
  return Submit(std::move(request));
}

uint64_t FakeTier::Submit(Request request) {
  request.submission.user_data = ++requests_;
  Call([&] { scheduler_->Submit(request, now_ns_); });
  return request.submission.user_data;
}

// What is accepted is in the slot from now on; whoever else had something there has lost it.
uint64_t FakeTier::SubmitIn(uint64_t slot, SessionId session, uint16_t op, SubgroupId id, uint32_t epoch,
                            uint64_t first, uint64_t count) {
  Request request;
  request.session = session;
  request.submission.op = op;
  request.submission.subgroup = id;
  request.submission.epoch = epoch;
  request.submission.staging_offset = slot;
  if (op == MLPO_OP_GRAD) {
    request.submission.arg = MLPO_PIECE_VALUE;
    request.submission.first = first;
    request.submission.count = std::min(count, Numel(session, id) - first);
  }
  const uint64_t number = Submit(std::move(request));
  if (answered(number)) return number;
  auto& slots = slots_[session];
  const uint64_t end = slot + SlotBytes(session, id);
  for (auto it = slots.begin(); it != slots.end();) {
    it = it->first < end && slot < it->second.end ? slots.erase(it) : std::next(it);
  }
  slots[slot] = {end, id};
  return number;
}

// Work on what op has in its slot has ended.
void FakeTier::CheckSlot(const Op& op) {
  const SubgroupSpec& spec = op.subgroup()->spec;
  if (spec.lent == nullptr || op.session->ending) return;
  if (op.kind() == MLPO_OP_GRAD && op.results != op.subgroup()->window.results()) return;  // discarded
  const auto& slots = slots_[op.session->id];
  const auto it = slots.find(op.request.submission.staging_offset);
  if (it == slots.end() || it->second.id != spec.id) Violate(op.subgroup()->Name() + ": another one has used its slot");
}

uint64_t FakeTier::Flush(SessionId session, uint32_t handle, const std::string& name, uint64_t bytes, uint64_t piece) {
  Open(session, MLPO_OP_FLUSH, handle, name, bytes);
  for (uint64_t at = 0; at < bytes; at += piece) {
    Piece(session, MLPO_OP_FLUSH, handle, at, std::min(piece, bytes - at));
  }
  return Commit(session, handle);
}

uint64_t FakeTier::scratch_bytes() {
  uint64_t bytes = 0;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    PathSnapshot path;
    scheduler_->Fill(i, &path, now_ns_);
    bytes += path.scratch_bytes;
  }
  return bytes;
}

void FakeTier::Complete(const Completion& completion) {
  const Outside outside(this);
  if (!completions_.insert({completion.user_data, completion}).second) Violate("a request was answered twice");
  if (gone_.contains(completion.session)) Violate("a session that is gone was answered");
  if (on_complete) At(now_ns_, [this, completion] { on_complete(completion); });
}

void FakeTier::SessionGone(SessionId session) {
  const Outside outside(this);
  if (!gone_.insert({session, true}).second) Violate("a session was gone twice");
  for (const auto& [place, transfers] : moving_) {
    for (const auto& [id, transfer] : transfers) {
      if (saving_[session] > 0 && transfer.direction == Direction::kRead) continue;  // a copy needs no session
      if (transfer.file == FileOf(session)) Violate("a session was gone before its last transfer");
    }
  }
}

void FakeTier::MakeRoom(const ObjectStore& asks, uint64_t bytes, uint64_t ticket) {
  const Outside outside(this);
  if (++asking_[asks.id] != 1) Violate("a store asked for room twice at once");
  rooms.push_back(bytes);
  std::vector<FileId> files;
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    const FileId file = FileOn(i, asks.id);
    files.push_back(removed_.contains({i, file}) ? kNone : file);
  }
  At(now_ns_ + 1000, [this, store = asks.id, bytes, ticket, files = std::move(files)] {
    --asking_[store];
    std::vector<FileId> told = files;
    for (PathIndex i = 0; i < paths_.size(); ++i) {
      PathSnapshot snapshot;
      scheduler_->Fill(i, &snapshot, now_ns_);
      if (!snapshot.evacuated) told[i] = FileOn(i, store);  // enabled since: what it has there then is told last
    }
    Failure failure = bytes > most_room_bytes ? Fail(-ENOSPC, "no room") : room_failure;
    Call([&] { scheduler_->RoomMade(store, bytes, ticket, std::move(told), std::move(failure), now_ns_); });
  });
}

FileId FakeTier::FileOn(PathIndex path, SessionId session) const {
  const auto found = anew_.find({path, session});
  return found == anew_.end() ? FileOf(session) : found->second;
}

// ---- Checkpoints ----

uint64_t FakeTier::BeginSave(SessionId session, uint32_t handle, CopyPace::Options pace, std::vector<bool> hands_over,
                             std::vector<bool> clones) {
  std::vector<FileId> next_files;
  for (const bool leaves : hands_over) next_files.push_back(leaves ? next_file_++ : kNone);
  const uint64_t number = scheduler_->BeginSave(session, handle, pace, std::move(next_files), now_ns_);
  if (number == 0) return 0;
  saver_[number] = session;
  ++saving_[session];
  clones.resize(paths_.size());
  clones_[number] = std::move(clones);
  return number;
}

void FakeTier::StatePinned(const StateSave& save) {
  const Outside outside(this);
  Save& known = saves_[save.id];
  if (std::exchange(known.pinned, true)) Violate("a state was pinned twice");
  if (gone_.contains(save.session_id)) Violate("the state of a session that is gone was pinned");
  known.left = std::any_of(save.next_files.begin(), save.next_files.end(), [](FileId file) { return file != kNone; });
  if (on_pinned) on_pinned(save);
}

void FakeTier::FileUnused(SessionId session, PathIndex path, FileId file) {
  const Outside outside(this);
  if (gone_.contains(session)) Violate("a file of a session that is gone is told of");
  if (!unused_.insert({path, file}).second) Violate("a file was told to be unused twice");
  if (!moving_[{path, file}].empty()) Violate("a file was told to be unused before its last transfer");
}

// What is in files that are handed over, or cloned, is in the part at once; the others follow each other there.
void FakeTier::StateTaken(const StateSave& save) {
  const Outside outside(this);
  Save& known = saves_[save.id];
  if (std::exchange(known.taken, true) || !known.pinned) Violate("a state was taken twice, or before it was pinned");
  known.blocks = save.pins.size();
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (save.old_files[i] == kNone) continue;
    left_.insert({i, save.old_files[i]});
    for (const auto& [id, transfer] : moving_[{i, save.old_files[i]}])
      if (transfer.direction == Direction::kWrite) Violate("a file is handed over that is being written");
  }
  GiveBackUnused(save);
  std::vector<PinPlace> places;
  uint64_t offset = options_.extents_offset_bytes;
  for (const Pin& pin : save.pins) {
    PinPlace& place = places.emplace_back();
    if (pin.extent.path == kNone) continue;
    const Extent& extent = pin.extent;
    const bool handed_over = save.old_files[extent.path] == extent.file;
    place.there = handed_over || clones_[save.id][extent.path];
    if (!place.there) {
      place.part_offset = offset;
      offset += pin.bytes;
      continue;
    }
    const uint64_t at = options_.extents_offset_bytes + extent.offset + pin.first_byte;
    const uint64_t token = StoredAt(extent.path, extent.file, at);
    if (token == kGarbage) Violate("a block is in the part that is none");
    in_parts_[{save.id, pin.subgroup, pin.index}] = token;
    if (handed_over) handed_over_[{extent.path, extent.file, at}] = token;
  }
  At(now_ns_ + place_ns, [this, number = save.id, places = std::move(places)] {
    Call([&] { scheduler_->CopyState(number, places, now_ns_); });
  });
}

// All but what is in use: whoever reads anything else reads garbage.
void FakeTier::GiveBackUnused(const StateSave& save) {
  const std::vector<Extent> used = scheduler_->ExtentsLeft(save);
  for (PathIndex i = 0; i < paths_.size(); ++i) {
    if (save.old_files[i] == kNone) continue;
    File& file = files_[{i, save.old_files[i]}];
    std::erase_if(file, [&](const auto& stored) {
      return std::none_of(used.begin(), used.end(), [&](const Extent& extent) {
        return extent.path == i &&
               Overlap(options_.extents_offset_bytes + extent.offset, extent.bytes, stored.first, stored.second.bytes);
      });
    });
  }
}

uint64_t FakeTier::left_bytes() const {
  uint64_t bytes = 0;
  for (const auto& place : left_) {
    const auto found = files_.find(place);
    if (found == files_.end()) continue;
    for (const auto& [offset, stored] : found->second) bytes += stored.bytes;
  }
  return bytes;
}

uint64_t FakeTier::StoredAt(PathIndex path, FileId file, uint64_t offset) const {
  const auto found = files_.find({path, file});
  if (found == files_.end()) return kGarbage;
  const auto stored = found->second.find(offset);
  return stored == found->second.end() || stored->second.gradient ? kGarbage : stored->second.token;
}

bool FakeTier::HandedOverIsUnchanged() const {
  return std::all_of(handed_over_.begin(), handed_over_.end(), [this](const auto& entry) {
    const auto& [path, file, offset] = entry.first;
    return StoredAt(path, file, offset) == entry.second;
  });
}

void FakeTier::WritePart(uint64_t save, Pin& pin, BufferIndex buffer) {
  const Outside outside(this);
  Use(buffer, Use::kTransfer);
  ++part_writes;
  auto end = [this, save, &pin, buffer, started_ns = now_ns_] { EndPart(save, pin, buffer, started_ns); };
  if (!part_path) return At(now_ns_ + (part_write_time ? part_write_time(save) : part_write_ns), std::move(end));
  Transfer transfer;
  transfer.id = kPartWrites + ++order_;
  transfer.direction = Direction::kWrite;
  transfer.path = *part_path;
  transfer.bytes = pin.bytes;
  to_parts_[transfer.id] = std::move(end);
  paths_[*part_path].device.Start(transfer, now_ns_);
}

void FakeTier::EndPart(uint64_t save, Pin& pin, BufferIndex buffer, int64_t started_ns) {
  --part_writes;
  buffers_[buffer].use = Use::kIdle;
  Failure failure;
  failure.os_errno = part_fault ? part_fault(pin) : 0;
  if (failure.os_errno != 0) failure.status = -failure.os_errno;
  uint64_t& token = in_parts_[{save, pin.subgroup, pin.index}];
  if (token != 0) Violate("a block was copied twice");
  token = buffers_[buffer].token;
  if (token == kGarbage) Violate("what was copied to a part is no block");
  const bool flipped = (buffers_[buffer].flipped & kPartState) != 0;
  const uint64_t hash = pin.hash + (flipped ? 1 : 0);
  if (flipped && pin.hashed) token = 0;  // what is written again, or given up
  Call([&] { scheduler_->PartWritten(save, pin, buffer, hash, failure, now_ns_ - started_ns, now_ns_); });
}

void FakeTier::StateCopied(uint64_t save, const Failure& failure) {
  const Outside outside(this);
  Save& known = saves_[save];
  if (std::exchange(known.copied, true)) Violate("a state was copied twice");
  known.failure = failure;
  --saving_[saver_[save]];
  At(now_ns_ + 1000, [this, save] { Call([&] { scheduler_->SaveEnded(save, {}, true, now_ns_); }); });
}

// ---- Time ----

void FakeTier::At(int64_t at_ns, std::function<void()> happen) { events_.push({at_ns, ++order_, std::move(happen)}); }

bool FakeTier::Step() {
  Path* path = nullptr;
  int64_t next_ns = events_.empty() ? SimulatedPath::kNever : events_.top().at_ns;
  for (Path& other : paths_) {
    if (other.device.next_ns() >= next_ns) continue;
    next_ns = other.device.next_ns();
    path = &other;
  }
  const int64_t wake_ns = scheduler_->wake_ns();
  if (next_ns == SimulatedPath::kNever && wake_ns == Scheduler::kNever) return false;
  if (wake_ns < next_ns) {
    now_ns_ = std::max(now_ns_, wake_ns);
    Call([&] { scheduler_->Tick(now_ns_); });
    return true;
  }
  const int64_t next_second_ns = (now_ns_ / 1'000'000'000 + 1) * 1'000'000'000;
  if (next_ns >= next_second_ns) {
    now_ns_ = next_second_ns;
    Call([&] { scheduler_->Tick(now_ns_); });
    return true;
  }
  now_ns_ = std::max(now_ns_, next_ns);
  if (path != nullptr) {
    for (const auto& [transfer, end_ns] : path->device.Advance(now_ns_)) {
      if (end_ns == now_ns_) {
        EndTransfer(transfer);
      } else {
        At(end_ns, [this, ended = transfer] { EndTransfer(ended); });
      }
    }
    return true;
  }
  const Event event = events_.top();
  events_.pop();
  event.happen();
  return true;
}

void FakeTier::Wait(int64_t ns) {
  const int64_t end = now_ns_ + ns;
  At(end, [] {});
  while (now_ns_ < end && Step()) {
  }
}

// ---- Paths ----

void FakeTier::Use(BufferIndex buffer, enum Use use) {
  if (buffers_[buffer].use != Use::kIdle) Violate("buffer " + std::to_string(buffer) + " is in use twice");
  buffers_[buffer].use = use;
}

// No other transfer in flight has bytes of the same extent, unless both read: one for a checkpoint.
void FakeTier::CheckAlone(const Transfer& transfer) {
  std::map<uint64_t, Transfer>& moving = moving_[{transfer.path, transfer.file}];
  const auto meets = [&](const auto& entry) {
    const Transfer& other = entry.second;
    const bool read = transfer.direction == Direction::kRead && other.direction == Direction::kRead;
    return !read && Overlap(transfer.offset, transfer.bytes, other.offset, other.bytes);
  };
  if (std::any_of(moving.begin(), moving.end(), meets)) {
    Violate("two transfers of file " + std::to_string(transfer.file) + " on path " + std::to_string(transfer.path) +
            " overlap at " + std::to_string(transfer.offset));
  }
  moving[transfer.id] = transfer;
}

void FakeTier::StartTransfer(const Transfer& transfer) {
  const Outside outside(this);
  Use(transfer.buffer, Use::kTransfer);
  CheckAlone(transfer);
  if (transfer.direction == Direction::kWrite && left_.contains({transfer.path, transfer.file}))
    Violate("a write to a file that a checkpoint may have");
  if (removed_.contains({transfer.path, transfer.file})) Violate("a transfer of a file that was removed");
  if (on_transfer) on_transfer(transfer);
  if (options_.integrity && transfer.direction == Direction::kWrite) {
    const Buffer& buffer = buffers_[transfer.buffer];
    const uint64_t gradient = transfer.buffer_offset == 0 ? std::min(buffer.gradient_bytes, transfer.bytes) : 0;
    const uint8_t parts = (gradient > 0 ? kPartGradient : 0) | (transfer.bytes > gradient ? kPartState : 0);
    if ((parts & ~buffer.summed) != 0) Violate("bytes without checksums are written");
    if ((parts & buffer.flipped) != 0) Violate("wrong bytes are written");
  }
  Path& path = paths_[transfer.path];
  PathCounts& counts = path.counts;
  counts.most_in_flight = std::max(counts.most_in_flight, ++counts.in_flight);
  const bool read = transfer.direction == Direction::kRead;
  (read ? counts.reads : counts.writes)++;
  (read ? counts.read_bytes : counts.written_bytes) += transfer.bytes;
  path.device.Start(transfer, now_ns_);
}

void FakeTier::Evacuated(PathIndex path) {
  const Outside outside(this);
  evacuated.push_back(path);
  PathSnapshot snapshot;
  scheduler_->Fill(path, &snapshot, now_ns_);
  if (snapshot.scratch_bytes != 0 || snapshot.checkpoint_bytes != 0 || snapshot.in_flight != 0)
    Violate("a path was evacuated before its last block");
  for (const auto& [session, has_files] : known_) {
    if (has_files) removed_.insert({path, FileOn(path, session)});
  }
  for (const auto& [store, asks] : asking_) removed_.insert({path, FileOn(path, store)});
  // Whatever is read there from now on is nothing of ours; what has been handed over stays.
  for (auto& [place, file] : files_) {
    if (place.first == path && !left_.contains(place)) file.clear();
  }
}

void FakeTier::EnablePath(PathIndex path) {
  PathSnapshot snapshot;
  scheduler_->Fill(path, &snapshot, now_ns_);
  if (snapshot.evacuated) {
    const auto make = [&](SessionId session) {
      const FileId file = anew_[{path, session}] = next_file_++;
      scheduler_->SetFile(session, path, file);
    };
    for (const auto& [session, has_files] : known_) {
      if (has_files) make(session);
    }
    for (const auto& [store, asks] : asking_) make(store);
  }
  Call([&] { scheduler_->EnablePath(path, now_ns_); });
}

// A block written and read back, at the device's pace.
void FakeTier::StartProbe(PathIndex path, uint64_t end) {
  const Outside outside(this);
  Transfer transfer;
  transfer.direction = Direction::kWrite;
  transfer.path = path;
  transfer.bytes = Scheduler::BufferBytes(options_.block_elements);
  transfer.offset = end > transfer.bytes ? end - transfer.bytes : 0;
  ++paths_[path].counts.probes;
  paths_[path].device.Start(transfer, now_ns_);
}

void FakeTier::EndProbe(Transfer transfer) {
  Path& path = paths_[transfer.path];
  const int error = path.fault ? path.fault(transfer) : 0;
  if (error == 0 && transfer.direction == Direction::kWrite) {
    transfer.direction = Direction::kRead;
    return path.device.Start(transfer, now_ns_);
  }
  Call([&] { scheduler_->ProbeDone(transfer.path, error, now_ns_); });
}

void FakeTier::EndTransfer(const Transfer& transfer) {
  if (transfer.id == 0) return EndProbe(transfer);
  if (transfer.id >= kPartWrites) return to_parts_.extract(transfer.id).mapped()();
  Path& path = paths_[transfer.path];
  --path.counts.in_flight;
  moving_[{transfer.path, transfer.file}].erase(transfer.id);
  Buffer& buffer = buffers_[transfer.buffer];
  buffer.use = Use::kIdle;
  TransferResult result;
  result.id = transfer.id;
  result.path = transfer.path;
  result.error = path.fault ? path.fault(transfer) : 0;
  if (result.error == 0) result.bytes = transfer.bytes;
  const bool read = transfer.direction == Direction::kRead;
  (read ? path.counts.done_read_bytes : path.counts.done_written_bytes) += result.bytes;
  File& file = files_[{transfer.path, transfer.file}];
  const bool again = read && buffer.read_again > 0;
  buffer.read_again -= again;
  if (!read) {
    Write(transfer, &file, buffer, result.error == 0);
  } else if (result.error == 0) {
    Read(transfer, file, again, &buffer);
  }
  if (on_transfer_end) on_transfer_end(transfer);
  Call([&] { scheduler_->TransferDone(result, now_ns_); });
}

// Of what was stored, all or some.
void FakeTier::Bring(const Transfer& transfer, const Stored& stored, bool again, Buffer* buffer) {
  const Path& path = paths_[transfer.path];
  buffer->flipped &= ~stored.part();
  if (stored.flipped || (path.flip && path.flip(transfer, again))) buffer->flipped |= stored.part();
  buffer->summed |= stored.part();
}

// The state, the gradient in front of it, or both: each as it was written; or some of one of them, once more.
void FakeTier::Read(const Transfer& transfer, const File& file, bool again, Buffer* buffer) {
  auto around = file.upper_bound(transfer.offset);
  if (around != file.begin()) {
    --around;
    const uint64_t end = transfer.offset + transfer.bytes, stored_end = around->first + around->second.bytes;
    const bool some = end <= stored_end && transfer.bytes < around->second.bytes;
    if (some && again) return Bring(transfer, around->second, again, buffer);
  }
  if (transfer.buffer_offset == 0) buffer->gradient_bytes = 0;  // there is none, unless it is read now
  auto it = file.find(transfer.offset);
  uint64_t left = transfer.bytes;
  if (it != file.end() && it->second.gradient && it->second.bytes <= left) {
    buffer->gradient = it->second.token;
    buffer->gradient_bytes = it->second.bytes;
    Bring(transfer, it->second, again, buffer);
    left -= it->second.bytes;
    it = file.find(transfer.offset + buffer->gradient_bytes);
    if (left == 0) return;
  }
  const bool whole = it != file.end() && !it->second.gradient && it->second.bytes == left;
  buffer->token = whole ? it->second.token : kGarbage;
  if (whole) Bring(transfer, it->second, again, buffer);
}

void FakeTier::Write(const Transfer& transfer, File* file, const Buffer& buffer, bool good) {
  auto it = file->lower_bound(transfer.offset);
  if (it != file->begin()) {
    auto before = std::prev(it);
    if (Overlap(transfer.offset, transfer.bytes, before->first, before->second.bytes)) file->erase(before);
  }
  while (it != file->end() && it->first < transfer.offset + transfer.bytes) it = file->erase(it);
  const uint64_t gradient = transfer.buffer_offset == 0 ? std::min(buffer.gradient_bytes, transfer.bytes) : 0;
  const auto flipped = [&](uint8_t part) { return (buffer.flipped & part) != 0; };
  if (gradient > 0) {
    (*file)[transfer.offset] = {gradient, good ? buffer.gradient : kGarbage, true, flipped(kPartGradient)};
  }
  if (transfer.bytes == gradient) return;
  (*file)[transfer.offset + gradient] = {transfer.bytes - gradient, good ? buffer.token : kGarbage, false,
                                         flipped(kPartState)};
}

// ---- Workers ----

void FakeTier::Occupy(int64_t work_ns, std::function<void()> then) {
  worker_busy_ns_ = std::max(worker_busy_ns_, now_ns_) + std::max<int64_t>(1, work_ns / work_.workers);
  At(worker_busy_ns_, std::move(then));
}

// Wrong bytes are in the last piece: of the state, in its master parameters.
std::vector<uint8_t> FakeTier::WrongIn(const Block& block, uint8_t flipped) {
  if (flipped == 0) return {};
  std::vector<uint8_t> wrong(Scheduler::LayoutOf(block).pieces());
  if (flipped & kPartState) wrong.back() |= 1 << kArrayMaster;
  if (flipped & kPartGradient) wrong.back() |= 1 << kArrayGradient;
  return wrong;
}

std::vector<uint8_t> FakeTier::Compare(const Op& op, const Block& block, const Buffer& buffer) {
  const bool with_gradient = op.kind() == MLPO_OP_UPDATE || op.kind() == MLPO_OP_WRITE_STATE;
  uint8_t flipped = buffer.flipped & block.filled & (with_gradient ? kPartState | kPartGradient : kPartState);
  if (!(block.nonzero & kPartGradient)) flipped &= ~kPartGradient;
  if (!options_.integrity || flipped == 0) return {};
  const bool compared = (!(flipped & kPartState) || block.unchecked & kPartState) &&
                        (!(flipped & kPartGradient) || block.unchecked & kPartGradient);
  if (!compared) Violate(block.owner->Name() + " block " + std::to_string(block.index) + ": wrong bytes are used");
  return WrongIn(block, flipped);
}

void FakeTier::ChecksumsWrong(const Block& block, PathIndex, uint64_t pieces, bool again) {
  wrong_checksums_.push_back({pieces, again});
  buffers_[block.buffer].read_again = again ? 0 : pieces;  // one after another
}

void FakeTier::StartChecksums(Block& block, uint8_t check, uint8_t form) {
  const Outside outside(this);
  Use(block.buffer, Use::kWork);
  ++passes_;
  std::vector<uint8_t> wrong = WrongIn(block, buffers_[block.buffer].flipped & check);
  const double part = static_cast<double>(block.count) / static_cast<double>(options_.block_elements);
  Occupy(static_cast<int64_t>(std::min(1.0, part) * static_cast<double>(work_.block_ns)),
         [this, index = block.buffer, form, wrong = std::move(wrong), &block] {
           buffers_[index].use = Use::kIdle;
           if (wrong.empty()) {
             buffers_[index].summed |= (form & kPartState ? kPartState : 0) | (form & kPartGradient);
           }
           Call([&] { scheduler_->ChecksumsFormed(block, now_ns_, wrong); });
         });
}

void FakeTier::StartBlockWork(const Op& op, Block& block) {
  const Outside outside(this);
  Use(block.buffer, Use::kWork);
  Buffer& buffer = buffers_[block.buffer];
  if (block.filled == 0) {  // what is known of it is of another block
    buffer.summed = buffer.flipped = 0;
  }
  const Subgroup* subgroup = op.subgroup();
  const uint64_t owner = subgroup != nullptr ? subgroup->spec.id : reinterpret_cast<uint64_t>(block.owner);
  uint64_t& version = versions_[BlockName{block.owner->session->id, owner, block.index}];
  if (subgroup == nullptr && block.nonzero == 0) version = 0;  // a new object, maybe where another has been
  // What must be read has been read; what is all zero need not.
  const bool whole_write = op.kind() == MLPO_OP_WRITE_STATE && !(block.filled & kPartState);
  uint64_t& gradient = gradients_[BlockName{block.owner->session->id, owner, block.index}];
  if (op.kind() == MLPO_OP_GRAD) return CopyGradient(op, block, &gradient);
  if (!(block.nonzero & kPartGradient)) {
    buffer.gradient_bytes = 0;  // what is written next has none
    const auto needs = [&](const Segment& segment) {
      return segment.kind == MLPO_PIECE_VALUE && segment.first < block.first + block.count && block.first < segment.end;
    };
    if (op.kind() == MLPO_OP_UPDATE && subgroup->spec.kept_as &&
        std::any_of(op.segments.begin(), op.segments.end(), needs)) {
      Violate(subgroup->Name() + " block " + std::to_string(block.index) + ": an update without its gradient");
    }
  } else if (buffer.gradient != gradient) {
    Violate(block.owner->Name() + " block " + std::to_string(block.index) + ": the buffer does not hold its gradient");
  }
  const bool restores = op.kind() == MLPO_OP_RESTORE;
  if (version != 0 && !whole_write && !restores && buffer.token != version) {
    Violate(block.owner->Name() + " block " + std::to_string(block.index) +
            ": the buffer does not hold its newest state");
  }
  const double part = static_cast<double>(block.count) / static_cast<double>(options_.block_elements);
  const auto work_ns = static_cast<int64_t>(std::min(1.0, part) * static_cast<double>(work_.block_ns));
  std::vector<uint8_t> wrong;
  if (!restores) wrong = Compare(op, block, buffer);  // which looks at nothing that was there
  if (!wrong.empty()) {
    return Occupy(work_ns, [this, index = block.buffer, wrong = std::move(wrong), &block] {
      buffers_[index].use = Use::kIdle;
      Call([&] { scheduler_->BlockWorkDone(block, now_ns_, wrong); });
    });
  }
  if (op.kind() == MLPO_OP_UPDATE) ++updates_;
  if (op.kind() != MLPO_OP_READ_STATE && op.kind() != MLPO_OP_FETCH) version = ++next_version_;
  if (subgroup != nullptr) worked_.push_back({subgroup->spec.id, block.index});
  const bool changed = op.kind() != MLPO_OP_READ_STATE && op.kind() != MLPO_OP_FETCH;
  const uint8_t gone = op.kind() == MLPO_OP_UPDATE ? kPartState | kPartGradient : kPartState;
  const uint8_t formed = op.kind() == MLPO_OP_UPDATE && block.form ? kPartState : 0;
  std::function<void()> end = [this, index = block.buffer, token = version, changed, gone, formed, &op, &block] {
    if (op.kind() == MLPO_OP_UPDATE) CheckSlot(op);
    Buffer& done = buffers_[index];
    done.use = Use::kIdle;
    done.token = token;
    if (changed) {
      done.flipped &= ~gone;
      done.summed = (done.summed & ~gone) | formed;
    }
    if (op.kind() != MLPO_OP_RESTORE) return Call([&] { scheduler_->BlockWorkDone(block, now_ns_); });
    Failure failure;
    failure.os_errno = restore_fault ? restore_fault(block) : 0;
    if (failure.os_errno != 0) failure.status = MLPO_E_IO;
    Call([&] { scheduler_->BlockRestored(block, kPartState, failure, now_ns_); });
  };
  if (restores && restore_time) return At(now_ns_ + restore_time(block), std::move(end));
  Occupy(work_ns, std::move(end));
}

void FakeTier::CopyGradient(const Op& op, Block& block, uint64_t* gradient) {
  *gradient = ++next_version_;
  const double part = static_cast<double>(block.count) / static_cast<double>(options_.block_elements);
  const uint64_t bytes = Scheduler::GradientBytes(op.subgroup()->spec, block.count);
  Occupy(static_cast<int64_t>(part * static_cast<double>(work_.stats_ns)),
         [this, index = block.buffer, token = *gradient, bytes, form = block.form, &op, &block] {
           CheckSlot(op);
           Buffer& done = buffers_[index];
           done.use = Use::kIdle;
           done.gradient = token;
           done.gradient_bytes = bytes;
           done.flipped &= ~kPartGradient;
           done.summed = form ? done.summed | kPartGradient : done.summed & ~kPartGradient;
           Call([&] { scheduler_->BlockWorkDone(block, now_ns_); });
         });
}

void FakeTier::StartStats(Op& op) {
  const Outside outside(this);
  for (const StatChunk& chunk : op.stats.chunks) (*op.results)[chunk.chunk] = {chunk_sum, chunk_finite};
  const double part = static_cast<double>(op.request.submission.count) / static_cast<double>(options_.block_elements);
  const auto done = [this, &op] {
    CheckSlot(op);
    Call([&] { scheduler_->StatsDone(&op, now_ns_); });
  };
  if (work_.stats_ns == 0) return At(now_ns_ + 1, done);
  Occupy(static_cast<int64_t>(part * static_cast<double>(work_.stats_ns)), done);
}

}  // namespace mlpo::test
