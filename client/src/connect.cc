// mlpo_connect: options and environment.
#include <errno.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "client/src/error.h"
#include "client/src/handshake.h"
#include "client/src/session.h"
#include "client/src/socket_path.h"
#include "client/src/versioned_struct.h"

namespace mlpo::client {
namespace {

constexpr int64_t kConnectTimeoutNs = 30 * kNsPerS;
constexpr uint32_t kRingEntries = 1024;

bool NameByte(char c, bool first) {
  const bool word = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  return word || (!first && (c == '.' || c == '-'));
}

const char* NonEmpty(const char* variable) {
  const char* value = getenv(variable);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

int ChooseJob(const char* given, char (&job)[MLPO_MAX_JOB + 1]) {
  char from_slurm[256];
  const char* name = given;
  if (name == nullptr) name = NonEmpty("MLPO_JOB");
  if (name == nullptr) {
    name = NonEmpty("TORCHELASTIC_RUN_ID");
    if (name != nullptr && strcmp(name, "none") == 0) name = nullptr;
  }
  if (name == nullptr) {
    const char* slurm_job = NonEmpty("SLURM_JOB_ID");
    const char* slurm_step = NonEmpty("SLURM_STEP_ID");
    if (slurm_job != nullptr && slurm_step != nullptr) {
      snprintf(from_slurm, sizeof from_slurm, "%s.%s", slurm_job, slurm_step);
      name = from_slurm;
    }
  }
  if (name == nullptr) return Fail(-EINVAL, "no job's name: give one, or set MLPO_JOB");
  const size_t length = strlen(name);
  bool fine = length >= 1 && length <= MLPO_MAX_JOB;
  for (size_t i = 0; fine && i < length; ++i) fine = NameByte(name[i], i == 0);
  if (!fine) {
    return Fail(-EINVAL, "job name \"%.128s\": 1 to %d of A-Z a-z 0-9 . _ - are allowed, not beginning with . or -",
                name, MLPO_MAX_JOB);
  }
  memcpy(job, name, length + 1);
  return 0;
}

// `given`, or the variable's number where that is -1, or `otherwise`.
int ChooseNumber(int32_t given, const char* variable, int32_t otherwise, const char* what, uint32_t* number) {
  if (given < -1) return Fail(-EINVAL, "%s is %d", what, given);
  const char* text = given == -1 ? NonEmpty(variable) : nullptr;
  if (text == nullptr) {
    *number = static_cast<uint32_t>(given == -1 ? otherwise : given);
    return 0;
  }
  char* end;
  errno = 0;
  const long value = strtol(text, &end, 10);
  if (errno != 0 || *end != '\0' || value < 0 || value > INT32_MAX)
    return Fail(-EINVAL, "%s is \"%s\", not a number from 0 up", variable, text);
  *number = static_cast<uint32_t>(value);
  return 0;
}

// The NUMA node that the arena is to be on: what the thread's memory policy says, where that is one node, else where
// the thread runs now. -1: not known.
int32_t NodeOfThread() {
  constexpr size_t kWords = 16, kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[kWords] = {};
  int mode = 0;
  if (syscall(SYS_get_mempolicy, &mode, nodes, kWords * kBits, nullptr, 0) == 0 &&
      (mode == MPOL_BIND || mode == MPOL_PREFERRED)) {
    int32_t found = -1, count = 0;
    for (size_t bit = 0; bit < kWords * kBits; ++bit) {
      if ((nodes[bit / kBits] >> (bit % kBits) & 1) == 0) continue;
      found = static_cast<int32_t>(bit);
      ++count;
    }
    if (count == 1) return found;
  }
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int32_t>(node) : -1;
}

int ChooseNode(int32_t* node) {
  const char* variable = "MLPO_NUMA_NODE";
  if (NonEmpty(variable) == nullptr) {
    *node = NodeOfThread();
    return 0;
  }
  uint32_t number = 0;
  const int code = ChooseNumber(-1, variable, -1, "NUMA node", &number);
  *node = static_cast<int32_t>(number);
  return code;
}

int Prepare(const mlpo_connect_options& options, mlpo_client* client, HandshakeWishes* wishes) {
  int code = FindSocket(options.socket, client->socket_path, sizeof client->socket_path);
  if (code == 0) code = ChooseJob(options.job, client->job);
  if (code == 0) code = ChooseNumber(options.rank, "RANK", 0, "rank", &client->rank);
  if (code == 0) code = ChooseNumber(options.world_size, "WORLD_SIZE", 1, "world_size", &client->world_size);
  if (code != 0) return code;
  if (client->rank >= client->world_size)
    return Fail(-EINVAL, "rank %u is not below world size %u", client->rank, client->world_size);
  const uint32_t entries = options.ring_entries == 0 ? kRingEntries : options.ring_entries;
  if (entries < MLPO_MIN_RING_ENTRIES || entries > MLPO_MAX_RING_ENTRIES || (entries & (entries - 1)) != 0) {
    return Fail(-EINVAL, "ring_entries is %u: a power of two from %u to %u is needed", entries, MLPO_MIN_RING_ENTRIES,
                MLPO_MAX_RING_ENTRIES);
  }
  if (options.reserved != 0) return Fail(-EINVAL, "mlpo_connect_options.reserved is not 0");
  if (options.connect_timeout_ns < 0)
    return Fail(-EINVAL, "connect_timeout_ns is %lld", static_cast<long long>(options.connect_timeout_ns));
  wishes->ring_entries = entries;
  wishes->arena_bytes = options.arena_bytes;
  return ChooseNode(&wishes->numa_node);
}

}  // namespace
}  // namespace mlpo::client

extern "C" int mlpo_connect(const mlpo_connect_options* given, mlpo_client** client) {
  using namespace mlpo::client;
  if (client == nullptr) return Fail(-EINVAL, "client is NULL");
  *client = nullptr;
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  if (given != nullptr) {
    if (int code = TakeStruct(given, &options, "mlpo_connect_options"); code != 0) return code;
  }
  void* memory = calloc(1, sizeof(mlpo_client));
  if (memory == nullptr) return Fail(-ENOMEM, "no memory for a client");
  auto* session = new (memory) mlpo_client();
  session->creator = getpid();
  HandshakeWishes wishes;
  int code = session->mark.Open();
  if (code == 0) code = Prepare(options, session, &wishes);
  session->arena_bytes = wishes.arena_bytes;
  if (code == 0) {
    const int64_t timeout_ns = options.connect_timeout_ns == 0 ? kConnectTimeoutNs : options.connect_timeout_ns;
    code = Handshake(session, wishes, Deadline::In(timeout_ns));
  }
  if (code != 0) {
    session->mark.Close();
    session->~mlpo_client();
    free(memory);
    return code;
  }
  *client = session;
  return 0;
}
