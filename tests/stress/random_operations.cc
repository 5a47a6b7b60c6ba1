// Random operations on several subgroups at once, against a model in memory: gradients in pieces of all kinds,
// discards, state read and written in ranges, updates that overlap, and what must be refused. Every bit is compared.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "daemon/adam/kernel.h"
#include "daemon/adam/reference.h"
#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

constexpr uint32_t kUncovered = 0;

// One subgroup of several tensors, and what its state must be.
class Model {
 public:
  Model(Client& client, const std::string& key, mlpo_dtype dtype, const std::vector<uint64_t>& tensors,
        std::mt19937_64& random)
      : random_(random), dtype_(dtype), tensors_(tensors), steps_(tensors.size()) {
    for (const uint64_t count : tensors) {
      first_.push_back(numel_);
      numel_ += count;
    }
    for (auto* part : {&p_, &m_, &v_}) part->resize(numel_);
    for (float& value : p_) value = Value();
    kinds_.assign(numel_, kUncovered);
    grad_.resize(numel_ * mlpo::ElementBytes(dtype));
    param_ = grad_;
    std::vector<mlpo_tensor_spec> specs(tensors.size());
    std::vector<std::string> names;
    for (size_t i = 0; i < tensors.size(); ++i) names.push_back("t" + std::to_string(i));
    for (size_t i = 0; i < tensors.size(); ++i) {
      specs[i].struct_size = sizeof specs[i];
      specs[i].name = names[i].c_str();
      specs[i].numel = tensors[i];
    }
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = key.c_str();
    options.numel = numel_;
    options.dtype = dtype;
    options.tensors = specs.data();
    options.tensor_count = static_cast<uint32_t>(specs.size());
    options.initial = p_.data();
    subgroup_ = std::make_unique<mlpo::Subgroup>(client.Register(options));
  }

  void Operate() {
    const uint64_t dice = Below(100);
    if (dice < 35) return Grad();
    if (dice < 55) return Fill();
    if (dice < 60) return GradTwice();
    if (dice < 63) return Discard();
    if (dice < 75) return Read();
    if (dice < 85) return Write();
    Update();
  }
  // An update that was left running.
  void Settle() {
    if (!running_) return;
    running_->Wait();
    running_.reset();
    CheckParameters();
  }
  void CheckAll() {
    Settle();
    Compare(0, numel_, 7);
    CHECK(subgroup_->ReadSteps() == steps_);
  }

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }
  float Value() { return std::normal_distribution<float>(0, 0.1f)(random_); }
  std::pair<uint64_t, uint64_t> Range() {
    const uint64_t first = Below(numel_);
    const uint64_t most = Below(3) == 0 ? numel_ - first : std::min<uint64_t>(numel_ - first, 2000);
    return {first, 1 + Below(most)};
  }
  size_t TensorAt(uint64_t element) const {
    return static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), element) - first_.begin()) - 1;
  }
  int Submit(uint64_t first, uint64_t count, uint32_t kind) {
    try {
      subgroup_->SubmitGrad({{first, count, kind, 0}}).Wait();
      return 0;
    } catch (const mlpo::Error& error) {
      return error.code();
    }
  }

  void Piece(uint64_t first, uint64_t count, uint32_t kind) {
    std::byte* slot = static_cast<std::byte*>(subgroup_->info().grad);
    const size_t size = mlpo::ElementBytes(dtype_);
    for (uint64_t i = first; i < first + count; ++i) {
      mlpo::reference::StoreElement(grad_.data(), dtype_, i, Value());
      kinds_[i] = kind;
    }
    if (kind == MLPO_GRAD_VALUE) std::memcpy(slot + first * size, grad_.data() + first * size, count * size);
    REQUIRE(Submit(first, count, kind) == 0);
  }
  // A random piece of what is not covered; now and then a whole tensor that is left out.
  void Grad() {
    Settle();
    const uint64_t at = Below(numel_);
    const size_t tensor = TensorAt(at);
    const uint64_t tensor_end = first_[tensor] + tensors_[tensor];
    const auto whole = [&] {
      for (uint64_t i = first_[tensor]; i < tensor_end; ++i) {
        if (kinds_[i] != kUncovered) return false;
      }
      return true;
    };
    if (Below(6) == 0 && whole()) return Piece(first_[tensor], tensors_[tensor], MLPO_GRAD_SKIP);
    if (kinds_[at] != kUncovered) return;
    uint64_t end = at + 1;
    const uint64_t most = at + 1 + Below(5000);
    while (end < numel_ && end < most && kinds_[end] == kUncovered) ++end;
    Piece(at, end - at, Below(4) == 0 ? MLPO_GRAD_ZERO : MLPO_GRAD_VALUE);
  }
  // All that is missing.
  void Fill() {
    Settle();
    for (uint64_t first = 0; first < numel_;) {
      uint64_t end = first;
      while (end < numel_ && kinds_[end] == kUncovered) ++end;
      if (end > first) Piece(first, end - first, MLPO_GRAD_VALUE);
      first = std::max(end, first + 1);
    }
  }
  void GradTwice() {
    Settle();
    const uint64_t at = Below(numel_);
    if (kinds_[at] != kUncovered) CHECK(Submit(at, 1, MLPO_GRAD_ZERO) == MLPO_ERR_COVERAGE);
  }
  void Discard() {
    Settle();
    subgroup_->Discard();
    kinds_.assign(numel_, kUncovered);
  }
  void Read() {
    if (Below(2)) Settle();  // else behind the update that runs
    const auto [first, count] = Range();
    Compare(first, count, 1 + static_cast<uint32_t>(Below(7)));
  }
  void Compare(uint64_t first, uint64_t count, uint32_t parts) {
    std::vector<float> read[3];
    const std::vector<float>* expected[3] = {&p_, &m_, &v_};
    for (auto& part : read) part.resize(count);
    subgroup_->ReadState(first, count, parts & 1 ? read[0].data() : nullptr, parts & 2 ? read[1].data() : nullptr,
                         parts & 4 ? read[2].data() : nullptr);
    for (int i = 0; i < 3; ++i) {
      if (!(parts & (1u << i))) continue;
      CAPTURE(first, count, i);
      REQUIRE(std::memcmp(read[i].data(), expected[i]->data() + first, count * sizeof(float)) == 0);
    }
  }
  void Write() {
    if (Below(2)) Settle();
    const auto [first, count] = Range();
    const uint32_t parts = 1 + static_cast<uint32_t>(Below(7));
    std::vector<float>* state[3] = {&p_, &m_, &v_};
    for (int i = 0; i < 3; ++i) {
      if (!(parts & (1u << i))) continue;
      for (uint64_t k = first; k < first + count; ++k) (*state[i])[k] = i == 2 ? std::abs(Value()) : Value();
    }
    subgroup_->WriteState(first, count, parts & 1 ? p_.data() + first : nullptr,
                          parts & 2 ? m_.data() + first : nullptr, parts & 4 ? v_.data() + first : nullptr);
  }
  void Update() {
    Settle();
    const bool complete = std::find(kinds_.begin(), kinds_.end(), kUncovered) == kinds_.end();
    mlpo_update_options options = MLPO_UPDATE_OPTIONS_INIT;
    options.lr = 1e-3 * static_cast<double>(1 + Below(5));
    options.mode = Below(2) ? MLPO_OPTIMIZER_ADAMW : MLPO_OPTIMIZER_ADAM;
    options.grad_scale = Below(2) ? 1 : 0.25;
    mlpo::Request request = subgroup_->SubmitUpdate(options);
    if (!complete) {
      try {
        request.Wait();
        FAIL("an update of a window with gaps was accepted");
      } catch (const mlpo::Error& error) {
        CHECK(error.code() == MLPO_ERR_COVERAGE);
      }
      return;
    }
    running_ = std::make_unique<mlpo::Request>(std::move(request));
    Apply({options.lr, options.beta1, options.beta2, options.eps, options.weight_decay, options.grad_scale,
           static_cast<uint32_t>(options.mode), 0, 0});
    if (Below(3) == 0) Settle();
  }
  void Apply(const mlpo_hyper& hyper) {
    for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      const uint64_t end = first_[tensor] + tensors_[tensor];
      if (first_[tensor] < end && kinds_[first_[tensor]] == MLPO_GRAD_SKIP) continue;
      ++steps_[tensor];
      const mlpo::AdamScalars scalars = mlpo::MakeScalars(hyper, steps_[tensor]);
      for (uint64_t i = first_[tensor], next; i < end; i = next) {
        for (next = i + 1; next < end && kinds_[next] == kinds_[i];) ++next;
        mlpo::AdamRange range;
        range.p = &p_[i];
        range.m = &m_[i];
        range.v = &v_[i];
        range.grad = kinds_[i] == MLPO_GRAD_VALUE ? grad_.data() + i * mlpo::ElementBytes(dtype_) : nullptr;
        range.param = param_.data() + i * mlpo::ElementBytes(dtype_);
        range.n = next - i;
        range.grad_dtype = dtype_;
        range.dtype = dtype_;
        mlpo::reference::Adam(scalars, range);
      }
    }
    updated_ = std::move(kinds_);
    kinds_.assign(numel_, kUncovered);
  }
  // In the slot, of all tensors that took part.
  void CheckParameters() const {
    const std::byte* slot = static_cast<const std::byte*>(subgroup_->info().param);
    const size_t size = mlpo::ElementBytes(dtype_);
    for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      const uint64_t first = first_[tensor];
      if (tensors_[tensor] == 0 || updated_[first] == MLPO_GRAD_SKIP) continue;
      CAPTURE(tensor);
      REQUIRE(std::memcmp(slot + first * size, param_.data() + first * size, tensors_[tensor] * size) == 0);
    }
  }

  std::mt19937_64& random_;
  const mlpo_dtype dtype_;
  const std::vector<uint64_t> tensors_;
  std::vector<uint64_t> first_;
  uint64_t numel_ = 0;
  std::vector<int64_t> steps_;
  std::vector<float> p_, m_, v_;
  std::vector<uint32_t> kinds_;    // of the open window, by element
  std::vector<uint32_t> updated_;  // of the last update
  std::vector<std::byte> grad_, param_;
  std::unique_ptr<mlpo::Subgroup> subgroup_;
  std::unique_ptr<mlpo::Request> running_;
};

// Named objects of one rank, and what each must hold.
class ObjectsModel {
 public:
  ObjectsModel(Client& client, std::mt19937_64& random) : client_(client), random_(random) {}

  void Operate() {
    const std::string name = "object " + std::to_string(random_() % 6);
    auto known = objects_.find(name);
    const uint64_t dice = random_() % 10;
    if (dice < 4) {
      std::string content(random_() % 3 ? random_() % 2000 : random_() % 300'000, '\0');
      for (char& c : content) c = static_cast<char>(random_());
      client_.FlushObject(name, content.data(), content.size());
      objects_[name] = std::move(content);
    } else if (known == objects_.end()) {
      CHECK_FALSE(client_.ObjectSize(name));
    } else if (dice == 4) {
      client_.DeleteObject(name);
      objects_.erase(known);
    } else {
      Compare(*known, dice < 6);
    }
  }
  void CheckAll() {
    for (const auto& object : objects_) Compare(object, true);
  }

 private:
  void Compare(const std::pair<const std::string, std::string>& object, bool whole) {
    const std::string& content = object.second;
    const uint64_t first = whole ? 0 : random_() % (content.size() + 1);
    std::string out(whole ? content.size() : random_() % (content.size() - first + 1), '\0');
    REQUIRE(client_.FetchObject(object.first, first, out.size(), out.data()) == content.size());
    CAPTURE(object.first, first, out.size());
    REQUIRE(content.compare(first, out.size(), out) == 0);
  }

  Client& client_;
  std::mt19937_64& random_;
  std::map<std::string, std::string> objects_;
};

void RunMix(const DaemonProcess::Options& options, uint64_t seed) {
  CAPTURE(seed);
  DaemonProcess daemon(options);
  Client client = Connect(daemon.socket());
  std::mt19937_64 random(seed);
  std::vector<std::unique_ptr<Model>> models;
  models.push_back(
      std::make_unique<Model>(client, "bf16", MLPO_BFLOAT16, std::vector<uint64_t>{7000, 1, 9001}, random));
  models.push_back(std::make_unique<Model>(client, "fp32", MLPO_FLOAT32, std::vector<uint64_t>{3, 12'287}, random));
  models.push_back(std::make_unique<Model>(client, "fp16", MLPO_FLOAT16, std::vector<uint64_t>{4096}, random));
  models.push_back(std::make_unique<Model>(client, "tiny", MLPO_BFLOAT16, std::vector<uint64_t>{1, 1, 3}, random));
  const int operations = LongForm() ? 20'000 : 1'000;
  ObjectsModel objects(client, random);
  for (int i = 0; i < operations; ++i) {
    const size_t which = random() % (models.size() + 1);
    which < models.size() ? models[which]->Operate() : objects.Operate();
  }
  for (auto& model : models) model->CheckAll();
  objects.CheckAll();
  const nlohmann::json status = DaemonStatus(daemon.socket());
  CHECK(status.at("lost_wakeups") == 0);
  CHECK(status.at("protocol_errors") == 0);
}

}  // namespace

TEST_CASE("C12_RandomOperationsPoolOfThreeBuffersTwoPaths") { RunMix({.paths = 2, .memory = "147456"}, 1); }
TEST_CASE("C12_RandomOperationsThreadEngine") { RunMix({.paths = 2, .memory = "147456", .engine = "threads"}, 2); }
TEST_CASE("C12_RandomOperationsThreePaths") { RunMix({.paths = 3, .memory = "256KiB"}, 3); }
TEST_CASE("C12_RandomOperationsAllCached") { RunMix({.paths = 1, .memory = "16MiB"}, 4); }
TEST_CASE("C12_RandomOperationsGradientsFlushed") {
  const std::vector<std::string> flushed = {"MLPO_SCHEDULER__GRADIENTS=flushed"};
  RunMix({.paths = 2, .memory = "147456", .environment = flushed}, 5);
  RunMix({.paths = 3, .memory = "256KiB", .engine = "threads", .environment = flushed}, 6);
}

namespace {

// What ranks did to one name, as intervals of a common clock: from before the call to after it.
class History {
 public:
  // A version of all that is there has one length, so that a fetch need not know which one it will get.
  static constexpr size_t kBytes = 150'001;
  static constexpr uint64_t kNothing = 0;  // deleted, or never there

  uint64_t Now() { return ++clock_; }
  void Add(uint64_t version, uint64_t start, uint64_t end) {
    std::lock_guard lock(mutex_);
    changes_[version] = {false, start, end};
  }
  void AddDelete(uint64_t start, uint64_t end) {
    std::lock_guard lock(mutex_);
    changes_[kDeletes + changes_.size()] = {true, start, end};
  }
  // Whether a read in [start, end] may have found the version: it did not begin later, and no change that began after
  // it had ended before the read began. Once all have ended.
  bool Allows(uint64_t version, uint64_t start, uint64_t end) const {
    const auto replaced = [&](const Change& made) {
      return std::any_of(changes_.begin(), changes_.end(),
                         [&](const auto& other) { return other.second.start > made.end && other.second.end < start; });
    };
    if (version != kNothing) {
      const auto made = changes_.find(version);
      return made != changes_.end() && made->second.start < end && !replaced(made->second);
    }
    if (!replaced({true, 0, 0})) return true;  // it was never there
    return std::any_of(changes_.begin(), changes_.end(), [&](const auto& change) {
      return change.second.deletes && change.second.start < end && !replaced(change.second);
    });
  }

 private:
  struct Change {
    bool deletes;
    uint64_t start, end;
  };
  static constexpr uint64_t kDeletes = uint64_t{1} << 62;
  std::atomic<uint64_t> clock_{0};
  std::mutex mutex_;
  std::map<uint64_t, Change> changes_;
};

std::string VersionContent(uint64_t version) {
  std::string content(History::kBytes, '\0');
  std::mt19937_64 random(version);
  for (size_t at = 8; at < content.size(); ++at) content[at] = static_cast<char>(random());
  std::memcpy(content.data(), &version, 8);
  return content;
}

// Ranks that flush, fetch and delete few names at once. Each fetch has one whole version, and one that it may have.
void RunRanks(const DaemonProcess::Options& options, uint64_t seed) {
  constexpr int kRanks = 4;
  constexpr int kNames = 2;
  struct Read {
    uint64_t version, start, end;
    int name;
  };
  DaemonProcess daemon(options);
  const std::string socket = daemon.socket();
  const auto join = [&](int rank) {
    mlpo_connect_options connect = MLPO_CONNECT_OPTIONS_INIT;
    connect.socket = socket.c_str();
    connect.job = "ranks";
    connect.rank = rank;
    connect.world_size = kRanks + 1;
    return Client::Connect(connect);
  };
  auto keeper = std::make_unique<Client>(join(kRanks));  // the job lives from the first operation to the last
  History histories[kNames];
  std::vector<Read> reads[kRanks];
  std::atomic<uint64_t> next_version{1};
  std::atomic<int> torn{0}, unexpected{0};
  const int operations = LongForm() ? 5'000 : 100;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937_64 random(seed * 100 + static_cast<uint64_t>(rank));
      Client client = join(rank);
      std::string out(History::kBytes, '\0');
      for (int i = 0; i < operations; ++i) {
        const int name = static_cast<int>(random() % kNames);
        const std::string text = "name" + std::to_string(name);
        History& history = histories[name];
        const uint64_t dice = random() % 10;
        const uint64_t version = dice < 4 ? next_version++ : 0;
        const std::string content = dice < 4 ? VersionContent(version) : "";
        const uint64_t start = history.Now();
        try {
          if (dice < 4) {
            client.FlushObject(text, content.data(), content.size());
            history.Add(version, start, history.Now());
          } else if (dice == 4) {
            client.DeleteObject(text);
            history.AddDelete(start, history.Now());
          } else {
            client.FetchObject(text, 0, out.size(), out.data());
            const uint64_t end = history.Now();
            uint64_t found;
            std::memcpy(&found, out.data(), 8);
            if (out != VersionContent(found)) ++torn;
            reads[rank].push_back({found, start, end, name});
          }
        } catch (const mlpo::Error& error) {
          if (error.code() != -ENOENT) ++unexpected;
          reads[rank].push_back({History::kNothing, start, history.Now(), name});
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  keeper.reset();
  CHECK(torn == 0);
  CHECK(unexpected == 0);
  int impossible = 0, found = 0;
  for (const auto& of_rank : reads) {
    for (const Read& read : of_rank) {
      found += read.version != History::kNothing;
      impossible += !histories[read.name].Allows(read.version, read.start, read.end);
    }
  }
  CHECK(impossible == 0);
  CHECK(found > operations / 2);
  const nlohmann::json status = DaemonStatus(daemon.socket());
  CHECK(status.at("lost_wakeups") == 0);
  CHECK(status.at("protocol_errors") == 0);
  CHECK(daemon.ScratchGone());
}

}  // namespace

TEST_CASE("Objects.RanksPoolOfThreeBuffers") { RunRanks({.paths = 2, .memory = "147456"}, 1); }
TEST_CASE("Objects.RanksAllCachedThreadEngine") { RunRanks({.paths = 1, .memory = "16MiB", .engine = "threads"}, 2); }
