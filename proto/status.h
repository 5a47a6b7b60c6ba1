/* Status codes of completions, control frames and the C API.
 *
 * 0 is success. A negative value above -4096 is a negated errno of the reporting side, a value below it one of the
 * codes here. They are part of the protocol: values are never reused, new ones are added at the end. */
#ifndef MLPO_PROTO_STATUS_H_
#define MLPO_PROTO_STATUS_H_

#include <stdint.h>

enum mlpo_status {
  MLPO_OK = 0,
  MLPO_E_EPOCH = -4097,      /* the epoch is not stored + 1: a repeated, reordered or stale submission */
  MLPO_E_COVERAGE = -4098,   /* gradient pieces overlap, leave a gap, or skip part of a tensor */
  MLPO_E_NOT_FINITE = -4099, /* UPDATE on a gradient recorded as not finite, without MLPO_UPDATE_APPLY_NONFINITE */
  MLPO_E_TORN = -4100,       /* the subgroup is partly updated: repeat the identical UPDATE, or write its state */
  MLPO_E_SLOT_BUSY = -4101,  /* the daemon has the slot: an UPDATE of it is queued or running */
  MLPO_E_PROTOCOL = -4102,   /* the peer broke the protocol; the session has ended */
  MLPO_E_VERSION = -4103,    /* no common protocol version or a required feature is missing */
  MLPO_E_QUOTA = -4104,      /* a quota or limit of the daemon; the text has need and limit */
  MLPO_E_IO = -4105,         /* storage failed; the error record names path, block and errno */
  MLPO_E_FORKED = -4106,     /* the client was made before fork(); this process must connect itself */
  MLPO_E_CLOSED = -4107,     /* the client was closed */
  MLPO_E_DAEMON_DIED = -4108 /* the daemon went away without a word */
};

/* The lowest code in use, for range checks. */
#define MLPO_STATUS_MIN (-4108)

#endif /* MLPO_PROTO_STATUS_H_ */
