// What the tests of a part's files have in common: a directory of checkpoints and a journal, whole and unfinished
// saves, and a process that dies before its n-th step.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_set.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace mlpo::test {

namespace fs = std::filesystem;

inline AttemptId Attempt(uint8_t last) {
  AttemptId attempt;
  attempt.bytes.back() = last;
  return attempt;
}

inline Result<WorkingOrigin> NoWorkingHeader(int) { return Status::Invalid("there are no working files here"); }

// A directory for checkpoints, and a folder for journals beside it.
struct Place {
  ScratchDir scratch;
  std::string directory = scratch / "checkpoints";
  std::string journal = scratch / "journal";
  UniqueFd directory_fd, journal_fd;

  Place() {
    fs::create_directory(directory);
    fs::create_directory(journal);
    directory_fd.reset(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    journal_fd.reset(::open(journal.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    REQUIRE(directory_fd);
    REQUIRE(journal_fd);
  }
  PartFiles::Options Options(uint32_t rank, uint32_t world_size, const AttemptId& attempt, int64_t started = 1) const {
    PartFiles::Options options;
    options.directory = directory;
    options.head.job = "job";
    options.head.tag = "tag";
    options.head.step = 7;
    options.head.world_size = world_size;
    options.head.rank = rank;
    options.head.attempt = attempt;
    options.head.started_unix_ns = started;
    options.journal_fd = journal_fd.get();
    options.journal_shown = journal;
    options.working = NoWorkingHeader;
    return options;
  }
  PartFiles::Options Overwriting(uint32_t rank, uint32_t world_size, const AttemptId& attempt, int64_t started) const {
    PartFiles::Options options = Options(rank, world_size, attempt, started);
    options.overwrite = true;
    return options;
  }
  std::string Part(uint32_t rank) const { return directory + "/tag/part-" + std::to_string(rank); }
  FoundTag Scan() const {
    Result<FoundTag> found = ScanTag(directory_fd.get(), "tag", directory);
    INFO(found.status().message());
    REQUIRE(found.ok());
    return std::move(*found);
  }
};

inline const std::string kContent(4096, 'c');

// One block of 10 elements, all three arrays, filled with `kContent`.
inline Manifest Filled() {
  Manifest manifest;
  manifest.hashed = false;
  PartFile file;
  file.bytes = 4 * 4096;
  manifest.files = {file};
  PartSubgroup subgroup;
  subgroup.key = "w";
  subgroup.numel = 10;
  TensorShard shard;
  shard.global_shape = shard.shape = {10};
  shard.offsets = {0};
  shard.count = 10;
  subgroup.tensors.push_back({"w", shard, 7});
  PartBlock block;
  block.count = 10;
  block.offset = 4096;
  block.stored = kStoredAll;
  subgroup.blocks.push_back(block);
  manifest.subgroups.push_back(subgroup);
  return manifest;
}

inline Status Fill(PartFiles& part) {
  Status status = part.Allocate(4 * 4096);
  for (uint64_t i = 1; status.ok() && i < 4; ++i)
    status = WriteAll(part.data_fd(), kContent.data(), kContent.size(), i * 4096, part.shown());
  return status;
}

// A whole save of one rank.
inline Status Save(PartFiles::Options options, bool* complete = nullptr) {
  Result<std::unique_ptr<PartFiles>> part = PartFiles::Begin(std::move(options));
  if (!part.ok()) return part.status();
  Status status = Fill(**part);
  Manifest manifest = Filled();
  if (status.ok()) status = (*part)->Commit(&manifest);
  if (!status.ok()) return status;
  std::vector<std::string> kept;
  const Result<bool> all = (*part)->IsComplete(&kept);
  if (!all.ok()) return all.status();
  if (complete != nullptr) *complete = all.value();
  return Status();
}

// A part that is being saved, and goes on when the test says so.
struct Live {
  std::unique_ptr<PartFiles> part;

  explicit Live(PartFiles::Options options) {
    Result<std::unique_ptr<PartFiles>> begun = PartFiles::Begin(std::move(options));
    INFO(begun.status().message());
    REQUIRE(begun.ok());
    part = std::move(*begun);
    REQUIRE(Fill(*part).ok());
  }
  Status Commit() {
    Manifest manifest = Filled();
    return part->Commit(&manifest);
  }
  bool IsComplete(size_t expected_kept = 0) {
    std::vector<std::string> kept;
    const Result<bool> complete = part->IsComplete(&kept);
    INFO(complete.status().message());
    REQUIRE(complete.ok());
    CHECK(kept.size() == expected_kept);
    return complete.value();
  }
};

inline Status NoWorkingFiles(int, const WorkingOrigin&) { return Status::Invalid("there are no working files here"); }

// What a start does about what a dead daemon has left. Returns what it kept.
inline std::vector<std::string> Recover(const Place& place, const WorkingHeaderCheck& working = NoWorkingFiles) {
  std::vector<std::string> strange, unfinished, kept;
  Result<std::vector<JournalRecord>> records =
      LoadJournal(place.journal_fd.get(), place.journal, &strange, &unfinished);
  REQUIRE(records.ok());
  CHECK(strange == std::vector<std::string>());
  REQUIRE(RemoveUnfinished(place.journal_fd.get(), place.journal, unfinished).ok());
  for (const JournalRecord& record : *records) {
    const Result<JournalOutcome> outcome = UndoPart(record, working, false);
    INFO(outcome.status().message());
    REQUIRE(outcome.ok());
    for (const std::string& reason : outcome.value().kept) kept.push_back(reason);
    if (outcome.value().kept.empty()) REQUIRE(RemoveJournal(place.journal_fd.get(), place.journal, record).ok());
  }
  return kept;
}

// The content of a complete part, by its manifest; "" if it is not what was saved.
inline bool IsWhole(const Place& place, uint32_t rank, const AttemptId& attempt) {
  const std::string shown = place.Part(rank);
  UniqueFd part(::open(shown.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!part) return false;
  const Result<Manifest> manifest = ReadManifest(part.get(), attempt, shown);
  if (!manifest.ok() || !CheckFiles(part.get(), manifest.value(), NoWorkingFiles, shown).ok()) return false;
  std::ifstream data(shown + "/" + DataName(attempt, 0), std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(data)), std::istreambuf_iterator<char>());
  return text.size() == 4 * 4096 && text.substr(4096) == kContent + kContent + kContent;
}

inline std::set<std::string> Everything(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    names.insert(entry.path().string().substr(directory.size() + 1));
  return names;
}

inline void WriteFile(const std::string& name, const std::string& text) {
  std::ofstream(name, std::ios::binary) << text;
}

// A child that does `work` and ends, as if killed, before the n-th step. How many steps it made; -1: it was stopped.
inline int StepsBefore(int n, const std::function<Status()>& work) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int steps = 0;
    SetStepHook([&](std::string_view, std::string_view) {
      if (steps++ == n) ::_exit(250);
    });
    const bool ok = work().ok();
    ::_exit(ok && steps < 250 ? steps : 251);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) != 251);
  return WEXITSTATUS(status) == 250 ? -1 : WEXITSTATUS(status);
}

}  // namespace mlpo::test
