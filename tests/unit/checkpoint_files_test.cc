// The files of a part on a real file system: what a process that dies at any step leaves, which checkpoints count, and
// that nothing of anybody else's is used or removed.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/inspect.h"
#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_header.h"
#include "daemon/checkpoint/part_set.h"
#include "tests/support/catch.h"
#include "tests/support/scratch_dir.h"

namespace mlpo::test {
namespace {

namespace fs = std::filesystem;

AttemptId Attempt(uint8_t last) {
  AttemptId attempt;
  attempt.bytes.back() = last;
  return attempt;
}

Result<WorkingOrigin> NoWorkingHeader(int) { return Status::Invalid("there are no working files here"); }

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

const std::string kContent(4096, 'c');

// One block of 10 elements, all three arrays, filled with `kContent`.
Manifest Filled() {
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

Status Fill(PartFiles& part) {
  Status status = part.Allocate(4 * 4096);
  for (uint64_t i = 1; status.ok() && i < 4; ++i)
    status = WriteAll(part.data_fd(), kContent.data(), kContent.size(), i * 4096, part.shown());
  return status;
}

// A whole save of one rank.
Status Save(PartFiles::Options options, bool* complete = nullptr) {
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

Status NoWorkingFiles(int, const WorkingOrigin&) { return Status::Invalid("there are no working files here"); }

// What a start does about what a dead daemon has left. Returns what it kept.
std::vector<std::string> Recover(const Place& place, const WorkingHeaderCheck& working = NoWorkingFiles) {
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
bool IsWhole(const Place& place, uint32_t rank, const AttemptId& attempt) {
  const std::string shown = place.Part(rank);
  UniqueFd part(::open(shown.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!part) return false;
  const Result<Manifest> manifest = ReadManifest(part.get(), attempt, shown);
  if (!manifest.ok() || !CheckFiles(part.get(), manifest.value(), NoWorkingFiles, shown).ok()) return false;
  std::ifstream data(shown + "/" + DataName(attempt, 0), std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(data)), std::istreambuf_iterator<char>());
  return text.size() == 4 * 4096 && text.substr(4096) == kContent + kContent + kContent;
}

std::set<std::string> Everything(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    names.insert(entry.path().string().substr(directory.size() + 1));
  return names;
}

void WriteFile(const std::string& name, const std::string& text) { std::ofstream(name, std::ios::binary) << text; }

// A working file, as the next two tests know it, of this user's and rank 0.
const std::string kWorking(2 * 4096, 'w');
const WorkingOrigin kOrigin{"node", ::geteuid(), 2, "job", 0, 9};
Result<WorkingOrigin> ReadWorking(int fd) {
  char first = 0;
  if (::pread(fd, &first, 1, 0) == 1 && first == 'w') return kOrigin;
  return Status::Invalid("no working file");
}

// A live part that has had such a file handed over, as data file 1.
Live WithWorkingFile(const Place& place, PartFiles::Options options) {
  options.working = ReadWorking;
  Live live(std::move(options));
  WriteFile(place.scratch / "state", kWorking);
  const UniqueFd from(::open(place.scratch.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const UniqueFd state(::open((place.scratch / "state").c_str(), O_RDWR | O_CLOEXEC));
  bool moved = false;
  REQUIRE(live.part->HandOver(from.get(), "state", state.get(), kOrigin, place.scratch / "state", &moved).ok());
  return live;
}

Status CommitWithWorkingFile(Live& live) {
  Manifest manifest = Filled();
  PartFile file;
  file.index = 1;
  file.bytes = kWorking.size();
  file.working = true;
  file.origin = kOrigin;
  manifest.files.push_back(file);
  return live.part->Commit(&manifest);
}

// A child that does `work` and ends, as if killed, before the n-th step. How many steps it made; -1: it was stopped.
int StepsBefore(int n, const std::function<Status()>& work) {
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

}  // namespace

TEST_CASE("PartFiles.SaveOfTwoRanksIsCompleteWithTheSecond") {
  Place place;
  bool complete = true;
  REQUIRE(Save(place.Options(1, 2, Attempt(1)), &complete).ok());
  CHECK(!complete);
  CHECK(CompleteAttempt(place.Scan()) == nullptr);
  REQUIRE(Save(place.Options(0, 2, Attempt(1)), &complete).ok());
  CHECK(complete);
  const FoundTag found = place.Scan();
  CHECK(found.strange.empty());
  CHECK(found.unfinished.empty());
  const FoundAttempt* attempt = CompleteAttempt(found);
  REQUIRE(attempt != nullptr);
  CHECK(attempt->id == Attempt(1));
  CHECK(IsWhole(place, 0, Attempt(1)));
  CHECK(IsWhole(place, 1, Attempt(1)));
  CHECK(Everything(place.journal).empty());
  struct stat st {};
  REQUIRE(::stat((place.Part(0) + "/" + DataName(Attempt(1), 0)).c_str(), &st) == 0);
  CHECK((st.st_mode & 07777) == 0600);
  REQUIRE(::stat(place.Part(0).c_str(), &st) == 0);
  CHECK((st.st_mode & 07777) == 0700);
}

TEST_CASE("C19_DataAndFoldersAreSyncedBeforeTheRenameAndTheRenameBeforeItIsSaid") {
  Place place;
  std::vector<std::string> steps;
  SetStepHook([&](std::string_view step, std::string_view shown) {
    if (shown.find("/tag") != std::string_view::npos || shown == place.directory)
      steps.push_back(std::string(step) + " " + std::string(shown.substr(place.scratch.path().size())));
  });
  const Status saved = Save(place.Options(0, 1, Attempt(1)));
  SetStepHook(nullptr);
  REQUIRE(saved.ok());
  const auto at = [&](const std::string& step, bool last = false) {
    size_t found = steps.size();
    for (size_t i = 0; i < steps.size(); ++i)
      if (steps[i] == step && (last || found == steps.size())) found = i;
    INFO(step);
    REQUIRE(found < steps.size());
    return found;
  };
  const std::string part = "/checkpoints/tag/part-0";
  const std::string data = part + "/" + DataName(Attempt(1), 0);
  const size_t renamed = at("rename " + part + "/" + ManifestName(Attempt(1)));
  CHECK(at("sync " + data, true) > at("write " + part, true));  // Fill's
  CHECK(at("sync " + data, true) < renamed);
  CHECK(at("sync " + part + "/" + NewManifestName(Attempt(1))) >
        at("write " + part + "/" + NewManifestName(Attempt(1))));
  CHECK(at("sync " + part + "/" + NewManifestName(Attempt(1))) < renamed);
  CHECK(at("sync_folder " + part) < renamed);
  CHECK(at("sync_folder " + part, true) > renamed);
  CHECK(at("sync_folder /checkpoints/tag", true) > renamed);
  CHECK(at("sync_folder /checkpoints", true) > renamed);
}

TEST_CASE("C19_KilledAtAnyStepOfASaveThereIsAWholePartOrNone") {
  int steps = 0;
  {
    Place place;
    steps = StepsBefore(1000, [&] { return Save(place.Options(0, 1, Attempt(1))); });
  }
  REQUIRE(steps > 20);
  int whole = 0;
  for (int n = 0; n < steps; ++n) {
    INFO("stopped before step " << n << " of " << steps);
    Place place;
    REQUIRE(StepsBefore(n, [&] { return Save(place.Options(0, 1, Attempt(1))); }) == -1);
    const bool before = IsWhole(place, 0, Attempt(1));
    CHECK(Recover(place) == std::vector<std::string>());
    CHECK(IsWhole(place, 0, Attempt(1)) == before);
    whole += before;
    if (!before) CHECK(Everything(place.directory) == std::set<std::string>());
    CHECK(Everything(place.journal).empty());
    // The same again under the same tag, by another attempt: never refused for what was cut.
    const Status again = Save(place.Options(0, 1, Attempt(2), 2));
    if (before) {
      CHECK(again.code() == -EEXIST);
    } else {
      CHECK(again.ok());
      CHECK(IsWhole(place, 0, Attempt(2)));
    }
  }
  CHECK(whole > 0);
  CHECK(whole < steps);
}

TEST_CASE("C19_KilledAtAnyStepOfAnOverwriteOneOfThemIsComplete") {
  const auto overwrite = [](const Place& place) {
    PartFiles::Options options = place.Options(0, 1, Attempt(2), 2);
    options.overwrite = true;
    return Save(std::move(options));
  };
  int steps = 0;
  {
    Place place;
    REQUIRE(Save(place.Options(0, 1, Attempt(1))).ok());
    steps = StepsBefore(1000, [&] { return overwrite(place); });
    CHECK(IsWhole(place, 0, Attempt(2)));
    CHECK(!IsWhole(place, 0, Attempt(1)));
    CHECK(Everything(place.directory).size() == 4);  // tag, part, data, manifest
  }
  for (int n = 0; n < steps; ++n) {
    INFO("stopped before step " << n << " of " << steps);
    Place place;
    REQUIRE(Save(place.Options(0, 1, Attempt(1))).ok());
    REQUIRE(StepsBefore(n, [&] { return overwrite(place); }) == -1);
    for (const bool recovered : {false, true}) {
      if (recovered) CHECK(Recover(place) == std::vector<std::string>());
      const FoundTag found = place.Scan();
      const FoundAttempt* attempt = CompleteAttempt(found);
      REQUIRE(attempt != nullptr);
      CHECK(IsWhole(place, 0, attempt->id));
      if (recovered) CHECK(found.unfinished.empty());  // of the one that was being removed, too
    }
    CHECK(Everything(place.journal).empty());
    const bool done = IsWhole(place, 0, Attempt(2));
    CHECK(overwrite(place).code() == (done ? -EEXIST : 0));
    CHECK(IsWhole(place, 0, Attempt(2)));
  }
}

TEST_CASE("PartFiles.ASaveCutAfterSomeRanksIsNeverMixedWithTheNextOne") {
  Place place;
  REQUIRE(Save(place.Options(0, 3, Attempt(1), 1)).ok());
  REQUIRE(Save(place.Options(1, 3, Attempt(1), 1)).ok());  // rank 2 died
  bool complete = true;
  REQUIRE(Save(place.Options(2, 3, Attempt(2), 5), &complete).ok());  // the requeued job
  CHECK(!complete);
  CHECK(CompleteAttempt(place.Scan()) == nullptr);
  REQUIRE(Save(place.Options(0, 3, Attempt(2), 6), &complete).ok());
  CHECK(!complete);
  CHECK(!IsWhole(place, 0, Attempt(1)));  // replaced
  CHECK(IsWhole(place, 1, Attempt(1)));
  REQUIRE(Save(place.Options(1, 3, Attempt(2), 7), &complete).ok());
  CHECK(complete);
  const FoundTag found = place.Scan();
  REQUIRE(CompleteAttempt(found) != nullptr);
  CHECK(CompleteAttempt(found)->id == Attempt(2));
  CHECK(found.attempts.size() == 1);
}

TEST_CASE("PartFiles.WithAnotherWorldSizeWhatIsLeftOfTheOldOneGoes") {
  Place place;
  for (uint32_t rank = 0; rank < 4; ++rank) REQUIRE(Save(place.Options(rank, 4, Attempt(1), 1)).ok());
  bool complete = false;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    PartFiles::Options options = place.Options(rank, 2, Attempt(2), 5);
    options.overwrite = true;
    REQUIRE(Save(std::move(options), &complete).ok());
    if (rank == 0) CHECK(CompleteAttempt(place.Scan())->id == Attempt(1));  // the old one goes last
  }
  CHECK(complete);
  CHECK(CompleteAttempt(place.Scan())->id == Attempt(2));
  CHECK(!fs::exists(place.Part(2)));
  CHECK(!fs::exists(place.Part(3)));
}

TEST_CASE("PartFiles.ExistsOnlyIfComplete") {
  Place place;
  REQUIRE(Save(place.Options(0, 1, Attempt(1))).ok());
  const Status refused = Save(place.Options(0, 1, Attempt(2), 2));
  CHECK(refused.code() == -EEXIST);
  CHECK(refused.message().find("step 7") != std::string::npos);
  CHECK(IsWhole(place, 0, Attempt(1)));
  CHECK(Everything(place.directory).size() == 4);
  CHECK(Everything(place.journal).empty());
}

TEST_CASE("PartFiles.AbandonedLeavesNothing") {
  Place place;
  {
    Result<std::unique_ptr<PartFiles>> part = PartFiles::Begin(place.Options(0, 1, Attempt(1)));
    REQUIRE(part.ok());
    REQUIRE(Fill(**part).ok());
    CHECK(Everything(place.journal).size() == 1);
    CHECK(place.Scan().unfinished.size() == 1);
  }
  CHECK(Everything(place.directory).empty());
  CHECK(Everything(place.journal).empty());
}

// A save whose trainer has been killed goes on, and the requeued job saves under the same tag.
TEST_CASE("PartFiles.OfTwoSavesAtOnceNeitherTakesTheOthersFiles") {
  for (const bool first_commits_first : {true, false}) {
    INFO("the first one commits first: " << first_commits_first);
    Place place;
    REQUIRE(Save(place.Options(0, 1, Attempt(1), 1)).ok());
    Live first(place.Overwriting(0, 1, Attempt(2), 2));
    Live second(place.Overwriting(0, 1, Attempt(3), 3));
    CHECK(place.Scan().unfinished.size() == 2);
    Live& one = first_commits_first ? first : second;
    Live& other = first_commits_first ? second : first;
    REQUIRE(one.Commit().ok());
    CHECK(one.IsComplete(1));  // the other is being saved
    CHECK(!IsWhole(place, 0, Attempt(1)));
    CHECK(IsWhole(place, 0, first_commits_first ? Attempt(2) : Attempt(3)));
    CHECK(place.Scan().unfinished.size() == 1);
    const Status committed = other.Commit();
    INFO(committed.message());
    REQUIRE(committed.ok());
    // The one that began last counts, and only that one says so.
    CHECK(other.IsComplete() == first_commits_first);
    REQUIRE(CompleteAttempt(place.Scan()) != nullptr);
    CHECK(CompleteAttempt(place.Scan())->id == Attempt(3));
    CHECK(IsWhole(place, 0, Attempt(3)));
    CHECK(IsWhole(place, 0, Attempt(2)) == !first_commits_first);
  }
}

TEST_CASE("PartFiles.WhatAnEarlierSaveCompletesIsThereWhenTheNextOneFails") {
  for (const bool next_begins_first : {true, false}) {
    INFO("the next one begins before the first part is committed: " << next_begins_first);
    Place place;
    for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(Save(place.Options(rank, 2, Attempt(1), 1)).ok());
    std::vector<Live> old, next;
    for (uint32_t rank = 0; rank < 2; ++rank) old.emplace_back(place.Overwriting(rank, 2, Attempt(2), 2));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (next_begins_first) next.emplace_back(place.Overwriting(rank, 2, Attempt(3), 3));
      REQUIRE(old[rank].Commit().ok());
      CHECK(old[rank].IsComplete(rank == 1 && next_begins_first ? 2 : 0) == (rank == 1));
    }
    for (uint32_t rank = 0; !next_begins_first && rank < 2; ++rank)
      next.emplace_back(place.Overwriting(rank, 2, Attempt(3), 3));
    next.clear();
    REQUIRE(CompleteAttempt(place.Scan()) != nullptr);
    CHECK(CompleteAttempt(place.Scan())->id == Attempt(2));
    for (uint32_t rank = 0; rank < 2; ++rank) CHECK(IsWhole(place, rank, Attempt(2)));
  }
}

// The next save begins on a rank that has committed its part, and is refused (EBUSY) to one that has not.
TEST_CASE("PartFiles.WhatOtherRanksAreStillSavingIsNotTakenApart") {
  for (const bool next_goes_on : {false, true}) {
    INFO("the next one goes on: " << next_goes_on);
    Place place;
    REQUIRE(Save(place.Options(0, 2, Attempt(1), 1)).ok());
    Live slow(place.Options(1, 2, Attempt(1), 1));
    Live next(place.Overwriting(0, 2, Attempt(2), 2));
    CHECK(IsWhole(place, 0, Attempt(1)));
    if (next_goes_on) {  // its rank 1 begins once the first save's has ended
      REQUIRE(slow.Commit().ok());
      CHECK(slow.IsComplete(1));  // the next one's part is being saved
      REQUIRE(next.Commit().ok());
      CHECK(!next.IsComplete());
      bool complete = false;
      REQUIRE(Save(place.Overwriting(1, 2, Attempt(2), 3), &complete).ok());
      CHECK(complete);
      CHECK(place.Scan().attempts.size() == 1);
      continue;
    }
    next.part.reset();
    REQUIRE(slow.Commit().ok());
    CHECK(slow.IsComplete());
    REQUIRE(CompleteAttempt(place.Scan()) != nullptr);
    CHECK(CompleteAttempt(place.Scan())->id == Attempt(1));
    for (uint32_t rank = 0; rank < 2; ++rank) CHECK(IsWhole(place, rank, Attempt(1)));
  }
  // Where nobody saves the others any more, it goes at once.
  Place place;
  REQUIRE(Save(place.Options(0, 2, Attempt(1), 1)).ok());
  Live(place.Options(1, 2, Attempt(1), 1)).part.reset();
  const Live next(place.Options(0, 2, Attempt(2), 2));
  CHECK(!fs::exists(place.Part(0) + "/" + ManifestName(Attempt(1))));
}

TEST_CASE("PartFiles.OneAttemptIsSavedOnce") {
  Place place;
  Live live(place.Options(0, 1, Attempt(1)));
  CHECK(PartFiles::Begin(place.Options(0, 1, Attempt(1), 2)).status().code() == -EEXIST);
  CHECK(Everything(place.journal).size() == 1);  // the live one's
  // By another daemon, which has a journal of its own.
  const std::string journal = place.scratch / "another-journal";
  fs::create_directory(journal);
  const UniqueFd journal_fd(::open(journal.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto elsewhere = [&] {
    PartFiles::Options options = place.Options(0, 1, Attempt(1), 2);
    options.journal_fd = journal_fd.get();
    options.journal_shown = journal;
    return PartFiles::Begin(std::move(options)).status();
  };
  const Status again = elsewhere();
  CHECK(again.code() == -EEXIST);
  CHECK(again.message().find("another process") != std::string::npos);
  CHECK(Everything(journal).empty());
  REQUIRE(live.Commit().ok());
  CHECK(live.IsComplete());
  CHECK(IsWhole(place, 0, Attempt(1)));
  CHECK(elsewhere().code() == -EEXIST);
  CHECK(IsWhole(place, 0, Attempt(1)));
}

// Its path was evacuated and is another daemon's now, with the record that is there; or the same daemon's gc finds it.
TEST_CASE("Journal.WhatIsBeingSavedIsNoRest") {
  Place place;
  Live live(place.Options(0, 1, Attempt(1)));
  const Result<JournalRest> rest =
      FindRest(UniqueFd(::fcntl(place.journal_fd.get(), F_DUPFD_CLOEXEC, 0)), place.journal, nullptr, /*alone=*/true);
  REQUIRE(rest.ok());
  REQUIRE(rest.value().records.size() == 1);
  GcReport report;
  RemoveRest(rest.value(), NoWorkingFiles, /*dry_run=*/false, &report);
  CHECK(report.removed.empty());
  CHECK(report.failed.empty());
  REQUIRE(report.kept.size() == 1);
  CHECK(report.kept[0].why.find("being saved") != std::string::npos);
  CHECK(Everything(place.journal).size() == 1);
  REQUIRE(live.Commit().ok());
  CHECK(live.IsComplete());
  CHECK(IsWhole(place, 0, Attempt(1)));
}

TEST_CASE("PartFiles.WhatIsRemovedOrReplacedUnderASaveIsNoPart") {
  for (const bool replaced : {true, false}) {
    Place place;
    Live live(place.Options(0, 1, Attempt(1)));
    const std::string data = place.Part(0) + "/" + DataName(Attempt(1), 0);
    fs::remove(data);
    if (replaced) WriteFile(data, kContent);
    const Status committed = live.Commit();
    CHECK(committed.code() == -ESTALE);
    CHECK(committed.message().find(DataName(Attempt(1), 0)) != std::string::npos);
    CHECK(place.Scan().attempts.empty());
    live.part.reset();  // what is not its own stays
    CHECK(fs::exists(data) == replaced);
    CHECK(Everything(place.journal).empty());
  }
}

TEST_CASE("PartFiles.RemovingWaitsForNobodyAndLeavesWhatIsBeingSaved") {
  Place place;
  REQUIRE(Save(place.Options(0, 1, Attempt(1), 1)).ok());
  Live live(place.Overwriting(0, 1, Attempt(2), 2));
  bool all = true;
  REQUIRE(RemoveCheckpoint(place.directory, "tag", NoWorkingHeader, &all).ok());
  CHECK(!all);
  CHECK(!IsWhole(place, 0, Attempt(1)));
  REQUIRE(live.Commit().ok());
  CHECK(live.IsComplete());
  CHECK(IsWhole(place, 0, Attempt(2)));
  REQUIRE(RemoveCheckpoint(place.directory, "tag", NoWorkingHeader, &all).ok());
  CHECK(all);
  CHECK(Everything(place.directory).empty());
}

// Two jobs of one user with one directory, and tags like step-100.
TEST_CASE("PartFiles.AnotherJobsAttemptGoesOnlyToBeOverwritten") {
  Place place;
  const auto of_job = [](PartFiles::Options options, const std::string& job) {
    options.head.job = job;
    return options;
  };
  REQUIRE(Save(of_job(place.Options(0, 2, Attempt(1), 1), "a")).ok());  // its other rank is on its way
  bool complete = false;
  REQUIRE(Save(of_job(place.Options(0, 1, Attempt(2), 2), "b"), &complete).ok());
  CHECK(complete);
  CHECK(IsWhole(place, 0, Attempt(1)));
  REQUIRE(Save(of_job(place.Options(1, 2, Attempt(1), 1), "a"), &complete).ok());
  CHECK(!complete);  // "b" began later
  CHECK(IsWhole(place, 0, Attempt(1)));
  CHECK(IsWhole(place, 1, Attempt(1)));
  CHECK(IsWhole(place, 0, Attempt(2)));
  REQUIRE(Save(of_job(place.Overwriting(0, 1, Attempt(3), 3), "c"), &complete).ok());
  CHECK(complete);
  CHECK(Everything(place.directory).size() == 4);
  CHECK(IsWhole(place, 0, Attempt(3)));
}

TEST_CASE("PartFiles.NothingEarlierGoesBeforeTheOtherRanksManifestsAreOnStorage") {
  Place place;
  for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(Save(place.Options(rank, 2, Attempt(1), 1)).ok());
  Live zero(place.Overwriting(0, 2, Attempt(2), 2));
  Live one(place.Overwriting(1, 2, Attempt(2), 2));
  REQUIRE(zero.Commit().ok());
  bool renamed = false, looked = false, complete = true, whole = false;
  SetStepHook([&](std::string_view step, std::string_view shown) {
    if (looked) return;
    if (renamed && step == "sync_folder") {  // it has its name, and the folder is not synced yet
      looked = true;
      complete = zero.IsComplete();
      whole = IsWhole(place, 0, Attempt(1)) && IsWhole(place, 1, Attempt(1));
    }
    renamed |= step == "rename" && shown.ends_with(ManifestName(Attempt(2)));
  });
  const Status committed = one.Commit();
  SetStepHook(nullptr);
  REQUIRE(committed.ok());
  REQUIRE(looked);
  CHECK(!complete);
  CHECK(whole);
  CHECK(one.IsComplete());  // who is done last sees it
  CHECK(CompleteAttempt(place.Scan())->id == Attempt(2));
  CHECK(!fs::exists(place.Part(0) + "/" + ManifestName(Attempt(1))));
}

TEST_CASE("PartFiles.AnOverwriteCountsWhateverTheClockAndTheStep") {
  Place place;
  REQUIRE(Save(place.Options(0, 1, Attempt(9), 1'000)).ok());
  PartFiles::Options options = place.Overwriting(0, 1, Attempt(2), 5);  // of a node whose clock is behind
  options.head.step = 3;                                                // that went back to an earlier step
  bool complete = false;
  REQUIRE(Save(std::move(options), &complete).ok());
  CHECK(complete);
  const FoundTag found = place.Scan();
  REQUIRE(CompleteAttempt(found) != nullptr);
  CHECK(CompleteAttempt(found)->id == Attempt(2));
  CHECK(found.attempts.size() == 1);
}

TEST_CASE("PartFiles.AManifestWithoutItsDataKeepsNobodyFromSaving") {
  Place place;
  Live first(place.Options(0, 1, Attempt(1), 1));
  Live second(place.Options(0, 1, Attempt(2), 2));
  REQUIRE(second.Commit().ok());
  REQUIRE(first.Commit().ok());  // both are complete
  fs::remove(place.Part(0) + "/" + DataName(Attempt(2), 0));
  CHECK(PartFiles::Begin(place.Options(0, 1, Attempt(3), 3)).status().code() == -EEXIST);
  CHECK(IsWhole(place, 0, Attempt(1)));
  fs::remove(place.Part(0) + "/" + DataName(Attempt(1), 0));
  bool complete = false;
  REQUIRE(Save(place.Options(0, 1, Attempt(3), 3), &complete).ok());
  CHECK(complete);
  CHECK(Everything(place.directory).size() == 4);
}

TEST_CASE("PartFiles.WhatAClientPassesIsWrittenAndOnlyIfItIsItsOwnEmptyFile") {
  Place place;
  const uint32_t uid = ::geteuid();
  const auto open = [&](const std::string& name, int flags = O_RDWR | O_CREAT) {
    return UniqueFd(::open((place.directory + "/" + name).c_str(), flags | O_CLOEXEC, 0600));
  };
  const auto adopt = [&](UniqueFd data, UniqueFd manifest, uint32_t owner) {
    PartFiles::Options options = place.Options(0, 1, Attempt(1));
    options.journal_fd = -1;
    return PartFiles::Adopt(std::move(options), std::move(data), std::move(manifest), owner);
  };
  const auto refused = [&](UniqueFd data, UniqueFd manifest, uint32_t owner) {
    return adopt(std::move(data), std::move(manifest), owner).status().code() == -EINVAL;
  };
  WriteFile(place.directory + "/full", kContent);
  CHECK(refused(open("full"), open("m"), uid));
  CHECK(refused(open("d"), open("m"), uid + 1));
  CHECK(refused(open("d"), open("d"), uid));
  CHECK(refused(open("d", O_RDONLY), open("m"), uid));
  CHECK(refused(open("d", O_RDWR | O_APPEND), open("m"), uid));
  CHECK(refused(open("d"), open("m", O_WRONLY), uid));
  int pipe_fds[2];
  REQUIRE(::pipe2(pipe_fds, O_CLOEXEC) == 0);
  const UniqueFd other_end(pipe_fds[1]);
  CHECK(refused(UniqueFd(pipe_fds[0]), open("m"), uid));
  // Memory that would count as the daemon's.
  const auto memory = [] { return UniqueFd(::memfd_create("data", MFD_CLOEXEC)); };
  CHECK(refused(memory(), open("m"), uid));
  CHECK(refused(open("d"), memory(), uid));
  CHECK(adopt(memory(), open("m"), uid).status().message().find("is memory") != std::string::npos);
  struct statfs file_system {};
  REQUIRE(::fstatfs(place.directory_fd.get(), &file_system) == 0);
  if (file_system.f_type == TMPFS_MAGIC) return;  // and so is every file here
  {
    Result<std::unique_ptr<PartFiles>> given_up = adopt(open("d"), open("m"), uid);
    REQUIRE(given_up.ok());
    REQUIRE(Fill(**given_up).ok());
  }
  CHECK(fs::file_size(place.directory + "/d") == 0);  // nothing that could be taken for a part
  Result<std::unique_ptr<PartFiles>> part = adopt(open("d"), open("m"), uid);
  INFO(part.status().message());
  REQUIRE(part.ok());
  REQUIRE(Fill(**part).ok());
  Manifest manifest = Filled();
  REQUIRE((*part)->Commit(&manifest).ok());
  std::vector<std::string> kept;
  const Result<bool> complete = (*part)->IsComplete(&kept);
  REQUIRE(complete.ok());
  CHECK(!complete.value());
  part.value().reset();
  // With their names it is one.
  fs::create_directories(place.Part(0));
  fs::rename(place.directory + "/d", place.Part(0) + "/" + DataName(Attempt(1), 0));
  fs::rename(place.directory + "/m", place.Part(0) + "/" + ManifestName(Attempt(1)));
  CHECK(IsWhole(place, 0, Attempt(1)));
  CHECK(Everything(place.journal).empty());
}

TEST_CASE("PartFiles.SaysBeforehandWhetherThereIsRoom") {
  Place place;
  Live live(place.Options(0, 1, Attempt(1)));
  CHECK(live.part->CheckRoom(4096).ok());
  const Status none = live.part->CheckRoom(uint64_t{1} << 60);
  CHECK(none.code() == -ENOSPC);
  CHECK(none.message().find(std::to_string(uint64_t{1} << 60)) != std::string::npos);
}

TEST_CASE("PartFiles.HandOverIsInTheJournalBeforeItHasItsName") {
  Place place;
  const std::string from = place.scratch / "from";
  fs::create_directory(from);
  WriteFile(from + "/state", kContent + kContent);
  UniqueFd from_fd(::open(from.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  UniqueFd state(::open((from + "/state").c_str(), O_RDWR | O_CLOEXEC));
  const WorkingOrigin origin{"node", 1, 2, "job", 0, 9};
  {
    Result<std::unique_ptr<PartFiles>> part = PartFiles::Begin(place.Options(0, 1, Attempt(1)));
    REQUIRE(part.ok());
    const std::string name = DataName(Attempt(1), 1);
    std::string record;  // when it first has the name
    SetStepHook([&](std::string_view, std::string_view) {
      if (!record.empty() || !fs::exists(place.Part(0) + "/" + name)) return;
      std::ifstream file(place.journal + "/" + AttemptText(Attempt(1)) + "-0");
      std::getline(file, record);
    });
    bool moved = false;
    const Result<uint32_t> index =
        (*part)->HandOver(from_fd.get(), "state", state.get(), origin, from + "/state", &moved);
    SetStepHook(nullptr);
    REQUIRE(index.ok());
    CHECK(moved);
    CHECK(index.value() == 1);
    CHECK(record.find("\"working\"") != std::string::npos);
    CHECK(!fs::exists(from + "/state"));
    CHECK(fs::exists(place.Part(0) + "/" + name));
    std::vector<std::string> strange, unfinished;
    const Result<std::vector<JournalRecord>> records =
        LoadJournal(place.journal_fd.get(), place.journal, &strange, &unfinished);
    REQUIRE(records.ok());
    REQUIRE(records.value().size() == 1);
    REQUIRE(records.value()[0].files.size() == 2);
    CHECK(records.value()[0].files[1].working);
    CHECK(records.value()[0].files[1].origin == origin);
    struct stat st {};
    REQUIRE(::fstat(state.get(), &st) == 0);
    CHECK(records.value()[0].files[1].inode == st.st_ino);
    // As long as it is being saved it stays, whoever comes with the record.
    const auto untouched = [&](const Result<JournalOutcome>& outcome) {
      return outcome.ok() && outcome.value().removed == 0 && outcome.value().kept.size() == 1 &&
             outcome.value().kept[0].find("being saved") != std::string::npos;
    };
    CHECK(untouched(UndoPart(records.value()[0], NoWorkingFiles, false)));
    CHECK(untouched(UndoPart(records.value()[0], NoWorkingFiles, true)));
    CHECK(fs::exists(place.Part(0) + "/" + DataName(Attempt(1), 0)));
    // A dead daemon's: gone if its header is right, left alone if not.
    REQUIRE(UnlockFile((*part)->data_fd(), name).ok());
    const Result<JournalOutcome> kept = UndoPart(records.value()[0], NoWorkingFiles, false);
    REQUIRE(kept.ok());
    CHECK(kept.value().kept.size() == 1);
    CHECK(fs::exists(place.Part(0) + "/" + name));
    const auto right = [&](int, const WorkingOrigin& found) {
      return found == origin ? Status() : Status::Invalid("another");
    };
    const Result<JournalOutcome> gone = UndoPart(records.value()[0], right, false);
    REQUIRE(gone.ok());
    CHECK(gone.value().kept.empty());
    CHECK(!fs::exists(place.Part(0)));
  }
  CHECK(Everything(place.journal).empty());
}

TEST_CASE("PartFiles.AHandedOverFileWhoseManifestIsGoneCanBeRemoved") {
  for (const bool by_hand : {true, false}) {
    Place place;
    {
      Live live = WithWorkingFile(place, place.Options(0, 1, Attempt(1)));
      REQUIRE(CommitWithWorkingFile(live).ok());
      CHECK(live.IsComplete());
    }
    // A removal that was killed behind the manifest; without the first data file, too.
    fs::remove(place.Part(0) + "/" + ManifestName(Attempt(1)));
    fs::remove(place.Part(0) + "/" + DataName(Attempt(1), 0));
    REQUIRE(fs::exists(place.Part(0) + "/" + DataName(Attempt(1), 1)));
    if (by_hand) {
      bool all = false;
      REQUIRE(RemoveCheckpoint(place.directory, "tag", NoWorkingHeader, &all).ok());
      CHECK(!all);
      REQUIRE(RemoveCheckpoint(place.directory, "tag", ReadWorking, &all).ok());
      CHECK(all);
      CHECK(Everything(place.directory).empty());
    } else {
      PartFiles::Options options = place.Options(0, 1, Attempt(2), 2);
      options.working = ReadWorking;
      REQUIRE(Save(std::move(options)).ok());
      CHECK(Everything(place.directory).size() == 4);
    }
  }
}

TEST_CASE("C19_KilledAtAnyStepOfARemovalNothingOfItStays") {
  const auto removal = [](const Place& place) {
    PartFiles::Options options = place.Overwriting(0, 1, Attempt(2), 2);
    options.working = ReadWorking;
    return Save(std::move(options));
  };
  const auto right = [](int, const WorkingOrigin& origin) {
    return origin == kOrigin ? Status() : Status::Invalid("another");
  };
  const auto prepare = [](const Place& place) {
    Live live = WithWorkingFile(place, place.Options(0, 1, Attempt(1)));
    REQUIRE(CommitWithWorkingFile(live).ok());
  };
  int steps = 0, began = 0;
  {
    Place place;
    prepare(place);
    steps = StepsBefore(1000, [&] { return removal(place); });
  }
  REQUIRE(steps > 30);
  for (int n = steps - 20; n < steps; ++n) {  // the last ones: the others are as in any save
    INFO("stopped before step " << n << " of " << steps);
    Place place;
    prepare(place);
    REQUIRE(StepsBefore(n, [&] { return removal(place); }) == -1);
    CHECK(Recover(place, right) == std::vector<std::string>());
    const std::string part = place.Part(0) + "/";
    const bool there = fs::exists(part + ManifestName(Attempt(1)));
    CHECK(fs::exists(part + DataName(Attempt(1), 0)) == there);
    CHECK(fs::exists(part + DataName(Attempt(1), 1)) == there);
    CHECK((there || IsWhole(place, 0, Attempt(2))));
    CHECK(Everything(place.journal).empty());
    began += !there;
  }
  CHECK(began > 2);
}

TEST_CASE("C19_KilledAtAnyStepOfAHandOverThereIsAWholePartOrNone") {
  const auto save = [](const Place& place) {
    Live live = WithWorkingFile(place, place.Options(0, 1, Attempt(1)));
    return CommitWithWorkingFile(live);
  };
  const auto right = [](int, const WorkingOrigin& origin) {
    return origin == kOrigin ? Status() : Status::Invalid("another");
  };
  int steps = 0, whole = 0, moved = 0;
  {
    Place place;
    steps = StepsBefore(1000, [&] { return save(place); });
  }
  for (int n = 0; n < steps; ++n) {
    INFO("stopped before step " << n << " of " << steps);
    Place place;
    REQUIRE(StepsBefore(n, [&] { return save(place); }) == -1);
    const std::string part = place.Part(0) + "/";
    const bool there = fs::exists(part + ManifestName(Attempt(1)));
    const bool was_moved = fs::exists(part + DataName(Attempt(1), 1));
    CHECK(Recover(place, right) == std::vector<std::string>());
    CHECK(fs::exists(part + ManifestName(Attempt(1))) == there);
    CHECK(Everything(place.directory).size() == (there ? 5 : 0));
    CHECK(Everything(place.journal).empty());
    whole += there;
    moved += was_moved && !there;
  }
  CHECK(whole > 0);
  CHECK(moved > 2);
}

// Without nameless files the record is older than the file: a power cut may leave a page of zeros.
TEST_CASE("Journal.AFileThatNeverGotItsHeaderGoes") {
  for (const std::string& content : {std::string(), std::string(4096, '\0'), std::string(4096, 'x')}) {
    const bool ours = content.find('x') == std::string::npos;
    Place place;
    JournalRecord record;
    record.directory = place.directory;
    record.mark = MarkOf(place.directory_fd.get(), place.directory).value();
    record.job = "job";
    record.tag = "tag";
    record.attempt = Attempt(1);
    record.files.push_back({});
    fs::create_directories(place.Part(0));
    WriteFile(place.Part(0) + "/" + DataName(Attempt(1), 0), content);
    const Result<JournalOutcome> outcome = UndoPart(record, NoWorkingFiles, false);
    REQUIRE(outcome.ok());
    CHECK(outcome.value().kept.size() == (ours ? 0 : 1));
    CHECK(fs::exists(place.directory + "/tag") == !ours);
    // The next save of that rank may find it, too.
    fs::create_directories(place.Part(0));
    WriteFile(place.Part(0) + "/" + DataName(Attempt(1), 0), content);
    fs::permissions(place.directory + "/tag", fs::perms::owner_all);
    fs::permissions(place.Part(0), fs::perms::owner_all);
    REQUIRE(Save(place.Options(0, 1, Attempt(2), 2)).ok());
    CHECK(fs::exists(place.Part(0) + "/" + DataName(Attempt(1), 0)) == !ours);
  }
}

TEST_CASE("C29_NothingOfAnybodyElseIsUsedOrRemoved") {
  Place place;
  const std::string outside = place.scratch / "outside";
  fs::create_directory(outside);
  // A link in the place of a folder is not followed.
  fs::create_directory_symlink(outside, place.directory + "/tag");
  CHECK(!Save(place.Options(0, 1, Attempt(1))).ok());
  CHECK(Everything(outside).empty());
  CHECK(fs::is_symlink(place.directory + "/tag"));
  fs::remove(place.directory + "/tag");
  fs::create_directory(place.directory + "/tag");
  fs::create_directory_symlink(outside, place.Part(0));
  CHECK(!Save(place.Options(0, 1, Attempt(1))).ok());
  CHECK(Everything(outside).empty());
  fs::remove(place.Part(0));
  CHECK(Recover(place) == std::vector<std::string>());
  CHECK(Everything(place.journal).empty());

  // Files that have our names and are not what they say: strangers' stay.
  fs::create_directories(place.Part(0));
  const std::string strange = place.Part(0) + "/" + DataName(Attempt(3), 0);
  WriteFile(strange, kContent);
  WriteFile(place.Part(0) + "/notes.txt", "mine");
  REQUIRE(Save(place.Options(0, 1, Attempt(1))).ok());
  CHECK(fs::exists(strange));
  CHECK(fs::exists(place.Part(0) + "/notes.txt"));
  CHECK(place.Scan().strange.size() == 1);

  // A file that took the place of ours after the record was written: another inode.
  Place other;
  Result<std::unique_ptr<PartFiles>> part = PartFiles::Begin(other.Options(0, 1, Attempt(1)));
  REQUIRE(part.ok());
  const std::string name = other.Part(0) + "/" + DataName(Attempt(1), 0);
  fs::copy_file(name, name + "x");
  fs::rename(name + "x", name);
  std::vector<std::string> ignored;
  const Result<std::vector<JournalRecord>> records =
      LoadJournal(other.journal_fd.get(), other.journal, &ignored, &ignored);
  REQUIRE(records.ok());
  const Result<JournalOutcome> outcome = UndoPart(records.value().at(0), NoWorkingFiles, false);
  REQUIRE(outcome.ok());
  CHECK(outcome.value().kept.size() == 1);
  CHECK(fs::exists(name));
}

TEST_CASE("Journal.ARecordOfAnotherDirectoryUnderThatNameIsNotCarriedOut") {
  Place place;
  const int n = 12;
  REQUIRE(StepsBefore(n, [&] { return Save(place.Options(0, 1, Attempt(1))); }) == -1);
  std::vector<std::string> strange, unfinished;
  Result<std::vector<JournalRecord>> records =
      LoadJournal(place.journal_fd.get(), place.journal, &strange, &unfinished);
  REQUIRE(records.ok());
  REQUIRE(records->size() == 1);
  JournalRecord record = (*records)[0];
  ++record.mark.inode;
  const std::set<std::string> before = Everything(place.directory);
  CHECK(UndoPart(record, NoWorkingFiles, false).status().code() == -ESTALE);
  CHECK(Everything(place.directory) == before);
  // A dry run tells and leaves.
  const Result<JournalOutcome> told = UndoPart((*records)[0], NoWorkingFiles, true);
  REQUIRE(told.ok());
  CHECK(Everything(place.directory) == before);
  // What is no record is left alone.
  WriteFile(place.journal + "/notes", "x");
  REQUIRE(LoadJournal(place.journal_fd.get(), place.journal, &strange, &unfinished).ok());
  CHECK(strange.size() == 1);
}

TEST_CASE("Journal.ARecordWithNamesThatNoDaemonWritesIsNone") {
  for (const char* job : {"job", "../job", ""}) {
    CAPTURE(job);
    Place place;
    JournalRecord record;
    record.directory = place.directory;
    record.job = "job";
    record.tag = "tag";
    record.attempt = Attempt(1);
    record.files.push_back({1, 5, true, {"node", 1, 2, job, 0, 9}});
    REQUIRE(SaveJournal(place.journal_fd.get(), place.journal, record).ok());
    std::vector<std::string> strange, unfinished;
    const Result<std::vector<JournalRecord>> read =
        LoadJournal(place.journal_fd.get(), place.journal, &strange, &unfinished);
    REQUIRE(read.ok());
    const bool right = std::string(job) == "job";
    REQUIRE(read.value().size() == (right ? 1 : 0));
    CHECK(strange.size() == (right ? 0 : 1));
    if (right) CHECK(read.value()[0].files.at(0).origin == record.files[0].origin);
  }
}

TEST_CASE("Journal.WhatIsNotFoundOnAnotherFileSystemIsNotDone") {
  Place place;
  JournalRecord record;
  {
    Live live(place.Options(0, 1, Attempt(1)));
    std::vector<std::string> ignored;
    const Result<std::vector<JournalRecord>> records =
        LoadJournal(place.journal_fd.get(), place.journal, &ignored, &ignored);
    REQUIRE(records.ok());
    record = records.value().at(0);
    CHECK(record.mark == MarkOf(place.directory_fd.get(), place.directory).value());
  }
  REQUIRE(Everything(place.directory).empty());
  const auto undo = [&] { return UndoPart(record, NoWorkingFiles, false); };
  CHECK(undo().ok());
  // Its root has the same inode number; nothing of ours is there, but it may be on the one that is not mounted now.
  ++record.mark.file_system;
  CHECK(undo().status().code() == -ESTALE);
  fs::create_directories(place.Part(0));
  CHECK(undo().status().code() == -ESTALE);
  CHECK(fs::exists(place.Part(0)));
  // What is there, with inode and header, is ours, however the file system is called now.
  fs::remove_all(place.directory + "/tag");
  Live live(place.Options(0, 1, Attempt(1)));
  struct stat st {};
  REQUIRE(::fstat(live.part->data_fd(), &st) == 0);
  record.files.at(0).inode = st.st_ino;
  REQUIRE(UnlockFile(live.part->data_fd(), "the data file").ok());  // as if its daemon had died
  const Result<JournalOutcome> outcome = undo();
  REQUIRE(outcome.ok());
  CHECK(outcome.value().removed == 1);
  CHECK(!fs::exists(place.directory + "/tag"));
}

TEST_CASE("Journal.ARecordOfADirectoryThatWasRemovedIsDone") {
  Place place;
  const std::string parent = place.scratch / "parent", directory = parent + "/checkpoints";
  fs::create_directories(directory);
  PartFiles::Options options = place.Options(0, 1, Attempt(1));
  options.directory = directory;
  Live live(std::move(options));
  std::vector<std::string> ignored;
  const Result<std::vector<JournalRecord>> records =
      LoadJournal(place.journal_fd.get(), place.journal, &ignored, &ignored);
  REQUIRE(records.ok());
  const JournalRecord& record = records.value().at(0);
  fs::remove_all(directory);
  const Result<JournalOutcome> outcome = UndoPart(record, NoWorkingFiles, false);
  REQUIRE(outcome.ok());
  CHECK(outcome.value().kept.empty());
  // Where the folder above is another one, a file system may be missing.
  fs::rename(parent, parent + "-before");
  CHECK(UndoPart(record, NoWorkingFiles, false).status().code() == -ENOENT);
  fs::create_directory(parent);
  CHECK(UndoPart(record, NoWorkingFiles, false).status().code() == -ENOENT);
}

TEST_CASE("PartSet.PartsThatContradictEachOtherAreNoCheckpoint") {
  const auto head = [](uint32_t rank, uint32_t world_size, uint64_t step, const std::string& job) {
    PartHead h;
    h.job = job;
    h.tag = "tag";
    h.step = step;
    h.world_size = world_size;
    h.rank = rank;
    h.attempt = Attempt(1);
    return h;
  };
  CHECK(GroupParts({head(0, 2, 1, "a"), head(1, 2, 1, "a")}).at(0).complete());
  CHECK(!GroupParts({head(0, 2, 1, "a")}).at(0).complete());
  CHECK(!GroupParts({head(0, 2, 1, "a"), head(1, 2, 2, "a")}).at(0).complete());
  CHECK(!GroupParts({head(0, 2, 1, "a"), head(1, 2, 1, "b")}).at(0).complete());
  const std::vector<FoundAttempt> sizes = GroupParts({head(0, 2, 1, "a"), head(1, 3, 1, "a")});
  CHECK(!sizes.at(0).complete());
  CHECK(sizes.at(0).wrong.find("3 ranks") != std::string::npos);
}

TEST_CASE("PartSet.TheNewestIsThatOfTheHighestStep") {
  Place place;
  const auto save = [&](const std::string& tag, uint64_t step, int64_t started, uint32_t world_size) {
    PartFiles::Options options = place.Options(0, world_size, Attempt(static_cast<uint8_t>(step)), started);
    options.head.tag = tag;
    options.head.step = step;
    REQUIRE(Save(std::move(options)).ok());
  };
  save("b", 10, 5, 1);
  save("a", 20, 4, 1);
  save("c", 30, 6, 2);  // not complete
  fs::create_directory(place.directory + "/other");
  WriteFile(place.directory + "/file", "x");
  const Result<std::vector<FoundTag>> found = ScanDirectory(place.directory_fd.get(), place.directory);
  REQUIRE(found.ok());
  CHECK(found.value().size() == 3);
  REQUIRE(NewestTag(found.value(), "job") != nullptr);
  CHECK(NewestTag(found.value(), "job")->tag == "a");
}

TEST_CASE("PartSet.TheNewestIsOneOfTheOwnJobIfThereIsOne") {
  Place place;
  const auto save = [&](const std::string& tag, uint64_t step, const std::string& job) {
    PartFiles::Options options = place.Options(0, 1, Attempt(static_cast<uint8_t>(step)));
    options.head.tag = tag;
    options.head.step = step;
    options.head.job = job;
    REQUIRE(Save(std::move(options)).ok());
  };
  save("a", 10, "mine");
  save("b", 20, "mine");
  save("c", 30, "other");
  const Result<std::vector<FoundTag>> found = ScanDirectory(place.directory_fd.get(), place.directory);
  REQUIRE(found.ok());
  const auto newest = [&](const std::string& job) { return NewestTag(found.value(), job)->tag; };
  CHECK(newest("mine") == "b");
  CHECK(newest("other") == "c");
  CHECK(newest("third") == "c");
  CHECK(newest("") == "c");
}

TEST_CASE("PartSet.WhatAnotherUserHasPutThereIsNotBelieved") {
  if (::geteuid() != 0) return;  // only root can give files away
  constexpr uid_t kStranger = 12345;
  Place place;
  REQUIRE(Save(place.Options(0, 1, Attempt(1))).ok());
  PartFiles::Options options = place.Options(0, 1, Attempt(2));
  options.head.tag = "theirs";
  options.head.step = 1'000'000;
  REQUIRE(Save(std::move(options)).ok());
  const std::string tag = place.directory + "/theirs", part = tag + "/part-0";
  const std::string manifest = part + "/" + ManifestName(Attempt(2)), data = part + "/" + DataName(Attempt(2), 0);
  const auto give = [](const std::string& name, uid_t uid) { REQUIRE(::chown(name.c_str(), uid, 0) == 0); };
  const auto newest = [&] {
    const Result<std::vector<FoundTag>> found = ScanDirectory(place.directory_fd.get(), place.directory);
    REQUIRE(found.ok());
    return NewestTag(found.value(), "job")->tag;
  };
  CHECK(newest() == "theirs");
  for (const std::string& name : {tag, part, manifest}) {
    INFO(name);
    give(name, kStranger);
    CHECK(newest() == "tag");
    give(name, 0);
  }
  give(tag, kStranger);
  CHECK(ScanTag(place.directory_fd.get(), "theirs", place.directory).status().code() == -EPERM);
  give(tag, 0);
  // The data of a part is looked at when it is used.
  const auto check = [&] {
    const Result<FoundTag> found = ScanTag(place.directory_fd.get(), "theirs", place.directory);
    REQUIRE(found.ok());
    REQUIRE(found.value().attempts.size() == 1);
    return CheckAttempt(place.directory_fd.get(), found.value().attempts[0], NoWorkingFiles, place.directory).code();
  };
  CHECK(check() == 0);
  give(data, kStranger);
  CHECK(check() == -EPERM);
  // In a directory of their own they are believed: it is that one which was asked for.
  for (const std::string& name : {place.directory, tag, part, manifest}) give(name, kStranger);
  CHECK(newest() == "theirs");
  CHECK(check() == 0);
}

TEST_CASE("PartSet.WhatWasCutOrMovedIsNotCounted") {
  Place place;
  REQUIRE(Save(place.Options(0, 1, Attempt(1))).ok());
  const std::string manifest = place.Part(0) + "/" + ManifestName(Attempt(1));
  const auto size = fs::file_size(manifest);
  fs::resize_file(manifest, size - 1);
  FoundTag found = place.Scan();
  CHECK(CompleteAttempt(found) == nullptr);
  REQUIRE(found.strange.size() == 1);
  CHECK(found.strange[0].find("was cut") != std::string::npos);
  CHECK(found.unfinished.size() == 1);

  Place moved;
  REQUIRE(Save(moved.Options(0, 1, Attempt(1))).ok());
  fs::rename(moved.Part(0), moved.Part(1));
  CHECK(CompleteAttempt(moved.Scan()) == nullptr);

  Place cut;
  REQUIRE(Save(cut.Options(0, 1, Attempt(1))).ok());
  CHECK(IsWhole(cut, 0, Attempt(1)));
  fs::resize_file(cut.Part(0) + "/" + DataName(Attempt(1), 0), 3 * 4096);
  CHECK(!IsWhole(cut, 0, Attempt(1)));
}

}  // namespace mlpo::test
