// Checksum: the numbers that XXH3's authors published, for every length class, wherever the bytes lie.
#include "daemon/base/checksum.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

namespace {

// What the sanity check of xxHash's own command (cli/xsum_sanity_check.c) is made over.
std::vector<unsigned char> PublishedInput(size_t bytes) {
  std::vector<unsigned char> input(bytes);
  uint64_t generator = 2654435761u;
  for (unsigned char& byte : input) {
    byte = static_cast<unsigned char>(generator >> 56);
    generator *= 11400714785074694797u;
  }
  return input;
}

struct Published {
  size_t bytes;
  uint64_t checksum;
};
constexpr Published kPublished[] = {
    {0, 0x2D06800538D394C2},    {1, 0xC44BDFF4074EECDB},   {6, 0x27B56A84CD2D7325},    {12, 0xA713DAF0DFBB77E7},
    {24, 0xA3FE70BF9D3510EB},   {48, 0x397DA259ECBA1F11},  {80, 0xBCDEFBBB2C47C90A},   {195, 0xCD94217EE362EC3A},
    {403, 0xCDEB804D65C6DEA4},  {512, 0x617E49599013CB6B}, {2048, 0xDD59E2C3A5F038E0}, {2240, 0x6E73A90539CF2948},
    {2367, 0xCB37AEB9E5D361ED},
};

}  // namespace

TEST_CASE("Checksum.IsXxh3AsPublished") {
  const std::vector<unsigned char> input = PublishedInput(4096);
  for (const Published& published : kPublished) {
    CAPTURE(published.bytes);
    CHECK(mlpo::Checksum(input.data(), published.bytes) == published.checksum);
  }
}

TEST_CASE("Checksum.IsTheSameWhereverTheBytesLie") {
  constexpr size_t kBytes = 256 * 1024;
  const std::vector<unsigned char> input = PublishedInput(kBytes);
  const uint64_t expected = mlpo::Checksum(input.data(), kBytes);
  std::vector<unsigned char> shifted(kBytes + 64);
  for (size_t offset = 0; offset < 64; ++offset) {
    std::memcpy(shifted.data() + offset, input.data(), kBytes);
    REQUIRE(mlpo::Checksum(shifted.data() + offset, kBytes) == expected);
  }
}

TEST_CASE("Checksum.EachBitOfAPageCounts") {
  std::vector<unsigned char> page = PublishedInput(4096);
  std::set<uint64_t> seen = {mlpo::Checksum(page.data(), page.size())};
  for (size_t bit = 0; bit < 8 * page.size(); ++bit) {
    page[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    seen.insert(mlpo::Checksum(page.data(), page.size()));
    page[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
  }
  CHECK(seen.size() == 8 * page.size() + 1);
}

TEST_CASE("Checksum.ThreadsMayStartAtOnce") {
  const std::vector<unsigned char> input = PublishedInput(2367);
  std::array<uint64_t, 8> sums = {};
  std::vector<std::thread> threads;
  for (uint64_t& sum : sums) threads.emplace_back([&] { sum = mlpo::Checksum(input.data(), input.size()); });
  for (std::thread& thread : threads) thread.join();
  for (const uint64_t sum : sums) CHECK(sum == 0xCB37AEB9E5D361ED);
}
