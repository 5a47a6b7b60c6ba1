/* The two shared areas of a session's ring, and a slot's header. FORMAT.md has the prose, spsc_ring.hpp the cursors.
 *
 * Client area (a memfd, written by the client only, read by the daemon):
 *   0      struct mlpo_client_lines
 *   4096   submissions[entries], then hyper[entries]; both at the offsets that WELCOME gives
 * Daemon area (a memfd, written by the daemon only, mapped read-only by the client):
 *   0      struct mlpo_daemon_lines
 *   4096   completions[entries], then errors[entries]; both at the offsets that WELCOME gives
 *
 * Indices are free-running uint32; an entry's place is index & (entries - 1). */
#ifndef MLPO_PROTO_RING_H_
#define MLPO_PROTO_RING_H_

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/abi.h"
#include "proto/command.h"

#define MLPO_LINE 128 /* bytes; two cache lines, because of adjacent-line prefetch */
#define MLPO_RING_HEADER_BYTES 4096

struct mlpo_client_lines {
  uint32_t submission_tail; /* stored by the client after the entries before it are written */
  uint8_t pad0[MLPO_LINE - 4];
  uint32_t completion_head; /* stored by the client after the entries before it are read */
  uint8_t pad1[MLPO_LINE - 4];
  uint32_t completion_sleepers; /* how many client threads wait in futex(completion_tail) */
  uint8_t pad2[MLPO_LINE - 4];
};

static_assert(sizeof(struct mlpo_client_lines) == 384, "layout");
static_assert(offsetof(struct mlpo_client_lines, submission_tail) == 0, "layout");
static_assert(offsetof(struct mlpo_client_lines, completion_head) == 128, "layout");
static_assert(offsetof(struct mlpo_client_lines, completion_sleepers) == 256, "layout");

struct mlpo_daemon_lines {
  uint32_t submission_head; /* stored by the daemon after it copied the entries before it */
  uint8_t pad0[MLPO_LINE - 4];
  uint32_t completion_tail; /* stored by the daemon after the entries before it are written; the futex word */
  uint8_t pad1[MLPO_LINE - 4];
  uint32_t doorbell_wanted; /* 1 while the daemon sleeps: the client then writes the doorbell eventfd */
  uint8_t pad2[MLPO_LINE - 4];
  uint32_t state;               /* enum mlpo_session_state; changes are followed by a wake of completion_tail */
  uint32_t checkpoint_requests; /* how often somebody has asked for a checkpoint; nobody is woken */
  uint8_t pad3[MLPO_LINE - 8];
};

static_assert(sizeof(struct mlpo_daemon_lines) == 512, "layout");
static_assert(offsetof(struct mlpo_daemon_lines, submission_head) == 0, "layout");
static_assert(offsetof(struct mlpo_daemon_lines, completion_tail) == 128, "layout");
static_assert(offsetof(struct mlpo_daemon_lines, doorbell_wanted) == 256, "layout");
static_assert(offsetof(struct mlpo_daemon_lines, state) == 384, "layout");
static_assert(offsetof(struct mlpo_daemon_lines, checkpoint_requests) == 388, "layout");

enum mlpo_session_state {
  MLPO_SESSION_RUNNING = 0,
  MLPO_SESSION_DRAINING = 1, /* the daemon is stopping: what is in the ring finishes, new work gets ESHUTDOWN */
  MLPO_SESSION_ENDED = 2,    /* no completion will follow; the socket says why */
};

/* In front of every slot, in the arena. */
struct mlpo_slot_header {
  uint64_t epoch; /* stored by the daemon (release) after all parameters of that epoch */
  uint8_t pad[MLPO_SLOT_HEADER_BYTES - 8];
};

static_assert(sizeof(struct mlpo_slot_header) == 128, "layout");
static_assert(offsetof(struct mlpo_slot_header, epoch) == 0, "layout");

#endif /* MLPO_PROTO_RING_H_ */
