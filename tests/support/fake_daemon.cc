#include "tests/support/fake_daemon.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "proto/spsc_ring.hpp"
#include "proto/status.h"

namespace {

// A fake that cannot work is a broken test, not a failed one.
void Must(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

template <class T>
T MakeFrame(mlpo_frame_type type, uint32_t seq) {
  T frame = {};
  auto* header = reinterpret_cast<mlpo_frame*>(&frame);
  header->magic = MLPO_MAGIC;
  header->type = static_cast<uint16_t>(type);
  header->bytes = sizeof frame;
  header->seq = seq;
  return frame;
}

std::byte* MapShared(int fd, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  Must(base != MAP_FAILED, "mmap");
  return static_cast<std::byte*>(base);
}

uint64_t ElementBytes(uint32_t dtype) { return dtype == MLPO_FLOAT32 ? 4 : 2; }

uint64_t RoundUp(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

bool SendRaw(int socket, const void* bytes, size_t count, const std::vector<int>& fds) {
  iovec part = {const_cast<void*>(bytes), count};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 16)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(count);
}

bool SendError(int socket, uint32_t seq, int32_t status, const std::string& text) {
  auto error = MakeFrame<mlpo_error>(MLPO_FRAME_ERROR, seq);
  error.status = status;
  text.copy(error.text, sizeof error.text - 1);
  return SendRaw(socket, &error, sizeof error);
}

int MakeMemfd(size_t bytes, bool sealed) {
  const int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Must(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "memfd");
  if (sealed) Must(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0, "seal");
  return fd;
}

void FakeRing::Create(uint32_t entry_count, bool sealed) {
  entries = entry_count;
  hyper_offset = MLPO_RING_HEADER_BYTES + uint64_t{entries} * sizeof(mlpo_submission);
  client_bytes = hyper_offset + uint64_t{entries} * sizeof(mlpo_hyper);
  errors_offset = MLPO_RING_HEADER_BYTES + uint64_t{entries} * sizeof(mlpo_completion);
  daemon_bytes = errors_offset + uint64_t{entries} * sizeof(mlpo_error_record);
  client_fd = MakeMemfd(client_bytes, sealed);
  daemon_fd = MakeMemfd(daemon_bytes, sealed);
  client = MapShared(client_fd, client_bytes);
  daemon = MapShared(daemon_fd, daemon_bytes);
  doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  Must(doorbell >= 0, "eventfd");
}

void FakeRing::Destroy() {
  if (client != nullptr) munmap(client, client_bytes);
  if (daemon != nullptr) munmap(daemon, daemon_bytes);
  for (const int fd : {client_fd, daemon_fd, doorbell}) {
    if (fd >= 0) close(fd);
  }
}

class FakeDaemon::Connection {
 public:
  Connection(FakeDaemon* daemon, int socket) : daemon_(daemon), script_(*daemon->script_), socket_(socket) {
    thread_ = std::thread([this] { Serve(); });
  }
  ~Connection() {
    Cut();
    thread_.join();
    close(socket_);
    ring_.Destroy();
    for (const Piece& piece : arena_) munmap(piece.base, piece.bytes);
  }

  void Cut() {
    stop_.store(true);
    shutdown(socket_, SHUT_RDWR);
  }
  void End(uint32_t state, int32_t status, const std::string& text) {
    if (!open_.load()) return;
    if (status != 0) SendError(socket_, 0, status, text);
    mlpo::SharedWords::Store(&ring_.daemon_lines()->state, state, std::memory_order_seq_cst);
    Wake();
  }

 private:
  struct Piece {
    std::byte* base;
    size_t bytes;
    size_t used;
  };
  struct Subgroup {
    uint32_t dtype = 0, grad_dtype = 0;
    uint64_t numel = 0;
    uint32_t tensors_expected = 0;
    std::string key;
    std::byte *header = nullptr, *grad = nullptr, *param = nullptr;
    std::vector<float> state[3];
    std::vector<int64_t> steps;
    uint32_t epoch = 0;
  };

  void Serve() {
    if (!Handshake()) return Hangup();
    daemon_->sessions_.fetch_add(1);
    open_.store(true);
    while (!stop_.load()) {
      if (Turn()) continue;
      if (daemon_->release_held_.exchange(false)) {
        Answer(held_);
        held_.clear();
        continue;
      }
      if (!Sleep()) break;
    }
    Hangup();
  }
  // The descriptor stays, so that nobody else gets its number.
  void Hangup() { shutdown(socket_, SHUT_RDWR); }

  bool Receive(std::vector<std::byte>* frame, std::vector<int>* fds) {
    alignas(8) static thread_local std::byte buffer[MLPO_MAX_FRAME];
    iovec part = {buffer, sizeof buffer};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * MLPO_MAX_FRAME_FDS)];
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) return false;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        fds->push_back(fd);
      }
    }
    frame->assign(buffer, buffer + got);
    return true;
  }

  static bool IsPidfdOfThisProcess(int fd) {
    char path[64], text[4096] = {};
    std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    const int info = open(path, O_RDONLY | O_CLOEXEC);
    if (info < 0) return false;
    const bool read_it = read(info, text, sizeof text - 1) > 0;
    close(info);
    const std::string line = "Pid:\t" + std::to_string(getpid()) + "\n";
    return read_it && std::strstr(text, line.c_str()) != nullptr;
  }

  bool Handshake() {
    std::vector<std::byte> bytes;
    std::vector<int> fds;
    if (!Receive(&bytes, &fds)) return false;
    mlpo_hello hello = {};
    if (bytes.size() == sizeof hello) std::memcpy(&hello, bytes.data(), sizeof hello);
    if (fds.size() == 1 && IsPidfdOfThisProcess(fds[0])) daemon_->pidfds_.fetch_add(1);
    for (const int fd : fds) close(fd);
    if (hello.frame.type != MLPO_FRAME_HELLO) return false;
    if (script_.hello && script_.hello(socket_, hello)) return false;
    ring_.Create(hello.ring_entries, script_.sealed);
    auto welcome = MakeFrame<mlpo_welcome>(MLPO_FRAME_WELCOME, hello.frame.seq);
    welcome.abi_major = MLPO_ABI_MAJOR;
    welcome.abi_minor = MLPO_ABI_MINOR;
    welcome.features = MLPO_FEATURE_UPDATE;
    welcome.session = 7;
    welcome.generation = 3;
    welcome.entries = ring_.entries;
    welcome.block_elements = script_.block_elements;
    welcome.client_area_bytes = ring_.client_bytes;
    welcome.daemon_area_bytes = ring_.daemon_bytes;
    welcome.submissions_offset = MLPO_RING_HEADER_BYTES;
    welcome.hyper_offset = ring_.hyper_offset;
    welcome.completions_offset = MLPO_RING_HEADER_BYTES;
    welcome.errors_offset = ring_.errors_offset;
    welcome.arena_limit_bytes = uint64_t{1} << 40;
    if (script_.welcome) script_.welcome(&welcome);
    std::vector<int> sent = {ring_.client_fd, ring_.daemon_fd, ring_.doorbell};
    if (script_.welcome_fds) sent = script_.welcome_fds(ring_);
    if (!SendRaw(socket_, &welcome, sizeof welcome, sent)) return false;
    bytes.clear();
    fds.clear();
    if (!Receive(&bytes, &fds)) return false;
    const auto* ready = reinterpret_cast<const mlpo_frame*>(bytes.data());
    if (bytes.size() != sizeof *ready || ready->type != MLPO_FRAME_READY) return false;
    // Existing mappings of the client go on writing, new ones cannot.
    Must(fcntl(ring_.client_fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0 || !script_.sealed, "seal client area");
    submissions_ = {reinterpret_cast<mlpo_submission*>(ring_.client + MLPO_RING_HEADER_BYTES), ring_.entries,
                    &ring_.client_lines()->submission_tail, &ring_.daemon_lines()->submission_head};
    completions_ = {reinterpret_cast<mlpo_completion*>(ring_.daemon + MLPO_RING_HEADER_BYTES), ring_.entries,
                    &ring_.daemon_lines()->completion_tail, &ring_.client_lines()->completion_head};
    return true;
  }

  // Takes one batch of submissions; false if there was none.
  bool Turn() {
    if (!script_.reads_ring.load()) return false;
    const int64_t available = submissions_.Available();
    Must(available >= 0, "the client's submission index");
    if (available == 0) return false;
    std::vector<Pending> batch;
    for (int64_t i = 0; i < available; ++i) {
      const auto* hyper = reinterpret_cast<mlpo_hyper*>(ring_.client + ring_.hyper_offset) + submissions_.next_place();
      Pending pending;
      pending.submission = submissions_.Pop();
      pending.hyper = mlpo::CopyOut(hyper);
      batch.push_back(pending);
    }
    submissions_.Release();
    daemon_->submissions_.fetch_add(batch.size());
    for (Pending& pending : batch) pending.answer = Work(pending);
    std::vector<Pending> now;
    for (Pending& pending : batch) (pending.answer.hold ? held_ : now).push_back(pending);
    Answer(now);
    return true;
  }

  struct Pending {
    mlpo_submission submission;
    mlpo_hyper hyper;
    FakeAnswer answer;
  };

  void Answer(std::vector<Pending>& pendings) {
    if (pendings.empty()) return;
    for (Pending& pending : pendings) {
      Must(completions_.Free() > 0, "a place for a completion");
      mlpo_completion completion = pending.answer.completion;
      completion.user_data = pending.submission.user_data;
      if (pending.answer.record) {
        completion.flags |= MLPO_COMPLETION_ERROR_RECORD;
        completion.detail = completions_.next_place();
        auto* records = reinterpret_cast<mlpo_error_record*>(ring_.daemon + ring_.errors_offset);
        mlpo::CopyIn(&records[completion.detail], *pending.answer.record);
      }
      completions_.Push(completion);
    }
    if (script_.before_publish) script_.before_publish(ring_);
    completions_.Publish();
    if (completions_.ConsumerSleeps(&ring_.client_lines()->completion_sleepers) && script_.wakes.load()) Wake();
    if (script_.after_publish) script_.after_publish(ring_);
  }
  void Wake() { syscall(SYS_futex, &ring_.daemon_lines()->completion_tail, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

  // Waits for the doorbell or a frame; false when the client is gone.
  bool Sleep() {
    mlpo::SharedWords::Store(&ring_.daemon_lines()->doorbell_wanted, 1, std::memory_order_seq_cst);
    bool lives = true;
    if (!script_.reads_ring.load() || submissions_.AvailableBeforeSleep() == 0) {
      pollfd waits[2] = {{socket_, POLLIN, 0}, {ring_.doorbell, POLLIN, 0}};
      // The time-out is for the hooks (held answers, reads_ring), not for the client.
      poll(waits, 2, 20);
      uint64_t count;
      if (waits[1].revents != 0) Must(read(ring_.doorbell, &count, sizeof count) == sizeof count, "doorbell");
      if (waits[0].revents != 0) lives = TakeFrame();
    }
    mlpo::SharedWords::Store(&ring_.daemon_lines()->doorbell_wanted, 0, std::memory_order_seq_cst);
    return lives;
  }

  FakeAnswer Work(const Pending& pending) {
    const mlpo_submission& submission = pending.submission;
    if (script_.answer) {
      if (auto answer = script_.answer(submission, pending.hyper)) return *answer;
    }
    FakeAnswer answer;
    if (submission.op == MLPO_OP_NOP || submission.op == MLPO_OP_DISCARD) return answer;
    auto found = subgroups_.find(submission.subgroup);
    if (found == subgroups_.end()) {
      answer.completion.status = -ENOENT;
      return answer;
    }
    Subgroup& subgroup = found->second;
    if (submission.op == MLPO_OP_GRAD) Grad(subgroup, submission, &answer);
    if (submission.op == MLPO_OP_UPDATE) Update(subgroup, submission, pending.hyper, &answer);
    if (submission.op == MLPO_OP_READ_STATE) Move(subgroup, submission, /*write=*/false);
    if (submission.op == MLPO_OP_WRITE_STATE) Move(subgroup, submission, /*write=*/true);
    return answer;
  }

  static void Grad(const Subgroup& subgroup, const mlpo_submission& submission, FakeAnswer* answer) {
    if (submission.epoch != subgroup.epoch + 1) {
      answer->completion.status = MLPO_E_EPOCH;
      return;
    }
    double sum = 0;
    if (submission.arg == MLPO_PIECE_VALUE && subgroup.grad_dtype == MLPO_FLOAT32) {
      const auto* grad = reinterpret_cast<const float*>(subgroup.grad);
      for (uint64_t i = submission.first; i < submission.first + submission.count; ++i)
        sum += double{grad[i]} * grad[i];
    }
    std::memcpy(&answer->completion.value, &sum, sizeof sum);
    answer->completion.flags = MLPO_COMPLETION_ALL_FINITE;
    if (submission.count == subgroup.numel) answer->completion.flags |= MLPO_COMPLETION_WINDOW_COMPLETE;
  }

  static void Update(Subgroup& subgroup, const mlpo_submission& submission, const mlpo_hyper& hyper,
                     FakeAnswer* answer) {
    if (submission.epoch != subgroup.epoch + 1) {
      answer->completion.status = MLPO_E_EPOCH;
      return;
    }
    if (subgroup.dtype == MLPO_FLOAT32 && subgroup.grad_dtype == MLPO_FLOAT32) {
      const auto* grad = reinterpret_cast<const float*>(subgroup.grad);
      auto* param = reinterpret_cast<float*>(subgroup.param);
      for (uint64_t i = 0; i < subgroup.numel; ++i) {
        const float g = grad[i];
        subgroup.state[0][i] -= static_cast<float>(hyper.lr * hyper.grad_scale) * g;
        subgroup.state[1][i] = g;
        subgroup.state[2][i] = g * g;
        param[i] = subgroup.state[0][i];
      }
    }
    for (int64_t& step : subgroup.steps) ++step;
    answer->completion.value = ++subgroup.epoch;
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(subgroup.header))
        .store(subgroup.epoch, std::memory_order_release);
  }

  void Move(Subgroup& subgroup, const mlpo_submission& submission, bool write) {
    std::byte* at = staging_ + submission.staging_offset;
    const auto copy = [&](void* array, uint64_t bytes) {
      Must(at + bytes <= staging_ + staging_bytes_, "a chunk within the staging area");
      if (write) {
        std::memcpy(array, at, bytes);
      } else {
        std::memcpy(at, array, bytes);
      }
      at += bytes;
    };
    if (submission.arg == MLPO_PART_STEP) {
      copy(subgroup.steps.data() + submission.first, submission.count * 8);
      return;
    }
    for (int part = 0; part < 3; ++part) {
      if ((submission.arg >> part & 1) != 0) copy(subgroup.state[part].data() + submission.first, submission.count * 4);
    }
  }

  // False when the client is gone or said BYE.
  bool TakeFrame() {
    std::vector<std::byte> bytes;
    std::vector<int> fds;
    if (!Receive(&bytes, &fds)) return false;
    for (const int fd : fds) close(fd);
    const auto& frame = *reinterpret_cast<const mlpo_frame*>(bytes.data());
    if (frame.type == MLPO_FRAME_BYE) {
      daemon_->byes_.fetch_add(1);
      return false;
    }
    if (script_.frame && script_.frame(socket_, frame)) return true;
    switch (frame.type) {
      case MLPO_FRAME_REGISTER_BEGIN: {
        const auto& begin = *reinterpret_cast<const mlpo_register_begin*>(bytes.data());
        registering_ = {};
        registering_.dtype = begin.dtype;
        registering_.grad_dtype = begin.grad_dtype;
        registering_.numel = begin.numel;
        registering_.tensors_expected = begin.tensors;
        registering_.key.assign(begin.key, begin.key_bytes);
        return true;
      }
      case MLPO_FRAME_REGISTER_TENSORS: {
        const auto& tensors = *reinterpret_cast<const mlpo_register_tensors*>(bytes.data());
        registering_.steps.resize(registering_.steps.size() + tensors.count);
        return true;
      }
      case MLPO_FRAME_REGISTER_END:
        return FinishRegistration(frame.seq);
      case MLPO_FRAME_STAGING:
        return MakeStaging(frame.seq, reinterpret_cast<const mlpo_staging*>(bytes.data())->bytes);
      default:
        return false;
    }
  }

  // A place in the arena, in a new piece of it if need be; false when the client is gone.
  bool Place(uint32_t seq, uint64_t bytes, uint32_t* index, uint64_t* offset) {
    bytes = RoundUp(bytes, MLPO_ALIGN);
    if (arena_.empty() || arena_.back().bytes - arena_.back().used < bytes) {
      const size_t piece_bytes = std::max<uint64_t>(bytes, 1 << 16);
      const int fd = MakeMemfd(piece_bytes, script_.sealed);
      arena_.push_back({MapShared(fd, piece_bytes), piece_bytes, 0});
      auto arena = MakeFrame<mlpo_arena>(MLPO_FRAME_ARENA, seq);
      arena.index = static_cast<uint32_t>(arena_.size() - 1);
      arena.bytes = piece_bytes;
      SendRaw(socket_, &arena, sizeof arena, {fd});
      std::vector<std::byte> answer;
      std::vector<int> fds;
      const bool got = Receive(&answer, &fds);
      const auto* mapped = reinterpret_cast<const mlpo_mapped*>(answer.data());
      const bool fine = got && answer.size() == sizeof *mapped && mapped->frame.type == MLPO_FRAME_MAPPED &&
                        mapped->frame.seq == seq && mapped->index == arena.index;
      if (fine) Must(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0, "seal arena");
      close(fd);
      if (!fine) return false;
    }
    *index = static_cast<uint32_t>(arena_.size() - 1);
    *offset = arena_.back().used;
    arena_.back().used += bytes;
    return true;
  }

  bool FinishRegistration(uint32_t seq) {
    Subgroup subgroup = std::move(registering_);
    for (const auto& [handle, other] : subgroups_) {
      if (other.key == subgroup.key) return SendError(socket_, seq, -EEXIST, "key " + subgroup.key + " is taken");
    }
    if (subgroup.steps.size() != subgroup.tensors_expected)
      return SendError(socket_, seq, -EINVAL, "tensors are missing");
    const uint64_t grad_bytes = subgroup.numel * ElementBytes(subgroup.grad_dtype);
    const uint64_t param_bytes = subgroup.numel * ElementBytes(subgroup.dtype);
    if (grad_bytes > script_.slot_limit_bytes) {
      return SendError(
          socket_, seq, MLPO_E_QUOTA,
          "needs " + std::to_string(grad_bytes) + ", limit is " + std::to_string(script_.slot_limit_bytes));
    }
    const bool shared = grad_bytes == param_bytes;
    const uint64_t grad_at = MLPO_SLOT_HEADER_BYTES;
    const uint64_t param_at = shared ? grad_at : RoundUp(grad_at + grad_bytes, 128);
    auto registered = MakeFrame<mlpo_registered>(MLPO_FRAME_REGISTERED, seq);
    uint64_t offset;
    if (!Place(seq, param_at + param_bytes, &registered.arena, &offset)) return false;
    registered.subgroup = static_cast<uint32_t>(subgroups_.size() + 1);
    registered.header_offset = offset;
    registered.grad_offset = offset + grad_at;
    registered.param_offset = offset + param_at;
    registered.blocks = 1;
    subgroup.header = arena_.back().base + offset;
    subgroup.grad = subgroup.header + grad_at;
    subgroup.param = subgroup.header + param_at;
    for (auto& part : subgroup.state) part.resize(subgroup.numel);
    subgroups_[registered.subgroup] = std::move(subgroup);
    return SendRaw(socket_, &registered, sizeof registered);
  }

  bool MakeStaging(uint32_t seq, uint64_t wanted) {
    Must(staging_ == nullptr, "a session's only staging area");
    auto staged = MakeFrame<mlpo_staged>(MLPO_FRAME_STAGED, seq);
    staged.bytes = script_.staging_bytes != 0 ? script_.staging_bytes : wanted;
    if (!Place(seq, staged.bytes, &staged.arena, &staged.offset)) return false;
    staging_ = arena_.back().base + staged.offset;
    staging_bytes_ = staged.bytes;
    return SendRaw(socket_, &staged, sizeof staged);
  }

  FakeDaemon* const daemon_;
  Script& script_;
  const int socket_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> open_{false};  // the ring is there
  FakeRing ring_;
  mlpo::SpscConsumer<mlpo_submission> submissions_;
  mlpo::SpscProducer<mlpo_completion> completions_;
  std::vector<Pending> held_;
  std::vector<Piece> arena_;
  std::map<uint32_t, Subgroup> subgroups_;
  Subgroup registering_;
  std::byte* staging_ = nullptr;
  uint64_t staging_bytes_ = 0;
  std::thread thread_;
};

FakeDaemon::FakeDaemon(std::shared_ptr<Script> script) : socket_(directory_ / "mlpo.sock"), script_(std::move(script)) {
  listener_ = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  socket_.copy(address.sun_path, sizeof address.sun_path - 1);
  Must(listener_ >= 0 && bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
           listen(listener_, 64) == 0,
       "listening");
  acceptor_ = std::thread([this] { Accept(); });
}

FakeDaemon::~FakeDaemon() { Die(); }

void FakeDaemon::Accept() {
  for (;;) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (stop_.load() || socket < 0) {
      if (socket >= 0) close(socket);
      return;
    }
    std::lock_guard lock(mutex_);
    connections_.push_back(std::make_unique<Connection>(this, socket));
  }
}

void FakeDaemon::Die() {
  if (stop_.exchange(true)) return;
  shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  close(listener_);
  std::lock_guard lock(mutex_);
  connections_.clear();
}

void FakeDaemon::EndSessions(uint32_t state, int32_t status, const std::string& text) {
  std::lock_guard lock(mutex_);
  for (auto& connection : connections_) connection->End(state, status, text);
}
