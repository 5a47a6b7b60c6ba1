// A session's files on several paths, of which some do not answer. What is on storage is looked at by the file system.
#include "daemon/io/extent_store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <thread>

#include "tests/support/catch.h"
#include "tests/unit/io_scratch.h"

namespace mlpo::test {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

constexpr uint64_t kExtentBytes = 12 << 10;
const FileOwner kOwner{1000, "job", 3, 7};

// Paths "p0", "p1", ... with a keeper each; those that are held do not answer until they are let go.
class Paths {
 public:
  explicit Paths(size_t count, std::vector<uint64_t> capacities = {}) : folders_(count), gates_(count) {
    capacities.resize(count);
    for (size_t i = 0; i < count; ++i) {
      PathConfig config;
      config.directory = folders_[i].path();
      config.capacity_bytes = capacities[i];
      const std::string name = "p" + std::to_string(i);
      Result<std::unique_ptr<Path>> path = Path::Open(config, name, "node");
      Result<std::unique_ptr<PathKeeper>> keeper = PathKeeper::Start(name);
      REQUIRE((path.ok() && keeper.ok()));
      paths_.push_back(std::move(*path));
      keepers_.push_back(std::move(*keeper));
    }
  }
  ~Paths() {
    for (size_t i = 0; i < gates_.size(); ++i) LetGo(i);
    keepers_.clear();
  }

  std::vector<ExtentStore::Place> places() const {
    std::vector<ExtentStore::Place> places;
    for (size_t i = 0; i < paths_.size(); ++i) places.push_back({paths_[i].get(), keepers_[i].get()});
    return places;
  }
  std::vector<bool> all() const { return std::vector<bool>(paths_.size(), true); }
  // From the return on.
  void Hold(size_t i) {
    gates_[i] = std::make_unique<std::promise<void>>();
    keepers_[i]->Post([gate = std::make_shared<std::future<void>>(gates_[i]->get_future())] { gate->wait(); }, 0s);
    while (!keepers_[i]->stuck()) std::this_thread::sleep_for(1ms);
  }
  void LetGo(size_t i) {
    if (!gates_[i]) return;
    gates_[i]->set_value();
    gates_[i].reset();
    // Behind all that was posted meanwhile.
    while (!keepers_[i]->Ask<bool>([] { return true; }, 10s)) std::this_thread::sleep_for(1ms);
  }
  std::string FileName(size_t i) const {
    return folders_[i].path() + "/mlpo/" + std::to_string(::geteuid()) + "/node/1000-job/3-7/state";
  }
  bool HasFile(size_t i) const { return fs::exists(FileName(i)); }
  // Of extents in the file, behind its header.
  uint64_t Extents(size_t i) const {
    struct stat st {};
    REQUIRE(::stat(FileName(i).c_str(), &st) == 0);
    return (static_cast<uint64_t>(st.st_size) - 4096) / kExtentBytes;
  }

 private:
  std::vector<ScratchFolder> folders_;
  std::vector<std::unique_ptr<Path>> paths_;
  std::vector<std::unique_ptr<PathKeeper>> keepers_;
  std::vector<std::unique_ptr<std::promise<void>>> gates_;
};

std::unique_ptr<ExtentStore> Make(const Paths& paths, const std::vector<bool>& uses) {
  Result<std::unique_ptr<ExtentStore>> store = ExtentStore::Create(paths.places(), kOwner, uses);
  INFO(store.status().message());
  REQUIRE(store.ok());
  return std::move(*store);
}

TEST_CASE("ExtentStore.SharesAndAQuarterMore") {
  Paths paths(2);
  const auto store = Make(paths, paths.all());
  REQUIRE(store->Reserve({0.75, 0.25}, 40, kExtentBytes, "it", paths.all()).ok());
  CHECK(paths.Extents(0) == 38);  // of 40, 30 and a quarter more
  CHECK(paths.Extents(1) == 13);
  REQUIRE(store->Reserve({0.25, 0.75}, 40, kExtentBytes, "it", paths.all()).ok());
  CHECK(paths.Extents(0) == 38);
  CHECK(paths.Extents(1) == 38);
  CHECK(store->Remove().ok());
  CHECK_FALSE((paths.HasFile(0) || paths.HasFile(1)));
}

TEST_CASE("ExtentStore.APathThatDoesNotAnswerIsLeftOut") {
  Paths paths(2);
  paths.Hold(0);
  const auto start = std::chrono::steady_clock::now();
  const auto store = Make(paths, paths.all());
  CHECK(store->files()[0] == kNone);
  CHECK(store->files()[1] != kNone);
  REQUIRE(store->Reserve({0.9, 0.1}, 40, kExtentBytes, "it", paths.all()).ok());
  CHECK(paths.Extents(1) == 50);
  CHECK(store->AddMissing(paths.all()).empty());
  CHECK(std::chrono::steady_clock::now() - start < 5s);
  paths.LetGo(0);
  CHECK_FALSE(paths.HasFile(0));  // nothing was begun there
  const auto added = store->AddMissing(paths.all());
  REQUIRE(added.size() == 1);
  CHECK(added[0].first == 0);
  CHECK(added[0].second == store->files()[0]);
  CHECK(paths.HasFile(0));
  CHECK(store->AddMissing(paths.all()).empty());
}

TEST_CASE("ExtentStore.SoIsOneThatIsNotUsed") {
  Paths paths(3);
  const auto store = Make(paths, {true, false, true});
  CHECK(store->files()[1] == kNone);
  CHECK_FALSE(paths.HasFile(1));
  REQUIRE(store->Reserve({0.2, 0.6, 0.2}, 40, kExtentBytes, "it", {true, false, true}).ok());
  CHECK(paths.Extents(0) == 25);  // half of 40 and a quarter more
  CHECK(paths.Extents(2) == 25);
}

TEST_CASE("ExtentStore.WithoutAnyPathThereIsNone") {
  Paths paths(2);
  paths.Hold(0);
  paths.Hold(1);
  const Status silent = ExtentStore::Create(paths.places(), kOwner, paths.all()).status();
  CHECK(silent.code() == -ETIMEDOUT);
  CHECK(silent.message().find("path p0") != std::string::npos);
  CHECK(ExtentStore::Create(paths.places(), kOwner, {false, false}).status().code() == -ENOSPC);
}

TEST_CASE("ExtentStore.WhetherOneCanBeEmptied") {
  Paths paths(2, {0, 30 * kExtentBytes});
  const auto store = Make(paths, paths.all());
  CHECK(store->ReserveAgain({0.5, 0.5}, {false, true}).ok());  // nothing is in it yet
  REQUIRE(store->Reserve({0.5, 0.5}, 40, kExtentBytes, "the state", paths.all()).ok());
  CHECK(paths.Extents(1) == 25);
  const Status refused = store->ReserveAgain({0.5, 0.5}, {false, true});
  CHECK(refused.code() == -ENOSPC);
  for (const std::string& text : {"the state needs " + std::to_string(40 * kExtentBytes),
                                  "'p1' " + std::to_string(30 * kExtentBytes), std::string("'p0' 0 (not in use)")}) {
    INFO(refused.message());
    CHECK(refused.message().find(text) != std::string::npos);
  }
  CHECK(store->ReserveAgain({0.5, 0.5}, {true, false}).ok());
  CHECK(paths.Extents(0) == 50);
  CHECK(store->RemoveOn(1).ok());
  CHECK_FALSE(paths.HasFile(1));
  CHECK(store->files()[1] == kNone);
  CHECK(store->RemoveOn(1).ok());
  CHECK(store->AddMissing({true, true}).size() == 1);
}

TEST_CASE("ExtentStore.GoesOnInNextFilesWithRoomOfTheirOwn") {
  Paths paths(2);
  const auto store = Make(paths, paths.all());
  REQUIRE(store->Reserve({0.5, 0.5}, 8, kExtentBytes, "the state", paths.all()).ok());
  const std::vector<FileId> first = store->files();
  store->MakeNext({true, false}, {1000, "job", 3, 8});
  const FileId next = store->next_files()[0];
  REQUIRE(next != kNone);
  CHECK(store->next_files()[1] == kNone);
  REQUIRE(store->ReserveForCopy({0.5, 0.5}, paths.all()).ok());
  const std::string folder = fs::path(paths.FileName(0)).parent_path().parent_path().string();
  CHECK(paths.Extents(0) == 5);  // half of 8 and a quarter more
  CHECK(fs::file_size(folder + "/3-8/state") == 4096 + 5 * kExtentBytes);
  CHECK(paths.Extents(1) == 10);
  CHECK(store->ReserveAgain({0.5, 0.5}, {false, true}).ok());  // 8 fit into what is there
  CHECK(paths.Extents(1) == 10);
  store->UseNext();
  CHECK(store->files() == std::vector<FileId>{next, first[1]});
  CHECK(paths.HasFile(0));
  CHECK(store->RemoveLeft(0, first[0]).ok());
  CHECK_FALSE(paths.HasFile(0));
  CHECK(store->RemoveLeft(0, first[0]).ok());  // told twice
  // Once more, and given up.
  store->MakeNext({true, false}, {1000, "job", 3, 9});
  CHECK(fs::exists(folder + "/3-9"));
  CHECK(store->DropNext().ok());
  CHECK_FALSE(fs::exists(folder + "/3-9"));
  CHECK(store->files()[0] == next);
  // And with the path that it is on, left ones, too.
  store->MakeNext({true, false}, {1000, "job", 3, 10});
  store->UseNext();
  store->MakeNext({true, false}, {1000, "job", 3, 11});
  CHECK(store->RemoveOn(0).ok());
  CHECK_FALSE(fs::exists(folder));
  CHECK(store->next_files()[0] == kNone);
  store->MakeNext({true, true}, {1000, "job", 3, 12});
  CHECK(store->next_files()[0] == kNone);  // nothing of the session is there
  CHECK(store->next_files()[1] != kNone);
  CHECK(store->Remove().ok());
}

// What an earlier checkpoint, that was copied, has had made of room is in the file that is left.
TEST_CASE("ExtentStore.ANextFileHasRoomAlthoughTheOldOneHasMuch") {
  const auto next_size = [](const Paths& paths, size_t i, const char* generation) {
    const fs::path folder = fs::path(paths.FileName(i)).parent_path().parent_path();
    return (fs::file_size(folder / generation / "state") - 4096) / kExtentBytes;
  };
  Paths paths(2, {0, 40 * kExtentBytes});
  const auto store = Make(paths, paths.all());
  REQUIRE(store->Reserve({0.5, 0.5}, 8, kExtentBytes, "the state", paths.all()).ok());
  REQUIRE(store->ReserveForCopy({0.5, 0.5}, paths.all()).ok());
  CHECK(paths.Extents(0) == 10);
  CHECK(paths.Extents(1) == 10);
  store->MakeNext({true, true}, {1000, "job", 3, 8});
  REQUIRE(store->ReserveForCopy({0.5, 0.5}, paths.all()).ok());
  CHECK(paths.Extents(0) == 10);
  CHECK(next_size(paths, 0, "3-8") == 5);
  CHECK(next_size(paths, 1, "3-8") == 5);
  store->UseNext();
  REQUIRE(store->ReserveAgain({0.5, 0.5}, paths.all()).ok());
  CHECK(next_size(paths, 0, "3-8") == 5);
  // A registration meanwhile: there is room for it wherever the session goes on.
  store->MakeNext({true, false}, {1000, "job", 3, 9});
  REQUIRE(store->ReserveForCopy({0.5, 0.5}, paths.all()).ok());
  REQUIRE(store->Reserve({0.5, 0.5}, 16, kExtentBytes, "the state", paths.all()).ok());
  CHECK(next_size(paths, 0, "3-8") == 10);
  CHECK(next_size(paths, 0, "3-9") == 10);
  CHECK(store->Remove().ok());
}

TEST_CASE("ExtentStore.NoRoomIsAskedForWhatIsForgotten") {
  Paths paths(1, {12 * kExtentBytes});
  const auto store = Make(paths, paths.all());
  REQUIRE(store->Reserve({1}, 8, kExtentBytes, "the state", paths.all()).ok());
  CHECK(store->ReserveForCopy({1}, paths.all()).code() == -ENOSPC);
  store->Forget(4);
  CHECK(store->ReserveForCopy({1}, paths.all()).ok());
}

// Room in the old file is of no use: where the next one gets none, the checkpoint is refused before anything stalls.
TEST_CASE("ExtentStore.ANextFileWithoutRoomIsRefused") {
  Paths paths(1, {12 * kExtentBytes});
  const auto store = Make(paths, paths.all());
  REQUIRE(store->Reserve({1}, 4, kExtentBytes, "the state", paths.all()).ok());
  REQUIRE(store->ReserveForCopy({1}, paths.all()).ok());
  REQUIRE(paths.Extents(0) == 10);
  store->MakeNext({true}, {1000, "job", 3, 8});
  const Status refused = store->ReserveForCopy({1}, paths.all());
  INFO(refused.message());
  CHECK(refused.code() == -ENOSPC);
  CHECK(store->DropNext().ok());
  CHECK(store->ReserveForCopy({1}, paths.all()).ok());
}

TEST_CASE("ExtentStore.APathWithoutRoomForANextFileKeepsItsOwn") {
  Paths paths(2, {5 * kExtentBytes, 0});
  const auto store = Make(paths, paths.all());
  REQUIRE(store->Reserve({0.5, 0.5}, 8, kExtentBytes, "the state", paths.all()).ok());
  store->MakeNext({true, false}, {1000, "job", 3, 8});
  REQUIRE(store->next_files()[0] != kNone);
  REQUIRE(store->ReserveForCopy({0.5, 0.5}, paths.all()).ok());
  CHECK(store->next_files()[0] == kNone);
  CHECK(paths.Extents(0) == 5);
  CHECK(paths.Extents(1) == 12);  // of 16, all but the 4 that the first has of the state
  CHECK(store->Remove().ok());
}

// A session that ends does not wait for a path that hangs; its file goes when the path answers.
TEST_CASE("ExtentStore.AFileOnAPathThatHangsGoesLater") {
  Paths paths(2);
  const auto store = Make(paths, paths.all());
  paths.Hold(0);
  const auto start = std::chrono::steady_clock::now();
  CHECK(store->Remove().code() == -ETIMEDOUT);
  CHECK(std::chrono::steady_clock::now() - start < 5s);
  CHECK(paths.HasFile(0));
  CHECK_FALSE(paths.HasFile(1));
  paths.LetGo(0);
  CHECK_FALSE(paths.HasFile(0));
  // Nobody would remove what a path that is well again were given now.
  CHECK(store->AddMissing(paths.all()).empty());
  CHECK_FALSE((paths.HasFile(0) || paths.HasFile(1)));
}

}  // namespace
}  // namespace mlpo::test
