#include "tests/support/raw_session.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "proto/spsc_ring.hpp"

namespace mlpo::test {
namespace {

[[noreturn]] void Throw(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

template <class T>
T MakeFrame(uint16_t type, uint32_t seq, size_t bytes = sizeof(T)) {
  T frame = {};
  const mlpo_frame header = {MLPO_MAGIC, type, 0, static_cast<uint32_t>(bytes), seq};
  std::memcpy(&frame, &header, sizeof header);
  return frame;
}

}  // namespace

int OpenPidfd(pid_t pid) {
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) Throw("pidfd_open");
  return fd;
}

bool KernelGivesPidfd() {
  int ends[2], pidfd = -1;
  socklen_t bytes = sizeof pidfd;
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) Throw("socketpair");
  const bool gives = ::getsockopt(ends[0], SOL_SOCKET, 77 /* SO_PEERPIDFD */, &pidfd, &bytes) == 0;
  if (gives) ::close(pidfd);
  for (const int fd : ends) ::close(fd);
  return gives;
}

mlpo_hello MakeHello(const std::string& job, uint32_t rank, uint32_t world_size, uint32_t entries) {
  auto hello = MakeFrame<mlpo_hello>(MLPO_FRAME_HELLO, 0);
  hello.abi_major = MLPO_ABI_MAJOR;
  hello.abi_minor = MLPO_ABI_MINOR;
  hello.features_offered = MLPO_FEATURES_HERE;
  hello.rank = rank;
  hello.world_size = world_size;
  hello.numa_node = -1;
  hello.ring_entries = entries;
  hello.job_bytes = static_cast<uint32_t>(job.size());
  job.copy(hello.job, sizeof hello.job);
  return hello;
}

RawSession::RawSession(const std::string& socket) : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  if (socket_ < 0) Throw("socket");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  socket.copy(address.sun_path, sizeof address.sun_path - 1);
  if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    ::close(socket_);
    Throw("connect");
  }
}

RawSession::RawSession(const std::string& socket, const mlpo_hello& hello) : RawSession(socket) { Handshake(hello); }

RawSession::~RawSession() {
  Close();
  CloseFds();
  if (doorbell_ >= 0) ::close(doorbell_);
  for (const Mapping& mapping : arenas_) ::munmap(mapping.data, mapping.bytes);
  if (client_.data != nullptr) ::munmap(client_.data, client_.bytes);
  if (daemon_.data != nullptr) ::munmap(daemon_.data, daemon_.bytes);
}

void RawSession::Close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

void RawSession::CloseFds() {
  for (const int fd : fds_) ::close(fd);
  fds_.clear();
}

// ---- Frames ----

bool RawSession::SendBytes(const void* bytes, size_t count, std::span<const int> fds) {
  iovec part = {const_cast<void*>(bytes), count};
  std::vector<std::byte> control(CMSG_SPACE(fds.size_bytes()));
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  const ssize_t sent = ::sendmsg(socket_, &message, MSG_NOSIGNAL);
  if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return false;
  if (sent < 0) Throw("sendmsg");
  return true;
}

bool RawSession::SendBare(uint16_t type, uint32_t seq) { return Send(MakeFrame<mlpo_frame>(type, seq)); }

bool RawSession::SendHello(const mlpo_hello& hello) {
  const int pidfd = OpenPidfd(::getpid());
  const bool sent = Send(hello, {&pidfd, 1});
  ::close(pidfd);
  return sent;
}

bool RawSession::Receive(int seconds) {
  CloseFds();
  pollfd ready = {socket_, POLLIN, 0};
  if (::poll(&ready, 1, seconds * 1000) <= 0) throw std::runtime_error("the daemon sent nothing in time");
  iovec part = {buffer_, sizeof buffer_};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * MLPO_MAX_FRAME_FDS)];
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
  if (got < 0 && errno != ECONNRESET) Throw("recvmsg");
  if (got <= 0) return false;
  bytes_ = static_cast<size_t>(got);
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    fds_.resize(count);
    std::memcpy(fds_.data(), CMSG_DATA(c), count * sizeof(int));
  }
  return true;
}

void RawSession::Handshake(const mlpo_hello& hello) {
  if (!SendHello(hello) || !Receive()) throw std::runtime_error("the daemon closed the socket during the handshake");
  if (type() != MLPO_FRAME_WELCOME || fds_.size() != 3) {
    const std::string text = type() == MLPO_FRAME_ERROR ? As<mlpo_error>().text : "frame " + std::to_string(type());
    throw std::runtime_error("no WELCOME: " + text);
  }
  welcome_ = As<mlpo_welcome>();
  client_ = Map(fds_[0], welcome_.client_area_bytes, true);
  daemon_ = Map(fds_[1], welcome_.daemon_area_bytes, false);
  doorbell_ = ::dup(fds_[2]);
  SendBare(MLPO_FRAME_READY);
}

RawSession::EndReason RawSession::WaitForEnd(int seconds) {
  EndReason reason;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (Receive(seconds)) {
    if (type() == MLPO_FRAME_ERROR) reason = {As<mlpo_error>().status, As<mlpo_error>().text};
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("the daemon did not end the session");
  }
  return reason;
}

// ---- Registration ----

void RawSession::SendRegistration(const std::string& key, uint64_t numel, uint32_t dtype, uint32_t seq, int keeps) {
  auto begin = MakeFrame<mlpo_register_begin>(MLPO_FRAME_REGISTER_BEGIN, seq);
  begin.dtype = dtype;
  begin.grad_dtype = dtype;
  begin.numel = numel;
  begin.tensors = 1;
  begin.key_bytes = static_cast<uint32_t>(key.size());
  key.copy(begin.key, sizeof begin.key);
  Send(begin);
  for (int i = 0; i < keeps; ++i) SendBare(MLPO_FRAME_REGISTER_KEEP, seq);
  // The daemon closes at the second one: what it has not read then would hide its reason from us.
  if (keeps > 1) return;
  struct Tensors {
    mlpo_register_tensors header;
    mlpo_tensor_record record;
  };
  auto tensors = MakeFrame<Tensors>(MLPO_FRAME_REGISTER_TENSORS, seq);
  tensors.header.count = 1;
  tensors.record.numel = numel;
  tensors.record.name_bytes = begin.key_bytes;
  key.copy(tensors.record.name, sizeof tensors.record.name);
  Send(tensors);
  SendBare(MLPO_FRAME_REGISTER_END, seq);
}

mlpo_registered RawSession::Register(const std::string& key, uint64_t numel, uint32_t dtype, bool keep) {
  SendRegistration(key, numel, dtype, ++seq_, keep ? 1 : 0);
  AwaitAnswer(MLPO_FRAME_REGISTERED);
  return As<mlpo_registered>();
}

mlpo_staged RawSession::Stage(uint64_t bytes) {
  auto staging = MakeFrame<mlpo_staging>(MLPO_FRAME_STAGING, ++seq_);
  staging.bytes = bytes;
  Send(staging);
  AwaitAnswer(MLPO_FRAME_STAGED);
  return As<mlpo_staged>();
}

mlpo_staged RawSession::Lend(uint64_t bytes) {
  auto lend = MakeFrame<mlpo_staging>(MLPO_FRAME_LEND, ++seq_);
  lend.bytes = bytes;
  Send(lend);
  AwaitAnswer(MLPO_FRAME_LENT);
  return As<mlpo_staged>();
}

void RawSession::AwaitAnswer(uint16_t answer) {
  while (Receive()) {
    if (type() == answer) return;
    if (type() == MLPO_FRAME_ERROR) throw std::runtime_error(As<mlpo_error>().text);
    if (type() == MLPO_FRAME_ARENA) TakeArena();
  }
  throw std::runtime_error("the daemon closed the socket before it answered a request");
}

void RawSession::TakeArena() {
  const mlpo_arena arena = As<mlpo_arena>();
  arenas_.push_back(Map(fds_.at(0), arena.bytes, true));
  auto mapped = MakeFrame<mlpo_mapped>(MLPO_FRAME_MAPPED, arena.frame.seq);
  mapped.index = arena.index;
  Send(mapped);
}

RawSession::Mapping RawSession::Map(int fd, uint64_t bytes, bool writable) {
  void* data = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) Throw("mmap");
  return {static_cast<std::byte*>(data), bytes};
}

// ---- Ring ----

void RawSession::Push(const mlpo_submission& submission, const mlpo_hyper* hyper) {
  const uint32_t place = tail_ & (entries() - 1);
  if (hyper != nullptr) CopyIn(&hypers()[place], *hyper);  // word by word: another thread of the test may change it
  CopyIn(&submissions()[place], submission);
  ShowTail(tail_ + 1);
}

void RawSession::ShowTail(uint32_t tail) {
  tail_ = tail;
  std::atomic_ref<uint32_t>(client_lines()->submission_tail).store(tail, std::memory_order_seq_cst);
  RingDoorbell();
}

void RawSession::RingDoorbell() {
  const uint64_t one = 1;
  (void)!::write(doorbell_, &one, sizeof one);  // full: it is readable
}

std::optional<mlpo_completion> RawSession::Reap(int milliseconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  const auto* tail = &daemon_lines()->completion_tail;
  while (std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(tail)).load(std::memory_order_acquire) == head_) {
    pollfd socket = {socket_, POLLRDHUP, 0};
    if (::poll(&socket, 1, 0) > 0 && socket.revents != 0) return std::nullopt;
    if (std::chrono::steady_clock::now() > deadline) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  const auto* completions = reinterpret_cast<const mlpo_completion*>(daemon_.data + welcome_.completions_offset);
  const mlpo_completion completion = completions[head_++ & (entries() - 1)];
  std::atomic_ref<uint32_t>(client_lines()->completion_head).store(head_, std::memory_order_release);
  RingDoorbell();
  return completion;
}

}  // namespace mlpo::test
