// Manifest: what a part of a checkpoint holds and where. Its file is the part's commit: without it there is no part.
//
// Two JSON documents, a line each: the head, which says whose part it is and how long the body is and what its hash,
// and the body. So whether a checkpoint is complete needs the first 4 KiB of each manifest, and a manifest that was cut
// or changed is noticed. design: daemon/checkpoint/README.md.
//
// No state; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/checkpoint/names.h"
#include "daemon/types/tensor_shard.h"
#include "proto/abi.h"
#include "proto/tensor.h"

namespace mlpo {

inline constexpr size_t kMaxHeadBytes = 4096;                           // of the first line, with its end
inline constexpr uint64_t kMaxManifestBytes = MLPO_MAX_MANIFEST_BYTES;  // 10^12 bytes of state need about 5 MB
inline constexpr uint32_t kMaxWorldSize = 1u << 24;
inline constexpr uint64_t kPartHeaderBytes = 4096;  // at the beginning of each data file

struct PartHead {
  std::string job;
  std::string tag;
  uint64_t step = 0;
  uint32_t world_size = 1;
  uint32_t rank = 0;
  AttemptId attempt;
  int64_t started_unix_ns = 0;
  uint64_t body_bytes = 0;  // without the end of its line
  uint64_t body_xxh3 = 0;
};

// Whose working file it was, before it was handed over to the checkpoint.
struct WorkingOrigin {
  std::string node;
  uint32_t daemon_uid = 0;
  uint32_t client_uid = 0;
  std::string job;
  uint32_t rank = 0;
  uint64_t generation = 0;
  bool operator==(const WorkingOrigin&) const = default;
};

struct PartFile {
  uint32_t index = 0;  // its name is DataName(attempt, index)
  uint64_t bytes = 0;
  bool working = false;  // it was a working file, whose header it has; else its header is part_header.h's
  WorkingOrigin origin;  // of a working file
};

struct PartTensor {
  std::string name;  // any bytes
  TensorShard shard;
  int64_t step = 0;
};

// What is stored of a block: of its three arrays of FP32 values none, the master parameters, or all; each padded to
// MLPO_ALIGN. What is not stored is all zero.
inline constexpr uint8_t kStoredNothing = 0;
inline constexpr uint8_t kStoredMaster = 1;
inline constexpr uint8_t kStoredAll = 3;

struct PartBlock {
  uint64_t first = 0;  // element of the subgroup
  uint64_t count = 0;
  uint32_t file = 0;    // place in Manifest::files
  uint64_t offset = 0;  // bytes in that file
  uint8_t stored = kStoredNothing;
  uint64_t hash = 0;  // block_hash.h, if Manifest::hashed
};

struct PartSubgroup {
  std::string key;  // any bytes
  mlpo_dtype dtype = MLPO_FLOAT32;
  mlpo_dtype grad_dtype = MLPO_FLOAT32;
  uint64_t numel = 0;
  std::vector<PartTensor> tensors;  // one after another
  std::vector<PartBlock> blocks;    // likewise
};

struct Manifest {
  PartHead head;
  bool hashed = true;  // its blocks have hashes
  std::vector<PartFile> files;
  std::vector<PartSubgroup> subgroups;
};

// Bytes of one array of a block, and of all that is stored of it.
inline uint64_t StoredArrayBytes(uint64_t elements) {
  return (elements * 4 + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN;
}
inline uint64_t StoredBytes(uint64_t elements, uint8_t stored) { return stored * StoredArrayBytes(elements); }
inline uint64_t StoredBytes(const PartBlock& block) { return StoredBytes(block.count, block.stored); }

// The file's text. Sets head.body_bytes and head.body_xxh3. EFBIG beyond kMaxManifestBytes.
Result<std::string> ManifestText(Manifest* manifest);

// From the beginning of a file: at least its first line. `who` names the file for messages.
Result<PartHead> ParseHead(std::string_view text, const std::string& who);
// Of the whole file, as far as the head tells: what its size must be.
Result<uint64_t> ManifestFileBytes(std::string_view beginning, const std::string& who);
// The whole text. EINVAL says what is wrong; everything in the result keeps its bounds: names, shapes, that tensors and
// blocks follow each other and make up their subgroup, that blocks lie inside their files. Whatever the text, it needs
// no more memory than the result, which is a few times the text at most.
Result<Manifest> ParseManifest(std::string_view text, const std::string& who);

}  // namespace mlpo
