// Which checkpoints a directory has, which of them are complete, and which is the newest.
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "daemon/checkpoint/part_files.h"
#include "daemon/checkpoint/part_set.h"
#include "tests/unit/checkpoint_parts.h"

namespace mlpo::test {

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
