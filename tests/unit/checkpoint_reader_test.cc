// Blocks filled from parts on a real file system, and what list, verify and remove say of these, against values that
// are kept beside them.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/checkpoint/attempt_table.h"
#include "daemon/checkpoint/block_hash.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/inspect.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_reader.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr uint64_t kNumel = 200'003;
const AttemptId kAttempt{{1, 2, 3}};

Status NoWorkingFiles(int, const WorkingOrigin&) { return Status::Invalid("there are no working files here"); }
Result<WorkingOrigin> NoWorkingHeader(int) { return Status::Invalid("there are no working files here"); }

TensorShard Range(uint64_t first, uint64_t count) {
  TensorShard shard;
  shard.global_shape = {kNumel};
  shard.flat = true;
  shard.flat_first = first;
  shard.count = count;
  return shard;
}

// One flat tensor "w", saved by three ranks in blocks of so many elements; the last block of each rank has master
// parameters only, the first of rank 1 nothing at all.
struct Saved {
  const uint64_t block_elements;
  ScratchDir scratch;
  std::string directory = scratch / "checkpoints";
  std::vector<float> arrays[3];

  explicit Saved(uint64_t elements = 30'000) : block_elements(elements) {
    fs::create_directory(directory);
    fs::create_directory(scratch / "journal");
    std::mt19937 random(1);
    std::uniform_real_distribution<float> values(-1, 1);
    for (std::vector<float>& array : arrays) {
      array.resize(kNumel);
      for (float& value : array) value = values(random);
    }
    for (uint32_t rank = 0; rank < 3; ++rank) Save(rank);
  }

  void Save(uint32_t rank) {
    UniqueFd journal(::open((scratch / "journal").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    PartFiles::Options options;
    options.directory = directory;
    options.head.job = "job";
    options.head.tag = "tag";
    options.head.step = 7;
    options.head.world_size = 3;
    options.head.rank = rank;
    options.head.attempt = kAttempt;
    options.head.started_unix_ns = 1;
    options.journal_fd = journal.get();
    options.journal_shown = "journal";
    options.working = NoWorkingHeader;
    Result<std::unique_ptr<PartFiles>> part = PartFiles::Begin(options);
    INFO(part.status().message());
    REQUIRE(part.ok());
    const uint64_t begin = kNumel * rank / 3, end = kNumel * (rank + 1) / 3;
    Manifest manifest;
    PartSubgroup subgroup;
    subgroup.key = "w";
    subgroup.numel = end - begin;
    subgroup.tensors.push_back({"w", Range(begin, end - begin), 7});
    uint64_t offset = kPartHeaderBytes;
    for (uint64_t first = 0; first < subgroup.numel; first += block_elements) {
      PartBlock block;
      block.first = first;
      block.count = std::min(block_elements, subgroup.numel - first);
      block.stored = rank == 1 && first == 0                    ? kStoredNothing
                     : first + block_elements >= subgroup.numel ? kStoredMaster
                                                                : kStoredAll;
      std::vector<std::byte> stored(StoredBytes(block));
      for (uint32_t array = 0; array < 3; ++array) {
        float* values = arrays[array].data() + begin + first;
        if (array >= block.stored) std::fill_n(values, block.count, 0.0f);
        if (array < block.stored)
          std::memcpy(stored.data() + array * StoredArrayBytes(block.count), values, block.count * 4);
      }
      if (block.stored != kStoredNothing) {
        block.offset = offset;
        block.hash = BlockHash(stored.data(), block.stored, StoredArrayBytes(block.count));
        REQUIRE(WriteAll((*part)->data_fd(), stored.data(), stored.size(), offset, "data").ok());
        offset += stored.size();
      }
      subgroup.blocks.push_back(block);
    }
    PartFile file;
    file.bytes = offset;
    manifest.files = {file};
    manifest.subgroups = {subgroup};
    const Status committed = (*part)->Commit(&manifest);
    INFO(committed.message());
    REQUIRE(committed.ok());
  }

  std::string Part(uint32_t rank) const { return directory + "/tag/part-" + std::to_string(rank); }
  std::string Data(uint32_t rank) const { return Part(rank) + "/" + DataName(kAttempt, 0); }

  RestorePlan::Parts Parts() const {
    RestorePlan::Parts parts;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      UniqueFd fd(::open(Part(rank).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      Result<Manifest> manifest = ReadManifest(fd.get(), kAttempt, Part(rank));
      REQUIRE(manifest.ok());
      parts.push_back(std::make_shared<const Manifest>(std::move(*manifest)));
    }
    return parts;
  }
};

// A subgroup that holds a range of the tensor.
std::vector<TargetTensor> OfTensor(uint64_t first, uint64_t count) {
  std::vector<TargetTensor> tensors(1);
  tensors[0].name = "w";
  tensors[0].shard = Range(first, count);
  return tensors;
}

// The readers of one restore, one a subgroup, and how often they opened a file.
struct Reading {
  std::shared_ptr<std::atomic<int>> opened = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<OpenParts> open;
  std::vector<std::shared_ptr<PartReader>> readers;

  Reading(const Saved& saved, RestorePlan::Subgroups subgroups) {
    const RestorePlan::Parts parts = saved.Parts();
    Result<std::vector<RestorePlan>> plans = RestorePlan::Make(parts, 0, 1, std::move(subgroups));
    INFO(plans.status().message());
    REQUIRE(plans.ok());
    open = std::make_shared<OpenParts>(
        [opened = opened, opener = FolderOpener(saved.directory, parts)](uint32_t part, uint32_t file) {
          ++*opened;
          return opener(part, file);
        });
    for (RestorePlan& plan : *plans)
      readers.push_back(std::make_shared<PartReader>(std::make_shared<const RestorePlan>(std::move(plan)), open));
  }
};

// All elements of a range of the tensor, in blocks of `block`, by a reader of its own for that range.
struct Filled {
  Status status;
  std::vector<float> arrays[3];
  uint64_t read_bytes = 0;
  uint32_t stored_less = 0;  // blocks in which something is not stored
};

Filled Fill(const Saved& saved, uint64_t first, uint64_t count, uint64_t block, int threads = 1) {
  const Reading reading(saved, {OfTensor(first, count)});
  PartReader& reader = *reading.readers.front();
  Filled filled;
  for (std::vector<float>& array : filled.arrays) array.assign(count, -9.0f);
  std::mutex mutex;
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t at; (at = next.fetch_add(block)) < count;) {
      PartReader::Target target;
      for (size_t i = 0; i < 3; ++i) target.arrays[i] = reinterpret_cast<std::byte*>(filled.arrays[i].data() + at);
      uint8_t stored = 99;
      const Status status = reader.Fill(at, std::min(block, count - at), target, &stored);
      std::lock_guard guard(mutex);
      if (!status.ok()) filled.status = status;
      filled.stored_less += stored < kStoredAll;
    }
  };
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  filled.read_bytes = reading.open->read_bytes();
  return filled;
}

void Flip(const std::string& file, uint64_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(stream.get());
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(static_cast<char>(byte ^ 16));
  REQUIRE(stream.good());
}

}  // namespace

TEST_CASE("PartReader.FillsWhatWasSavedWhateverTheBlocks") {
  for (const uint64_t elements : {uint64_t{30'000}, uint64_t{66'000}}) {  // of one piece, and of two
    const Saved saved(elements);
    const std::vector<std::pair<uint64_t, uint64_t>> ranges = {{0, kNumel}, {1, 17}, {65'500, 70'001}, {199'999, 4}};
    for (const auto& [first, count] : ranges) {
      for (const uint64_t block : {uint64_t{1000}, uint64_t{65'536}, uint64_t{1} << 20}) {
        for (const int threads : {1, 4}) {
          const Filled filled = Fill(saved, first, count, block, threads);
          INFO(filled.status.message() << " from " << first << " in blocks of " << block);
          REQUIRE(filled.status.ok());
          for (uint32_t array = 0; array < 3; ++array)
            CHECK(std::memcmp(filled.arrays[array].data(), saved.arrays[array].data() + first, count * 4) == 0);
        }
      }
    }
    CHECK(Fill(saved, 0, kNumel, 1000).stored_less > 0);
  }
}

TEST_CASE("PartReader.WhatIsCutAlikeIsReadOnce") {
  const Saved saved;
  uint64_t stored = 0;
  for (uint32_t rank = 0; rank < 3; ++rank) stored += fs::file_size(saved.Data(rank)) - kPartHeaderBytes;
  // In one go each block is read once, of however many runs; in the cut of rank 0's blocks, those of that rank.
  CHECK(Fill(saved, 0, kNumel, uint64_t{1} << 20).read_bytes == stored);
  CHECK(Fill(saved, 0, kNumel / 3, 30'000).read_bytes == fs::file_size(saved.Data(0)) - kPartHeaderBytes);
}

// Between two blocks that are filled from one that is stored, the page cache may have forgotten it, and the disk may
// say something else now: what was right the first time is compared again.
TEST_CASE("PartReader.WhatChangesAfterItWasComparedIsNoticed") {
  const Saved saved;
  const Reading reading(saved, {OfTensor(0, kNumel)});
  std::vector<float> arrays[3];
  PartReader::Target target;
  for (size_t i = 0; i < 3; ++i) {
    arrays[i].resize(15'000);
    target.arrays[i] = reinterpret_cast<std::byte*>(arrays[i].data());
  }
  uint8_t stored = 0;
  REQUIRE(reading.readers[0]->Fill(0, 15'000, target, &stored).ok());
  Flip(saved.Data(0), kPartHeaderBytes + 4 * 20'000);  // of the same block's other half
  const Status changed = reading.readers[0]->Fill(15'000, 15'000, target, &stored);
  CHECK(changed.code() == -EBADMSG);
  CHECK(changed.message().find(DataName(kAttempt, 0)) != std::string::npos);
  Flip(saved.Data(0), kPartHeaderBytes + 4 * 20'000);
  REQUIRE(reading.readers[0]->Fill(15'000, 15'000, target, &stored).ok());
  for (uint32_t array = 0; array < 3; ++array)
    CHECK(std::memcmp(arrays[array].data(), saved.arrays[array].data() + 15'000, 15'000 * 4) == 0);
}

TEST_CASE("PartReader.OnlyThePiecesThatAreNeededAreReadAgain") {
  const Saved saved(66'000);
  const Reading reading(saved, {OfTensor(0, kNumel)});
  std::vector<float> arrays[3];
  PartReader::Target target;
  for (size_t i = 0; i < 3; ++i) {
    arrays[i].resize(1'000);
    target.arrays[i] = reinterpret_cast<std::byte*>(arrays[i].data());
  }
  uint8_t stored = 0;
  REQUIRE(reading.readers[0]->Fill(0, 1'000, target, &stored).ok());
  const uint64_t whole = StoredBytes(66'000, kStoredAll);
  CHECK(reading.open->read_bytes() == whole);
  Flip(saved.Data(0), kPartHeaderBytes + 4 * 65'600);  // in the second piece
  REQUIRE(reading.readers[0]->Fill(1'000, 1'000, target, &stored).ok());
  CHECK(reading.open->read_bytes() == whole + 3 * 65'536 * 4);
  CHECK(reading.readers[0]->Fill(65'000, 1'000, target, &stored).code() == -EBADMSG);
}

// Many small runs of two blocks, which are not in the order of these.
TEST_CASE("PartReader.SmallRunsComeFromOneReading") {
  const Saved saved;
  RestorePlan::Subgroups subgroups(1);
  for (uint64_t i = 0; i < 9; ++i) {
    subgroups[0].push_back(OfTensor((8 - i) * 6'000 + 13, 1'000).front());
    subgroups[0].back().first = i * 1'000;
  }
  const Reading reading(saved, subgroups);
  std::vector<float> arrays[3];
  PartReader::Target target;
  for (size_t i = 0; i < 3; ++i) {
    arrays[i].resize(9'000);
    target.arrays[i] = reinterpret_cast<std::byte*>(arrays[i].data());
  }
  uint8_t stored = 0;
  REQUIRE(reading.readers[0]->Fill(0, 9'000, target, &stored).ok());
  for (uint64_t i = 0; i < 9; ++i) {
    for (uint32_t array = 0; array < 3; ++array)
      CHECK(std::memcmp(arrays[array].data() + i * 1'000, saved.arrays[array].data() + (8 - i) * 6'000 + 13, 4'000) ==
            0);
  }
  CHECK(reading.open->read_bytes() == 2 * StoredBytes(30'000, kStoredAll));
}

TEST_CASE("PartReader.SubgroupsOfARestoreShareFilesAndWhatWasCompared") {
  const Saved saved;
  RestorePlan::Subgroups subgroups;
  for (uint64_t i = 0; i < 50; ++i) subgroups.push_back(OfTensor(i * 4'000, 4'000));
  const Reading reading(saved, std::move(subgroups));
  REQUIRE(reading.readers.size() == 50);
  std::vector<float> arrays[3];
  PartReader::Target target;
  for (size_t i = 0; i < 3; ++i) {
    arrays[i].resize(4'000);
    target.arrays[i] = reinterpret_cast<std::byte*>(arrays[i].data());
  }
  for (uint64_t i = 0; i < 50; ++i) {
    uint8_t stored = 0;
    REQUIRE(reading.readers[i]->Fill(0, 4'000, target, &stored).ok());
    for (uint32_t array = 0; array < 3; ++array)
      CHECK(std::memcmp(arrays[array].data(), saved.arrays[array].data() + i * 4'000, 16'000) == 0);
  }
  CHECK(reading.opened->load() == 3);
}

TEST_CASE("PartReader.NoValueComesFromABlockThatHasChanged") {
  const Saved saved;
  const uint64_t bytes = fs::file_size(saved.Data(2));
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 40; ++trial) {
    const uint64_t at = kPartHeaderBytes + random() % (bytes - kPartHeaderBytes);
    INFO("byte " << at);
    Flip(saved.Data(2), at);
    const Filled filled = Fill(saved, 0, kNumel, 65'536);
    CHECK(filled.status.code() == -EBADMSG);
    CHECK(filled.status.message().find("rank 2") != std::string::npos);
    CHECK(filled.status.message().find(DataName(kAttempt, 0)) != std::string::npos);
    Flip(saved.Data(2), at);
  }
  CHECK(Fill(saved, 0, kNumel, 65'536).status.ok());
  // What needs nothing of that file is not concerned.
  Flip(saved.Data(2), kPartHeaderBytes);
  CHECK(Fill(saved, 0, kNumel / 3, 65'536).status.ok());
}

TEST_CASE("PartReader.AFileThatIsCutOrGoneIsNamed") {
  const Saved saved;
  fs::resize_file(saved.Data(1), fs::file_size(saved.Data(1)) - 4096);
  CHECK(Fill(saved, 0, kNumel, 65'536).status.code() == -EIO);
  fs::remove(saved.Data(1));
  const Filled gone = Fill(saved, 0, kNumel, 65'536);
  CHECK(gone.status.code() == -ENOENT);
  CHECK(gone.status.message().find("part-1") != std::string::npos);
  fs::create_symlink(saved.Data(0), saved.Data(1));
  CHECK(Fill(saved, 0, kNumel, 65'536).status.code() == -ELOOP);
}

TEST_CASE("Inspect.ListsVerifiesAndRemoves") {
  const Saved saved;
  const auto list = [&] {
    const Result<std::string> text = ListCheckpoints(saved.directory, NoWorkingFiles);
    REQUIRE(text.ok());
    return json::parse(text.value()).at("checkpoints");
  };
  bool right = false;
  const auto verify = [&](const std::optional<std::string>& tag) {
    const Result<std::string> text = VerifyCheckpoint(saved.directory, tag, NoWorkingFiles, &right);
    INFO(text.status().message());
    REQUIRE(text.ok());
    const json found = json::parse(text.value());
    CHECK(found.at("ok") == right);
    return found;
  };
  json found = list();
  REQUIRE(found.size() == 1);
  CHECK(found[0].at("tag") == "tag");
  CHECK(found[0].at("state") == "complete");
  CHECK(found[0].at("step") == 7);
  CHECK(found[0].at("parts") == 3);
  CHECK(found[0].at("bytes") ==
        fs::file_size(saved.Data(0)) + fs::file_size(saved.Data(1)) + fs::file_size(saved.Data(2)));
  CHECK(verify(std::nullopt).at("tag") == "tag");
  CHECK(right);

  Flip(saved.Data(0), kPartHeaderBytes + 5);
  CHECK(verify("tag").at("problems").size() == 1);
  CHECK(!right);
  CHECK(list()[0].at("state") == "complete");  // it reads no blocks
  Flip(saved.Data(0), kPartHeaderBytes + 5);
  Flip(saved.Data(0), 100);  // its header
  CHECK(verify("tag").at("problems").size() == 1);
  CHECK(list()[0].at("state") == "damaged");
  Flip(saved.Data(0), 100);

  std::ofstream(saved.directory + "/tag/notes") << "mine";
  bool all = true;
  Result<std::string> text = RemoveCheckpoint(saved.directory, "tag", NoWorkingHeader, &all);
  REQUIRE(text.ok());
  CHECK(!all);
  CHECK(json::parse(text.value()).at("removed") == 6);
  CHECK(fs::exists(saved.directory + "/tag/notes"));
  CHECK(!fs::exists(saved.Part(0)));
  CHECK(list().empty());
  CHECK(VerifyCheckpoint(saved.directory, "tag", NoWorkingFiles, &right).status().code() == -ENOENT);
  fs::remove(saved.directory + "/tag/notes");
  text = RemoveCheckpoint(saved.directory, "tag", NoWorkingHeader, &all);
  REQUIRE(text.ok());
  CHECK(all);
  CHECK(!fs::exists(saved.directory + "/tag"));
  CHECK(RemoveCheckpoint(saved.directory, "../x", NoWorkingHeader, &all).status().code() == -EINVAL);
}

TEST_CASE("Inspect.ASaveThatWasCutIsIncomplete") {
  const Saved saved;
  fs::remove(saved.Part(1) + "/" + ManifestName(kAttempt));
  const json found = json::parse(ListCheckpoints(saved.directory, NoWorkingFiles).value()).at("checkpoints");
  REQUIRE(found.size() == 1);
  CHECK(found[0].at("state") == "incomplete");
  CHECK(found[0].at("parts") == 2);
  bool right = true;
  const Status status = VerifyCheckpoint(saved.directory, std::nullopt, NoWorkingFiles, &right).status();
  CHECK(status.code() == -ENOENT);
  bool all = false;
  REQUIRE(RemoveCheckpoint(saved.directory, "tag", NoWorkingHeader, &all).ok());
  CHECK(all);
  CHECK(!fs::exists(saved.directory + "/tag"));
}

// A client's, where the file system makes no nameless files: one that has died has left it, one that lives has its
// lock.
TEST_CASE("Inspect.FilesThatHaveNotGotTheirNamesGoUnlessSomebodyHasThem") {
  const Saved saved;
  const std::string left = saved.Part(0) + "/.manifest-" + std::string(32, 'a') + ".new";
  const std::string held = saved.Part(1) + "/.data-" + std::string(31, '0') + "f.new";
  const std::string other = saved.Part(2) + "/.data-" + std::string(32, 'g') + ".new";
  for (const std::string& file : {left, held, other}) std::ofstream(file) << "x";
  UniqueFd live(::open(held.c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(::flock(live.get(), LOCK_EX | LOCK_NB) == 0);
  const json found = json::parse(ListCheckpoints(saved.directory, NoWorkingFiles).value()).at("checkpoints");
  REQUIRE(found.size() == 2);
  CHECK(found[0].at("state") == "complete");
  CHECK(found[1].at("state") == "incomplete");
  CHECK(found[1].at("problems").at(0).get<std::string>().starts_with("2 files that have no name yet"));
  bool all = true;
  Result<std::string> text = RemoveCheckpoint(saved.directory, "tag", NoWorkingHeader, &all);
  REQUIRE(text.ok());
  CHECK(!all);
  CHECK(json::parse(text.value()).at("removed") == 7);
  CHECK(json::parse(text.value()).at("kept").size() == 2);
  CHECK(!fs::exists(left));
  CHECK(fs::exists(held));
  CHECK(fs::exists(other));
  fs::remove(other);
  // What is left of the tag is still shown, and goes when whoever made it has died.
  CHECK(json::parse(ListCheckpoints(saved.directory, NoWorkingFiles).value()).at("checkpoints").size() == 1);
  live.reset();
  text = RemoveCheckpoint(saved.directory, "tag", NoWorkingHeader, &all);
  REQUIRE(text.ok());
  CHECK(all);
  CHECK(!fs::exists(saved.directory + "/tag"));
}

TEST_CASE("AttemptTable.AllRanksOfANodeHaveTheSameAndARepeatedSaveAnother") {
  AttemptTable table;
  const AttemptTable::Save save{1000, "job", "/dir", "tag", 7, 2};
  uint8_t count = 0;
  const auto choose = [&](const AttemptTable::Save& which, uint32_t rank, uint32_t here = 2) {
    std::array<uint8_t, 16> random{};
    random[3] = ++count;
    return table.Choose(which, {rank, rank + 1, 2, here}, random);
  };
  const AttemptId first = choose(save, 0).value();
  CHECK(!first.zero());
  CHECK(choose(save, 1).value() == first);
  // Refused, for want of space perhaps, and asked again: still with the others.
  table.Return(save, 1, first);
  CHECK(choose(save, 1).value() == first);
  // The next save under the same tag, and one of which a rank begins again.
  const AttemptId second = choose(save, 1).value();
  CHECK(second != first);
  const AttemptId third = choose(save, 1).value();
  CHECK(third != second);
  CHECK(choose(save, 0).value() == third);
  AttemptTable::Save other = save;
  other.step = 8;
  const AttemptId fourth = choose(other, 0).value();
  CHECK(choose(save, 0).value() != fourth);
  const Result<AttemptId> elsewhere = choose(save, 0, 1);
  CHECK(elsewhere.status().code() == -EINVAL);
  CHECK(elsewhere.status().message().find("attempt=") != std::string::npos);
  CHECK(table.size() == 2);
  table.Forget(1000, "another");
  CHECK(table.size() == 2);
  table.Forget(1000, "job");
  CHECK(table.size() == 0);
}

TEST_CASE("AttemptTable.SavesThatFailOrStayWithoutARankDoNotPileUp") {
  AttemptTable table;
  AttemptTable::Save save{1000, "job", "/dir", "tag", 0, 2};
  uint8_t count = 0;
  const auto choose = [&](uint32_t rank) {
    std::array<uint8_t, 16> random{};
    random[3] = ++count;
    return table.Choose(save, {rank, rank + 1, 2, 2}, random).value();
  };
  for (save.step = 1; save.step <= 100; ++save.step) {  // as where the directory is missing
    const AttemptId attempt = choose(0);
    CHECK(choose(1) == attempt);
    table.Return(save, 0, attempt);
    CHECK(table.size() == 1);
    CHECK(choose(0) == attempt);  // rank 1 has it
    table.Return(save, 1, attempt);
    table.Return(save, 0, attempt);
    CHECK(table.size() == 0);
  }
  AttemptTable::Save other = save;
  other.job = "other";
  REQUIRE(table.Choose(other, {0, 1, 2, 2}, {9}).ok());
  AttemptId last;
  for (save.step = 200; save.step < 300; ++save.step) {  // rank 1 never comes
    last = choose(0);
    CHECK(table.size() <= AttemptTable::kMostOfJob + 1);
  }
  CHECK(table.size() == AttemptTable::kMostOfJob + 1);  // the other job's, too
  save.step = 299;
  CHECK(choose(1) == last);
}

// Sessions 1 and 2 are there when the first begins.
TEST_CASE("AttemptTable.ARankThatIsLateHasItAndOneThatHasBegunAnewNot") {
  AttemptTable table;
  const AttemptTable::Save save{1000, "job", "/dir", "tag", 7, 2};
  uint8_t count = 0;
  const auto choose = [&](uint32_t rank, SessionId session, SessionId newest, uint32_t here) {
    std::array<uint8_t, 16> random{};
    random[3] = ++count;
    return table.Choose(save, {rank, session, newest, here}, random);
  };
  const AttemptId first = choose(0, 1, 2, 2).value();
  CHECK(choose(1, 2, 2, 1).value() == first);  // rank 0 has saved, and ended
  AttemptTable again;
  table = again;
  const AttemptId second = choose(0, 1, 2, 2).value();
  CHECK(choose(1, 3, 3, 1).status().code() == -EINVAL);  // rank 1 has another session now, and rank 0 none
  const AttemptId third = choose(1, 3, 4, 2).value();
  CHECK(third != second);
  CHECK(choose(0, 4, 4, 2).value() == third);
}

}  // namespace mlpo::test
