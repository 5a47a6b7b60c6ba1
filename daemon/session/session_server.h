// SessionServer: accepts clients and knows which (user, job, rank) has a session.
//
// Owner: the main thread, on its io_context. Must outlive the io_context's run; Connections borrow it.
#pragma once

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "daemon/base/log.h"
#include "daemon/base/unique_fd.h"
#include "daemon/session/client_connection.h"
#include "daemon/session/log_share.h"
#include "daemon/session/quota_book.h"
#include "daemon/session/session_host.h"

namespace mlpo {

class SessionServer {
 public:
  struct Options {
    uint64_t block_elements = 0;
    uint64_t arenas_limit_bytes = 0;  // all sessions together
    uint32_t max_sessions = 0;
    QuotaAmounts user_limits{};  // of each user, and of each job
    QuotaAmounts job_limits{};
    std::string group;  // that may connect, besides our own uid and root
    bool flush_gradients = false;
  };

  // `listener`: a listening SOCK_SEQPACKET socket.
  SessionServer(boost::asio::io_context& io, UniqueFd listener, Options options, SessionHost* host);

  void Start();
  // No new clients; those that come are refused by the closed socket.
  void StopAccepting();
  // Ends every session with `reason`.
  void EndAll(const Status& reason);
  // The data thread found `session` breaking the protocol.
  void Break(SessionId session, const std::string& reason);
  // Nothing of an ended session is in use any more.
  void SessionGone(SessionId session);
  // I/O of an ended session hangs: the same rank of its job may come again. What it has else stays taken.
  void SessionHangs(SessionId session);
  size_t session_count() const { return connections_.size(); }
  uint64_t arenas_bytes() const { return arenas_bytes_; }
  uint64_t protocol_errors() const { return protocol_errors_; }
  // nullptr if it is not known.
  const ClientConnection* Find(SessionId session) const;

  // ---- For ClientConnection ----
  enum class ClaimOutcome { kYours, kWait, kTaken, kFull };
  // Takes (uid, job, rank) for a connection, or makes it wait until a predecessor that has ended is gone, or hangs.
  // kFull: *why.
  ClaimOutcome Claim(ClientConnection& connection, Status* why);
  void CountProtocolError() { ++protocol_errors_; }
  void OnEnd(ClientConnection& connection, bool was_running);
  Status TakeArenaBytes(const SessionIdentity& identity, uint64_t bytes);
  void GiveArenaBytes(const SessionIdentity& identity, uint64_t bytes);
  QuotaBook& quotas() { return quotas_; }
  LogShare& log_share() { return log_share_; }
  uint64_t NextGeneration() { return ++generation_; }
  SessionHost& host() { return *host_; }
  Frame& frame() { return frame_; }
  const std::string& group() const { return options_.group; }
  uint64_t block_elements() const { return options_.block_elements; }
  // Of a job, that are connected.
  uint32_t RanksOf(uint32_t uid, const std::string& job) const;
  // The number of the last connection.
  SessionId newest_session() const { return next_session_ - 1; }
  bool flush_gradients() const { return options_.flush_gradients; }
  uint64_t arenas_limit_bytes() const { return options_.arenas_limit_bytes; }
  const std::array<uint8_t, MLPO_BOOT_ID_BYTES>& boot_id() const { return boot_id_; }

 private:
  using Key = std::tuple<uint32_t, std::string, uint32_t>;  // uid, job, rank
  struct Claimed {
    SessionId holder = 0;
    std::weak_ptr<ClientConnection> waiter;
  };

  void Accept();
  void OnAcceptable();
  Status CheckRoom(uint32_t uid) const;
  static Key KeyOf(const ClientConnection& connection);
  void ReleaseClaim(const ClientConnection& connection);
  void GiveBack(const ClientConnection& connection);

  boost::asio::io_context& io_;
  boost::asio::posix::stream_descriptor listener_;
  const Options options_;
  SessionHost* const host_;
  QuotaBook quotas_;
  LogShare log_share_;
  Frame frame_;  // the one that is being received
  std::array<uint8_t, MLPO_BOOT_ID_BYTES> boot_id_;
  std::map<SessionId, std::shared_ptr<ClientConnection>> connections_;
  std::map<Key, Claimed> claims_;
  SessionId next_session_ = 1;
  uint64_t generation_ = 0;
  uint64_t arenas_bytes_ = 0;
  uint64_t protocol_errors_ = 0;
  RateLimit accept_log_{1'000'000'000};
};

}  // namespace mlpo
