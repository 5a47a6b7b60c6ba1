// ControlScene: a control server with a made-up snapshot, its io_context in a thread of its own, and raw peers of it.
#pragma once

#include <grp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>
//
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <cstring>
#include <future>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/control/control_server.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"
#include "tests/support/thread_uid.h"

inline mlpo::Snapshot MadeUpSnapshot() {
  mlpo::Snapshot s;
  s.state = "ready";
  s.version = "0.1.0";
  s.node = "node-17";
  s.socket = "/run/mlpo/mlpo.sock";
  s.pid = 4711;
  s.uptime_s = 12.5;
  s.adam_target = "AVX3";
  s.adam_workers = 6;
  s.protocol_errors = 2;
  s.lost_wakeups = 0;
  s.arenas_bytes = 3u << 20;
  s.arenas_limit_bytes = 1ull << 40;
  mlpo::SessionSnapshot mine;
  mine.id = 7;
  mine.job = "mine";
  mine.rank = 1;
  mine.world_size = 2;
  mine.pid = 100;
  mine.uid = 65534;
  mine.generation = 3;
  mine.epoch = 42;
  mine.subgroups = 5;
  mine.parameters = 268000000;
  mine.skipped_steps = 4;
  mlpo::SessionSnapshot other = mine;
  other.id = 8;
  other.job = "other";
  other.uid = 4000;
  other.parameters = 1000;
  s.sessions = {mine, other};
  s.total_sessions = 2;
  s.total_parameters = 268001000;
  mlpo::PathSnapshot path;
  path.name = "nvme";
  path.directory = "/mnt/nvme";
  path.state = "healthy";
  path.engine = "io_uring";
  path.direct_io = true;
  path.read_bytes = 1ull << 41;
  path.written_bytes = 17;
  path.read_bytes_per_s = 345e6;
  path.write_bytes_per_s = 1.5;
  path.scratch_bytes = 99;
  path.checkpoint_bytes = 98;
  s.paths = {path};
  s.pool.bytes = 64ull << 30;
  s.pool.cached_blocks = 10;
  s.pool.dirty_blocks = 4;
  s.pool.free_blocks = 6;
  return s;
}

class ControlScene {
 public:
  ScratchDir dir;
  std::string socket = dir / "mlpo.sock";      // the session socket: not there; its ".ctl" is the server's
  mlpo::Snapshot snapshot = MadeUpSnapshot();  // set before Start, or in the server's thread
  mlpo::Trace trace;                           // what every recording has
  bool hold_answers = false;                   // snapshots are not answered until Release()
  std::vector<std::string> commands;           // for paths, gc and figures, in the server's thread
  std::vector<mlpo::ShareRequest> shares;      // likewise
  std::string gc_report = R"({"dry_run":false,"bytes":0,"removed":[],"kept":[],"failed":[]})";
  bool holds_blocks = false;  // an evacuation does not end
  std::atomic<int> asked{0}, drains{0}, examinations{0};
  mlpo::ControlOptions options;

  ControlScene() { options.path = socket + ".ctl"; }
  ~ControlScene() {
    OnServerThread([&] {
      held_.clear();
      server_.reset();
    });
    work_.reset();
    thread_.join();
  }

  void Start() {
    mlpo::ControlHandlers handlers;
    handlers.snapshot = [this](std::function<void(mlpo::Snapshot)> answer) {
      ++asked;
      if (hold_answers)
        held_.push_back(std::move(answer));
      else
        answer(snapshot);
    };
    handlers.drain = [this] {
      ++drains;
      snapshot.state = "draining";
    };
    handlers.doctor = [this](std::function<void(std::string)> answer) {
      ++examinations;
      answer(R"({"state":"fine","findings":[]})");
    };
    handlers.gc = [this](const mlpo::GcRequest& request, std::function<void(mlpo::Result<std::string>)> answer) {
      commands.push_back(std::string(request.dry_run ? "dry " : "") + "gc " + request.node);
      answer(std::string(gc_report));
    };
    handlers.path = [this](const mlpo::PathCommand& command, std::function<void(mlpo::Result<std::string>)> answer) {
      commands.push_back(command.name + " " + command.path);
      if (command.path != "nvme") return answer(mlpo::Status(-EINVAL, "no path '" + command.path + "'"));
      mlpo::PathSnapshot& path = snapshot.paths.at(0);
      path.evacuating = command.name == "evacuate";
      path.evacuation_bytes = 99;
      if (path.evacuating) path.checkpoint_bytes = 0;  // none is running
      if (path.evacuating && !holds_blocks) path.scratch_bytes = 0;
      path.evacuated = path.evacuating && !holds_blocks;
      answer(std::string(R"({"state":"disabled","total_bytes":99})"));
    };
    handlers.trace = [this](double, std::function<void(mlpo::Trace)> answer) { answer(trace); };
    handlers.trace_stop = [] {};
    handlers.request_checkpoint = [this](std::optional<uint32_t> uid, const std::optional<std::string>& job,
                                         const std::function<void(uint64_t)>& answer) {
      uint64_t asked_sessions = 0;
      for (const mlpo::SessionSnapshot& session : snapshot.sessions)
        asked_sessions += (!uid || session.uid == *uid) && (!job || session.job == *job);
      answer(asked_sessions);
    };
    handlers.share_figures = [this](uint32_t uid, const std::string& job,
                                    const std::function<void(mlpo::Result<std::string>)>& answer) {
      commands.push_back("figures of " + job + " for " + std::to_string(uid));
      answer(std::string(R"({"daemon":"d","paths":{}})"));
    };
    handlers.share = [this](const mlpo::ShareRequest& told,
                            const std::function<void(mlpo::Result<std::string>)>& answer) {
      shares.push_back(told);
      if (told.path != "nvme") return answer(mlpo::Status(-EINVAL, "no path '" + told.path + "'"));
      answer(std::string(R"({"nodes":2})"));
    };
    OnServerThread([&] {
      auto opened = mlpo::ControlServer::Open(io_, options, std::move(handlers));
      error_ = opened.status();
      if (opened.ok()) server_ = std::move(*opened);
    });
    REQUIRE(error_.message() == "");
  }
  void Stop() {
    OnServerThread([&] { server_.reset(); });
  }
  // Answers the snapshots held back.
  void Release() {
    OnServerThread([&] {
      for (auto& answer : std::exchange(held_, {})) answer(snapshot);
    });
  }
  template <class F>
  void OnServerThread(F&& work) {
    std::promise<void> done;
    boost::asio::post(io_, [&] {
      work();
      done.set_value();
    });
    done.get_future().wait();
  }

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  std::thread thread_{[this] { io_.run(); }};
  std::unique_ptr<mlpo::ControlServer> server_;
  std::vector<std::function<void(mlpo::Snapshot)>> held_;
  mlpo::Status error_;
};

// A connection that sends what it is told and reads lines, never longer than its deadline.
class RawPeer {
 public:
  explicit RawPeer(const std::string& path) : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    error_ = ::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
  }
  int error() const { return error_; }
  int fd() const { return fd_.get(); }

  bool Send(const std::string& text) {
    for (size_t at = 0; at < text.size();) {
      const ssize_t sent = ::send(fd_.get(), text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += static_cast<size_t>(sent);
    }
    return true;
  }
  // The next line; "" at the end of the connection; "<deadline>" if there is nothing for so long.
  std::string Line(int timeout_ms = 20000) {
    for (;;) {
      const size_t end = input_.find('\n');
      if (end != std::string::npos) {
        std::string line = input_.substr(0, end);
        input_.erase(0, end + 1);
        return line;
      }
      pollfd ready{fd_.get(), POLLIN, 0};
      if (::poll(&ready, 1, timeout_ms) <= 0) return "<deadline>";
      char chunk[4096];
      const ssize_t got = ::recv(fd_.get(), chunk, sizeof chunk, 0);
      if (got <= 0) return "";
      input_.append(chunk, static_cast<size_t>(got));
    }
  }
  nlohmann::json Ask(const std::string& line) {
    if (!Send(line + "\n")) return nullptr;
    return nlohmann::json::parse(Line(), nullptr, false);
  }
  nlohmann::json Call(const std::string& method) {
    return Ask(R"({"jsonrpc":"2.0","id":1,"method":")" + method + "\"}");
  }

 private:
  mlpo::UniqueFd fd_;
  int error_ = 0;
  std::string input_;
};
