// Connection: one peer of the control socket: reads a line, has it answered, writes the answer, and only then reads on.
//
// Owner: the main thread. Lives as long as an operation of its is pending; Close() ends it. Internal to control/.
#pragma once

#include <utility>  // before Asio: Boost 1.74 needs it in C++20
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <string>

#include "daemon/base/unix_socket.h"

namespace mlpo {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  static constexpr size_t kMaxRequestBytes = 64 * 1024;

  struct Hooks {
    // Answers `line` by calling Answer() on the connection once, now or later.
    std::function<void(const std::shared_ptr<Connection>&, std::string line)> request;
    std::function<void(const Connection*)> closed;  // once; may drop its last reference elsewhere
  };

  Connection(boost::asio::local::stream_protocol::socket socket, Peer peer, std::chrono::nanoseconds idle, Hooks hooks);

  void Start();
  // Writes the reply ("": nothing to say) and reads on; with `then_close` ends after it.
  void Answer(std::string reply, bool then_close = false);
  // While an answer takes long: closes when the peer has gone. A peer that has sent more is not watched any further.
  void WatchForEnd();
  void Close();

  const Peer& peer() const { return peer_; }
  bool closed() const { return closed_; }

 private:
  void NextRequest();
  void Read();
  void ArmDeadline();

  boost::asio::local::stream_protocol::socket socket_;
  boost::asio::steady_timer deadline_;
  const Peer peer_;
  const std::chrono::nanoseconds idle_;
  Hooks hooks_;
  std::string input_;   // received and not yet taken; at most kMaxRequestBytes + 1
  std::string output_;  // being written
  bool closed_ = false;
};

}  // namespace mlpo
