#include "daemon/io/file_header.h"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "daemon/base/checksum.h"
#include "daemon/base/file_io.h"
#include "daemon/base/name.h"
#include "daemon/io/scratch_layout.h"

namespace mlpo {
namespace {

constexpr char kMagic[8] = {'M', 'L', 'P', 'O', 'S', 'T', 'A', 'T'};
constexpr uint32_t kFormatVersion = 1;
constexpr size_t kNameBytes = 136;  // 128 and a NUL, rounded to 8

struct FileHeaderPage {
  char magic[8];
  uint32_t format_version;
  uint32_t header_bytes;
  uint32_t daemon_uid;
  uint32_t client_uid;
  uint32_t rank;
  uint32_t reserved;
  uint64_t generation;
  char node[kNameBytes];  // NUL-padded
  char job[kNameBytes];
  uint8_t zero[4096 - 40 - 2 * kNameBytes - 8];
  uint64_t checksum;
};
static_assert(sizeof(FileHeaderPage) == Path::kFileHeaderBytes);
static_assert(offsetof(FileHeaderPage, generation) == 32 && offsetof(FileHeaderPage, checksum) == 4088);
static_assert(std::is_trivially_copyable_v<FileHeaderPage>);
static_assert(std::endian::native == std::endian::little, "the file format is little endian");

uint64_t ChecksumOf(const FileHeaderPage& page) { return Checksum(&page, offsetof(FileHeaderPage, checksum)); }

std::string Describe(const FileIdentity& identity) {
  return "daemon uid " + std::to_string(identity.daemon_uid) + " node " + identity.node + " client uid " +
         std::to_string(identity.owner.client_uid) + " job " + identity.owner.job + " rank " +
         std::to_string(identity.owner.rank) + " generation " + std::to_string(identity.owner.generation);
}

}  // namespace

HeaderPage MakeFileHeader(const FileIdentity& identity) {
  MLPO_CHECK(IsName(identity.node) && IsName(identity.owner.job));
  FileHeaderPage page{};
  std::memcpy(page.magic, kMagic, sizeof kMagic);
  page.format_version = kFormatVersion;
  page.header_bytes = sizeof page;
  page.daemon_uid = identity.daemon_uid;
  page.client_uid = identity.owner.client_uid;
  page.rank = identity.owner.rank;
  page.generation = identity.owner.generation;
  std::memcpy(page.node, identity.node.data(), identity.node.size());
  std::memcpy(page.job, identity.owner.job.data(), identity.owner.job.size());
  page.checksum = ChecksumOf(page);
  HeaderPage out;
  std::memcpy(out.bytes.data(), &page, sizeof page);
  return out;
}

Result<FileIdentity> ParseFileHeader(const HeaderPage& bytes) {
  FileHeaderPage page;
  std::memcpy(&page, bytes.bytes.data(), sizeof page);
  if (std::memcmp(page.magic, kMagic, sizeof kMagic) != 0) return Status::Invalid("no state file header (wrong magic)");
  if (page.checksum != ChecksumOf(page)) return Status::Invalid("the file header is damaged (wrong checksum)");
  if (page.format_version != kFormatVersion)
    return Status::Invalid("the file header has format " + std::to_string(page.format_version) +
                           ", this daemon knows " + std::to_string(kFormatVersion));
  FileIdentity identity;
  identity.node.assign(page.node, ::strnlen(page.node, kNameBytes));
  identity.daemon_uid = page.daemon_uid;
  identity.owner.client_uid = page.client_uid;
  identity.owner.job.assign(page.job, ::strnlen(page.job, kNameBytes));
  identity.owner.rank = page.rank;
  identity.owner.generation = page.generation;
  if (page.header_bytes != sizeof page || !IsName(identity.node) || !IsName(identity.owner.job))
    return Status::Invalid("the file header has names or sizes that this daemon never writes");
  return identity;
}

Result<FileIdentity> ReadFileHeader(int fd) {
  HeaderPage page;
  size_t got = 0;
  const int error = ReadAt(fd, page.bytes.data(), page.bytes.size(), 0, &got);
  // Behind an odd end O_DIRECT is refused, which is no other error than the end.
  if (error != 0 && got % 512 == 0) return Status::Errno(error, "reading a file header");
  if (got < page.bytes.size()) return Status::Invalid("the file ends within its header");
  return ParseFileHeader(page);
}

Status CheckFileHeader(int fd, const FileIdentity& expected) {
  const Result<FileIdentity> found = ReadFileHeader(fd);
  if (!found.ok()) return found.status();
  const std::string is = Describe(found.value()), should = Describe(expected);
  if (is != should) return Status(-EPERM, "the file belongs to " + is + ", not to " + should);
  return Status();
}

}  // namespace mlpo
