// mlpo_control against a scripted control socket, and the JSON scanner behind it.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "client/src/json_scan.h"
#include "mlpo/client.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace {

constexpr int64_t kSecond = 1'000'000'000;
using mlpo::client::JsonText;

JsonText Text(const std::string& text) { return {text.data(), text.data() + text.size()}; }

bool Valid(const std::string& text) { return mlpo::client::IsJson(Text(text)); }

std::string Member(const std::string& text, const char* key) {
  const JsonText found = mlpo::client::FindMember(Text(text), key);
  return found.begin == nullptr ? "(none)" : std::string(found.begin, found.bytes());
}

std::string Decoded(const std::string& text) {
  char out[64];
  return mlpo::client::DecodeString(Text(text), out, sizeof out) ? out : "(none)";
}

// Answers one request on <directory>/s.ctl.
class ControlEnd {
 public:
  explicit ControlEnd(std::function<void(int socket, const std::string& line)> answer) {
    listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    (directory_ / "s.ctl").copy(address.sun_path, sizeof address.sun_path - 1);
    REQUIRE(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(listen(listener_, 4) == 0);
    thread_ = std::thread([this, answer] {
      const int socket = accept(listener_, nullptr, nullptr);
      if (socket < 0) return;
      std::string line;
      char c;
      while (recv(socket, &c, 1, 0) == 1 && c != '\n') line += c;
      request_ = line;
      answer(socket, line);
      close(socket);
    });
  }
  ~ControlEnd() {
    Finish();
    close(listener_);
  }
  std::string socket() const { return directory_ / "s"; }
  // What was asked; ends the serving of calls.
  const std::string& request() {
    Finish();
    return request_;
  }

 private:
  void Finish() {
    shutdown(listener_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
  }

  ScratchDir directory_;
  int listener_ = -1;
  std::string request_;
  std::thread thread_;
};

void SendText(int socket, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t sent = send(socket, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (sent <= 0) return;
    done += static_cast<size_t>(sent);
  }
}

// What a call gives for an answer.
struct Outcome {
  int code;
  std::string json, error, request;
};
Outcome CallFor(const std::string& answer, const char* params = nullptr, int64_t timeout_ns = 5 * kSecond) {
  ControlEnd end([&](int socket, const std::string&) { SendText(socket, answer); });
  char* json = nullptr;
  Outcome outcome;
  outcome.code = mlpo_control(end.socket().c_str(), "status", params, timeout_ns, &json);
  outcome.error = mlpo_last_error();
  if (json != nullptr) outcome.json = json;
  mlpo_free(json);
  outcome.request = end.request();
  return outcome;
}

}  // namespace

TEST_CASE("Control.ResultComesBackAsItWas") {
  const Outcome outcome =
      CallFor("{\"jsonrpc\":\"2.0\",\"id\":1,\"result\": {\"state\":\"ready\", \"x\":[1,2.5e-3]} }\n");
  CHECK(outcome.code == 0);
  CHECK(outcome.json == "{\"state\":\"ready\", \"x\":[1,2.5e-3]}");
  CHECK(outcome.request == "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\"}");
  const Outcome with_params = CallFor("{\"result\":true}\n", "{\"a\":\n1}");
  CHECK(with_params.json == "true");
  CHECK(with_params.request == "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\",\"params\":{\"a\": 1}}");
}

TEST_CASE("Control.LongAnswersArriveWhole") {
  const std::string body = "\"" + std::string(5'000'000, 'x') + "\"";
  CHECK(CallFor("{\"result\":" + body + "}\n").json == body);
}

TEST_CASE("Control.ErrorsCarryTheDaemonsMessage") {
  const Outcome outcome =
      CallFor("{\"jsonrpc\":\"2.0\",\"id\":1,\"error\":{\"code\":-32601,\"message\":\"no method \\\"x\\\"\"}}\n");
  CHECK(outcome.code == -EPROTO);
  CHECK(outcome.error == "status: no method \"x\"");
  CHECK(CallFor("{\"id\":1}\n").code == -EPROTO);
  CHECK(CallFor("{\"result\":1,}\n").code == -EPROTO);
  CHECK(CallFor("nonsense\n").code == -EPROTO);
  CHECK(CallFor("{\"result\":1}").code == -ECONNRESET);
  CHECK(CallFor("").code == -ECONNRESET);
}

TEST_CASE("Control.BadRequestsAreNotSent") {
  char* json = nullptr;
  CHECK(mlpo_control("/nowhere", "a\"b", nullptr, kSecond, &json) == -EINVAL);
  CHECK(mlpo_control("/nowhere", "", nullptr, kSecond, &json) == -EINVAL);
  CHECK(mlpo_control("/nowhere", "status", "{\"a\":}", kSecond, &json) == -EINVAL);
  CHECK(mlpo_control("/nowhere", "status", nullptr, kSecond, &json) == -ENOENT);
}

TEST_CASE("Control.SilentDaemonEndsAtTheDeadline") {
  ControlEnd end([](int socket, const std::string&) {
    char c;
    recv(socket, &c, 1, 0);  // until the caller hangs up
  });
  char* json = nullptr;
  const auto start = std::chrono::steady_clock::now();
  CHECK(mlpo_control(end.socket().c_str(), "status", nullptr, kSecond / 5, &json) == -ETIMEDOUT);
  const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(waited >= 0.2);
  CHECK(waited < 2);
}

TEST_CASE("JsonScan.AcceptsJsonAndNothingElse") {
  for (const char* good : {"0", "-0.5e+10", "\"\"", "\"\\u00e9\\n\"", "[]", "{}", " [1, {\"a\":[true,false,null]}] ",
                           "{\"a\":{\"b\":\"c\"}}"}) {
    INFO(good);
    CHECK(Valid(good));
  }
  for (const char* bad : {"",        " ",          "01",      "+1",          ".5",      "1.",   "1e",    "nul",
                          "tru",     "\"",         "\"\\x\"", "\"\\u12g4\"", "\"\n\"",  "[1,]", "[1 2]", "{a:1}",
                          "{\"a\"}", "{\"a\":1,}", "{} {}",   "[",           "{\"a\":", "'a'",  "NaN",   "[1]]"}) {
    INFO(bad);
    CHECK_FALSE(Valid(bad));
  }
  CHECK(Valid(std::string(100, '[') + std::string(100, ']')));
  CHECK_FALSE(Valid(std::string(1'000'000, '[')));  // bounded depth, not a stack overflow
}

TEST_CASE("JsonScan.FindsMembersOfTheOuterObjectOnly") {
  const std::string text = "{\"x\":{\"result\":1}, \"y\":\"result\", \"result\" : [ 2 ] , \"z\":0}";
  CHECK(Member(text, "result") == "[ 2 ]");
  CHECK(Member(text, "z") == "0");
  CHECK(Member(text, "x") == "{\"result\":1}");
  CHECK(Member(text, "w") == "(none)");
  CHECK(Member("[\"result\"]", "result") == "(none)");
  CHECK(Member("{\"result\":1", "result") == "(none)");
}

TEST_CASE("JsonScan.DecodesEscapes") {
  CHECK(Decoded("\"a\\\\b\\\"c\\/\\t\\n\"") == "a\\b\"c/\t\n");
  CHECK(Decoded("\"\\u0041\\u00e9\\u20ac\"") == "A\xc3\xa9\xe2\x82\xac");
  CHECK(Decoded("\"\\ud83d\\ude00\"") == "\xf0\x9f\x98\x80");
  CHECK(Decoded("\"\\ud83d!\"") == "\xef\xbf\xbd!");
  CHECK(Decoded("12") == "(none)");
  CHECK(Decoded("\"" + std::string(100, 'y') + "\"") == std::string(63, 'y'));
}
