// The first page of a checkpoint's data file, whoever wrote it. An input with an odd first byte gets its checksum
// right.
#include "daemon/checkpoint/part_header.h"
#include "daemon/base/name.h"

#include <xxhash.h>

#include "tests/fuzz/fuzz_target.h"

namespace {

using namespace mlpo;

constexpr size_t kChecksumAt = kPartHeaderBytes - sizeof(uint64_t);

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  test::FuzzInput input(data, size);
  const bool mend = input.Byte() & 1;
  PartHeader page;
  const std::string_view bytes = input.Rest().substr(0, page.bytes.size());
  std::memcpy(page.bytes.data(), bytes.data(), bytes.size());
  if (mend) {
    const uint64_t checksum = XXH3_64bits(page.bytes.data(), kChecksumAt);
    std::memcpy(page.bytes.data() + kChecksumAt, &checksum, sizeof checksum);
  }
  const Result<PartIdentity> parsed = ParsePartHeader(page);
  if (!parsed.ok()) {
    FUZZ_CHECK(parsed.status().code() == -EINVAL && !parsed.status().message().empty(), parsed.status().message());
    return 0;
  }
  FUZZ_CHECK(IsName(parsed.value().job) && IsName(parsed.value().tag), "names");
  const Result<PartIdentity> again = ParsePartHeader(MakePartHeader(parsed.value()));
  FUZZ_CHECK(again.ok() && again.value() == parsed.value(), "a header that is made of what was read is another one");
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() {
  PartIdentity identity;
  identity.attempt.bytes[0] = 1;
  identity.job = std::string(128, 'j');
  identity.tag = "step-1";
  const PartHeader page = MakePartHeader(identity);
  std::vector<std::string> seeds;
  for (const char first : {'\0', '\1'})
    seeds.push_back(first + std::string(reinterpret_cast<const char*>(page.bytes.data()), page.bytes.size()));
  return seeds;
}
