// The record of a path, as anything that may lie under its name. What is read is what is written and read again.
#include "daemon/io/path_record.h"

#include <fcntl.h>
#include <unistd.h>

#include "daemon/base/unique_fd.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/io_scratch.h"

namespace {

using namespace mlpo;

struct Folder {
  // In memory where that is to be had: a record is synced when it is written.
  test::ScratchFolder folder{::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"};
  UniqueFd fd{::open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
};

bool Same(const PathRecord& a, const PathRecord& b) {
  if (a.written_bytes != b.written_bytes || a.calibration.has_value() != b.calibration.has_value()) return false;
  if (!a.calibration) return true;
  const PathRecord::Calibration &x = *a.calibration, &y = *b.calibration;
  return x.read_bytes_per_s == y.read_bytes_per_s && x.write_bytes_per_s == y.write_bytes_per_s &&
         x.duplex == y.duplex && x.read_depth_bytes == y.read_depth_bytes &&
         x.write_depth_bytes == y.write_depth_bytes && x.unix_s == y.unix_s;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  {
    const UniqueFd file(::openat(folder.fd.get(), kRecordFile, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    FUZZ_CHECK(file && ::write(file.get(), data, size) == static_cast<ssize_t>(size), "writing the input");
  }
  const Result<PathRecord> read = LoadPathRecord(folder.fd.get(), "folder");
  if (!read.ok()) {
    FUZZ_CHECK(read.status().message().find("folder/record.json") != std::string::npos, read.status().message());
    return 0;
  }
  const Status saved = SavePathRecord(folder.fd.get(), "folder", read.value());
  FUZZ_CHECK(saved.ok(), saved.message());
  const Result<PathRecord> again = LoadPathRecord(folder.fd.get(), "folder");
  FUZZ_CHECK(again.ok(), again.status().message());
  FUZZ_CHECK(Same(read.value(), again.value()), "what was saved is not what is read");
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() { return {}; }
