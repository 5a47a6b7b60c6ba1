#include "daemon/control/trace_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "daemon/base/clock.h"
#include "proto/command.h"

namespace mlpo {
namespace {

using nlohmann::ordered_json;

// Numbers of "processes".
constexpr uint64_t kPool = 1;
constexpr uint64_t kWorkers = 2;
constexpr uint64_t kFirstPath = 100;
constexpr uint64_t kFirstSession = 1'000'000;
constexpr int64_t kRateNs = 100 * kNsPerMs;  // what a value of bytes per second is of

class Writer {
 public:
  Writer(const Trace& trace, Viewer viewer) : trace_(trace), viewer_(viewer) {}

  void Begin();
  void Add(size_t index);
  ordered_json Take() { return std::move(events_); }

 private:
  const Trace::Session* Visible(SessionId session) const {
    const auto found = trace_.sessions.find(session);
    if (found == trace_.sessions.end() || (viewer_ && found->second.uid != *viewer_)) return nullptr;
    return &found->second;
  }
  double Us(int64_t ns) const { return static_cast<double>(std::max(ns, trace_.began_ns) - trace_.began_ns) / 1e3; }
  static uint64_t Track(const TraceRecord& record) {
    return 2 * uint64_t{record.slot} + (record.kind == TraceKind::kWrite ? 1 : 0);
  }
  std::string NameOf(const TraceRecord& record) const;
  ordered_json ArgsOf(const TraceRecord& record) const;
  void Meta(const char* what, uint64_t process, uint64_t thread, const std::string& name);
  void AddSpan(const TraceRecord& record, uint64_t process, uint64_t thread, const std::string& name,
               ordered_json args);
  void AddAsync(const TraceRecord& record, size_t index, const char* category, const std::string& name);
  void AddRates();

  const Trace& trace_;
  const Viewer viewer_;
  ordered_json events_ = ordered_json::array();
};

std::string OpName(uint8_t op) {
  switch (op) {
    case MLPO_OP_UPDATE:
      return "Adam";
    case MLPO_OP_GRAD:
      return "statistics";
    case MLPO_OP_READ_STATE:
      return "read state";
    case MLPO_OP_WRITE_STATE:
      return "write state";
    case MLPO_OP_NOP:
      return "checksums";
    default:
      return "object";
  }
}

// "job/0 decoder.3 #17"
std::string Writer::NameOf(const TraceRecord& record) const {
  const Trace::Session* session = Visible(record.session);
  if (session == nullptr) return "another session";
  std::string name = session->job + (IsStore(record.session) ? "/objects" : "/" + std::to_string(session->rank));
  const auto key = trace_.subgroups.find({record.session, record.subgroup});
  if (key != trace_.subgroups.end()) name += " " + key->second;
  return name;
}

ordered_json Writer::ArgsOf(const TraceRecord& record) const {
  ordered_json args = ordered_json::object();
  if (record.error != 0) args["error"] = record.error;
  if (Visible(record.session) == nullptr) return args;
  args["session"] = record.session;
  args["subgroup"] = record.subgroup;
  args["block"] = record.block;
  return args;
}

void Writer::Meta(const char* what, uint64_t process, uint64_t thread, const std::string& name) {
  events_.push_back({{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", name}}}});
}

void Writer::AddSpan(const TraceRecord& record, uint64_t process, uint64_t thread, const std::string& name,
                     ordered_json args) {
  const double begin = Us(record.begin_ns);
  events_.push_back({{"ph", "X"},
                     {"name", name},
                     {"pid", process},
                     {"tid", thread},
                     {"ts", begin},
                     {"dur", Us(record.end_ns) - begin},
                     {"args", std::move(args)}});
}

void Writer::AddAsync(const TraceRecord& record, size_t index, const char* category, const std::string& name) {
  for (const bool end : {false, true}) {
    events_.push_back({{"ph", end ? "e" : "b"},
                       {"cat", category},
                       {"id", std::to_string(index) + category},
                       {"name", name},
                       {"pid", kFirstSession + record.session},
                       {"tid", 0},
                       {"ts", Us(end ? record.end_ns : record.begin_ns)}});
    if (!end) events_.back()["args"] = ArgsOf(record);
  }
}

// Names of everything, and what can be said only of all records.
void Writer::Begin() {
  Meta("process_name", kPool, 0, "pool");
  Meta("process_name", kWorkers, 0, "workers");
  for (uint32_t worker = 0; worker < trace_.workers; ++worker)
    Meta("thread_name", kWorkers, worker, "worker " + std::to_string(worker));
  for (size_t path = 0; path < trace_.paths.size(); ++path)
    Meta("process_name", kFirstPath + path, 0, "path " + trace_.paths[path]);
  std::vector<std::pair<uint64_t, uint64_t>> slots;
  for (const TraceRecord& record : trace_.records) {
    if (record.kind == TraceKind::kRead || record.kind == TraceKind::kWrite)
      slots.push_back({record.place, Track(record)});
  }
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  for (const auto& [path, track] : slots) {
    Meta("thread_name", kFirstPath + path, track,
         (track % 2 == 0 ? "read slot " : "write slot ") + std::to_string(track / 2));
  }
  for (const auto& [id, session] : trace_.sessions) {
    if (Visible(id) == nullptr || IsStore(id)) continue;
    Meta("process_name", kFirstSession + id, 0, "session " + session.job + "/" + std::to_string(session.rank));
    Meta("thread_name", kFirstSession + id, 0, "steps");
  }
  AddRates();
}

// A transfer counts evenly over its time.
void Writer::AddRates() {
  const auto bins = static_cast<size_t>((trace_.ended_ns - trace_.began_ns) / kRateNs + 1);
  std::vector<std::vector<std::array<double, 2>>> bytes(trace_.paths.size(), std::vector<std::array<double, 2>>(bins));
  for (const TraceRecord& record : trace_.records) {
    if (record.kind != TraceKind::kRead && record.kind != TraceKind::kWrite) continue;
    const int64_t begin = record.begin_ns - trace_.began_ns;
    const int64_t end = record.end_ns - trace_.began_ns;
    const auto last = std::min<size_t>(bins - 1, static_cast<size_t>(end / kRateNs));
    for (size_t bin = static_cast<size_t>(begin / kRateNs); bin <= last; ++bin) {
      const int64_t from = std::max<int64_t>(begin, static_cast<int64_t>(bin) * kRateNs);
      const int64_t to = std::min<int64_t>(end, static_cast<int64_t>(bin + 1) * kRateNs);
      const double part = end > begin ? static_cast<double>(to - from) / static_cast<double>(end - begin) : 1;
      bytes[record.place][bin][record.kind == TraceKind::kWrite] += part * static_cast<double>(record.bytes);
    }
  }
  for (size_t path = 0; path < bytes.size(); ++path) {
    for (size_t bin = 0; bin < bins; ++bin) {
      const double scale = static_cast<double>(kNsPerS) / kRateNs;
      events_.push_back(
          {{"ph", "C"},
           {"name", "bytes/s"},
           {"pid", kFirstPath + path},
           {"ts", static_cast<double>(bin) * kRateNs / 1e3},
           {"args",
            {{"read", std::round(bytes[path][bin][0] * scale)}, {"write", std::round(bytes[path][bin][1] * scale)}}}});
    }
  }
}

void Writer::Add(size_t index) {
  const TraceRecord& record = trace_.records[index];
  switch (record.kind) {
    case TraceKind::kRead:
    case TraceKind::kWrite: {
      ordered_json args = ArgsOf(record);
      args["bytes"] = record.bytes;
      const std::string block = Visible(record.session) ? " #" + std::to_string(record.block) : "";
      return AddSpan(record, kFirstPath + record.place, Track(record), NameOf(record) + block, std::move(args));
    }
    case TraceKind::kWork: {
      const std::string block =
          Visible(record.session) && record.op != MLPO_OP_GRAD ? " #" + std::to_string(record.block) : "";
      return AddSpan(record, kWorkers, record.place, OpName(record.op) + " " + NameOf(record) + block, ArgsOf(record));
    }
    case TraceKind::kPool:
      events_.push_back({{"ph", "C"},
                         {"name", "blocks"},
                         {"pid", kPool},
                         {"ts", Us(record.begin_ns)},
                         {"args", {{"free", record.block}, {"clean", record.place}, {"dirty", record.bytes}}}});
      return;
    case TraceKind::kWindow:
      if (Visible(record.session)) AddAsync(record, index, "gradients", "gradients of " + NameOf(record));
      return;
    case TraceKind::kUpdate:
      if (Visible(record.session)) AddAsync(record, index, "updates", "UPDATE " + NameOf(record));
      return;
    case TraceKind::kStep: {
      if (!Visible(record.session)) return;
      const StepRecord& step = trace_.steps[record.bytes];
      ordered_json args = {{"number", step.number}, {"epoch", step.epoch}, {"skipped", step.skipped}};
      for (size_t i = 0; i < kStepParts; ++i)
        args[std::string(kStepPartNames[i]) + "_s"] = static_cast<double>(step.parts_ns[i]) / kNsPerS;
      args["blocks"] = step.blocks;
      args["read_blocks"] = step.read_blocks;
      return AddSpan(record, kFirstSession + record.session, 0, "step " + std::to_string(step.number), std::move(args));
    }
  }
}

}  // namespace

std::string TraceJson(const Trace& trace, Viewer viewer, size_t from, size_t count) {
  Writer writer(trace, viewer);
  ordered_json out;
  if (from == 0) {
    writer.Begin();
    out["seconds"] = static_cast<double>(trace.ended_ns - trace.began_ns) / kNsPerS;
    out["records"] = trace.records.size();
    out["dropped"] = trace.dropped;
  }
  const size_t end = std::min(trace.records.size(), from + count);
  for (size_t i = from; i < end; ++i) writer.Add(i);
  out["events"] = writer.Take();
  out["next"] = end < trace.records.size() ? ordered_json(end) : ordered_json();
  return out.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace mlpo
