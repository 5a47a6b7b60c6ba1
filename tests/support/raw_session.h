// RawSession: a session spoken by hand, without the client library, so that a test can break the protocol at any place.
//
// Every wait has a deadline and throws std::runtime_error when it passes. The shared areas are mapped writable and not
// looked after: what the test writes is what the daemon sees. Threads: one at a time, but for the shared memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proto/control.h"
#include "proto/ring.h"

namespace mlpo::test {

// A pidfd of a process; -1 never.
int OpenPidfd(pid_t pid);
// Whether the daemon has a client's pidfd from the kernel (SO_PEERPIDFD, Linux 6.5) and takes none.
bool KernelGivesPidfd();
mlpo_hello MakeHello(const std::string& job, uint32_t rank = 0, uint32_t world_size = 1, uint32_t entries = 64);

class RawSession {
 public:
  // Connects and sends nothing.
  explicit RawSession(const std::string& socket);
  // Connects and does the whole handshake.
  RawSession(const std::string& socket, const mlpo_hello& hello);
  RawSession(const RawSession&) = delete;
  RawSession& operator=(const RawSession&) = delete;
  ~RawSession();

  // ---- Frames ----
  // False if the daemon has closed the socket.
  bool SendBytes(const void* bytes, size_t count, std::span<const int> fds = {});
  template <class T>
  bool Send(const T& frame, std::span<const int> fds = {}) {
    return SendBytes(&frame, sizeof frame, fds);
  }
  bool SendBare(uint16_t type, uint32_t seq = 0);
  bool SendHello(const mlpo_hello& hello);  // with our own pidfd
  // The next frame; its descriptors are kept until the one after it. False at the end of the socket.
  bool Receive(int seconds = 20);
  uint16_t type() const { return reinterpret_cast<const mlpo_frame*>(buffer_)->type; }
  template <class T>
  const T& As() const {
    return *reinterpret_cast<const T*>(buffer_);
  }
  const std::vector<int>& fds() const { return fds_; }
  void Handshake(const mlpo_hello& hello);
  // Waits for the end of the socket; the last ERROR frame before it, or status 0 if there was none.
  struct EndReason {
    int status = 0;
    std::string text;
  };
  EndReason WaitForEnd(int seconds = 20);
  void Close();  // the socket only
  int socket() const { return socket_; }

  // ---- Registration ----
  // Sends BEGIN, one tensor named like the key, and END.
  // `keeps`: with so many REGISTER_KEEP.
  void SendRegistration(const std::string& key, uint64_t numel, uint32_t dtype, uint32_t seq, int keeps = 0);
  // Until REGISTERED, with whatever ARENA comes before it.
  mlpo_registered Register(const std::string& key, uint64_t numel, uint32_t dtype = MLPO_FLOAT32, bool keep = false);
  // Asks for the staging area, with whatever ARENA comes before it.
  mlpo_staged Stage(uint64_t bytes);
  // The same for the lent area.
  mlpo_staged Lend(uint64_t bytes);
  std::byte* arena(uint32_t index) const { return arenas_.at(index).data; }
  uint64_t arena_bytes(uint32_t index) const { return arenas_.at(index).bytes; }

  // ---- Ring ----
  uint32_t entries() const { return welcome_.entries; }
  const mlpo_welcome& welcome() const { return welcome_; }
  std::byte* client_area() const { return client_.data; }
  mlpo_client_lines* client_lines() const { return reinterpret_cast<mlpo_client_lines*>(client_.data); }
  const mlpo_daemon_lines* daemon_lines() const { return reinterpret_cast<const mlpo_daemon_lines*>(daemon_.data); }
  mlpo_submission* submissions() const {
    return reinterpret_cast<mlpo_submission*>(client_.data + welcome_.submissions_offset);
  }
  mlpo_hyper* hypers() const { return reinterpret_cast<mlpo_hyper*>(client_.data + welcome_.hyper_offset); }
  // Writes an entry behind those pushed so far, without looking whether there is room, and shows it.
  void Push(const mlpo_submission& submission, const mlpo_hyper* hyper = nullptr);
  void ShowTail(uint32_t tail);  // and rings the doorbell
  void RingDoorbell();
  int doorbell() const { return doorbell_; }
  uint32_t tail() const { return tail_; }
  // The next completion; nothing when the session has ended or `milliseconds` have passed.
  std::optional<mlpo_completion> Reap(int milliseconds = 20'000);

 private:
  struct Mapping {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
  };
  void AwaitAnswer(uint16_t answer);
  static Mapping Map(int fd, uint64_t bytes, bool writable);
  void CloseFds();
  void TakeArena();

  int socket_ = -1;
  int doorbell_ = -1;
  alignas(8) std::byte buffer_[MLPO_MAX_FRAME];
  size_t bytes_ = 0;
  std::vector<int> fds_;
  mlpo_welcome welcome_ = {};
  Mapping client_, daemon_;
  std::vector<Mapping> arenas_;
  uint32_t tail_ = 0;
  uint32_t head_ = 0;
  uint32_t seq_ = 0;
};

}  // namespace mlpo::test
