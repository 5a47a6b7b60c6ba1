// Writing blocks to a part's file from threads, directly and through the page cache, and what fails of it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>

#include "daemon/checkpoint/block_hash.h"
#include "daemon/checkpoint/part_writer.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace mlpo::test {
namespace {

constexpr uint64_t kSpan = 3 << 20;
constexpr int kSpans = 12;

// Page-aligned memory in which every span has a letter of its own.
struct Spans {
  std::unique_ptr<std::byte, void (*)(void*)> memory{static_cast<std::byte*>(std::aligned_alloc(4096, kSpan* kSpans)),
                                                     std::free};
  Spans() {
    for (uint64_t i = 0; i < kSpan * kSpans; ++i)
      memory.get()[i] = static_cast<std::byte>('a' + i / kSpan + (i % 4093 == 0 ? 32 : 0));
  }
  const std::byte* at(int i) const { return memory.get() + i * kSpan; }
};

class Results {
 public:
  void operator()(const PartWriter::Written& written) {
    std::lock_guard guard(mutex_);
    twice_ |= !results_.emplace(written.id, written).second;
    changed_.notify_all();
  }
  std::map<uint64_t, PartWriter::Written> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return results_.size() == count; }));
    REQUIRE(!twice_);
    return results_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, PartWriter::Written> results_;
  bool twice_ = false;
};

}  // namespace

TEST_CASE("PartWriter.WritesEveryByteWhereItBelongs") {
  const Spans spans;
  for (const bool direct : {false, true}) {
    ScratchDir scratch;  // where O_DIRECT is refused, by the open file or by the first write, it is written without
    const std::string name = scratch / "data";
    UniqueFd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    REQUIRE(fd);
    Results results;
    {
      auto writer = PartWriter::Start(fd.get(), direct, 3, name, [&](const auto& written) { results(written); });
      REQUIRE(writer.ok());
      for (int i = kSpans; i-- > 0;)
        (*writer)->Write(static_cast<uint64_t>(i), spans.at(i), 3, kSpan / 3, 4096 + static_cast<uint64_t>(i) * kSpan);
    }  // what was accepted ends first
    for (const auto& [id, written] : results.Wait(kSpans)) {
      CHECK(written.error == 0);
      CHECK(written.bytes == kSpan);
      CHECK(written.hash == BlockHash(spans.at(static_cast<int>(id)), 3, kSpan / 3));
      CHECK(written.finished_ns >= written.started_ns);
    }
    std::ifstream file(name, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    REQUIRE(text.size() == 4096 + kSpans * kSpan);
    CHECK(text.substr(0, 4096) == std::string(4096, '\0'));
    CHECK(text.compare(4096, std::string::npos, reinterpret_cast<const char*>(spans.at(0)), kSpans * kSpan) == 0);
  }
}

// What `done` has counts the descriptor, which may hang when it is closed.
TEST_CASE("PartWriter.WhatItsResultsAreGivenToGoesWhenItsFileIsClosed") {
  ScratchDir scratch;
  const std::string name = scratch / "data";
  UniqueFd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  REQUIRE(fd);
  const auto open_descriptors = [file = std::filesystem::canonical(name)] {
    int count = 0;
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      count += std::filesystem::read_symlink(entry.path(), gone) == file;
    return count;
  };
  int then = -1;
  std::shared_ptr<int> counted(new int, [&](int* counts) {
    then = open_descriptors();
    delete counts;
  });
  auto writer = PartWriter::Start(fd.get(), false, 2, name, [counted](const auto&) {});
  REQUIRE(writer.ok());
  counted.reset();
  CHECK(open_descriptors() == 2);
  CHECK(then == -1);
  writer->reset();
  CHECK(then == 1);
}

TEST_CASE("PartWriter.AFailureIsTheWritesOwn") {
  const Spans spans;
  const std::map<std::string, std::pair<int, int>> cases = {{"/dev/full", {O_WRONLY, ENOSPC}},
                                                            {"/dev/null", {O_RDONLY, EBADF}}};
  for (const auto& [name, expected] : cases) {
    UniqueFd fd(::open(name.c_str(), expected.first | O_CLOEXEC));
    REQUIRE(fd);
    Results results;
    auto writer = PartWriter::Start(fd.get(), false, 2, name, [&](const auto& written) { results(written); });
    REQUIRE(writer.ok());
    (*writer)->Write(1, spans.at(0), 1, kSpan, 4096);
    (*writer)->Write(2, spans.at(1), 1, kSpan, 4096);
    for (const auto& [id, written] : results.Wait(2)) CHECK(written.error == expected.second);
  }
}

}  // namespace mlpo::test
