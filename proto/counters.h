/* What a running daemon tells without being asked: the file "<socket>.counters". FORMAT.md, section 9, has the prose.
 *
 * The daemon alone writes it, in place, a few times a second, from a thread that waits for no other. Every field of 8
 * bytes is 8-byte aligned. Texts are UTF-8, cut to fit, and filled with zeros: at least one. */
#ifndef MLPO_PROTO_COUNTERS_H_
#define MLPO_PROTO_COUNTERS_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define MLPO_COUNTERS_SUFFIX ".counters"                /* behind the session socket's path */
#define MLPO_COUNTERS_MAGIC 0x52544e434f504c4dull       /* "MLPOCNTR" */
#define MLPO_COUNTERS_VERSION 1u                        /* another number: another layout */
#define MLPO_COUNTERS_MAX_BYTES (1u << 20)              /* of the file */
#define MLPO_COUNTERS_PERIOD_NS 250000000               /* between two writes */
#define MLPO_COUNTERS_LATE_NS (5 * (int64_t)1000000000) /* a beat older than this: the thread is stuck */

enum mlpo_counters_state {
  MLPO_COUNTERS_STARTING = 0,
  MLPO_COUNTERS_READY = 1,
  MLPO_COUNTERS_DRAINING = 2,
};

enum mlpo_counters_path_state {
  MLPO_COUNTERS_HEALTHY = 0,
  MLPO_COUNTERS_SUSPECT = 1,
  MLPO_COUNTERS_QUARANTINED = 2,
  MLPO_COUNTERS_PROBING = 3,
  MLPO_COUNTERS_FULL = 4,
  MLPO_COUNTERS_READ_ONLY = 5,
  MLPO_COUNTERS_DISABLED = 6,
};

/* At the start of the file; `paths` records follow. Times are CLOCK_MONOTONIC in ns, totals count from the start. */
struct mlpo_counters {
  uint64_t magic;
  uint32_t version;
  uint32_t bytes;    /* of the file: header and paths */
  uint64_t sequence; /* odd while the file is being written */
  int32_t pid;       /* for display: of the daemon's own pid namespace */
  uint32_t paths;
  int64_t started_ns;
  int64_t written_ns;
  int64_t main_beat_ns; /* when the main thread last was in its loop */
  int64_t data_beat_ns; /* when the data thread last was in its loop */
  uint32_t state;       /* enum mlpo_counters_state */
  uint32_t adam_workers;
  uint64_t sessions;
  uint64_t parameters;
  uint64_t protocol_errors;
  uint64_t lost_wakeups;
  uint64_t arenas_bytes;
  uint64_t arenas_limit_bytes;
  uint64_t pool_bytes;
  uint64_t pool_buffer_bytes;
  uint64_t cached_blocks;
  uint64_t dirty_blocks;
  uint64_t free_blocks;
  char daemon_version[32];
  char node[136];
};

static_assert(sizeof(struct mlpo_counters) == 328, "layout");

struct mlpo_counters_path {
  char name[136];
  char directory[256];
  uint32_t state;     /* enum mlpo_counters_path_state */
  uint32_t engine;    /* 0 io_uring, 1 threads */
  uint32_t direct_io; /* 1 if O_DIRECT works */
  uint32_t in_flight; /* transfers */
  uint64_t read_bytes;
  uint64_t written_bytes;
  uint64_t read_bytes_per_s;
  uint64_t write_bytes_per_s;
  uint64_t scratch_bytes;
  uint64_t checkpoint_bytes;
  uint64_t read_errors;
  uint64_t write_errors;
};

static_assert(sizeof(struct mlpo_counters_path) == 472, "layout");

#endif /* MLPO_PROTO_COUNTERS_H_ */
