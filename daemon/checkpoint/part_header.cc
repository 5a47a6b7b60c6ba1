#include "daemon/checkpoint/part_header.h"

#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "daemon/base/check.h"
#include "daemon/base/file_io.h"
#include "daemon/base/name.h"

namespace mlpo {
namespace {

constexpr char kMagic[8] = {'M', 'L', 'P', 'O', 'P', 'A', 'R', 'T'};
constexpr uint32_t kFormatVersion = 1;
constexpr size_t kNameBytes = 136;  // 128 and a NUL, rounded to 8

struct PartHeaderPage {
  char magic[8];
  uint32_t format_version;
  uint32_t header_bytes;
  uint8_t attempt[16];
  uint32_t rank;
  uint32_t world_size;
  uint64_t step;
  uint32_t index;
  uint32_t uid;
  int64_t started_unix_ns;
  char job[kNameBytes];  // NUL-padded
  char tag[kNameBytes];
  uint8_t zero[4096 - 64 - 2 * kNameBytes - 8];
  uint64_t checksum;
};
static_assert(sizeof(PartHeaderPage) == kPartHeaderBytes);
static_assert(offsetof(PartHeaderPage, attempt) == 16 && offsetof(PartHeaderPage, step) == 40);
static_assert(offsetof(PartHeaderPage, job) == 64 && offsetof(PartHeaderPage, checksum) == 4088);
static_assert(std::is_trivially_copyable_v<PartHeaderPage>);
static_assert(std::endian::native == std::endian::little, "the file format is little endian");

uint64_t Checksum(const PartHeaderPage& page) { return XXH3_64bits(&page, offsetof(PartHeaderPage, checksum)); }

}  // namespace

PartHeader MakePartHeader(const PartIdentity& identity) {
  MLPO_CHECK(IsName(identity.job) && IsName(identity.tag));
  PartHeaderPage page{};
  std::memcpy(page.magic, kMagic, sizeof kMagic);
  page.format_version = kFormatVersion;
  page.header_bytes = sizeof page;
  std::memcpy(page.attempt, identity.attempt.bytes.data(), sizeof page.attempt);
  page.rank = identity.rank;
  page.world_size = identity.world_size;
  page.step = identity.step;
  page.index = identity.index;
  page.uid = identity.uid;
  page.started_unix_ns = identity.started_unix_ns;
  std::memcpy(page.job, identity.job.data(), identity.job.size());
  std::memcpy(page.tag, identity.tag.data(), identity.tag.size());
  page.checksum = Checksum(page);
  PartHeader out;
  std::memcpy(out.bytes.data(), &page, sizeof page);
  return out;
}

Result<PartIdentity> ParsePartHeader(const PartHeader& bytes) {
  PartHeaderPage page;
  std::memcpy(&page, bytes.bytes.data(), sizeof page);
  if (std::memcmp(page.magic, kMagic, sizeof kMagic) != 0)
    return Status::Invalid("no header of a checkpoint's part (wrong magic)");
  if (page.checksum != Checksum(page)) return Status::Invalid("the part's header is damaged (wrong checksum)");
  if (page.format_version != kFormatVersion)
    return Status::Invalid("the part's header has format " + std::to_string(page.format_version) +
                           ", this version knows " + std::to_string(kFormatVersion));
  PartIdentity identity;
  std::memcpy(identity.attempt.bytes.data(), page.attempt, sizeof page.attempt);
  identity.rank = page.rank;
  identity.world_size = page.world_size;
  identity.step = page.step;
  identity.index = page.index;
  identity.uid = page.uid;
  identity.started_unix_ns = page.started_unix_ns;
  identity.job.assign(page.job, ::strnlen(page.job, kNameBytes));
  identity.tag.assign(page.tag, ::strnlen(page.tag, kNameBytes));
  if (page.header_bytes != sizeof page || !IsName(identity.job) || !IsName(identity.tag))
    return Status::Invalid("the part's header has names or sizes that nobody writes");
  return identity;
}

namespace {

// Up to as many bytes as there are: how many.
Result<size_t> ReadPage(int fd, PartHeader* page, const std::string& shown) {
  size_t got = 0;
  const int error = ReadAt(fd, page->bytes.data(), page->bytes.size(), 0, &got);
  if (error != 0) return Status::Errno(error, "reading the header of " + shown);
  return got;
}

}  // namespace

Result<PartIdentity> ReadPartHeader(int fd, const std::string& shown) {
  PartHeader page;
  const Result<size_t> got = ReadPage(fd, &page, shown);
  if (!got.ok()) return got.status();
  if (got.value() < page.bytes.size()) return Status::Invalid(shown + " ends within its header");
  Result<PartIdentity> identity = ParsePartHeader(page);
  if (!identity.ok()) return identity.status().Within(shown);
  return identity;
}

Result<bool> LacksPartHeader(int fd, const std::string& shown) {
  struct stat st;
  if (::fstat(fd, &st) != 0) return Status::Errno(errno, "looking at " + shown);
  if (static_cast<uint64_t>(st.st_size) > kPartHeaderBytes) return false;
  PartHeader page;
  const Result<size_t> got = ReadPage(fd, &page, shown);
  if (!got.ok()) return got.status();
  return std::all_of(page.bytes.begin(), page.bytes.end(), [](std::byte byte) { return byte == std::byte{}; });
}

}  // namespace mlpo
