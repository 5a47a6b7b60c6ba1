// Requests on the control socket. The first byte says in how many bytes the rest comes at a time (0: all at once).
// Whatever comes, each answer is a line of JSON-RPC, there are no more answers than lines, and the server goes on.
#include <sys/socket.h>
#include <sys/un.h>

#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "daemon/control/control_server.h"
#include "daemon/control/json_rpc.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/scratch_dir.h"

namespace {

using namespace mlpo;

class Server {
 public:
  Server() {
    options_.path = folder_ / "ctl";
    ControlHandlers handlers;
    handlers.snapshot = [](std::function<void(Snapshot)> answer) {
      Snapshot snapshot;
      snapshot.state = "ready";
      snapshot.node = "node";
      snapshot.paths.resize(2);
      snapshot.sessions.resize(2);
      answer(std::move(snapshot));
    };
    handlers.drain = [] {};
    handlers.doctor = [](std::function<void(std::string)> answer) { answer("{}"); };
    handlers.bench = [](const BenchRequest& request, std::function<void(Result<std::string>)> answer) {
      if (request.paths.empty()) return answer(std::string("{}"));
      answer(Status::Invalid("no such path"));
    };
    handlers.stop_bench = [] {};
    handlers.trace = [](double, std::function<void(Trace)> answer) { answer(Trace()); };
    handlers.trace_stop = [] {};
    handlers.gc = [](const GcRequest&, std::function<void(Result<std::string>)> answer) { answer(std::string("{}")); };
    handlers.path = [](const PathCommand& command, std::function<void(Result<std::string>)> answer) {
      if (command.path == "a") return answer(std::string("{}"));
      answer(Status::Invalid("no path '" + command.path + "'"));
    };
    handlers.request_checkpoint = [](std::optional<uint32_t>, std::optional<std::string>,
                                     std::function<void(uint64_t)> answer) { answer(1); };
    handlers.share_figures = [](uint32_t, const std::string& job, std::function<void(Result<std::string>)> answer) {
      answer(Status(-ENOENT, "no session of job '" + job + "' is connected"));
    };
    handlers.share = [](const ShareRequest& told, std::function<void(Result<std::string>)> answer) {
      FUZZ_CHECK(told.me < told.nodes.size(), std::to_string(told.me));
      answer(std::string("{}"));
    };
    Result<std::unique_ptr<ControlServer>> opened = ControlServer::Open(io_, options_, std::move(handlers));
    FUZZ_CHECK(opened.ok(), opened.status().message());
    server_ = std::move(*opened);
  }

  int Connect() {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    options_.path.copy(address.sun_path, sizeof address.sun_path - 1);
    const bool connected = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    FUZZ_CHECK(connected, "the server does not accept any more");
    Run();
    return fd;
  }
  // Until nothing is ready any more.
  void Run() {
    do io_.restart();
    while (io_.poll() > 0);
  }

 private:
  ScratchDir folder_;
  ControlOptions options_;
  boost::asio::io_context io_;
  std::unique_ptr<ControlServer> server_;
};

bool IsAnswer(const std::string& line) {
  const nlohmann::json answer = nlohmann::json::parse(line, nullptr, false);
  return answer.is_object() && answer.value("jsonrpc", "") == "2.0" && answer.contains("id") &&
         answer.contains("result") != answer.contains("error");
}

void ParseAlone(std::string_view line) {
  std::string reply;
  const std::optional<RpcRequest> request = ParseRpc(line, &reply);
  if (request) {
    FUZZ_CHECK(nlohmann::json::accept(request->id), request->id);
    FUZZ_CHECK(request->params.empty() || nlohmann::json::accept(request->params), request->params);
    BenchRequest bench;
    (void)ParseBench(request->params, &bench);
    return;
  }
  FUZZ_CHECK(!reply.empty() && reply.back() == '\n' && IsAnswer(reply), reply);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Server server;
  test::FuzzInput input(data, size);
  const size_t chunk = input.Byte();
  std::string_view rest = input.Rest();
  const size_t lines = static_cast<size_t>(std::count(rest.begin(), rest.end(), '\n'));
  ParseAlone(rest.substr(0, rest.find('\n')));

  const int fd = server.Connect();
  std::string answers;
  const auto read = [&] {
    server.Run();
    char buffer[8192];
    ssize_t got;
    while ((got = ::recv(fd, buffer, sizeof buffer, 0)) > 0) {
      answers.append(buffer, static_cast<size_t>(got));
      server.Run();  // an answer that is larger than the socket's buffer
    }
    return got < 0;  // the end of the connection is 0
  };
  bool open = true;
  while (open && !rest.empty()) {
    const size_t wanted = chunk == 0 ? rest.size() : std::min<size_t>(chunk, rest.size());
    const ssize_t sent = ::send(fd, rest.data(), wanted, MSG_NOSIGNAL);
    if (sent <= 0) break;
    rest.remove_prefix(static_cast<size_t>(sent));
    open = read();
  }
  (void)::shutdown(fd, SHUT_WR);  // it may have been closed
  (void)read();
  ::close(fd);
  server.Run();
  size_t answered = 0;
  for (size_t at = 0; at < answers.size(); ++answered) {
    const size_t end = answers.find('\n', at);
    FUZZ_CHECK(end != std::string::npos, answers.substr(at));
    FUZZ_CHECK(IsAnswer(answers.substr(at, end - at)), answers.substr(at, end - at));
    at = end + 1;
  }
  FUZZ_CHECK(answered <= lines + 1, "more answers than questions");  // a line that is too long has one, too
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() {
  std::vector<std::string> seeds;
  for (const char* method : {"status", "sessions", "paths", "metrics", "version", "doctor", "drain", "bench",
                             "checkpoint_request", "trace_stop", "trace_read", "none"}) {
    const std::string line = R"({"jsonrpc":"2.0","id":7,"method":")" + std::string(method) + "\"}\n";
    seeds.push_back('\0' + line);
    seeds.push_back('\5' + line + line);
  }
  const std::string with_params = R"({"jsonrpc":"2.0","id":"a","method":"%","params":)";
  for (const auto& [method, params] :
       {std::pair("paths_disable", R"({"path":"a"})"), std::pair("paths_enable", R"({"path":"/a"})"),
        std::pair("paths_evacuate", R"({"path":""})"), std::pair("gc", R"({"dry_run":true,"node":"n"})"),
        std::pair("checkpoint_request", R"({"job":"a"})"), std::pair("share_figures", R"({"job":"a"})"),
        std::pair("share", R"({"job":"a","path":"p","nodes":[[1e9,0.5,0,1],[1,2,3,4]],"me":1})"),
        std::pair("trace_start", R"({"seconds":1})")}) {
    std::string line = with_params;
    line.replace(line.find('%'), 1, method);
    seeds.push_back('\0' + line + params + "}\n");
  }
  seeds.push_back('\0' + std::string(65 * 1024, 'x') + "\n");
  return seeds;
}
