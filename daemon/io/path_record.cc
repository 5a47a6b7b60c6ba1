#include "daemon/io/path_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>

#include "daemon/base/file_io.h"
#include "daemon/base/unique_fd.h"
#include "daemon/io/path_folders.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr size_t kMaxBytes = 65536;
constexpr double kMaxSpeed = 1e15;
constexpr uint64_t kMaxDepthBytes = uint64_t{1} << 40;

Result<std::string> ReadFile(int folder_fd, const std::string& name) {
  UniqueFd fd(::openat(folder_fd, kRecordFile, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!fd && errno == ENOENT) return std::string();
  if (!fd) return PathError(errno, "opening", name);
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return PathError(errno, "looking at", name);
  if (!S_ISREG(st.st_mode) || st.st_size <= 0 || static_cast<size_t>(st.st_size) > kMaxBytes)
    return Status::Invalid(name + " is no file of 1 to " + std::to_string(kMaxBytes) + " bytes");
  std::string text(static_cast<size_t>(st.st_size), '\0');
  size_t got = 0;
  if (const int error = ReadAt(fd.get(), text.data(), text.size(), 0, &got); error != 0)
    return PathError(error, "reading", name);
  text.resize(got);
  return text;
}

// What is out of range, or of another type, is as missing.
bool TakeNumber(const json& object, const char* key, double min, double max, double* value) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return false;
  *value = found->get<double>();
  return std::isfinite(*value) && *value >= min && *value <= max;
}
bool TakeWhole(const json& object, const char* key, uint64_t max, uint64_t* value) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return false;
  *value = found->get<uint64_t>();
  return *value <= max;
}

}  // namespace

Result<PathRecord> LoadPathRecord(int folder_fd, const std::string& shown) {
  const std::string name = shown + "/" + kRecordFile;
  Result<std::string> text = ReadFile(folder_fd, name);
  if (!text.ok()) return text.status();
  PathRecord record;
  if (text->empty()) return record;
  const json parsed = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object() || !TakeWhole(parsed, "written_bytes", UINT64_MAX, &record.written_bytes))
    return Status::Invalid(name + " is not what a daemon writes there");
  const auto measured = parsed.find("calibration");
  if (measured == parsed.end()) return record;
  PathRecord::Calibration c;
  uint64_t unix_s = 0;
  if (!measured->is_object() || !TakeNumber(*measured, "read_bytes_per_s", 1, kMaxSpeed, &c.read_bytes_per_s) ||
      !TakeNumber(*measured, "write_bytes_per_s", 1, kMaxSpeed, &c.write_bytes_per_s) ||
      !TakeNumber(*measured, "duplex", 0.5, 2, &c.duplex) ||
      !TakeWhole(*measured, "read_depth_bytes", kMaxDepthBytes, &c.read_depth_bytes) ||
      !TakeWhole(*measured, "write_depth_bytes", kMaxDepthBytes, &c.write_depth_bytes) ||
      !TakeWhole(*measured, "unix_s", INT64_MAX, &unix_s))
    return Status::Invalid(name + " has a calibration that no daemon writes");
  c.unix_s = static_cast<int64_t>(unix_s);
  record.calibration = c;
  return record;
}

Status SavePathRecord(int folder_fd, const std::string& shown, const PathRecord& record) {
  const std::string name = shown + "/" + kRecordFile;
  const std::string aside = std::string(kRecordFile) + ".new";
  json out = {{"written_bytes", record.written_bytes}};
  if (const auto& c = record.calibration) {
    out["calibration"] = {{"read_bytes_per_s", c->read_bytes_per_s},
                          {"write_bytes_per_s", c->write_bytes_per_s},
                          {"duplex", c->duplex},
                          {"read_depth_bytes", c->read_depth_bytes},
                          {"write_depth_bytes", c->write_depth_bytes},
                          {"unix_s", static_cast<uint64_t>(c->unix_s)}};
  }
  const std::string text = out.dump() + "\n";
  if (::unlinkat(folder_fd, aside.c_str(), 0) != 0 && errno != ENOENT) return PathError(errno, "replacing", name);
  UniqueFd fd(::openat(folder_fd, aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd) return PathError(errno, "writing", name);
  int error = WriteAt(fd.get(), text.data(), text.size(), 0);
  if (error == 0 && ::fsync(fd.get()) != 0) error = errno;
  if (error == 0 && ::renameat(folder_fd, aside.c_str(), folder_fd, kRecordFile) != 0) error = errno;
  if (error == 0) return Status();
  (void)::unlinkat(folder_fd, aside.c_str(), 0);  // the first error is the one to report
  return PathError(error, "writing", name);
}

}  // namespace mlpo
