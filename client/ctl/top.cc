#include "client/ctl/top.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "client/ctl/answer.h"
#include "client/ctl/endings.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/table.h"
#include "mlpo/client.h"

namespace mlpo::ctl {
namespace {

using nlohmann::json;

volatile sig_atomic_t caught = 0;  // the last signal that ended a wait
void Catch(int signal) { caught = signal; }

// What the terminal has of us, for the signals that end us whatever we do then: a stuck daemon may be waited for.
constexpr char kLeave[] = "\033[?25h\033[?1049l";
termios terminal_before;
volatile sig_atomic_t terminal_raw = 0;
volatile sig_atomic_t terminal_entered = 0;

void End(int /*signal*/) {
  if (terminal_raw != 0) ::tcsetattr(STDIN_FILENO, TCSANOW, &terminal_before);
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  if (terminal_entered != 0 && ::poll(&out, 1, 100) == 1) {
    // A terminal that does not take it is no longer there.
    [[maybe_unused]] const ssize_t written = ::write(STDOUT_FILENO, kLeave, sizeof kLeave - 1);
  }
  ::_exit(kFine);
}

// The terminal as this view uses it, while it lives: another screen, no cursor, keys at once.
class Screen {
 public:
  Screen() { Enter(); }
  ~Screen() { Leave(); }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void Enter() {
    keys_ = ::tcgetattr(STDIN_FILENO, &terminal_before) == 0;
    if (keys_) {
      termios raw = terminal_before;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      terminal_raw = 1;
      keys_ = ::tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
    }
    terminal_entered = 1;
    std::fputs("\033[?1049h\033[?25l", stdout);
    std::fflush(stdout);
  }
  void Leave() {
    std::fputs(kLeave, stdout);
    std::fflush(stdout);
    terminal_entered = 0;
    if (keys_) ::tcsetattr(STDIN_FILENO, TCSANOW, &terminal_before);
    terminal_raw = 0;
  }
  bool keys() const { return keys_; }

  // As many lines and columns of the text as there is room for.
  void Show(const std::string& text) const {
    winsize size{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) {
      size.ws_row = 24;
      size.ws_col = 80;
    }
    std::string out = "\033[H";
    size_t at = 0;
    for (unsigned row = 0; row < size.ws_row && at < text.size(); ++row) {
      const size_t end = std::min(text.find('\n', at), text.size());
      if (row > 0) out += "\r\n";
      out += text.substr(at, std::min<size_t>(end - at, size.ws_col)) + "\033[K";
      at = end + 1;
    }
    std::fputs((out + "\033[J").c_str(), stdout);
    std::fflush(stdout);
  }

 private:
  bool keys_ = false;
};

std::string Percent(double part, double whole) {
  if (!(whole > 0)) return "-";
  return std::to_string(std::lround(100 * std::clamp(part / whole, 0.0, 9.99))) + "%";
}

std::string SpeedOf(double speed, double limit) {
  return BytesPerS(speed) + (limit > 0 ? " of " + BytesPerS(limit) : "");
}

// What has grown since the frame before, as a share of the time between; "-" in the first one.
std::string Share(const json& now, const json& before, const char* name, double seconds) {
  return before.is_object() ? Percent(Number(now, name) - Number(before, name), seconds) : "-";
}

std::string Frame(const json& status, const json& before) {
  const double seconds = before.is_object() ? Number(status, "uptime_s") - Number(before, "uptime_s") : 0;
  const json pool = Member(status, "pool", json::value_t::object);
  const json sessions = Member(status, "sessions", json::value_t::array);
  const json totals = Member(status, "totals", json::value_t::object);
  std::string out = "mlpo-daemon " + Text(status, "version") + " on " + Text(status, "node") + ": " +
                    Text(status, "state") + ", up " + Seconds(Number(status, "uptime_s")) + "\n";
  out += "pool: " + Bytes(Number(pool, "bytes")) + "; blocks: " + Count(Whole(pool, "cached_blocks")) + " cached (" +
         Count(Whole(pool, "dirty_blocks")) + " dirty), " + Count(Whole(pool, "free_blocks")) + " free; " +
         Count(Whole(status, "adam_workers")) + " workers, in use " + Share(status, before, "workers_busy_s", seconds) +
         " of the time\n\n";

  Table paths({"PATH", "STATE", ">READING", ">WRITING", ">BUSY", ">IN FLIGHT", ">ERRORS"});
  const json all_before = Member(before.is_object() ? before : json::object(), "paths", json::value_t::array);
  size_t index = 0;
  for (const json& p : Member(status, "paths", json::value_t::array)) {
    const json path_before = index < all_before.size() ? all_before[index] : json();
    ++index;
    if (!p.is_object()) continue;
    paths.Add({Text(p, "name"), Text(p, "state"), SpeedOf(Number(p, "read_bytes_per_s"), Number(p, "read_limit")),
               SpeedOf(Number(p, "write_bytes_per_s"), Number(p, "write_limit")),
               Share(p, path_before, "busy_s", seconds), Count(Whole(p, "in_flight")),
               Count(Whole(p, "read_errors") + Whole(p, "write_errors") + Whole(p, "checksum_errors"))});
  }
  out += paths.Text() + "\n";

  out += "sessions: " + std::to_string(sessions.size()) + " of " + std::to_string(Whole(totals, "sessions")) +
         " shown; shares are of the last step's time\n";
  Table table({"JOB", ">RANK", ">STEP", ">PERIOD", ">STEP TIME", ">ADAM", ">FETCH WAIT", ">FLUSH WAIT", ">GRAD",
               ">IDLE", ">IN MEMORY", ">SKIPPED"});
  for (const json& s : sessions) {
    if (!s.is_object()) continue;
    const json step = Member(s, "last_step", json::value_t::object);
    const double time = Number(step, "time_s");
    const auto share = [&](const char* part) { return Percent(Number(step, part), time); };
    const bool any = !step.empty();
    table.Add({Text(s, "job"), std::to_string(Whole(s, "rank")) + "/" + std::to_string(Whole(s, "world_size")),
               any ? std::to_string(Whole(step, "number")) : "-", any ? Seconds(Number(step, "period_s")) : "-",
               any ? Seconds(time) : "-", share("adam_s"), share("fetch_wait_s"), share("flush_wait_s"),
               share("grad_s"), share("idle_s"),
               Percent(Number(step, "cached_blocks") + Number(step, "prefetched_blocks"), Number(step, "blocks")),
               Count(Whole(s, "skipped_steps"))});
  }
  if (!sessions.empty()) out += table.Text();
  return out;
}

// Waits for the time, SIGWINCH, SIGTSTP or a key. False: the view is to be left.
bool Pause(Screen* screen, double seconds) {
  sigset_t none;
  sigemptyset(&none);
  timespec time{static_cast<time_t>(seconds), static_cast<long>((seconds - std::floor(seconds)) * 1e9)};
  pollfd key{screen != nullptr && screen->keys() ? STDIN_FILENO : -1, POLLIN, 0};
  caught = 0;
  const int ready = ::ppoll(&key, 1, &time, &none);
  if (ready < 0 && errno != EINTR) return false;
  if (caught == SIGTSTP && screen != nullptr) {
    screen->Leave();
    ::raise(SIGSTOP);
    screen->Enter();
  }
  if (ready <= 0) return true;
  char pressed = 0;
  if (::read(STDIN_FILENO, &pressed, 1) != 1) return false;  // the terminal has gone
  return pressed != 'q' && pressed != 'Q';
}

}  // namespace

int Top(const Question& question, const TopOptions& options) {
  const char* term = std::getenv("TERM");
  const bool plain = question.json || options.once || ::isatty(STDOUT_FILENO) == 0 || term == nullptr ||
                     std::strcmp(term, "dumb") == 0 || *term == 0;
  if (!options.once) CatchEndings(End);  // no frame is no success
  // These are let in while we wait only, so that none comes between a look at `caught` and the wait.
  sigset_t ours;
  sigemptyset(&ours);
  struct sigaction action {};
  action.sa_handler = Catch;
  for (const int signal : {SIGWINCH, SIGTSTP}) {
    if (signal == SIGTSTP && plain) continue;
    sigaddset(&ours, signal);
    ::sigaction(signal, &action, nullptr);
  }
  ::sigprocmask(SIG_BLOCK, &ours, nullptr);

  std::optional<Screen> screen;
  json before;
  for (;;) {
    char* text = nullptr;
    const int code = mlpo_control(question.socket.empty() ? nullptr : question.socket.c_str(), "status", nullptr,
                                  question.timeout_ns, &text);
    json status = code == 0 ? json::parse(text, nullptr, /*allow_exceptions=*/false) : json();
    const std::string raw = code == 0 ? text : "";
    mlpo_free(text);
    if (!status.is_object()) {
      const std::string why = code == 0 ? "its answer is no JSON object" : Safe(mlpo_last_error());
      screen.reset();
      std::fprintf(stderr, "mlpo-ctl: %s: %s\n", before.is_object() ? "the daemon has gone" : "no daemon answers",
                   why.c_str());
      return code == 0 ? kFailed : Unreachable(code);
    }
    std::optional<BlockEndings> no_half_frames;
    if (plain) no_half_frames.emplace();
    if (question.json) {
      std::printf("%s\n", raw.c_str());
    } else if (plain) {
      std::printf("%s%s", before.is_object() ? "\n" : "", Frame(status, before).c_str());
    } else {
      if (!screen) screen.emplace();
      screen->Show(Frame(status, before));
    }
    if (std::fflush(stdout) != 0) return kFailed;
    no_half_frames.reset();
    before = std::move(status);
    if (options.once || !Pause(screen ? &*screen : nullptr, options.interval_s)) return kFine;
  }
}

}  // namespace mlpo::ctl
