/* Version, feature bits and limits that both ends agree on. FORMAT.md has the prose.
 *
 * All integers are little endian, in natural alignment. A field named `reserved` is 0 when sent; a receiver that finds
 * another value there refuses the frame or submission. */
#ifndef MLPO_PROTO_ABI_H_
#define MLPO_PROTO_ABI_H_

#include <stdint.h>

#define MLPO_MAGIC 0x4f504c4du /* "MLPO" */
#define MLPO_ABI_MAJOR 1u      /* must be equal */
#define MLPO_ABI_MINOR 0u      /* the smaller of the two is spoken */

/* Feature bits. HELLO carries those the client offers and those it requires; WELCOME the ones in force. */
#define MLPO_FEATURE_UPDATE 1ull   /* GRAD, UPDATE, DISCARD, READ_STATE, WRITE_STATE */
#define MLPO_FEATURE_OBJECTS 2ull  /* FETCH, FLUSH, DELETE */
#define MLPO_FEATURE_SNAPSHOT 4ull /* SNAPSHOT and checkpoints */
#define MLPO_FEATURE_KEEP 8ull     /* REGISTER_KEEP, LEND, GRAD with KEEP, UPDATE with OUTPUT */
#define MLPO_FEATURES_HERE (MLPO_FEATURE_UPDATE | MLPO_FEATURE_OBJECTS | MLPO_FEATURE_SNAPSHOT | MLPO_FEATURE_KEEP)

#define MLPO_MAX_JOB 128             /* bytes of a job's name, without terminator */
#define MLPO_MAX_FRAME 65536         /* bytes of a control frame */
#define MLPO_MAX_FRAME_FDS 8         /* descriptors in a control frame */
#define MLPO_MIN_RING_ENTRIES 8u     /* submissions; a power of two */
#define MLPO_MAX_RING_ENTRIES 65536u /* submissions; a power of two */
#define MLPO_SLOT_HEADER_BYTES 128
#define MLPO_SLOT_ALIGN 64 /* of slots in the lent area, and of all regions of slots */
#define MLPO_ALIGN 4096    /* of slots, extents and everything that is transferred */
#define MLPO_BOOT_ID_BYTES 16

/* Checkpoints. */
#define MLPO_MAX_TAG 128        /* bytes of a tag, without terminator */
#define MLPO_MAX_DIRECTORY 4096 /* bytes of the name of a directory of checkpoints, without terminator */
#define MLPO_ATTEMPT_BYTES 16
#define MLPO_MAX_RESTORE_FILES 4096u       /* descriptors of one RESTORE */
#define MLPO_MAX_MANIFEST_BYTES (1u << 28) /* of one part, its head included */

/* Named objects. */
#define MLPO_MAX_OBJECT_NAME 256u          /* bytes of a name; at least 1 */
#define MLPO_MAX_OBJECT_BYTES (1ull << 48) /* of one object */
#define MLPO_MAX_OBJECTS 16384u            /* of a job, versions that are being written or still read included */
#define MLPO_MAX_OBJECT_HANDLES 64u        /* of a session */

/* Gradient statistics are formed in chunks of this many elements, counted from each tensor's start, in this many
 * lanes (FORMAT.md, "Sum of squares"). */
#define MLPO_STAT_CHUNK_ELEMENTS 65536u
#define MLPO_STAT_LANES 16u

#endif /* MLPO_PROTO_ABI_H_ */
