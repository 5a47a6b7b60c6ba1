// FakeDaemon: a daemon's end of sessions, scripted, to test the client by itself: real sockets, memfds and rings,
// sleeping and waking as proto/FORMAT.md says, with a hook wherever a test wants a wrong answer.
//
// Keeps state in plain vectors. Its update is p -= lr * grad_scale * g, m = g, v = g * g: enough to see that every
// value arrived where it belongs. Threads: one accepts, one serves each connection; public functions are thread-safe.
// Hooks run on the serving thread and are set before the first connection.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "proto/control.h"
#include "proto/ring.h"
#include "tests/support/scratch_dir.h"

struct FakeAnswer {
  mlpo_completion completion = {};  // user_data is filled in
  std::optional<mlpo_error_record> record;
  bool hold = false;  // no answer now; FakeDaemon::ReleaseHeld gives them all
};

// The memfds of a session's ring, and what is in them.
struct FakeRing {
  uint32_t entries = 0;
  int client_fd = -1, daemon_fd = -1, doorbell = -1;
  std::byte* client = nullptr;
  std::byte* daemon = nullptr;
  size_t client_bytes = 0, daemon_bytes = 0;
  uint64_t hyper_offset = 0, errors_offset = 0;

  mlpo_client_lines* client_lines() const { return reinterpret_cast<mlpo_client_lines*>(client); }
  mlpo_daemon_lines* daemon_lines() const { return reinterpret_cast<mlpo_daemon_lines*>(daemon); }
  void Create(uint32_t entry_count, bool sealed);
  void Destroy();
};

class FakeDaemon {
 public:
  struct Script {
    uint32_t block_elements = 1024;
    uint64_t staging_bytes = 0;  // 0: as asked
    uint64_t slot_limit_bytes = UINT64_MAX;
    bool sealed = true;
    // After HELLO. True: the hook has answered by itself and the connection ends.
    std::function<bool(int socket, const mlpo_hello& hello)> hello;
    std::function<void(mlpo_welcome* welcome)> welcome;
    // Instead of the areas and the doorbell: which descriptors go with WELCOME.
    std::function<std::vector<int>(const FakeRing& ring)> welcome_fds;
    // A frame after the handshake. True: the hook has dealt with it.
    std::function<bool(int socket, const mlpo_frame& frame)> frame;
    // Any submission: nullopt leaves it to the fake.
    std::function<std::optional<FakeAnswer>(const mlpo_submission& submission, const mlpo_hyper& hyper)> answer;
    // Before completions are shown: may spoil them.
    std::function<void(FakeRing& ring)> before_publish;
    // After they were shown, and the client woken.
    std::function<void(FakeRing& ring)> after_publish;
    // False: the submission ring is not read at all.
    std::atomic<bool> reads_ring{true};
    // False: completions are published without waking the client.
    std::atomic<bool> wakes{true};
  };

  explicit FakeDaemon(std::shared_ptr<Script> script = std::make_shared<Script>());
  ~FakeDaemon();

  const std::string& socket() const { return socket_; }
  // Ends every connection at once and without a word, as kill -9 does; no further ones are accepted.
  void Die();
  // Stores a state word in every session, wakes, and sends an ERROR frame (seq 0) before that if `status` is not 0.
  void EndSessions(uint32_t state, int32_t status, const std::string& text);
  void ReleaseHeld() { release_held_.store(true); }

  int sessions() const { return sessions_.load(); }
  int byes() const { return byes_.load(); }
  uint64_t submissions() const { return submissions_.load(); }
  // Descriptors that came with HELLO and stand for this process.
  int pidfds() const { return pidfds_.load(); }

 private:
  class Connection;

  void Accept();

  ScratchDir directory_;
  std::string socket_;
  std::shared_ptr<Script> script_;
  int listener_ = -1;
  std::atomic<bool> stop_{false};
  std::atomic<bool> release_held_{false};
  std::atomic<int> sessions_{0}, byes_{0}, pidfds_{0};
  std::atomic<uint64_t> submissions_{0};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> connections_;  // guarded by mutex_
  std::thread acceptor_;
};

// One frame with descriptors on a SEQPACKET socket; false if the peer is gone.
bool SendRaw(int socket, const void* bytes, size_t count, const std::vector<int>& fds = {});
bool SendError(int socket, uint32_t seq, int32_t status, const std::string& text);
// A memfd of `bytes`, sealed as the daemon's are.
int MakeMemfd(size_t bytes, bool sealed);
