// Checkpoints in tests: one rank's save and restore, by the C API.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mlpo/client.hpp>
#include <string>

namespace mlpo::test {

// For the files of a save to be made, or a checkpoint to be found.
inline constexpr Timeout kBeginPatience = std::chrono::seconds(60);

// Of one client at a time. The handle is the daemon's: nothing happens at the end of this one's life.
class Save {
 public:
  // Makes the files; throws what it is refused with. `attempt`: 16 bytes; nullptr: the daemon chooses.
  Save(const Client& client, const std::string& directory, const std::string& tag, uint64_t step,
       bool overwrite = false, const uint8_t* attempt = nullptr)
      : client_(client.get()) {
    struct mlpo_checkpoint_options options = MLPO_CHECKPOINT_OPTIONS_INIT;
    options.directory = directory.c_str();
    options.tag = tag.c_str();
    options.step = step;
    options.attempt = attempt;
    options.overwrite = overwrite ? 1 : 0;
    struct mlpo_checkpoint_info info = {};
    info.struct_size = sizeof info;
    Check(mlpo_checkpoint_begin(client_, &options, kBeginPatience.count(), &info));
    handle_ = info.handle;
  }
  // Ends when the state is as it will be saved.
  Request Take() { return Submit(mlpo_checkpoint_take); }
  // Ends when this rank's part is durable; its value is 1 if those of all ranks are.
  Request Saved() { return Submit(mlpo_checkpoint_saved); }
  // Nothing of it stays, unless it has ended.
  void Abandon() {
    const int code = mlpo_checkpoint_abandon(client_, handle_, kBeginPatience.count());
    if (code != -EBADF) Check(code);
  }

 private:
  Request Submit(decltype(mlpo_checkpoint_take)* step) {
    mlpo_request* request = nullptr;
    Check(step(client_, handle_, MLPO_FOREVER, &request));
    return Request(request);
  }

  mlpo_client* const client_;
  uint32_t handle_ = 0;
};

// The client lives longer.
class Restoring {
 public:
  // Finds it; throws what it is refused with: -ENOENT, no complete one. `tag` "": the newest.
  Restoring(const Client& client, const std::string& directory, const std::string& tag) : client_(client.get()) {
    struct mlpo_restore_info info = {};
    info.struct_size = sizeof info;
    Check(mlpo_restore_begin(client_, directory.c_str(), tag.empty() ? nullptr : tag.c_str(), nullptr,
                             kBeginPatience.count(), &info));
    handle_ = info.handle;
    step_ = info.step;
    tag_ = info.tag;
  }
  ~Restoring() {
    // After an error; whether it still knows the handle does not matter then.
    if (handle_ != 0) (void)mlpo_restore_end(client_, handle_, kBeginPatience.count());
  }
  Restoring(const Restoring&) = delete;
  Restoring& operator=(const Restoring&) = delete;

  uint64_t step() const { return step_; }
  const std::string& tag() const { return tag_; }
  Request Submit(Subgroup& subgroup) {
    mlpo_request* request = nullptr;
    Check(mlpo_submit_restore(subgroup.get(), handle_, MLPO_FOREVER, &request));
    return Request(request);
  }
  // When all of them have ended.
  void End() {
    const uint32_t handle = handle_;
    handle_ = 0;
    Check(mlpo_restore_end(client_, handle, kBeginPatience.count()));
  }

 private:
  mlpo_client* const client_;
  uint32_t handle_ = 0;
  uint64_t step_ = 0;
  std::string tag_;
};

}  // namespace mlpo::test
