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
