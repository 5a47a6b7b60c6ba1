#include "daemon/config/settings.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>

#include "daemon/base/name.h"
#include "daemon/config/text.h"
#include "daemon/config/units.h"

namespace mlpo {
namespace {

constexpr uint64_t kAny = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
constexpr uint64_t kMiB = 1u << 20;
constexpr double kLeastShare = 1e-6;  // of a path, for one node

std::string KindOf(const RawValue& raw) {
  static constexpr std::array<const char*, 5> kKinds = {"a table, array or date", "a string", "an integer",
                                                        "a floating-point number", "a boolean"};
  return kKinds[raw.value.index()];
}

Status WrongType(const RawValue& raw, const std::string& wanted) {
  return Status::Invalid("must be " + wanted + ", not " + KindOf(raw));
}

// A number of whole units (bytes, elements, seconds, ...): a TOML number, or text read by `parse`.
template <class Parsed>
Result<uint64_t> Whole(const RawValue& raw, const std::string& wanted, Result<Parsed> (*parse)(std::string_view)) {
  if (const auto* text = std::get_if<std::string>(&raw.value); text != nullptr && (parse != nullptr)) {
    Result<Parsed> parsed = parse(*text);
    if (!parsed.ok()) return parsed.status();
    return static_cast<uint64_t>(*parsed);
  }
  if (const auto* number = std::get_if<int64_t>(&raw.value)) {
    if (*number < 0) return Status::Invalid("must not be negative: " + std::to_string(*number));
    return static_cast<uint64_t>(*number);
  }
  if (const auto* number = std::get_if<double>(&raw.value)) {
    if (!std::isfinite(*number)) return Status::Invalid("must be a finite number");
    if (*number < 0) return Status::Invalid("must not be negative: " + FormatNumber(*number));
    if (*number != std::floor(*number)) return Status::Invalid("must be a whole number: " + FormatNumber(*number));
    if (*number >= 9223372036854775808.0) return Status::Invalid("is too large: " + FormatNumber(*number));
    return static_cast<uint64_t>(*number);
  }
  return WrongType(raw, wanted);
}

Result<uint64_t> ParseInteger(std::string_view text) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end || value > kAny)
    return Status::Invalid("\"" + std::string(text) + "\" is not a whole number from 0");
  return value;
}

struct Range {
  uint64_t min = 0, max = kAny, multiple = 1;
  bool zero = false;  // 0 is allowed besides: "let the daemon choose"
};

Status CheckRange(uint64_t value, const Range& range, std::string (*format)(uint64_t)) {
  if (value == 0 && range.zero) return Status();
  if (value < range.min || value > range.max)
    return Status::Invalid("is " + format(value) + "; allowed: " + format(range.min) + " to " + format(range.max) +
                           (range.zero ? ", or 0 for the default" : ""));
  if (value % range.multiple != 0)
    return Status::Invalid("is " + format(value) + "; must be a multiple of " + format(range.multiple));
  return Status();
}

std::string FormatInteger(uint64_t value) { return std::to_string(value); }
std::string FormatSeconds(uint64_t value) { return FormatDuration(static_cast<int64_t>(value)); }

template <class S, class V, class Parsed>
Setting<S> Number(const char* key, V S::*field, const char* wanted, Result<Parsed> (*parse)(std::string_view),
                  std::string (*format)(uint64_t), Range range) {
  range.max = std::min<uint64_t>(range.max, static_cast<uint64_t>(std::numeric_limits<V>::max()));
  return {key,
          [=](const RawValue& raw, S* target) {
            Result<uint64_t> value = Whole(raw, wanted, parse);
            if (!value.ok()) return value.status();
            if (Status status = CheckRange(*value, range, format); !status.ok()) return status;
            target->*field = static_cast<V>(*value);
            return Status();
          },
          [=](const S& source) {
            const std::string text = format(static_cast<uint64_t>(source.*field));
            return text.find_first_not_of("0123456789") == std::string::npos ? text : Quote(text);
          }};
}

template <class S, class V>
Setting<S> Size(const char* key, V S::*field, Range range) {
  return Number(key, field, "a size such as \"64GiB\", or a number of bytes", &ParseSize, &FormatSize, range);
}
template <class S, class V>
Setting<S> Count(const char* key, V S::*field, Range range) {
  return Number(key, field, "a count such as \"1Mi\", or a number", &ParseCount, &FormatCount, range);
}
template <class S>
Setting<S> Duration(const char* key, int64_t S::*field, Range range) {
  return Number(key, field, "a duration such as \"30s\", or a number of seconds", &ParseDuration, &FormatSeconds,
                range);
}
template <class S>
Setting<S> Integer(const char* key, uint32_t S::*field, Range range) {
  Setting<S> setting = Number(key, field, "an integer", &ParseInteger, &FormatInteger, range);
  return {setting.key,
          [set = setting.set](const RawValue& raw, S* target) {
            if (std::holds_alternative<std::string>(raw.value) && !raw.untyped) return WrongType(raw, "an integer");
            return set(raw, target);
          },
          setting.print};
}

template <class S>
Setting<S> Flag(const char* key, bool S::*field) {
  return {key,
          [=](const RawValue& raw, S* target) {
            if (const auto* flag = std::get_if<bool>(&raw.value)) {
              target->*field = *flag;
              return Status();
            }
            const auto* text = std::get_if<std::string>(&raw.value);
            if (text == nullptr || !raw.untyped) return WrongType(raw, "true or false");
            if (*text != "true" && *text != "false")
              return Status::Invalid("must be true or false, not \"" + *text + "\"");
            target->*field = *text == "true";
            return Status();
          },
          [=](const S& source) { return std::string(source.*field ? "true" : "false"); }};
}

// `check` answers what is wrong with the text, "" if nothing.
template <class S, class Check>
Setting<S> Text(const char* key, std::string S::*field, Check check) {
  return {key,
          [=](const RawValue& raw, S* target) {
            const auto* text = std::get_if<std::string>(&raw.value);
            if (text == nullptr) return WrongType(raw, "a string");
            if (const std::string wrong = check(*text); !wrong.empty()) return Status::Invalid(wrong);
            target->*field = *text;
            return Status();
          },
          [=](const S& source) { return Quote(source.*field); }};
}

template <class S>
Setting<S> Choice(const char* key, std::string S::*field, std::initializer_list<const char*> choices) {
  return Text(key, field,
              [allowed = std::vector<std::string>(choices.begin(), choices.end())](const std::string& text) {
                if (std::find(allowed.begin(), allowed.end(), text) != allowed.end()) return std::string();
                std::string list;
                for (const std::string& choice : allowed) list += (list.empty() ? "" : ", ") + choice;
                return "is \"" + text + "\"; allowed: " + list;
              });
}

// A finite number from `min` to `max`, or 0 for "not given".
template <class S>
Setting<S> Real(const char* key, double S::*field, double min, double max, const char* wanted,
                Result<double> (*parse)(std::string_view), std::string (*format)(double)) {
  return {key,
          [=](const RawValue& raw, S* target) {
            double value = 0;
            if (const auto* text = std::get_if<std::string>(&raw.value)) {
              Result<double> parsed = parse(*text);
              if (!parsed.ok()) return parsed.status();
              value = *parsed;
            } else if (const auto* whole = std::get_if<int64_t>(&raw.value)) {
              value = static_cast<double>(*whole);
            } else if (const auto* number = std::get_if<double>(&raw.value)) {
              value = *number;
            } else {
              return WrongType(raw, wanted);
            }
            if (!std::isfinite(value)) return Status::Invalid("must be a finite number");
            if (value != 0 && (value < min || value > max))
              return Status::Invalid("is " + format(value) + "; allowed: " + format(min) + " to " + format(max) +
                                     ", or 0 for the default");
            target->*field = value;
            return Status();
          },
          [=](const S& source) {
            const std::string text = format(source.*field);
            return text.find('/') == std::string::npos ? text : Quote(text);
          }};
}

Result<double> ParseReal(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end) return Status::Invalid("\"" + std::string(text) + "\" is not a number");
  return value;
}

template <class S>
Setting<S> Speed(const char* key, double S::*field) {
  return Real(key, field, 1, 1e15, "a speed such as \"345MB/s\", or a number of bytes per second", &ParseSpeed,
              &FormatSpeed);
}

// A part of 1, or how it is found.
Setting<PathConfig> Share(const char* key) {
  return {key,
          [](const RawValue& raw, PathConfig* path) {
            const std::string wanted = "a number above 0 and at most 1, \"equal\" or \"measured\"";
            double value = 0;
            if (const auto* text = std::get_if<std::string>(&raw.value)) {
              if (*text == "equal" || *text == "measured") {
                path->share_rule = *text == "equal" ? ShareRule::kEqual : ShareRule::kMeasured;
                path->share = 1;
                return Status();
              }
              const Result<double> parsed = ParseReal(*text);
              if (!parsed.ok()) return Status::Invalid("is \"" + Printable(*text) + "\"; allowed: " + wanted);
              value = *parsed;
            } else if (const auto* whole = std::get_if<int64_t>(&raw.value)) {
              value = static_cast<double>(*whole);
            } else if (const auto* number = std::get_if<double>(&raw.value)) {
              value = *number;
            } else {
              return WrongType(raw, wanted);
            }
            if (!(value >= kLeastShare && value <= 1))
              return Status::Invalid("is " + FormatNumber(value) + "; allowed: " + wanted);
            path->share_rule = ShareRule::kFixed;
            path->share = value;
            return Status();
          },
          [](const PathConfig& path) {
            return path.share_rule == ShareRule::kFixed   ? FormatNumber(path.share)
                   : path.share_rule == ShareRule::kEqual ? Quote("equal")
                                                          : Quote("measured");
          }};
}

std::string CheckGroup(const std::string& text) {
  if (text.empty() || IsName(text)) return "";
  return "must name a group: " + std::string(kNameRule);
}

std::string CheckNode(const std::string& text) {
  if (text.empty() || IsName(text)) return "";
  return "\"" + Printable(text) + "\" is not a name: " + kNameRule;
}

std::string CheckPathName(const std::string& text) {
  return IsName(text) ? "" : "\"" + Printable(text) + "\" is not a name: " + std::string(kNameRule);
}

std::string CheckPlace(const std::string& text) {
  if (text.empty()) return "must not be empty";
  if (!IsPrintableUtf8(text)) return "must be UTF-8 without control characters: \"" + Printable(text) + "\"";
  if (text[0] != '/') return "must be absolute (begin with /): \"" + text + "\"";
  return "";
}

std::string CheckFile(const std::string& text) {
  if (text.empty()) return "";
  if (text.back() == '/') return "must name a file: \"" + text + "\"";
  return CheckPlace(text);
}

// Metrics have no password: only this host may ask.
std::string CheckListen(const std::string& text) {
  if (text.empty()) return "";
  const std::string rule = "\"" + Printable(text) + "\" is not 127.0.0.1:PORT or [::1]:PORT, PORT from 1 to 65535";
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return rule;
  const std::string host = text.substr(0, colon);
  in_addr v4{};
  const bool loopback = host == "[::1]" || (::inet_pton(AF_INET, host.c_str(), &v4) == 1 && host.starts_with("127."));
  const Result<uint64_t> port = ParseInteger(std::string_view(text).substr(colon + 1));
  return loopback && port.ok() && port.value() >= 1 && port.value() <= 65535 ? "" : rule;
}

std::string CheckSocket(const std::string& text) {
  if (text.empty()) return "";
  // sun_path holds 107 bytes, and the control socket's name is 4 longer.
  if (text.size() > 103) return "has " + std::to_string(text.size()) + " bytes; a socket's path may have 103";
  return CheckPlace(text);
}

template <class S>
void Append(std::vector<Setting<Config>>* all, const std::string& section, S Config::*member,
            std::vector<Setting<S>> settings) {
  for (Setting<S>& setting : settings) {
    all->push_back(
        {section + "." + setting.key,
         [member, set = setting.set](const RawValue& raw, Config* config) { return set(raw, &(config->*member)); },
         [member, print = setting.print](const Config& config) { return print(config.*member); }});
  }
}

std::vector<Setting<Config>> BuildSettings() {
  std::vector<Setting<Config>> all;
  using D = DaemonConfig;
  Append(&all, "daemon", &Config::daemon,
         {Text("socket", &D::socket, CheckSocket), Text("node", &D::node, CheckNode),
          Text("admin_group", &D::admin_group, CheckGroup), Text("group", &D::group, CheckGroup),
          Choice("log_level", &D::log_level, {"trace", "debug", "info", "warning", "error"}),
          Integer("max_sessions", &D::max_sessions, {.min = 1, .max = 65536}),
          Duration("drain_timeout", &D::drain_timeout_s, {.min = 1, .max = 7 * 86400}),
          Text("metrics_file", &D::metrics_file, CheckFile),
          Duration("metrics_interval", &D::metrics_interval_s, {.min = 1, .max = 3600}),
          Text("metrics_listen", &D::metrics_listen, CheckListen)});
  using M = MemoryConfig;
  Append(&all, "memory", &Config::memory,
         {Size("pool", &M::pool_bytes, {}), Size("arenas", &M::arenas_bytes, {}),
          Count("block", &M::block_elements, {.min = 1024, .max = 16 * kMiB, .multiple = 1024}),
          Choice("huge_pages", &M::huge_pages, {"auto", "never", "require"}),
          Choice("numa", &M::numa, {"auto", "interleave", "off"}), Flag("lock", &M::lock)});
  using A = AdamConfig;
  Append(&all, "adam", &Config::adam,
         {Integer("workers", &A::workers, {.min = 1, .max = 1024, .zero = true}), Flag("pin", &A::pin),
          Choice("target", &A::target, {"auto", "scalar", "avx2", "avx512"})});
  using S = SchedulerConfig;
  Append(&all, "scheduler", &Config::scheduler,
         {Choice("policy", &S::policy, {"adaptive", "proportional", "ratio"}),
          Choice("order", &S::order, {"adaptive", "alternating", "ascending"}), Flag("learn", &S::learn),
          Integer("queue_blocks", &S::queue_blocks, {.min = 1, .max = 1024, .zero = true}),
          Duration("no_path_timeout", &S::no_path_timeout_s, {.min = 1, .max = 86400}),
          Duration("hang_timeout", &S::hang_timeout_s, {.min = 10, .max = 7 * 86400, .zero = true}),
          Size("piece", &S::piece_bytes, {.min = kMiB, .max = 8 * kMiB, .multiple = 4096}),
          Choice("gradients", &S::gradients, {"delayed", "flushed"}), Flag("integrity", &S::integrity)});
  using Q = QuotaConfig;
  Append(
      &all, "quota", &Config::quota,
      {Count("user_sessions", &Q::user_sessions, {}),
       Count("user_requests", &Q::user_requests, {.min = 8, .zero = true}),
       Size("user_arenas", &Q::user_arenas_bytes, {}), Size("user_capacity", &Q::user_capacity_bytes, {}),
       Size("user_pool", &Q::user_pool_bytes, {}), Count("job_sessions", &Q::job_sessions, {}),
       Count("job_requests", &Q::job_requests, {.min = 8, .zero = true}), Size("job_arenas", &Q::job_arenas_bytes, {}),
       Size("job_capacity", &Q::job_capacity_bytes, {}), Size("job_pool", &Q::job_pool_bytes, {})});
  using C = CheckpointConfig;
  Append(
      &all, "checkpoint", &Config::checkpoint,
      {Real("copy_share", &C::copy_share, 0.05, 1, "a number from 0.05 to 1", &ParseReal, &FormatNumber),
       Integer("buffers", &C::buffers, {.min = 1, .max = 64}), Integer("writers", &C::writers, {.min = 1, .max = 64}),
       Integer("readers", &C::readers, {.min = 1, .max = 64})});
  return all;
}

std::vector<Setting<PathConfig>> BuildPathSettings() {
  using P = PathConfig;
  return {Text("name", &P::name, CheckPathName),
          Text("directory", &P::directory, CheckPlace),
          Flag("persistent", &P::persistent),
          Size("capacity", &P::capacity_bytes, {}),
          Choice("engine", &P::engine, {"auto", "io_uring", "threads"}),
          Flag("direct", &P::direct),
          Speed("read_limit", &P::read_limit),
          Speed("write_limit", &P::write_limit),
          Real("duplex", &P::duplex, 0.5, 2, "a number from 0.5 to 2", &ParseReal, &FormatNumber),
          Number("write_budget", &P::write_budget_bytes, "a budget such as \"40TB/day\", or a number of bytes a day",
                 &ParseBudget, &FormatBudget, {.min = uint64_t{1} << 30, .zero = true}),
          Share("share"),
          Real("weight", &P::weight, 1e-6, 1e6, "a number above 0", &ParseReal, &FormatNumber),
          Integer("turn.blocks", &P::turn_blocks, {.min = 1, .max = 65536, .zero = true}),
          Choice("turn.direction", &P::turn_direction, {"both", "one"}),
          Flag("exclusive", &P::exclusive)};
}

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

const std::vector<Setting<Config>>& Settings() {
  static const std::vector<Setting<Config>> settings = BuildSettings();
  return settings;
}

const std::vector<Setting<PathConfig>>& PathSettings() {
  static const std::vector<Setting<PathConfig>> settings = BuildPathSettings();
  return settings;
}

std::string NearestKey(const std::string& key, const std::vector<std::string>& known) {
  auto last = [](const std::string& text) { return text.substr(text.rfind('.') + 1); };  // npos + 1 is 0
  std::string nearest;
  size_t best = std::max<size_t>(2, key.size() / 3) + 1;
  for (const std::string& candidate : known) {
    const size_t distance = EditDistance(key, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  if (best <= 2) return nearest;
  for (const std::string& candidate : known)
    if (last(candidate) == last(key)) return candidate;  // the right name in the wrong section
  return nearest;
}

}  // namespace mlpo
