// Block, who has blocks (Subgroup; Object in object.h), and Op: what the scheduler moves. Data only; scheduler.h has
// the rules.
//
// Owner: the data thread. While a block is kWorking, or its checksums are being compared or formed, workers use
// `buffer`, `filled` and the Op read-only, and the checksums of the piece that they have.
#pragma once

#include <boost/intrusive/list.hpp>
#include <boost/intrusive/set.hpp>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/scheduler/block_layout.h"
#include "daemon/scheduler/step_record.h"
#include "daemon/scheduler/window.h"
#include "daemon/types/ids.h"
#include "daemon/types/request.h"
#include "proto/abi.h"
#include "proto/tensor.h"

namespace mlpo {

struct Block;
struct BlockOwner;
struct Object;
struct Op;
struct Pin;
struct Session;
struct Subgroup;

enum class BlockState : uint8_t {
  kAway,      // no buffer; its state is in its extent, or all zero
  kFetching,  // a read into its buffer is in flight
  kClean,     // in its buffer, and the same in its extent (or all zero)
  kWorking,   // workers use its buffer
  kDirty,     // in its buffer only
  kFlushing,  // a write of its buffer is in flight
};

struct Extent {
  PathIndex path = kNone;
  uint64_t offset = 0;  // bytes in the extents of the file
  uint64_t bytes = 0;
  FileId file = 0;  // of the session, on that path
};

// What of a block was not as it had been written, and is read again, into its place.
struct WrongPieces {
  std::vector<uint8_t> arrays;  // by piece: bits; 0: the piece was right, and its work is done
  uint64_t sequence = 0;        // of the operation whose work that is; 0: none's, the block was to be moved
  std::vector<ByteSpan> spans;
  size_t next = 0;  // of spans: the one that is being read
};

struct Block {
  BlockOwner* owner = nullptr;
  uint32_t index = 0;  // in the owner
  BlockState state = BlockState::kAway;
  uint8_t nonzero = 0;      // parts whose content is not known to be all zero; only these are ever read or written
  uint8_t filled = 0;       // parts that the buffer holds; workers zero the others first
  bool ahead = false;       // fetched before anybody asked, and not used since
  bool leaves = false;      // fetched to be written to another path, and not there yet
  bool stays = false;       // when it was to leave its path it could not be read, or was wrong, twice
  bool grad_saved = false;  // the extent has the gradient
  bool lone_grad = false;   // its buffer has the gradient only, which is nowhere else; its state is in its extent
  uint8_t summed = 0;       // parts of which `checksums` are those of its content; of all that an extent has
  uint8_t unchecked = 0;    // parts that the buffer has from an extent and that have not been compared with them
  bool form = false;        // the work that it is in forms them anew
  bool doubtful = false;    // its extent was wrong when it was read last, twice
  bool read_twice = false;  // what was wrong when it was to be moved has been read again, and not been compared yet
  bool damaged = false;     // its content is lost: nothing is given out until all of the subgroup has been written
  uint64_t first = 0;       // element of the subgroup, or byte of the object
  uint64_t count = 0;
  uint32_t epoch = 0;   // of its last update
  int64_t used_ns = 0;  // when work on it last ended
  BufferIndex buffer = kNone;
  Extent extent;
  Op* want = nullptr;                     // the running operation that still needs this block
  Op* flush_for = nullptr;                // the running TAKE that waits for its flush
  Pin* pin = nullptr;                     // what a checkpoint has of its extent (state_save.h)
  std::vector<PieceChecksums> checksums;  // by piece; empty as long as none were formed
  std::unique_ptr<WrongPieces> wrong;

  boost::intrusive::list_member_hook<> list_hook;    // in one of the lists of blocks that are not wanted
  boost::intrusive::set_member_hook<> pending_hook;  // kAway and wanted
};

// A range of an UPDATE that has one tensor and one kind of gradient.
struct Segment {
  uint64_t first = 0;  // elements of the subgroup
  uint64_t end = 0;
  uint32_t kind = 0;  // MLPO_PIECE_VALUE or MLPO_PIECE_ZERO
  int64_t step = 0;   // of this update, from 1
};

// An accepted request that is not answered yet.
struct Op {
  Request request;
  Session* session = nullptr;
  BlockOwner* owner = nullptr;
  uint64_t sequence = 0;
  uint32_t first_block = 0;  // operations on a range: the blocks they touch
  uint32_t end_block = 0;
  uint32_t next_fill = 0;  // RESTORE: blocks from here on have not been wanted yet
  int64_t accepted_ns = 0;
  int64_t window_ns = 0;                     // UPDATE: when the window that it ends began; 0: it was given no gradient
  uint32_t left = 0;                         // blocks not done
  uint32_t active = 0;                       // of these, being fetched or worked on
  bool updated_any = false;                  // UPDATE: a block of it has been updated
  Failure failure;                           // the first
  std::vector<Segment> segments;             // UPDATE: in ascending order, SKIP left out; GRAD: VALUE to be copied
  StatWork stats;                            // GRAD
  std::shared_ptr<Window::Results> results;  // GRAD: where its chunks' statistics go
  bool stats_running = false;                // GRAD that is in the queue
  bool begun = false;

  uint16_t kind() const { return request.submission.op; }
  uint32_t priority() const { return kind() == MLPO_OP_UPDATE ? request.submission.arg : 0; }
  Subgroup* subgroup() const;  // nullptr if the owner is an object
  Object* object() const;      // nullptr if it is a subgroup
  // GRAD: where the gradient is; UPDATE: where the parameters go. `own`: in a slot of the subgroup's own.
  std::byte* InSlot(std::byte* own) const;
};

// What is made of blocks, and the operations on it that need them: one runs at a time, the front of the queue.
struct BlockOwner {
  explicit BlockOwner(Session* s) : session(s) {}
  BlockOwner(const BlockOwner&) = delete;  // blocks point to it
  BlockOwner& operator=(const BlockOwner&) = delete;
  virtual ~BlockOwner() = default;
  virtual Subgroup* subgroup() { return nullptr; }
  virtual Object* object() { return nullptr; }
  virtual std::string Name() const = 0;  // for messages

  Session* const session;  // whose files its extents are in
  std::deque<Block> blocks;
  std::deque<std::unique_ptr<Op>> queue;
  uint64_t in_flight = 0;  // transfers of its blocks, and work on them
  bool ending = false;     // its buffers and extents go as soon as nothing uses them
};

using BlockList = boost::intrusive::list<
    Block, boost::intrusive::member_hook<Block, boost::intrusive::list_member_hook<>, &Block::list_hook>>;

inline Subgroup* Op::subgroup() const { return owner->subgroup(); }
inline Object* Op::object() const { return owner->object(); }

struct Subgroup : BlockOwner {
  Subgroup(Session* s, SubgroupSpec p) : BlockOwner(s), spec(std::move(p)), window(spec.numel, &spec.tensors) {}
  Subgroup* subgroup() override { return this; }
  // A long key is cut in the middle: messages are short, and end with what to do.
  std::string Name() const override {
    constexpr size_t kMost = 40, kEnd = 19;
    const std::string& key = spec.key;
    const std::string shown = key.size() <= kMost ? key : key.substr(0, kEnd) + ".." + key.substr(key.size() - kEnd);
    return "subgroup '" + shown + "'";
  }

  SubgroupSpec spec;
  Window window;           // borrows spec.tensors
  PathIndex home = kNone;  // policy kProportional: the path that all its blocks go to
  uint32_t epoch = 0;
  uint32_t grads_running = 0;    // of the open window
  Failure grad_lost;             // why a gradient of the open window could not be kept
  uint32_t grads_queued = 0;     // of kept gradients, discarded ones too
  std::optional<uint64_t> slot;  // offset in the lent area of the slot that it uses
  bool update_queued = false;    // there is never more than one
  uint32_t restores_queued = 0;  // RESTOREs that have not ended: each writes parameters to the slot
  bool params_valid = false;     // the slot holds the last update's parameters
  bool torn = false;
  bool unmade = false;         // it is torn, by a RESTORE that has begun and not succeeded: nothing of its state counts
  uint32_t damaged = 0;        // blocks that are damaged or doubtful
  mlpo_hyper torn_hyper = {};  // of the UPDATE that failed in the middle
  uint16_t torn_flags = 0;
  Coverage torn_written;  // what WRITE_STATE has written since, or since it has such blocks
  SubgroupSteps steps;
  int64_t window_ns = 0;                   // when its window began; 0: there is none
  std::vector<std::unique_ptr<Op>> grads;  // that workers have; those of gradients that are kept are in the queue
  std::vector<uint64_t> covered;           // kept gradients: elements of each block that pieces name
};

inline std::byte* Op::InSlot(std::byte* own) const {
  const SubgroupSpec& spec = subgroup()->spec;
  if (spec.lent == nullptr) return own;
  return spec.lent + request.submission.staging_offset + MLPO_SLOT_HEADER_BYTES;
}

}  // namespace mlpo
