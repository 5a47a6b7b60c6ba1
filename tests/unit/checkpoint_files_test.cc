// The files of a part on a real file system: what becomes of a save beside others under the same tag, and of files that
// a client passes.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/inspect.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_set.h"
#include "tests/unit/checkpoint_parts.h"

namespace mlpo::test {

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

// The next save begins on all ranks at once: each finds the others' parts of the cut one locked by who removes them.
TEST_CASE("PartFiles.RanksThatBeginTogetherAllRemoveWhatWasCut") {
  Place place;
  for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(Save(place.Options(rank, 3, Attempt(1), 1)).ok());
  const std::string data = place.Part(0) + "/" + DataName(Attempt(1), 0);
  std::unique_ptr<Live> one;
  bool met = false;
  SetStepHook([&](std::string_view, std::string_view) {
    if (met || !fs::exists(place.Part(0) + "/" + ManifestName(Attempt(1)))) return;
    const UniqueFd fd(::open(data.c_str(), O_RDONLY | O_CLOEXEC));
    const Result<FileLock> lock = LockFile(fd.get(), /*shared=*/true, data);
    if (!lock.ok() || lock.value() != FileLock::kHeld) return;
    met = true;  // rank 0 has the lock, and has removed nothing yet
    one = std::make_unique<Live>(place.Options(1, 3, Attempt(2), 2));
  });
  const Live zero(place.Options(0, 3, Attempt(2), 2));
  SetStepHook(nullptr);
  REQUIRE(one != nullptr);
  for (uint32_t rank = 0; rank < 2; ++rank) CHECK(!fs::exists(place.Part(rank) + "/" + ManifestName(Attempt(1))));
}

// A part without its manifest is on its way out, or is given up; or a rank that looks at this one's has it locked.
TEST_CASE("PartFiles.WhoFindsALockAsItBeginsLooksAgain") {
  for (const bool of_this_rank : {false, true}) {
    INFO("the lock is on this rank's own part: " << of_this_rank);
    Place place;
    REQUIRE(Save(place.Options(0, 2, Attempt(1), 1)).ok());
    Live other(place.Options(1, 2, Attempt(1), 1));
    UniqueFd own;
    if (of_this_rank) {
      other.part.reset();
      own.reset(::open((place.Part(0) + "/" + DataName(Attempt(1), 0)).c_str(), O_RDONLY | O_CLOEXEC));
      REQUIRE(::flock(own.get(), LOCK_SH | LOCK_NB) == 0);
    }
    std::jthread soon([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      own.reset();
      other.part.reset();
    });
    const Live next(place.Options(0, 2, Attempt(2), 2));
    CHECK(!fs::exists(place.Part(0) + "/" + ManifestName(Attempt(1))));
  }
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

}  // namespace mlpo::test
