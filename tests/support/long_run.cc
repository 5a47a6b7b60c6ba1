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
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "tests/unit/io_scratch.h"

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

// Unmounts everything below `folder` and frees the loop devices of files in it.
void Unmount(const std::string& folder) {
  std::vector<std::string> points;
  std::ifstream mounts("/proc/self/mounts");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string source, point;
    fields >> source >> point;
    if (point.rfind(folder + "/", 0) == 0) points.push_back(point);
  }
  for (auto point = points.rbegin(); point != points.rend(); ++point) {
    if (::umount2(point->c_str(), MNT_DETACH) != 0) (void)RunQuietly("fusermount3 -u -z " + *point);
  }
  std::istringstream devices(OutputOf("losetup --list --noheadings --output NAME,BACK-FILE"));
  for (std::string line; std::getline(devices, line);) {
    std::istringstream fields(line);
    std::string name, file;
    fields >> name >> file;
    if (file.rfind(folder + "/", 0) == 0) (void)RunQuietly("losetup --detach " + name);
  }
}

constexpr int kCleanings = 100;  // a tenth of a second apart

// In a process of its own: waits until whoever holds the other end of `held` lets go of it or dies, then ends the group
// and removes what is in the folder, as often as somebody who dies still makes a file there.
void CleanUpAfter(int held, pid_t group, const std::string& folder) {
  char byte;
  while (::read(held, &byte, 1) < 0 && errno == EINTR) {
  }
  ::kill(-group, SIGKILL);
  for (int i = 0; i < kCleanings; ++i) {
    Unmount(folder);
    std::error_code error;
    std::filesystem::remove_all(folder, error);
    if (!std::filesystem::exists(folder, error)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// Whether the process has ended within `seconds`; it is waited for then.
bool Ends(pid_t process, int seconds) {
  for (int i = 0; i < 100 * seconds; ++i) {
    if (::waitpid(process, nullptr, WNOHANG) == process) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace

Sources FindSources(const std::string& also) {
  const std::string git = std::string("git -C '") + MLPO_SOURCE_FOLDER + "' ";
  const std::string tested =
      " -- CMakeLists.txt proto client daemon tests/support tests/stress tests/unit/io_scratch.h " + also;
  Sources sources;
  sources.commit = OutputOf(git + "rev-parse HEAD");
  sources.tree = OutputOf(git + "ls-tree HEAD" + tested + " | sha256sum | cut -c 1-16");
  sources.dirty = sources.commit.empty() || !OutputOf(git + "status --porcelain" + tested).empty();
  return sources;
}

Report::Report(std::string file, std::string command, bool fresh, const std::string& also)
    : file_(std::move(file)), command_(std::move(command)), sources_(FindSources(also)) {
  if (file_.empty()) return;
  std::ofstream appends(file_, std::ios::app);
  std::ifstream lines(file_);
  bool whole = true;  // a run may have been cut in the middle of a line
  for (std::string text; std::getline(lines, text);) {
    whole = !lines.eof();
    json line = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!fresh && line.is_object()) lines_.push_back(std::move(line));
  }
  if (!whole) appends << "\n";
  if (!appends.flush()) throw std::runtime_error("the report " + file_ + " cannot be written");
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
  std::string folder = TemporaryFolder() + "/mlpo-long-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return Failed("no folder can be made: " + folder);
  int answers[2], held[2];
  if (::pipe2(answers, O_CLOEXEC) != 0 || ::pipe2(held, O_CLOEXEC) != 0) return Failed("pipe2 failed");
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    for (const int fd : {answers[0], held[0], held[1]}) ::close(fd);
    ::setenv("TMPDIR", folder.c_str(), 1);
    json answer;
    try {
      answer = work();
    } catch (const std::exception& error) {
      answer = Failed(error.what());
    }
    const std::string text = answer.dump(-1, ' ', false, json::error_handler_t::replace);
    for (size_t at = 0; at < text.size();) {
      const ssize_t put = ::write(answers[1], text.data() + at, text.size() - at);
      if (put <= 0) break;  // nobody reads any more
      at += static_cast<size_t>(put);
    }
    std::fflush(stdout);
    ::_exit(0);
  }
  if (child > 0) ::setpgid(child, child);  // whichever of the two is first; failing means that the child was
  const pid_t cleaner = child < 0 ? -1 : ::fork();
  if (cleaner == 0) {
    ::setsid();  // what ends us by the terminal, or by our group, is not for it
    for (const int fd : {answers[0], answers[1], held[1]}) ::close(fd);
    CleanUpAfter(held[0], child, folder);
    ::_exit(0);
  }
  ::close(answers[1]);
  ::close(held[0]);
  std::string text;
  const bool in_time =
      cleaner > 0 && ReadUntil(answers[0], std::chrono::steady_clock::now() + std::chrono::seconds(seconds), &text);
  ::close(answers[0]);
  if (child > 0) ::kill(-child, SIGKILL);
  ::close(held[1]);
  // Before the child is waited for: until then nobody else can have its number.
  const bool clean = cleaner > 0 && Ends(cleaner, kCleanings / 10 + 30);
  int status = 0;
  if (child > 0) ::waitpid(child, &status, 0);
  if (cleaner < 0) return Failed("fork failed");
  if (!in_time) return Failed("it has not ended within " + std::to_string(seconds) + " s");
  json answer = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) answer = Failed("its process ended with wait status " + std::to_string(status));
  if (!clean) answer["cleaning_up"] = "something is left in " + folder;
  return answer;
}

std::string EndOf(const std::string& text) {
  constexpr size_t kMost = 4000;
  return text.size() <= kMost ? text : text.substr(text.size() - kMost);
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
