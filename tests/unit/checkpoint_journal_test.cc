// The journal of what a daemon has begun in somebody's directory: what is undone by it, and that nothing of anybody
// else's is used or removed.
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint/part_files.h"
#include "tests/unit/checkpoint_parts.h"

namespace mlpo::test {

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

}  // namespace mlpo::test
