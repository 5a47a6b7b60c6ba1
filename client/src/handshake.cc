#include "client/src/handshake.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/src/error.h"
#include "proto/status.h"

namespace mlpo::client {
namespace {

int SendHello(FrameSocket& socket, const mlpo_client& client, const HandshakeWishes& wishes, Deadline deadline) {
  // By this the daemon notices our end even while a forked child keeps a copy of the socket.
  Fd pidfd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!pidfd) return FailErrno(errno, "pidfd_open (Linux 5.10 or newer is needed)");
  mlpo_hello hello = {};
  SetHeader(&hello, MLPO_FRAME_HELLO, 0);
  hello.abi_major = MLPO_ABI_MAJOR;
  hello.abi_minor = MLPO_ABI_MINOR;
  hello.features_offered = MLPO_FEATURES_HERE;
  hello.features_required = MLPO_FEATURE_UPDATE;
  hello.rank = client.rank;
  hello.world_size = client.world_size;
  hello.numa_node = wishes.numa_node;
  hello.ring_entries = wishes.ring_entries;
  hello.arena_bytes = wishes.arena_bytes;
  hello.job_bytes = static_cast<uint32_t>(strlen(client.job));
  memcpy(hello.job, client.job, hello.job_bytes);
  return socket.Send(&hello, sizeof hello, pidfd.get(), deadline);
}

// Whether `entries` things of `size` bytes lie at `offset`, behind the header and within the area.
bool TableFits(uint64_t offset, uint64_t entries, uint64_t size, uint64_t area_bytes) {
  return offset >= MLPO_RING_HEADER_BYTES && offset % 64 == 0 && offset <= area_bytes &&
         entries * size <= area_bytes - offset;
}

bool Disjoint(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) {
  return a + a_bytes <= b || b + b_bytes <= a;
}

// What the daemon says, before anything is mapped by it.
int CheckWelcome(const mlpo_welcome& welcome) {
  if (welcome.abi_major != MLPO_ABI_MAJOR || welcome.abi_minor > MLPO_ABI_MINOR) {
    return Fail(MLPO_E_VERSION, "the daemon speaks protocol %u.%u, this library %u.%u", welcome.abi_major,
                welcome.abi_minor, MLPO_ABI_MAJOR, MLPO_ABI_MINOR);
  }
  if ((welcome.features & MLPO_FEATURE_UPDATE) == 0 || (welcome.features & ~uint64_t{MLPO_FEATURES_HERE}) != 0) {
    return Fail(MLPO_E_VERSION, "the daemon put features %llx in force, this library offered %llx and requires %llx",
                static_cast<unsigned long long>(welcome.features), MLPO_FEATURES_HERE, MLPO_FEATURE_UPDATE);
  }
  const uint64_t entries = welcome.entries;
  if (entries < MLPO_MIN_RING_ENTRIES || entries > MLPO_MAX_RING_ENTRIES || (entries & (entries - 1)) != 0)
    return Fail(MLPO_E_PROTOCOL, "WELCOME: %u ring entries", welcome.entries);
  if (welcome.block_elements == 0) return Fail(MLPO_E_PROTOCOL, "WELCOME: blocks of 0 elements");
  const uint64_t submissions_bytes = entries * sizeof(mlpo_submission);
  const uint64_t hyper_bytes = entries * sizeof(mlpo_hyper);
  const uint64_t completions_bytes = entries * sizeof(mlpo_completion);
  const uint64_t errors_bytes = entries * sizeof(mlpo_error_record);
  if (!TableFits(welcome.submissions_offset, entries, sizeof(mlpo_submission), welcome.client_area_bytes) ||
      !TableFits(welcome.hyper_offset, entries, sizeof(mlpo_hyper), welcome.client_area_bytes) ||
      !TableFits(welcome.completions_offset, entries, sizeof(mlpo_completion), welcome.daemon_area_bytes) ||
      !TableFits(welcome.errors_offset, entries, sizeof(mlpo_error_record), welcome.daemon_area_bytes) ||
      !Disjoint(welcome.submissions_offset, submissions_bytes, welcome.hyper_offset, hyper_bytes) ||
      !Disjoint(welcome.completions_offset, completions_bytes, welcome.errors_offset, errors_bytes)) {
    return Fail(MLPO_E_PROTOCOL, "WELCOME: tables of %u entries do not lie within their areas", welcome.entries);
  }
  return 0;
}

int ReceiveWelcome(FrameSocket& socket, ReceivedFrame* frame, Deadline deadline) {
  int code = socket.Receive(frame, deadline);
  if (code == kSocketEnded) return Fail(MLPO_E_DAEMON_DIED, "the daemon closed the socket during the handshake");
  if (code == -ETIMEDOUT) return Fail(code, "the daemon did not answer the handshake in time");
  if (code != 0) return code;
  if (frame->header().type == MLPO_FRAME_ERROR) {
    const auto* error = frame->As<mlpo_error>();
    if (error == nullptr) return Fail(MLPO_E_PROTOCOL, "the daemon sent a malformed ERROR frame");
    Failure refusal;
    ReadRefusal(*error, &refusal);
    return refusal.Report();
  }
  if (frame->header().type != MLPO_FRAME_WELCOME || frame->As<mlpo_welcome>(3) == nullptr) {
    return Fail(MLPO_E_PROTOCOL, "the daemon answered HELLO with frame %u of %zu bytes and %d descriptors",
                frame->header().type, frame->size, frame->fd_count);
  }
  return CheckWelcome(*frame->As<mlpo_welcome>(3));
}

int MapAreas(mlpo_client* client, ReceivedFrame* frame, RingAreas* areas) {
  const mlpo_welcome& welcome = *frame->As<mlpo_welcome>(3);
  int code =
      client->client_area.Map(frame->fds[0].get(), welcome.client_area_bytes, /*writable=*/true, "client's ring area");
  if (code == 0)
    code = client->daemon_area.Map(frame->fds[1].get(), welcome.daemon_area_bytes, /*writable=*/false,
                                   "daemon's ring area");
  if (code != 0) return code;
  client->doorbell = static_cast<Fd&&>(frame->fds[2]);
  std::byte* ours = client->client_area.data();
  const std::byte* theirs = client->daemon_area.data();
  areas->client_lines = reinterpret_cast<mlpo_client_lines*>(ours);
  areas->daemon_lines = reinterpret_cast<const mlpo_daemon_lines*>(theirs);
  areas->submissions = reinterpret_cast<mlpo_submission*>(ours + welcome.submissions_offset);
  areas->hypers = reinterpret_cast<mlpo_hyper*>(ours + welcome.hyper_offset);
  areas->completions = reinterpret_cast<const mlpo_completion*>(theirs + welcome.completions_offset);
  areas->errors = reinterpret_cast<const mlpo_error_record*>(theirs + welcome.errors_offset);
  areas->entries = welcome.entries;
  areas->doorbell = client->doorbell.get();
  client->session = welcome.session;
  client->generation = welcome.generation;
  client->features = welcome.features;
  client->block_elements = welcome.block_elements;
  return 0;
}

int Finish(mlpo_client* client, FrameSocket&& socket, ReceivedFrame* welcome, Deadline deadline) {
  RingAreas areas;
  int code = MapAreas(client, welcome, &areas);
  if (code == 0) code = client->ring.Open(areas, WaitTuning(), &SessionSocket::Probe, &client->socket);
  if (code == 0) {
    mlpo_frame ready;
    SetHeader(&ready, MLPO_FRAME_READY, 0);
    code = socket.Send(&ready, sizeof ready, -1, deadline);
    if (code == kSocketEnded) code = Fail(MLPO_E_DAEMON_DIED, "the daemon closed the socket during the handshake");
  }
  if (code == 0) client->socket.Open(static_cast<FrameSocket&&>(socket), &client->ring);
  return code;
}

}  // namespace

int Handshake(mlpo_client* client, const HandshakeWishes& wishes, Deadline deadline) {
  FrameSocket socket;
  if (int code = socket.Connect(client->socket_path, deadline); code != 0) return code;
  ucred daemon = {};
  socklen_t size = sizeof daemon;
  if (getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &daemon, &size) != 0)
    return FailErrno(errno, "asking whose daemon it is");
  client->daemon_uid = daemon.uid;
  const int hello = SendHello(socket, *client, wishes, deadline);
  // A daemon that refuses at accept may have closed already: its reason still waits in the socket.
  if (hello != 0 && hello != kSocketEnded) return hello;
  ReceivedFrame welcome;
  if (int code = ReceiveWelcome(socket, &welcome, deadline); code != 0) return code;
  const int code = Finish(client, static_cast<FrameSocket&&>(socket), &welcome, deadline);
  if (code != 0) {
    client->ring.ReleaseMemory();
    client->client_area.Unmap();
    client->daemon_area.Unmap();
    client->doorbell.Reset();
  }
  return code;
}

}  // namespace mlpo::client
