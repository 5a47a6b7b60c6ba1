#include "tests/support/long_run.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace mlpo::test {
namespace {

using nlohmann::json;

// What a shell command prints, without the last newline; "" if it fails.
std::string OutputOf(const std::string& command) {
  FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  std::string text;
  char chunk[4096];
  size_t got;
  while ((got = std::fread(chunk, 1, sizeof chunk, pipe)) > 0) text.append(chunk, got);
  if (::pclose(pipe) != 0) return "";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

bool Includes(const json& line, const json& like) {
  for (const auto& [key, value] : like.items()) {
    if (!line.contains(key) || line.at(key) != value) return false;
  }
  return true;
}

std::string Now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  char text[32];
  ::gmtime_r(&now, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

json Failed(const std::string& why) { return {{"outcome", "failed"}, {"why", why}}; }

// All that comes until the other end is closed; false at the deadline.
bool ReadUntil(int fd, std::chrono::steady_clock::time_point deadline, std::string* text) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (left <= 0) return false;
    pollfd ready = {fd, POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(left)) <= 0) continue;
    char chunk[4096];
    const ssize_t got = ::read(fd, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return true;
    text->append(chunk, static_cast<size_t>(got));
  }
}

}  // namespace

Sources FindSources() {
  const std::string git = std::string("git -C '") + MLPO_SOURCE_FOLDER + "' ";
  const std::string tested = " -- CMakeLists.txt proto client daemon tests/support tests/stress";
  Sources sources;
  sources.commit = OutputOf(git + "rev-parse HEAD");
  sources.tree = OutputOf(git + "ls-tree HEAD" + tested + " | sha256sum | cut -c 1-16");
  sources.dirty = sources.commit.empty() || !OutputOf(git + "status --porcelain" + tested).empty();
  return sources;
}

Report::Report(std::string file, std::string command, bool fresh)
    : file_(std::move(file)), command_(std::move(command)), sources_(FindSources()) {
  if (file_.empty()) return;
  std::ofstream appends(file_, std::ios::app);
  if (!appends) throw std::runtime_error("the report " + file_ + " cannot be written");
  std::ifstream lines(file_);
  for (std::string text; std::getline(lines, text) && !fresh;) {
    json line = json::parse(text, nullptr, /*allow_exceptions=*/false);  // a run may have been cut in the middle of one
    if (line.is_object()) lines_.push_back(std::move(line));
  }
}

bool Report::Has(const json& like, const std::function<bool(const json&)>& counts) const {
  if (sources_.dirty) return false;
  json wanted = like;
  wanted.update({{"command", command_}, {"tree", sources_.tree}, {"dirty", false}});
  for (const json& line : lines_) {
    if (Includes(line, wanted) && counts(line)) return true;
  }
  return false;
}

double Report::Sum(const json& like, const std::string& number) const {
  double sum = 0;
  (void)Has(like, [&](const json& line) {
    sum += line.value(number, 0.0);
    return false;
  });
  return sum;
}

void Report::Add(json line) {
  line.update({{"command", command_},
               {"commit", sources_.commit},
               {"tree", sources_.tree},
               {"dirty", sources_.dirty},
               {"time", Now()}});
  const std::string text = line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  lines_.push_back(std::move(line));
  if (file_.empty()) return;
  std::ofstream file(file_, std::ios::app);
  file << text;
  if (!file.flush()) throw std::runtime_error("the report " + file_ + " cannot be written: is its disk full?");
}

json InChild(int seconds, const std::function<json()>& work) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return Failed("pipe2 failed");
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child < 0) {
    ::close(ends[0]);
    ::close(ends[1]);
    return Failed("fork failed");
  }
  if (child == 0) {
    ::setpgid(0, 0);
    ::close(ends[0]);
    json answer;
    try {
      answer = work();
    } catch (const std::exception& error) {
      answer = Failed(error.what());
    }
    const std::string text = answer.dump(-1, ' ', false, json::error_handler_t::replace);
    // A pipe takes so little at once; where it does not, the parent sees half a line.
    (void)!::write(ends[1], text.data(), text.size());
    std::fflush(stdout);
    ::_exit(0);
  }
  ::setpgid(child, child);  // whichever of the two is first; failing means that the child was
  ::close(ends[1]);
  std::string text;
  const bool in_time = ReadUntil(ends[0], std::chrono::steady_clock::now() + std::chrono::seconds(seconds), &text);
  ::close(ends[0]);
  ::kill(-child, SIGKILL);  // what it has left behind, too; its own memory is dead already if it was in time
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!in_time) return Failed("it has not ended within " + std::to_string(seconds) + " s");
  json answer = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (answer.is_object()) return answer;
  return Failed("its process ended with wait status " + std::to_string(status));
}

void CleanUpBelow(const std::string& folder) {
  std::vector<std::string> points;
  std::ifstream mounts("/proc/self/mounts");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string source, point;
    fields >> source >> point;
    if (point.rfind(folder + "/", 0) == 0) points.push_back(point);
  }
  for (auto point = points.rbegin(); point != points.rend(); ++point) (void)::umount2(point->c_str(), MNT_DETACH);
  std::istringstream devices(OutputOf("losetup --list --noheadings --output NAME,BACK-FILE"));
  for (std::string line; std::getline(devices, line);) {
    std::istringstream fields(line);
    std::string name, file;
    fields >> name >> file;
    if (file.rfind(folder + "/", 0) == 0) (void)OutputOf("losetup --detach " + name);
  }
}

uint64_t NumberFlag(const char* program, const std::string& flag, const char* value) {
  uint64_t number = 0;
  const char* end = value == nullptr ? nullptr : value + std::strlen(value);
  if (value != nullptr) {
    const auto [stopped, error] = std::from_chars(value, end, number);
    if (error == std::errc() && stopped == end) return number;
  }
  std::fprintf(stderr, "%s: %s needs a number\n", program, flag.c_str());
  std::exit(64);
}

}  // namespace mlpo::test
