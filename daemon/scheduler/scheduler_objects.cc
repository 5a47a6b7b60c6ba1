// Scheduler: named objects: FETCH, FLUSH, DELETE.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/scheduler/failure.h"
#include "daemon/scheduler/object.h"
#include "daemon/scheduler/scheduler.h"
#include "proto/abi.h"

namespace mlpo {
namespace {

// A name as a message can have it: names are any bytes, and a message is short.
std::string Shown(const std::string& name) {
  constexpr size_t kMost = 64;
  constexpr char kHex[] = "0123456789abcdef";
  std::string shown = "object '";
  for (const char c : name.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      shown += c;
    } else {
      shown += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return shown + (name.size() > kMost ? "...'" : "'");
}

Failure Unknown(const std::string& name) { return Fail(-ENOENT, "the job has no " + Shown(name)); }

uint64_t PaddedBytes(uint64_t bytes) { return (bytes + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN; }

}  // namespace

std::string Object::Name() const { return Shown(name); }

void Scheduler::SubmitObject(Session& session, const Request& request) {
  const mlpo_submission& submission = request.submission;
  if (!(session.features & MLPO_FEATURE_OBJECTS)) {
    return Answer(request, Fail(-EOPNOTSUPP, "the client did not offer named objects in HELLO"));
  }
  if (submission.op == MLPO_OP_DELETE) {
    Object* object = FindObject(session, request.name);
    if (object == nullptr) return Answer(request, Unknown(request.name));
    Answer(request, {});
    object->store->names.erase(request.name);
    object->named = false;
    return MaybeUnused(*object);
  }
  if (submission.arg == MLPO_OBJECT_SIZE) {
    const Object* object = FindObject(session, request.name);
    return object == nullptr ? Answer(request, Unknown(request.name)) : Answer(request, {}, object->bytes);
  }
  if (submission.arg == MLPO_OBJECT_OPEN) return Open(session, request);
  auto handle = session.handles.find(submission.subgroup);
  if (handle == session.handles.end() || handle->second.writes != (submission.op == MLPO_OP_FLUSH)) {
    return Answer(request,
                  Fail(-EBADF, "no object is open for that with handle " + std::to_string(submission.subgroup)));
  }
  Object& object = *handle->second.object;
  if (submission.arg == MLPO_OBJECT_CLOSE) {
    Answer(request, {});
    return CloseHandle(session, handle->first);
  }
  if (submission.arg == MLPO_OBJECT_PIECE) {
    Failure failure = CheckPiece(handle->second, submission);
    if (failure.status != 0) return Answer(request, std::move(failure));
    if (submission.op == MLPO_OP_FLUSH) object.received += submission.count;
  }
  Enqueue(object, session, request);
  if (submission.arg == MLPO_OBJECT_COMMIT) {  // its place in the queue keeps the version
    --object.handles;
    session.handles.erase(handle);
  }
  RunQueue(object);
  MaybeUnused(object);
}

Failure Scheduler::CheckPiece(const ObjectHandle& handle, const mlpo_submission& submission) const {
  const Object& object = *handle.object;
  const uint64_t limit = object.bytes;
  if (submission.first > limit || submission.count > limit - submission.first) {
    return Fail(-EINVAL, "bytes [" + std::to_string(submission.first) + ", +" + std::to_string(submission.count) +
                             ") of " + object.Name() + ", which has " + std::to_string(limit));
  }
  if (!handle.writes || submission.first == object.received) return {};
  return Fail(-EINVAL, "the pieces of " + object.Name() + " follow each other: " + std::to_string(object.received) +
                           " is next, not " + std::to_string(submission.first));
}

// ---- Handles ----

void Scheduler::Open(Session& session, const Request& request) {
  const uint32_t handle = request.submission.subgroup;
  if (session.handles.contains(handle)) {
    return Answer(request, Fail(-EEXIST, "handle " + std::to_string(handle) + " is open already"));
  }
  if (session.handles.size() >= MLPO_MAX_OBJECT_HANDLES) {
    return Answer(request, Fail(MLPO_E_QUOTA, "a session may have " + std::to_string(MLPO_MAX_OBJECT_HANDLES) +
                                                  " objects open: close one"));
  }
  if (request.submission.op == MLPO_OP_FLUSH) return OpenForWriting(session, request);
  Object* object = FindObject(session, request.name);
  if (object == nullptr) return Answer(request, Unknown(request.name));
  ++object->handles;
  session.handles[handle] = {object, false};
  Answer(request, {}, object->bytes);
}

// The new version is there at once, so that its pieces can queue behind the OPEN while that waits for room.
void Scheduler::OpenForWriting(Session& session, const Request& request) {
  const uint64_t bytes = request.submission.count;
  if (bytes > MLPO_MAX_OBJECT_BYTES) {
    return Answer(request, Fail(-EFBIG, Shown(request.name) + " of " + std::to_string(bytes) + " bytes: at most " +
                                            std::to_string(MLPO_MAX_OBJECT_BYTES)));
  }
  ObjectStore& store = StoreOf(*session.job);
  if (store.objects.size() >= MLPO_MAX_OBJECTS) {
    return Answer(request,
                  Fail(MLPO_E_QUOTA, "a job may have " + std::to_string(MLPO_MAX_OBJECTS) + " objects: delete some"));
  }
  auto made = std::make_unique<Object>(&store, request.name, bytes);
  Object& object = *made;
  store.objects[&object] = std::move(made);
  object.handles = 1;
  session.handles[request.submission.subgroup] = {&object, true};
  object.small = bytes <= kSmallObjectBytes && bytes <= options_.small_objects_bytes - small_objects_bytes_;
  if (object.small) {
    small_objects_bytes_ += bytes;
    object.memory.resize(bytes);
    return Answer(request, {});
  }
  coming_ += BlocksToCome(object);
  Enqueue(object, session, request).begun = true;
  store.waiting.push_back(&object);
  SeeToRoom(store);
}

// Answers the OPENs that wait, in their order, until one needs more room than there is: asks for that. An object may be
// gone afterwards, and with the last one the store.
void Scheduler::SeeToRoom(ObjectStore& store) {
  while (!store.asking && !store.waiting.empty()) {
    Object& object = *store.waiting.front();
    store.wanted_bytes += PaddedBytes(object.bytes);
    object.counted = true;
    if (store.wanted_bytes > store.room_bytes) {
      store.asking = true;
      store.has_files = true;
      return actions_->MakeRoom(store, store.wanted_bytes, object.queue.front()->sequence);
    }
    store.waiting.pop_front();
    const bool last = store.waiting.empty();
    Advance(object);
    if (last) return;
  }
}

void Scheduler::RoomMade(SessionId id, uint64_t bytes, uint64_t ticket, std::vector<FileId> files, Failure failure,
                         int64_t now_ns) {
  Enter(now_ns);
  auto* store = static_cast<ObjectStore*>(Find(id));
  if (store == nullptr) return;  // all that waited for it has gone
  if (failure.status == 0) {
    store->files = std::move(files);
    LeaveOutEvacuated(*store);
    store->room_bytes = std::max(store->room_bytes, bytes);
  }
  store->asking = false;
  bool last = false;
  // Else its session has ended.
  if (!store->waiting.empty() && store->waiting.front()->queue.front()->sequence == ticket) {
    Object& object = *store->waiting.front();
    store->waiting.pop_front();
    object.queue.front()->failure = std::move(failure);
    last = store->waiting.empty();
    Advance(object);
  }
  if (!last) SeeToRoom(*store);
  Pump();
}

void Scheduler::CloseHandle(Session& session, uint32_t handle) {
  Object& object = *session.handles.at(handle).object;
  session.handles.erase(handle);
  --object.handles;
  ForgetAhead(object);
  MaybeUnused(object);
}

// If nobody is left who could read on, what was fetched ahead is no better than other clean blocks, and goes first.
void Scheduler::ForgetAhead(Object& object) {
  if (object.handles > 0) return;
  for (auto it = clean_ahead_.begin(); it != clean_ahead_.end();) {
    Block& block = *it++;
    if (block.owner != &object) continue;
    LeaveLists(block);
    SetAhead(block, false);
    clean_.push_front(block);
  }
}

// ---- Operations of one version ----

Failure Scheduler::BeginObjectOp(Op& op) {
  Object& object = *op.object();
  const mlpo_submission& submission = op.request.submission;
  if (object.failure.status != 0) return object.failure;
  if (submission.arg != MLPO_OBJECT_PIECE || submission.count == 0 || object.small) return {};  // done in EndObjectOp
  const uint64_t end = submission.first + submission.count;
  const uint64_t block_bytes = BufferBytes(options_.block_elements);
  for (uint64_t first = object.blocks.size() * block_bytes; first < end; first += block_bytes) {
    Block& block = object.blocks.emplace_back();
    --coming_;
    block.owner = &object;
    block.index = static_cast<uint32_t>(object.blocks.size() - 1);
    block.first = first;
    block.count = std::min(block_bytes, object.bytes - first);
  }
  WantRange(op);
  if (submission.op == MLPO_OP_FETCH && submission.first == std::exchange(object.read_until, end)) {
    ReadAhead(object, op.end_block);
  }
  return {};
}

// What a reader that goes on will want next, into buffers that nobody else wants.
void Scheduler::ReadAhead(Object& object, uint32_t from) {
  const uint64_t end = std::min<uint64_t>(object.blocks.size(), from + model_.QueueBlocks(Direction::kRead));
  for (uint64_t i = from; i < end && pending_ == 0; ++i) {
    Block& block = object.blocks[i];
    if (block.state != BlockState::kAway || !MayStart(block.extent.path, Direction::kRead, *object.store)) continue;
    if (paths_[block.extent.path].health.doubtful()) continue;
    if (!MayKeep(*object.store, 1)) break;
    if (free_.empty() && clean_.empty()) {
      ++read_ahead_;
      continue;
    }
    BufferIndex buffer;
    MLPO_CHECK(TakeBuffer(NodeOf(block.extent.path), &buffer));
    SetAhead(block, true);
    StartRead(block, buffer);
  }
}

// Whether a piece will still be written to it.
bool Scheduler::IsGrowing(const Block& block) {
  const Object* object = block.owner->object();
  return object != nullptr && object->received < block.first + block.count;
}

uint64_t Scheduler::BlocksToCome(const Object& object) const {
  const uint64_t block_bytes = BufferBytes(options_.block_elements);
  return (object.bytes + block_bytes - 1) / block_bytes - object.blocks.size();
}

void Scheduler::EndObjectOp(Op& op) {
  Object& object = *op.object();
  const mlpo_submission& submission = op.request.submission;
  if (op.failure.status == 0) {
    if (submission.arg == MLPO_OBJECT_COMMIT) {
      op.failure = Commit(object);
    } else if (submission.arg == MLPO_OBJECT_PIECE && object.small && submission.count > 0) {
      actions_->CopyPiece(op, object.memory);
    }
  } else if (submission.op == MLPO_OP_FLUSH) {
    object.failure = op.failure;
    if (submission.arg == MLPO_OBJECT_OPEN) {
      auto handle = op.session->handles.find(submission.subgroup);
      if (handle != op.session->handles.end() && handle->second.object == &object) {
        op.session->handles.erase(handle);
        --object.handles;
      }
    }
  }
  Answer(op.request, std::move(op.failure));
}

Failure Scheduler::Commit(Object& object) {
  if (object.received < object.bytes) {
    return Fail(-EINVAL, object.Name() + " of " + std::to_string(object.bytes) + " bytes was committed after " +
                             std::to_string(object.received));
  }
  Object*& named = object.store->names[object.name];
  Object* const before = std::exchange(named, &object);
  object.named = true;
  if (before != nullptr) {
    before->named = false;
    MaybeUnused(*before);
  }
  return {};
}

// ---- Lives ----

ObjectStore& Scheduler::StoreOf(TrainingJob& job) {
  if (job.store != nullptr) return *job.store;
  auto store = std::make_unique<ObjectStore>(paths_.size());
  store->uid = job.uid;
  store->job_name = job.name;
  store->job = &job;
  job.store = store.get();
  Keep(next_store_++, std::move(store));
  return *job.store;
}

Object* Scheduler::FindObject(const Session& session, const std::string& name) const {
  const ObjectStore* store = session.job->store;
  if (store == nullptr) return nullptr;
  auto it = store->names.find(name);
  return it == store->names.end() ? nullptr : it->second;
}

void Scheduler::MaybeUnused(Object& object) {
  if (object.named || object.handles > 0 || !object.queue.empty() || object.ending) return;
  EndOwner(object);
  if (object.small) {
    small_objects_bytes_ -= object.bytes;
  } else {
    if (object.counted) object.store->wanted_bytes -= PaddedBytes(object.bytes);
    std::erase(object.store->waiting, &object);
    coming_ -= BlocksToCome(object);
  }
  MaybeGone(object);
}

// The session has ended: its handles and operations go, and with the job's last session the names.
void Scheduler::EndUseOfObjects(Session& session) {
  TrainingJob& job = *session.job;
  std::vector<Object*> objects;
  if (job.store != nullptr) {
    for (const auto& [pointer, object] : job.store->objects) objects.push_back(object.get());
  }
  for (const auto& [number, handle] : session.handles) --handle.object->handles;
  session.handles.clear();
  const bool last = --job.sessions == 0;
  if (last && job.store != nullptr) job.store->names.clear();
  for (Object* object : objects) {
    if (last) object->named = false;
    ForgetAhead(*object);
    DropOps(*object, session);
  }
  fair_share_.Forget(session);
  LeaveJob(session);
  if (!last) return;
  if (job.store != nullptr) LeaveJob(*job.store);  // nothing of it waits
  fair_share_.Forget(job);
  if (--job.user->jobs == 0) users_.erase(job.uid);
  jobs_.erase({job.uid, job.name});
}

// What of the session's operations workers have goes on to its end; the object may be gone afterwards.
void Scheduler::DropOps(Object& object, Session& session) {
  std::erase_if(object.queue, [&](const auto& op) { return op->session == &session && !op->begun; });
  if (object.queue.empty() || object.queue.front()->session != &session) return MaybeUnused(object);
  Op& op = *object.queue.front();
  FailOp(op, Fail(-ESHUTDOWN, "the session has ended"));
  for (uint32_t i = op.first_block; i < op.end_block; ++i) {
    Block& block = object.blocks[i];
    if (block.want != &op || block.state != BlockState::kFetching) continue;
    block.want = nullptr;  // read all the same; whoever wants it next has it
    --op.active;
  }
  if (op.active == 0) Advance(object);
}

}  // namespace mlpo
