// The first page of a state file, whoever wrote it. An input with an odd first byte gets its checksum right, so that
// what lies behind the check is reached, too.
#include "daemon/io/file_header.h"
#include "daemon/base/name.h"

#include <xxhash.h>

#include "daemon/io/scratch_layout.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

using namespace mlpo;

constexpr size_t kChecksumAt = Path::kFileHeaderBytes - sizeof(uint64_t);

bool Same(const FileIdentity& a, const FileIdentity& b) {
  return a.node == b.node && a.daemon_uid == b.daemon_uid && a.owner.client_uid == b.owner.client_uid &&
         a.owner.job == b.owner.job && a.owner.rank == b.owner.rank && a.owner.generation == b.owner.generation;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  test::FuzzInput input(data, size);
  const bool fix = input.Byte() & 1;
  HeaderPage page;
  const std::string_view bytes = input.Rest().substr(0, page.bytes.size());
  std::memcpy(page.bytes.data(), bytes.data(), bytes.size());
  if (fix) {
    const uint64_t checksum = XXH3_64bits(page.bytes.data(), kChecksumAt);
    std::memcpy(page.bytes.data() + kChecksumAt, &checksum, sizeof checksum);
  }
  const Result<FileIdentity> parsed = ParseFileHeader(page);
  if (!parsed.ok()) {
    FUZZ_CHECK(parsed.status().code() == -EINVAL && !parsed.status().message().empty(), parsed.status().message());
    return 0;
  }
  const FileIdentity& identity = parsed.value();
  FUZZ_CHECK(IsName(identity.node) && IsName(identity.owner.job), identity.node);
  const Result<FileIdentity> again = ParseFileHeader(MakeFileHeader(identity));
  FUZZ_CHECK(again.ok() && Same(again.value(), identity), "a header that is made of what was read is another one");
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() {
  std::vector<std::string> seeds;
  const std::string longest(128, 'n');
  for (const FileIdentity& identity : {FileIdentity{"node", 0, {1000, "job", 0, 1}},
                                       FileIdentity{longest, ~0u, {~0u, longest, kObjectsRank, ~uint64_t{0}}}}) {
    const HeaderPage page = MakeFileHeader(identity);
    for (const char first : {'\0', '\1'}) {
      seeds.push_back(first + std::string(reinterpret_cast<const char*>(page.bytes.data()), page.bytes.size()));
    }
  }
  return seeds;
}
