// Object: one version of a named object of a job; ObjectStore: all that a job has. Data only.
//
// A version is filled by one session's FLUSH, in pieces that follow each other, and is read only after that: COMMIT
// gives it the name, and takes it from the version that had it. It goes when it has no name, no handle and no operation
// any more: so who reads a version reads it to its end, whatever becomes of its name.
//
// Small versions are kept in memory whole, as long as a budget lasts; others are made of blocks that each fill a
// buffer, are placed, kept and moved like those of subgroups, and take an extent of their own length.
//
// Owner: the data thread. Workers use a working block's buffer as block.h says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/scheduler/block.h"
#include "daemon/scheduler/session.h"

namespace mlpo {

struct ObjectStore;

struct Object : BlockOwner {
  Object(ObjectStore* s, std::string n, uint64_t b);
  Object* object() override { return this; }
  std::string Name() const override;

  ObjectStore* const store;
  const std::string name;
  const uint64_t bytes;
  uint64_t received = 0;          // bytes that FLUSH's pieces have named so far
  uint64_t read_until = 0;        // where FETCH's last piece ended
  std::vector<std::byte> memory;  // all of it, if `small`
  bool small = false;
  bool counted = false;  // in the store's wanted_bytes
  bool named = false;    // it is what the name stands for
  uint32_t handles = 0;
  Failure failure;  // why this version can never be committed
};

// Has a session's files, extents and place in the order of sessions; made by a job's first object and gone with its
// last.
struct ObjectStore : Session {
  using Session::Session;
  uint32_t uid = 0;
  std::string job_name;
  std::map<std::string, Object*, std::less<>> names;
  std::map<const Object*, std::unique_ptr<Object>> objects;
  uint64_t wanted_bytes = 0;    // of the extents of all objects, those that have not come included
  uint64_t room_bytes = 0;      // what the paths have been asked for and have
  std::deque<Object*> waiting;  // whose OPEN waits for room, in their order; they are not in wanted_bytes yet
  bool asking = false;          // for the front's: one question at a time, whatever clients do
  bool has_files = false;       // or has asked for them
};

inline Object::Object(ObjectStore* s, std::string n, uint64_t b)
    : BlockOwner(s), store(s), name(std::move(n)), bytes(b) {}

}  // namespace mlpo
