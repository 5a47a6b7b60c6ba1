#include "daemon/control/connection.h"

#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>

#include "daemon/control/json_rpc.h"

namespace mlpo {

using boost::system::error_code;

Connection::Connection(boost::asio::local::stream_protocol::socket socket, Peer peer, std::chrono::nanoseconds idle,
                       Hooks hooks)
    : socket_(std::move(socket)),
      deadline_(socket_.get_executor()),
      peer_(std::move(peer)),
      idle_(idle),
      hooks_(std::move(hooks)) {}

void Connection::Start() {
  if (closed_) return;  // between a write and its completion
  ArmDeadline();
  NextRequest();
}

void Connection::ArmDeadline() {
  deadline_.expires_after(idle_);
  deadline_.async_wait([self = shared_from_this()](error_code error) {
    // A timer that was set anew while this handler already waited to run has not expired.
    if (!error && self->deadline_.expiry() <= boost::asio::steady_timer::clock_type::now()) self->Close();
  });
}

void Connection::NextRequest() {
  if (closed_) return;  // between a read and its completion
  const size_t end = input_.find('\n');
  if (end != std::string::npos) {
    std::string line = input_.substr(0, end);
    input_.erase(0, end + 1);
    deadline_.cancel();  // from here to Answer() the time is ours
    hooks_.request(shared_from_this(), std::move(line));
    return;
  }
  if (input_.size() > kMaxRequestBytes) {
    Answer(RpcErrorLine("null", RpcError::kInvalidRequest,
                        "a request has at most " + std::to_string(kMaxRequestBytes) + " bytes"),
           /*then_close=*/true);
    return;
  }
  Read();  // the deadline stands since the last answer: a request that drips in does not move it
}

void Connection::Read() {
  const size_t had = input_.size();
  input_.resize(kMaxRequestBytes + 1);
  socket_.async_read_some(boost::asio::buffer(input_.data() + had, input_.size() - had),
                          [self = shared_from_this(), had](error_code error, size_t got) {
                            self->input_.resize(had + (error ? 0 : got));
                            if (error) {
                              self->Close();  // end of file, or a broken connection: nobody is left to tell
                            } else {
                              self->NextRequest();
                            }
                          });
}

void Connection::Answer(std::string reply, bool then_close) {
  if (closed_) return;
  output_ = std::move(reply);
  ArmDeadline();
  boost::asio::async_write(socket_, boost::asio::buffer(output_),
                           [self = shared_from_this(), then_close](error_code error, size_t) {
                             self->output_.clear();
                             self->output_.shrink_to_fit();
                             if (error || then_close) {
                               self->Close();
                             } else {
                               self->Start();
                             }
                           });
}

void Connection::WatchForEnd() {
  if (closed_) return;
  using Socket = boost::asio::local::stream_protocol::socket;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](error_code error) {
    if (error || self->closed_) return;
    char byte = 0;
    const ssize_t got = ::recv(self->socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) self->Close();
  });
}

void Connection::Close() {
  if (closed_) return;
  closed_ = true;
  error_code ignored;  // closing cannot fail in a way that could be answered
  deadline_.cancel(ignored);
  socket_.close(ignored);
  hooks_.closed(this);
}

}  // namespace mlpo
