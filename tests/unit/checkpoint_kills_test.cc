// The files of a part on a real file system: in which order they become durable, and what a process that dies at any
// step of a save, a hand-over or a removal leaves.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/inspect.h"
#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_set.h"
#include "tests/unit/checkpoint_parts.h"

namespace mlpo::test {
namespace {

// A working file, as the tests of handing over know it, of this user's and rank 0.
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

}  // namespace

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

}  // namespace mlpo::test
