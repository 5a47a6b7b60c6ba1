// StorageFault: a directory on storage that a test can make fail, the way real storage does.
//
// What it needs (root, loop devices, /dev/fuse) may not be there: then reason() says so. Everything goes at the end of
// its life. The directory is there and works until Arm(). One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace mlpo::test {

// What the fault may do to what is there: the state of a training with more of it than memory, or a checkpoint.
enum class Harm : uint8_t {
  kNone,       // all goes on, to the bit
  kMayLose,    // what needs something that is lost fails, naming place and cause; or nothing was needed
  kMustLose,   // training: within three steps one fails so; a checkpoint that is written there fails
  kMustNotice  // the same when it is read, and only a checksum can tell
};

class StorageFault {
 public:
  virtual ~StorageFault() = default;

  // "", or why this machine does not have it.
  const std::string& reason() const { return reason_; }
  const std::string& directory() const { return directory_; }
  // From now on it fails. Throws std::runtime_error where that does not work.
  virtual void Arm() = 0;
  // Whether it has met a request since: asked of the storage, not of the daemon.
  virtual bool Struck() = 0;
  // As before, with all that was written; false if that cannot be.
  virtual bool Repair() = 0;
  // Calls take as long as it is armed, and end when it is repaired.
  virtual bool Hangs() const { return false; }
  // Whether a read or a write is in it now.
  virtual bool HoldsTransfers() { return false; }

  StorageFault(const StorageFault&) = delete;
  StorageFault& operator=(const StorageFault&) = delete;

 protected:
  StorageFault() = default;
  std::string reason_;
  std::string directory_;
};

struct FaultKind {
  std::string_view name;
  std::string_view op;      // what it meets: "read", "write", "fsync"; "all" of them
  Harm harm;                // to a path
  Harm saving;              // to a checkpoint that is saved there while it lasts
  std::string_view states;  // one of these is that of a path that it has met, in status, while it lasts; "": any
  bool quick;               // made in less than a second, and over in a few
  // nullptr: never to be had here, and `never` says why.
  std::unique_ptr<StorageFault> (*make)(uint64_t seed);
  std::string_view never;
  bool for_good = false;  // what hangs is let go only after what waits for it has failed
};
const std::vector<FaultKind>& FaultKinds();
// nullptr if there is none of the name.
const FaultKind* FindFault(std::string_view name);

}  // namespace mlpo::test
