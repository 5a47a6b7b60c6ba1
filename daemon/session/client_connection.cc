#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/session/client_connection.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <iterator>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/close_elsewhere.h"
#include "daemon/base/name.h"
#include "daemon/session/session_server.h"

namespace mlpo {
namespace {

constexpr int kHandshakeSeconds = 5;
constexpr int kPredecessorSeconds = 60;
constexpr int kMappedSeconds = 60;
constexpr int kFramesPerTurn = 16;
constexpr uint64_t kMaxStagingBytes = uint64_t{64} << 20;
constexpr uint64_t kLeastBlockOfKept = 2048;  // parameters; config/load.cc has the same for all gradients

Status Broken(const std::string& what) { return Status(MLPO_E_PROTOCOL, what); }

// Descriptors that a frame may bring.
size_t MostFds(uint16_t type) {
  switch (type) {
    case MLPO_FRAME_HELLO:
      return 1;
    case MLPO_FRAME_CHECKPOINT:
      return 2;
    case MLPO_FRAME_RESTORE_FILES:
      return MLPO_MAX_FRAME_FDS;
    default:
      return 0;
  }
}

// A daemon opens nothing for others than its own user: they could not open it themselves, or not the way it does.
Status CheckOwnUid(uint32_t uid) {
  if (uid == ::geteuid()) return Status();
  return Status(-EPERM, "the daemon of uid " + std::to_string(::geteuid()) + " opens no files for uid " +
                            std::to_string(uid) + ": run a daemon as that user");
}

}  // namespace

ClientConnection::ClientConnection(SessionServer* server, boost::asio::io_context& io, UniqueFd socket, Peer peer,
                                   UniqueFd process, SessionId id)
    : server_(server),
      peer_(std::move(peer)),
      process_(std::move(process)),
      socket_(io, socket.release()),
      pidfd_(io),
      deadline_(io) {
  identity_.id = id;
  identity_.uid = peer_.uid;
  identity_.pid = peer_.pid;
}

void ClientConnection::Start() {
  SetDeadline(kHandshakeSeconds, "the handshake was not finished");
  WaitForFrame();
}

void ClientConnection::SetDeadline(int seconds, const char* what) {
  deadline_.expires_after(std::chrono::seconds(seconds));
  deadline_.async_wait(
      [self = shared_from_this(), number = ++deadline_number_, seconds, what](boost::system::error_code error) {
        // Cancelled or set anew after it had passed: then there is another one, or none.
        if (error || number != self->deadline_number_) return;
        self->End(Status(-ETIMEDOUT, std::string(what) + " within " + std::to_string(seconds) + " s"), true);
      });
}

void ClientConnection::ClearDeadline() {
  ++deadline_number_;
  deadline_.cancel();
}

void ClientConnection::WaitForFrame() {
  socket_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                     [self = shared_from_this()](boost::system::error_code error) {
                       if (!error && !self->ended()) self->OnReadable();
                     });
}

void ClientConnection::WaitForProcessEnd() {
  pidfd_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                    [self = shared_from_this()](boost::system::error_code error) {
                      if (!error) self->End(Status(-EPIPE, "its process ended"), false);
                    });
}

void ClientConnection::OnReadable() {
  Frame& frame = server_->frame();
  for (int i = 0; i < kFramesPerTurn && !ended(); ++i) {
    Status status;
    switch (frame.Receive(socket_.native_handle(), peer_.uid, &status)) {
      case Frame::Outcome::kNothing:
        return WaitForFrame();
      case Frame::Outcome::kClosed:
        return End(Status(-EPIPE, "it closed its socket"), false);
      case Frame::Outcome::kBroken:
        return End(status, true);
      case Frame::Outcome::kFrame:
        OnFrame(frame);
        // Those that nobody has taken, now: the frame is all clients', and the next one may come in hours.
        CloseElsewhere(std::exchange(frame.fds(), {}), peer_.uid);
    }
  }
  if (!ended()) WaitForFrame();
}

void ClientConnection::OnFrame(Frame& frame) {
  if (frame.fds().size() > MostFds(frame.type()))
    return End(Broken("a frame has more descriptors than one of its type may"), true);
  if (frame.type() == MLPO_FRAME_BYE) return End(Status(), false);
  Status status;
  switch (state_) {
    case State::kHello:
      seq_ = frame.seq();
      status = OnHello(frame);
      break;
    case State::kWelcomed:
      status = frame.type() == MLPO_FRAME_READY && frame.As<mlpo_frame>() != nullptr
                   ? OnReady()
                   : Broken("READY was expected, not frame type " + std::to_string(frame.type()));
      break;
    case State::kRunning:
      status = OnRequest(frame);
      break;
    case State::kWaiting:
      status = Broken("a frame came before WELCOME");
      break;
    case State::kEnded:
      return;
  }
  if (!status.ok()) End(status, true);
}

// ---- Handshake ----

Status ClientConnection::OnHello(Frame& frame) {
  const auto* hello = frame.As<mlpo_hello>();
  if (frame.type() != MLPO_FRAME_HELLO || hello == nullptr || frame.fds().size() != 1) {
    return Broken("HELLO with one descriptor was expected");
  }
  hello_ = *hello;
  if (hello_.abi_major != MLPO_ABI_MAJOR) {
    return Status(MLPO_E_VERSION, "the client speaks protocol " + std::to_string(hello_.abi_major) + "." +
                                      std::to_string(hello_.abi_minor) + ", this daemon " +
                                      std::to_string(MLPO_ABI_MAJOR) + "." + std::to_string(MLPO_ABI_MINOR) +
                                      ": install the same version of both");
  }
  if (hello_.features_required & ~MLPO_FEATURES_HERE) {
    return Status(MLPO_E_VERSION, "the client requires features that this daemon lacks: update mlpo-daemon");
  }
  if (hello_.reserved != 0 || hello_.job_bytes > MLPO_MAX_JOB) return Broken("HELLO is broken");
  identity_.job.assign(hello_.job, hello_.job_bytes);
  if (!IsName(identity_.job)) {
    return Status::Invalid("the job's name must be [A-Za-z0-9_][A-Za-z0-9._-]{0,127}: it becomes a folder's name");
  }
  if (hello_.world_size == 0 || hello_.rank >= hello_.world_size) {
    return Status::Invalid("rank " + std::to_string(hello_.rank) + " is not below world size " +
                           std::to_string(hello_.world_size));
  }
  if (hello_.ring_entries < MLPO_MIN_RING_ENTRIES || hello_.ring_entries > MLPO_MAX_RING_ENTRIES ||
      !std::has_single_bit(hello_.ring_entries)) {
    return Status::Invalid("ring entries must be a power of two from " + std::to_string(MLPO_MIN_RING_ENTRIES) +
                           " to " + std::to_string(MLPO_MAX_RING_ENTRIES) + ", not " +
                           std::to_string(hello_.ring_entries));
  }
  identity_.rank = hello_.rank;
  identity_.world_size = hello_.world_size;
  identity_.numa_node = hello_.numa_node;
  Status status = CheckMayConnect(peer_, server_->group());
  if (!status.ok()) return status;
  const Status sent = CheckPidfd(frame.fds()[0].get(), peer_);
  if (!process_) {
    if (!sent.ok()) return sent;
    process_ = std::move(frame.fds()[0]);
  } else if (sent.ok()) {
    frame.fds().clear();  // closing a pidfd waits for nobody; what is none the frame closes elsewhere
  }
  boost::system::error_code error;
  pidfd_.assign(process_.get(), error);
  if (!error) process_.release();  // else it stays ours to close
  if (error) return Broken("the pidfd of HELLO cannot be watched: " + error.message());
  WaitForProcessEnd();
  Status full;
  switch (server_->Claim(*this, &full)) {
    case SessionServer::ClaimOutcome::kTaken:
      return Status(-EADDRINUSE, "rank " + std::to_string(identity_.rank) + " of job '" + identity_.job +
                                     "' has a live session: give this run another job name, or end the other one");
    case SessionServer::ClaimOutcome::kFull:
      return full;
    case SessionServer::ClaimOutcome::kWait:
      state_ = State::kWaiting;
      SetDeadline(kPredecessorSeconds, "the I/O of this rank's previous session did not end");
      return Status();
    case SessionServer::ClaimOutcome::kYours:
      return Welcome();
  }
  return Status();
}

void ClientConnection::Proceed() {
  if (state_ != State::kWaiting) return;
  SetDeadline(kHandshakeSeconds, "the handshake was not finished");
  Status status = Welcome();
  if (!status.ok()) End(status, true);
}

Status ClientConnection::Welcome() {
  identity_.generation = server_->NextGeneration();
  const uint64_t limit = server_->arenas_limit_bytes();
  arena_ = std::make_unique<Arena>(hello_.arena_bytes == 0 ? limit : std::min(limit, hello_.arena_bytes));
  // As many as are left to its user and job, but no fewer than a ring has.
  const uint64_t left = server_->quotas().Left(identity_.uid, identity_.job, Quota::kRequests);
  const auto entries = static_cast<uint32_t>(
      std::max<uint64_t>(std::bit_floor(std::min<uint64_t>(hello_.ring_entries, left)), MLPO_MIN_RING_ENTRIES));
  const Status taken = server_->quotas().Take(identity_.uid, identity_.job, Quota::kRequests, entries);
  if (!taken.ok()) return taken;
  ring_entries_ = entries;
  Result<std::unique_ptr<Areas>> areas = Areas::Create(entries);
  if (!areas.ok()) return areas.status().Within("making the session's ring");
  areas_ = std::move(*areas);
  auto welcome = MakeFrame<mlpo_welcome>(MLPO_FRAME_WELCOME, seq_);
  welcome.abi_major = MLPO_ABI_MAJOR;
  welcome.abi_minor = std::min<uint32_t>(hello_.abi_minor, MLPO_ABI_MINOR);
  identity_.features = hello_.features_offered & MLPO_FEATURES_HERE;
  welcome.features = identity_.features;
  welcome.session = identity_.id;
  welcome.generation = identity_.generation;
  std::copy(server_->boot_id().begin(), server_->boot_id().end(), welcome.boot_id);
  welcome.block_elements = static_cast<uint32_t>(server_->block_elements());
  welcome.arena_limit_bytes = arena_->limit_bytes();
  areas_->Describe(&welcome);
  const int fds[] = {areas_->client_area_fd(), areas_->daemon_area_fd(), areas_->doorbell_fd()};
  state_ = State::kWelcomed;
  return SendFrame(socket_.native_handle(), &welcome, sizeof welcome, fds);
}

Status ClientConnection::OnReady() {
  ClearDeadline();
  Status status = areas_->SealClientArea();
  if (!status.ok()) return status;
  state_ = State::kRunning;
  if (uint64_t suppressed = 0; server_->log_share().Allow(peer_.uid, NowNs(), &suppressed)) {
    spdlog::info(
        "event=session_start session={} job={} rank={} world_size={} uid={} pid={} generation={} suppressed={}",
        identity_.id, identity_.job, identity_.rank, identity_.world_size, identity_.uid, identity_.pid,
        identity_.generation, suppressed);
  }
  server_->host().SessionReady(identity_, areas_);
  return Status();
}

// ---- Registration ----

Status ClientConnection::OnRequest(Frame& frame) {
  if (frame.type() == MLPO_FRAME_MAPPED) return OnMapped(frame);
  if (frame.type() == MLPO_FRAME_RESTORE_FILES) return OnRestoreFiles(frame);
  if (restore_) return Broken("a request came before all files of the RESTORE before it");
  if (busy_) return Broken("a request came before the answer to the one before it");
  const bool continues = frame.type() == MLPO_FRAME_REGISTER_TENSORS || frame.type() == MLPO_FRAME_REGISTER_END ||
                         frame.type() == MLPO_FRAME_REGISTER_KEEP;
  if (continues && !registration_.begun()) {
    if (frame.seq() == refused_seq_ && refused_seq_ != 0) return Status();  // was under way when we refused
    return Broken("REGISTER_TENSORS, REGISTER_KEEP or REGISTER_END without REGISTER_BEGIN");
  }
  Status refusal;
  switch (frame.type()) {
    case MLPO_FRAME_REGISTER_BEGIN:
      refusal = registration_.Begin(frame, keys_);
      break;
    case MLPO_FRAME_REGISTER_TENSORS:
      refusal = registration_.AddTensors(frame);
      break;
    case MLPO_FRAME_REGISTER_END:
      seq_ = frame.seq();
      busy_ = true;
      refusal = OnRegisterEnd();
      break;
    case MLPO_FRAME_STAGING:
      seq_ = frame.seq();
      busy_ = true;
      refusal = OnStaging(frame);
      break;
    case MLPO_FRAME_REGISTER_KEEP:
    case MLPO_FRAME_LEND:
      if (!(identity_.features & MLPO_FEATURE_KEEP)) return Broken("REGISTER_KEEP or LEND without feature KEEP");
      if (frame.type() == MLPO_FRAME_REGISTER_KEEP) {
        refusal = registration_.Keep();
        break;
      }
      seq_ = frame.seq();
      busy_ = true;
      refusal = OnLend(frame);
      break;
    case MLPO_FRAME_CHECKPOINT:
    case MLPO_FRAME_RESTORE:
      if (!(identity_.features & MLPO_FEATURE_SNAPSHOT))
        return Broken("CHECKPOINT or RESTORE without feature SNAPSHOT");
      seq_ = frame.seq();
      busy_ = true;
      refusal = frame.type() == MLPO_FRAME_CHECKPOINT ? OnCheckpoint(frame) : OnRestore(frame);
      break;
    default:
      return Broken("unknown frame type " + std::to_string(frame.type()));
  }
  if (refusal.code() == MLPO_E_PROTOCOL) return refusal;
  if (!refusal.ok()) {
    seq_ = frame.seq();
    if (frame.type() == MLPO_FRAME_REGISTER_BEGIN || continues) {
      registration_.Abandon();
      refused_seq_ = seq_;
    }
    Refuse(refusal);
  }
  return Status();
}

Status ClientConnection::OnRegisterEnd() {
  Status status = registration_.End();
  if (!status.ok()) return status;
  const bool keep = registration_.keep();
  auto spec = std::make_shared<SubgroupSpec>(registration_.TakeSpec());
  if (server_->flush_gradients()) spec->kept_as = MLPO_FLOAT32;
  if (tensors_ + spec->tensors.size() > kMaxSessionTensors) {
    return Status(MLPO_E_QUOTA, "a session may have " + std::to_string(kMaxSessionTensors) + " tensors");
  }
  if (keep) {
    status = PlaceInLentArea(spec.get());
    if (!status.ok()) return status;
    server_->host().PrepareStorage(identity_, *spec, [self = shared_from_this(), spec](Status prepared) {
      if (self->ended()) return;
      if (prepared.ok()) {
        return self->Publish(std::move(*spec), MakeFrame<mlpo_registered>(MLPO_FRAME_REGISTERED, self->seq_));
      }
      self->Refuse(prepared);
    });
    return Status();
  }
  const uint64_t bytes = LayOutSlot(*spec).bytes;
  Result<Arena::Place> place = arena_->Find(bytes);
  if (!place.ok()) return place.status();
  server_->host().PrepareStorage(identity_, *spec, [self = shared_from_this(), spec, bytes](Status prepared) {
    if (self->ended()) return;
    if (!prepared.ok()) return self->Refuse(prepared);
    const auto give_back = [self, spec] { self->server_->host().ReturnStorage(self->identity_.id, *spec); };
    const Status placed = self->WithPlace(
        bytes, [self, spec](Arena::Place p) { self->AddSubgroup(std::move(*spec), p); }, give_back);
    if (placed.ok()) return;
    self->Refuse(placed);
    give_back();
  });
  return Status();
}

// ---- Checkpoints ----

Status ClientConnection::OnCheckpoint(Frame& frame) {
  const auto* asked = frame.As<mlpo_checkpoint>();
  if (asked == nullptr || asked->reserved != 0 || asked->tag_bytes > MLPO_MAX_TAG ||
      asked->directory_bytes > MLPO_MAX_DIRECTORY ||
      asked->flags & ~(MLPO_CHECKPOINT_OVERWRITE | MLPO_CHECKPOINT_FILES))
    return Broken("a CHECKPOINT frame is broken");
  const bool passed = asked->flags & MLPO_CHECKPOINT_FILES;
  if (frame.fds().size() != (passed ? 2 : 0) || (passed && asked->directory_bytes != 0))
    return Broken("a CHECKPOINT frame has not the descriptors, or the directory, that its flags say");
  const Status own = passed ? Status() : CheckOwnUid(identity_.uid);
  if (!own.ok()) return own;
  CheckpointRequest request;
  if (passed) {
    // The data file has a second descriptor while it is written.
    Result<ForeignFiles> files = ShareForeign(std::exchange(frame.fds(), {}), peer_.uid, 3);
    if (!files.ok()) return files.status();
    request.files = std::move(*files);
  }
  request.directory.assign(asked->directory, asked->directory_bytes);
  request.tag.assign(asked->tag, asked->tag_bytes);
  request.step = asked->step;
  std::copy(std::begin(asked->attempt), std::end(asked->attempt), request.attempt.begin());
  request.overwrite = asked->flags & MLPO_CHECKPOINT_OVERWRITE;
  request.ranks_here = server_->RanksOf(identity_.uid, identity_.job);
  request.newest_session = server_->newest_session();
  server_->host().BeginCheckpoint(identity_, request, [self = shared_from_this()](Result<CheckpointBegun> begun) {
    if (self->ended()) return;
    if (!begun.ok()) return self->Refuse(begun.status());
    auto answer = MakeFrame<mlpo_checkpointing>(MLPO_FRAME_CHECKPOINTING, self->seq_);
    std::copy(begun->attempt.begin(), begun->attempt.end(), answer.attempt);
    answer.bytes = begun->bytes;
    answer.handle = begun->handle;
    self->Reply(answer);
  });
  return Status();
}

Status ClientConnection::OnRestore(const Frame& frame) {
  const auto* asked = frame.As<mlpo_restore>();
  if (asked == nullptr || asked->reserved != 0 || asked->tag_bytes > MLPO_MAX_TAG ||
      asked->directory_bytes > MLPO_MAX_DIRECTORY)
    return Broken("a RESTORE frame is broken");
  AttemptBytes attempt{};
  std::copy(std::begin(asked->attempt), std::end(asked->attempt), attempt.begin());
  if (attempt != AttemptBytes{} && (asked->tag_bytes == 0 || asked->files > 0))
    return Status::Invalid("RESTORE of an attempt, and not of a tag in a directory: say which tag it is one of");
  if (asked->files > 0) {
    if (asked->tag_bytes != 0 || asked->directory_bytes != 0) return Broken("RESTORE has both files and names");
    if (asked->files > MLPO_MAX_RESTORE_FILES)
      return Status(-E2BIG, std::to_string(asked->files) + " files are more than " +
                                std::to_string(MLPO_MAX_RESTORE_FILES) +
                                ": restore by a daemon of your own, which opens them as it needs them");
    Result<ForeignFiles> files = ShareForeign({}, peer_.uid, asked->files);
    if (!files.ok()) return files.status();
    busy_ = false;  // its files come
    restore_.emplace();
    restore_->files = std::move(*files);
    restore_files_ = asked->files;
    AwaitRestoreFiles();
    return Status();
  }
  const Status own = CheckOwnUid(identity_.uid);
  if (!own.ok()) return own;
  restore_.emplace();
  restore_->directory.assign(asked->directory, asked->directory_bytes);
  restore_->tag.assign(asked->tag, asked->tag_bytes);
  restore_->attempt = attempt;
  BeginRestore();
  return Status();
}

Status ClientConnection::OnRestoreFiles(Frame& frame) {
  const auto* passed = frame.As<mlpo_restore_files>();
  if (passed == nullptr || passed->count == 0 || frame.fds().size() != passed->count)
    return Broken("a RESTORE_FILES frame is broken");
  if (!restore_) {
    if (!busy_ && frame.seq() == seq_ && seq_ != 0) return Status();  // was under way when we refused
    return Broken("RESTORE_FILES without RESTORE");
  }
  std::vector<UniqueFd>& files = *restore_->files;
  if (frame.seq() != seq_ || passed->first != files.size() || passed->count > restore_files_ - files.size())
    return Broken("RESTORE_FILES in a wrong order");
  for (UniqueFd& file : std::exchange(frame.fds(), {})) files.push_back(std::move(file));
  if (files.size() < restore_files_) {
    AwaitRestoreFiles();
    return Status();
  }
  ClearDeadline();
  busy_ = true;
  BeginRestore();
  return Status();
}

// They count as the user's from the first on.
void ClientConnection::AwaitRestoreFiles() {
  SetDeadline(kHandshakeSeconds, "the next files of its RESTORE did not come");
}

void ClientConnection::BeginRestore() {
  const RestoreRequest request = std::move(*restore_);
  restore_.reset();
  server_->host().BeginRestore(identity_, request, [self = shared_from_this()](Result<RestoreBegun> begun) {
    if (self->ended()) return;
    if (!begun.ok()) return self->Refuse(begun.status());
    auto answer = MakeFrame<mlpo_restoring>(MLPO_FRAME_RESTORING, self->seq_);
    std::copy(begun->attempt.begin(), begun->attempt.end(), answer.attempt);
    answer.step = begun->step;
    answer.world_size = begun->world_size;
    answer.handle = begun->handle;
    answer.tag_bytes = static_cast<uint32_t>(begun->tag.copy(answer.tag, sizeof answer.tag));
    self->Reply(answer);
  });
}

Status ClientConnection::OnStaging(const Frame& frame) {
  const auto* staging = frame.As<mlpo_staging>();
  if (staging == nullptr) return Broken("STAGING has a wrong length");
  if (staging_) return Status(-EEXIST, "the session has its staging area already");
  if (staging->bytes == 0) return Status::Invalid("a staging area of 0 bytes");
  const uint64_t bytes = (std::min(staging->bytes, kMaxStagingBytes) + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN;
  return WithPlace(bytes, [self = shared_from_this(), bytes](Arena::Place place) { self->SetStaging(bytes, place); });
}

Status ClientConnection::OnLend(const Frame& frame) {
  const auto* lend = frame.As<mlpo_staging>();
  if (lend == nullptr) return Broken("LEND has a wrong length");
  if (lent_ != nullptr) return Status(-EEXIST, "the session has its lent area already");
  uint64_t bytes = lend->bytes;
  if (bytes == 0) {
    if (hello_.arena_bytes == 0) {
      return Status::Invalid(
          "subgroups without a slot of their own share what is left of an arena of a fixed size: "
          "connect with arena_bytes");
    }
    bytes = std::max<uint64_t>(arena_->MostBytes(), MLPO_ALIGN);  // else refused with the figures
  }
  if (bytes > arena_->limit_bytes()) {
    return Status(MLPO_E_QUOTA, "a lent area of " + std::to_string(bytes) +
                                    " bytes does not fit the arena's limit of " +
                                    std::to_string(arena_->limit_bytes()));
  }
  bytes = (bytes + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN;
  return WithPlace(bytes, [self = shared_from_this(), bytes](Arena::Place place) { self->SetLent(bytes, place); });
}

Status ClientConnection::WithPlace(uint64_t bytes, std::function<void(Arena::Place)> use,
                                   std::function<void()> refused) {
  Result<Arena::Place> found = arena_->Find(bytes);
  if (!found.ok()) return found.status();
  Arena::Place place = *found;
  if (place.new_memfd_bytes == 0) {
    use(place);
    return Status();
  }
  Status status = server_->TakeArenaBytes(identity_, place.new_memfd_bytes);
  if (!status.ok()) return status;
  auto allocated = [self = shared_from_this(), place, use, refused](Result<std::shared_ptr<Memfd>> memfd) {
    if (self->ended() || !memfd.ok()) {
      self->server_->GiveArenaBytes(self->identity_, place.new_memfd_bytes);
      if (memfd.ok()) self->server_->host().Dispose(*memfd);
      if (self->ended()) return;
      self->Refuse(memfd.status().Within("memory for the arena"));
      if (refused) refused();
      return;
    }
    self->arena_->Add(*memfd);  // nothing is placed in it before MAPPED
    self->after_mapped_ = [use, place] { use(place); };
    self->SendArena(*memfd);
  };
  server_->host().AllocateArena(place.new_memfd_bytes, identity_.numa_node, cancelled_, std::move(allocated));
  return Status();
}

void ClientConnection::SendArena(const std::shared_ptr<Memfd>& memfd) {
  auto frame = MakeFrame<mlpo_arena>(MLPO_FRAME_ARENA, seq_);
  frame.index = arena_->count() - 1;
  frame.bytes = memfd->bytes();
  const int fds[] = {memfd->fd()};
  unmapped_ = memfd;
  SetDeadline(kMappedSeconds, "the client did not map its arena");
  Status status = SendFrame(socket_.native_handle(), &frame, sizeof frame, fds);
  if (!status.ok()) End(status, false);
}

Status ClientConnection::OnMapped(const Frame& frame) {
  const auto* mapped = frame.As<mlpo_mapped>();
  if (unmapped_ == nullptr || mapped == nullptr || mapped->index + 1 != arena_->count() || mapped->reserved != 0) {
    return Broken("MAPPED for an arena that was not sent");
  }
  ClearDeadline();
  Status status = unmapped_->Seal();
  unmapped_.reset();
  if (!status.ok()) return status;
  std::exchange(after_mapped_, nullptr)();
  return Status();
}

void ClientConnection::AddSubgroup(SubgroupSpec spec, Arena::Place place) {
  const SlotLayout layout = LayOutSlot(spec);
  std::byte* slot = arena_->Take(place, layout.bytes);
  spec.header = slot;
  spec.grad = slot + layout.grad_offset;
  spec.param = slot + layout.param_offset;
  auto registered = MakeFrame<mlpo_registered>(MLPO_FRAME_REGISTERED, seq_);
  registered.arena = place.memfd;
  registered.header_offset = place.offset;
  registered.grad_offset = place.offset + layout.grad_offset;
  registered.param_offset = place.offset + layout.param_offset;
  Publish(std::move(spec), registered);
}

// Its slots will be of the lent area.
Status ClientConnection::PlaceInLentArea(SubgroupSpec* spec) const {
  if (server_->block_elements() < kLeastBlockOfKept) {
    return Status(-EOPNOTSUPP, "a block of [memory] block = " + std::to_string(server_->block_elements()) +
                                   " has no room for a gradient beside the state: at least " +
                                   std::to_string(kLeastBlockOfKept) + " is needed");
  }
  spec->slot_bytes = LentSlotBytes(*spec);
  if (spec->slot_bytes > lent_bytes_) {
    return Status(MLPO_E_QUOTA, "a slot of the subgroup needs " + std::to_string(spec->slot_bytes) +
                                    " bytes, and the lent area has " + std::to_string(lent_bytes_) +
                                    ": raise the client's arena, register fewer subgroups with a slot of their own, "
                                    "or use smaller ones");
  }
  spec->lent = lent_;
  spec->lent_bytes = lent_bytes_;
  return Status();
}

// `registered` has the slot.
void ClientConnection::Publish(SubgroupSpec spec, mlpo_registered registered) {
  spec.id = next_subgroup_++;
  keys_.insert(spec.key);
  tensors_ += spec.tensors.size();
  registered.subgroup = spec.id;
  registered.blocks = server_->host().BlockCount(spec);
  server_->host().AddSubgroup(identity_.id, std::move(spec),
                              [self = shared_from_this(), registered] { self->Reply(registered); });
}

void ClientConnection::SetStaging(uint64_t bytes, Arena::Place place) {
  std::byte* data = arena_->Take(place, bytes);
  staging_ = true;
  auto staged = MakeFrame<mlpo_staged>(MLPO_FRAME_STAGED, seq_);
  staged.arena = place.memfd;
  staged.offset = place.offset;
  staged.bytes = bytes;
  server_->host().SetStaging(identity_.id, data, bytes, [self = shared_from_this(), staged] { self->Reply(staged); });
}

void ClientConnection::SetLent(uint64_t bytes, Arena::Place place) {
  lent_ = arena_->Take(place, bytes);
  lent_bytes_ = bytes;
  auto lent = MakeFrame<mlpo_staged>(MLPO_FRAME_LENT, seq_);
  lent.arena = place.memfd;
  lent.offset = place.offset;
  lent.bytes = bytes;
  Reply(lent);
}

template <class T>
void ClientConnection::Reply(const T& frame) {
  if (ended()) return;
  busy_ = false;
  Status status = SendFrame(socket_.native_handle(), &frame, sizeof frame, {});
  if (!status.ok()) End(status, false);
}

void ClientConnection::Refuse(const Status& status) {
  busy_ = false;
  if (uint64_t suppressed = 0; server_->log_share().Allow(peer_.uid, NowNs(), &suppressed)) {
    spdlog::warn("event=request_refused session={} job={} rank={} code={} reason=\"{}\" suppressed={}", identity_.id,
                 identity_.job, identity_.rank, status.code(), status.message(), suppressed);
  }
  SendError(socket_.native_handle(), seq_, status);
}

// ---- End ----

void ClientConnection::End(const Status& reason, bool tell) {
  if (ended()) return;
  const bool was_running = state_ == State::kRunning;
  state_ = State::kEnded;
  cancelled_->store(true, std::memory_order_relaxed);
  after_mapped_ = nullptr;
  restore_.reset();
  if (reason.code() == MLPO_E_PROTOCOL) server_->CountProtocolError();
  LogEnd(reason, was_running);
  if (tell) SendError(socket_.native_handle(), seq_, reason);
  CloseSocket(UniqueFd(socket_.release()), peer_.uid);
  boost::system::error_code ignored;  // closing cannot fail in a way that matters here
  pidfd_.close(ignored);
  ClearDeadline();
  server_->OnEnd(*this, was_running);
}

void ClientConnection::LogEnd(const Status& reason, bool was_running) {
  uint64_t suppressed = 0;
  if (!server_->log_share().Allow(peer_.uid, NowNs(), &suppressed)) return;
  if (was_running && reason.ok()) {
    return spdlog::info("event=session_end session={} job={} rank={} suppressed={}", identity_.id, identity_.job,
                        identity_.rank, suppressed);
  }
  spdlog::warn("event=session_end session={} job={} rank={} uid={} pid={} code={} reason=\"{}\" suppressed={}",
               identity_.id, identity_.job, identity_.rank, identity_.uid, identity_.pid, reason.code(),
               reason.message(), suppressed);
}

std::shared_ptr<void> ClientConnection::TakeMemory() {
  unmapped_.reset();
  auto memory =
      std::make_shared<std::pair<std::shared_ptr<Areas>, std::unique_ptr<Arena>>>(std::move(areas_), std::move(arena_));
  return memory;
}

}  // namespace mlpo
