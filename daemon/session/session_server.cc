#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/session/session_server.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>

#include "daemon/base/check.h"
#include "daemon/base/clock.h"
#include "daemon/base/close_elsewhere.h"
#include "daemon/session/frame.h"

namespace mlpo {
namespace {

constexpr int kAcceptsPerTurn = 16;
constexpr auto kAcceptPause = std::chrono::milliseconds(100);
constexpr size_t kHandshakes = 64;  // that there is room for, and for as many as there may be sessions
constexpr size_t kShareOfOne = 4;   // of that, its inverse: what one user may have of it

}  // namespace

SessionServer::SessionServer(boost::asio::io_context& io, UniqueFd listener, Options options, SessionHost* host)
    : io_(io),
      listener_(io, listener.release()),
      options_(std::move(options)),
      host_(host),
      quotas_(options_.user_limits, options_.job_limits) {
  MLPO_CHECK(::getrandom(boot_id_.data(), boot_id_.size(), 0) == static_cast<ssize_t>(boot_id_.size()));
}

void SessionServer::Start() { Accept(); }

void SessionServer::Accept() {
  listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](boost::system::error_code error) {
    if (!error) OnAcceptable();
  });
}

void SessionServer::OnAcceptable() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd socket(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      // Out of descriptors or memory: clients wait in the socket's backlog while we do not spin.
      uint64_t suppressed;
      if (accept_log_.Allow(NowNs(), &suppressed)) {
        spdlog::error("event=accept_failed error=\"{}\" suppressed={}", Status::Errno(errno, "accept").message(),
                      suppressed);
      }
      auto pause = std::make_shared<boost::asio::steady_timer>(io_, kAcceptPause);
      pause->async_wait([this, pause](boost::system::error_code error) {
        if (!error && listener_.is_open()) Accept();
      });
      return;
    }
    Result<Peer> peer = PeerOf(socket.get());
    Result<UniqueFd> process = PeerPidfd(socket.get());
    if (!peer.ok() || !process.ok()) {  // it has gone already
      CloseSocket(std::move(socket), peer.ok() ? peer->uid : 0);
      continue;
    }
    const Status room = CheckRoom(peer->uid);
    if (!room.ok()) {
      SendError(socket.get(), 0, room);
      CloseSocket(std::move(socket), peer->uid);
      continue;
    }
    const SessionId id = next_session_++;
    auto connection =
        std::make_shared<ClientConnection>(this, io_, std::move(socket), std::move(*peer), std::move(*process), id);
    connections_[id] = connection;
    connection->Start();
  }
  Accept();
}

// Handshakes are bounded, too: connections that have not claimed a session count, and time out. Who opens each anew as
// it does leaves room for others.
Status SessionServer::CheckRoom(uint32_t uid) const {
  const size_t handshakes = options_.max_sessions + kHandshakes;
  if (connections_.size() >= options_.max_sessions + handshakes)
    return Status(MLPO_E_QUOTA, "the daemon has too many connections: see [daemon] max_sessions");
  const auto silent = std::count_if(connections_.begin(), connections_.end(), [uid](const auto& entry) {
    return entry.second->silent() && entry.second->identity().uid == uid;
  });
  if (uid != 0 && uid != ::geteuid() && static_cast<size_t>(silent) >= handshakes / kShareOfOne)
    return Status(MLPO_E_QUOTA, "uid " + std::to_string(uid) + " has " + std::to_string(silent) +
                                    " connections that have not said HELLO: close them, or wait until they time out");
  return CheckForeign(uid);
}

void SessionServer::StopAccepting() {
  boost::system::error_code ignored;  // closing cannot fail in a way that matters here
  listener_.close(ignored);
}

void SessionServer::EndAll(const Status& reason) {
  const auto connections = connections_;  // ending changes the map
  for (const auto& [id, connection] : connections) connection->End(reason, true);
}

void SessionServer::Break(SessionId session, const std::string& reason) {
  auto it = connections_.find(session);
  if (it == connections_.end() || it->second->ended()) return CountProtocolError();  // it has ended for another reason
  const std::shared_ptr<ClientConnection> connection = it->second;
  connection->End(Status(MLPO_E_PROTOCOL, reason), true);
}

uint32_t SessionServer::RanksOf(uint32_t uid, const std::string& job) const {
  uint32_t ranks = 0;
  for (const auto& [id, connection] : connections_) {
    const SessionIdentity& identity = connection->identity();
    ranks += !connection->ended() && identity.uid == uid && identity.job == job;
  }
  return ranks;
}

const ClientConnection* SessionServer::Find(SessionId session) const {
  auto it = connections_.find(session);
  return it == connections_.end() ? nullptr : it->second.get();
}

SessionServer::Key SessionServer::KeyOf(const ClientConnection& connection) {
  return {connection.identity().uid, connection.identity().job, connection.identity().rank};
}

SessionServer::ClaimOutcome SessionServer::Claim(ClientConnection& connection, Status* why) {
  const SessionIdentity& identity = connection.identity();
  auto it = claims_.find(KeyOf(connection));
  if (it == claims_.end()) {
    *why = claims_.size() < options_.max_sessions
               ? quotas_.Take(identity.uid, identity.job, Quota::kSessions, 1)
               : Status(MLPO_E_QUOTA, "the daemon has its [daemon] max_sessions already");
    if (!why->ok()) return ClaimOutcome::kFull;
    claims_[KeyOf(connection)].holder = identity.id;
    return ClaimOutcome::kYours;
  }
  const std::shared_ptr<ClientConnection> holder = connections_.at(it->second.holder);
  if (!holder->ended() && !holder->HasLeft()) return ClaimOutcome::kTaken;
  const std::shared_ptr<ClientConnection> waiter = it->second.waiter.lock();
  if (waiter != nullptr && !waiter->ended()) return ClaimOutcome::kTaken;
  // It may have gone before we have heard so.
  it->second.waiter = connection.weak_from_this();
  holder->End(Status(-EPIPE, "its process ended or closed its socket"), false);
  return ClaimOutcome::kWait;
}

void SessionServer::OnEnd(ClientConnection& connection, bool was_running) {
  if (was_running) return host_->SessionEnded(connection.identity());  // SessionGone follows
  // Not from inside the connection's own call: whoever waits for the claim goes on with its handshake then.
  boost::asio::post(io_, [this, id = connection.identity().id] {
    const std::shared_ptr<ClientConnection> gone = connections_.at(id);
    GiveBack(*gone);
    connections_.erase(id);
    host_->Dispose(gone->TakeMemory());
    ReleaseClaim(*gone);
  });
}

void SessionServer::SessionGone(SessionId session) {
  const std::shared_ptr<ClientConnection> gone = connections_.at(session);
  MLPO_CHECK(gone->ended());
  GiveBack(*gone);
  connections_.erase(session);
  host_->Dispose(gone->TakeMemory());
  ReleaseClaim(*gone);
}

// Its files and its memory are its own: a successor has another generation. So there may be as many of these as the
// paths that hang let be in flight, which is few.
void SessionServer::SessionHangs(SessionId session) {
  const auto it = connections_.find(session);
  if (it == connections_.end()) return;  // it has come back meanwhile
  MLPO_CHECK(it->second->ended());
  const SessionIdentity& identity = it->second->identity();
  spdlog::warn("event=session_hangs session={} job={} rank={} reason=\"its I/O does not come back\"", session,
               identity.job, identity.rank);
  ReleaseClaim(*it->second);
}

void SessionServer::ReleaseClaim(const ClientConnection& connection) {
  auto it = claims_.find(KeyOf(connection));
  if (it == claims_.end() || it->second.holder != connection.identity().id) return;
  const std::shared_ptr<ClientConnection> waiter = it->second.waiter.lock();
  claims_.erase(it);
  if (waiter == nullptr || waiter->ended())
    return quotas_.Give(connection.identity().uid, connection.identity().job, Quota::kSessions, 1);
  claims_[KeyOf(*waiter)].holder = waiter->identity().id;  // of the same job: it takes the quota over, too
  waiter->Proceed();
}

// What it took but for its claim.
void SessionServer::GiveBack(const ClientConnection& connection) {
  const SessionIdentity& identity = connection.identity();
  GiveArenaBytes(identity, connection.arena_bytes());
  quotas_.Give(identity.uid, identity.job, Quota::kRequests, connection.ring_entries());
}

void SessionServer::GiveArenaBytes(const SessionIdentity& identity, uint64_t bytes) {
  quotas_.Give(identity.uid, identity.job, Quota::kArenas, bytes);
  arenas_bytes_ -= bytes;
}

Status SessionServer::TakeArenaBytes(const SessionIdentity& identity, uint64_t bytes) {
  const uint64_t left = options_.arenas_limit_bytes - arenas_bytes_;
  if (bytes > left) {
    return Status(MLPO_E_QUOTA,
                  "the arena needs " + std::to_string(bytes) + " bytes more, and " + std::to_string(left) +
                      " of [memory] arenas = " + std::to_string(options_.arenas_limit_bytes) + " are left");
  }
  Status status = quotas_.Take(identity.uid, identity.job, Quota::kArenas, bytes);
  if (status.ok()) arenas_bytes_ += bytes;
  return status;
}

}  // namespace mlpo
