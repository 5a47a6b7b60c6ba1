// ClientConnection: one client's socket, from HELLO to its end: handshake, registration, liveness.
//
// States: kHello -> [kWaiting for the same rank's predecessor to be gone ->] kWelcomed -> kRunning -> kEnded. One
// request of the client is carried out at a time; while it waits for memory, storage or the data thread, `busy_` is set
// and anything but MAPPED and BYE breaks the protocol. Owner: the main thread; lives until the session is gone.
// Handlers hold a reference.
#pragma once

#include <atomic>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "daemon/session/areas.h"
#include "daemon/session/arena.h"
#include "daemon/session/frame.h"
#include "daemon/session/peer.h"
#include "daemon/session/registration.h"
#include "daemon/types/checkpoint.h"
#include "daemon/types/session_identity.h"

namespace mlpo {

class SessionServer;

class ClientConnection : public std::enable_shared_from_this<ClientConnection> {
 public:
  // `process`: a pidfd of the client, where the kernel gives it; else HELLO brings one.
  ClientConnection(SessionServer* server, boost::asio::io_context& io, UniqueFd socket, Peer peer, UniqueFd process,
                   SessionId id);

  void Start();
  // Ends the session. `tell`: the client gets `reason` in an ERROR frame. Idempotent.
  void End(const Status& reason, bool tell);
  // The predecessor has gone: go on with the handshake.
  void Proceed();

  const SessionIdentity& identity() const { return identity_; }
  bool ended() const { return state_ == State::kEnded; }
  // Its HELLO has not come.
  bool silent() const { return state_ == State::kHello; }
  // Whether its process has ended or has closed its socket, noticed or not.
  bool HasLeft() {
    return !ended() && (HasHungUp(socket_.native_handle()) || (pidfd_.is_open() && HasEnded(pidfd_.native_handle())));
  }
  uint64_t arena_bytes() const { return arena_ ? arena_->bytes() : 0; }
  uint32_t ring_entries() const { return ring_entries_; }  // that it has been given
  // What is left of it for the housekeeping thread to free.
  std::shared_ptr<void> TakeMemory();

 private:
  enum class State { kHello, kWaiting, kWelcomed, kRunning, kEnded };

  void WaitForFrame();
  void WaitForProcessEnd();
  void SetDeadline(int seconds, const char* what);
  void ClearDeadline();
  void OnReadable();
  void OnFrame(Frame& frame);
  Status OnHello(Frame& frame);
  Status Welcome();
  Status OnReady();
  Status OnRequest(Frame& frame);
  Status OnRegisterEnd();
  Status OnStaging(const Frame& frame);
  Status OnLend(const Frame& frame);
  Status OnCheckpoint(Frame& frame);
  Status OnRestore(const Frame& frame);
  Status OnRestoreFiles(Frame& frame);
  void AwaitRestoreFiles();
  void BeginRestore();
  Status OnMapped(const Frame& frame);

  // A place of `bytes` in the arena, then `use` with it; makes, sends and seals a further memfd where needed. Where
  // that is refused: an error, or `refused` later, once the client has been told.
  Status WithPlace(uint64_t bytes, std::function<void(Arena::Place)> use, std::function<void()> refused = nullptr);
  void SendArena(const std::shared_ptr<Memfd>& memfd);
  void AddSubgroup(SubgroupSpec spec, Arena::Place place);
  Status PlaceInLentArea(SubgroupSpec* spec) const;
  void Publish(SubgroupSpec spec, mlpo_registered registered);
  void SetStaging(uint64_t bytes, Arena::Place place);
  void SetLent(uint64_t bytes, Arena::Place place);
  // Ends the client's request with an answer or an error; a request's own failure leaves the session alone.
  template <class T>
  void Reply(const T& frame);
  void Refuse(const Status& status);
  void LogEnd(const Status& reason, bool was_running);

  SessionServer* const server_;
  const Peer peer_;
  UniqueFd process_;  // until HELLO
  boost::asio::posix::stream_descriptor socket_;
  boost::asio::posix::stream_descriptor pidfd_;
  boost::asio::steady_timer deadline_;
  uint32_t deadline_number_ = 0;  // of the one in force
  State state_ = State::kHello;
  SessionIdentity identity_;
  mlpo_hello hello_ = {};
  uint32_t ring_entries_ = 0;

  std::shared_ptr<Areas> areas_;
  std::unique_ptr<Arena> arena_;
  Registration registration_;
  std::set<std::string> keys_;
  uint64_t tensors_ = 0;
  SubgroupId next_subgroup_ = 1;
  bool staging_ = false;
  std::byte* lent_ = nullptr;  // the lent area
  uint64_t lent_bytes_ = 0;

  std::optional<RestoreRequest> restore_;  // whose files are still to come
  uint32_t restore_files_ = 0;             // so many in all

  bool busy_ = false;
  uint32_t seq_ = 0;                 // of the request that is carried out
  uint32_t refused_seq_ = 0;         // of the last registration that was refused; one refusal is all it gets
  std::shared_ptr<Memfd> unmapped_;  // sent in ARENA, MAPPED has not come
  std::function<void()> after_mapped_;
  std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace mlpo
