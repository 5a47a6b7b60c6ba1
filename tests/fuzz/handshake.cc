// Frames on a session's socket, from up to three clients at once, against the daemon's real server, whose storage says
// yes at once. An input is a list of actions, see Act(). Each frame that comes back is well formed, and when all
// clients have gone nothing is left: no session, no claim, no arena.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>
//
#include <spdlog/spdlog.h>

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <memory>

#include "daemon/session/session_server.h"
#include "proto/control.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

using namespace mlpo;
using mlpo::test::FuzzInput;

constexpr char kPlain = 2, kWithTwoDescriptors = 2 + 2 * 32;  // actions of client 0 that send a frame
constexpr int kTypes = 24;                                    // of frames: all that there are, and some more
constexpr uint64_t kArenasBytes = 1 << 20;                    // of all: a memfd is allocated when it is made

// Everything is granted, later and in the same thread, as the daemon does it.
class GrantingHost : public SessionHost {
 public:
  explicit GrantingHost(boost::asio::io_context* io) : io_(io) {}
  SessionServer* server = nullptr;

  void SessionReady(const SessionIdentity&, std::shared_ptr<Areas>) override {}
  uint32_t BlockCount(const SubgroupSpec&) const override { return 1; }
  void PrepareStorage(const SessionIdentity&, const SubgroupSpec& spec, std::function<void(Status)> done) override {
    uint64_t numel = 0;
    for (const Tensor& tensor : spec.tensors) numel += tensor.count;
    FUZZ_CHECK(numel == spec.numel, "tensors that do not add up");
    boost::asio::post(*io_, [done = std::move(done)] { done(Status()); });
  }
  void ReturnStorage(SessionId, const SubgroupSpec&) override {}
  void AllocateArena(uint64_t bytes, int numa_node, std::shared_ptr<std::atomic<bool>> cancelled,
                     std::function<void(Result<std::shared_ptr<Memfd>>)> done) override {
    FUZZ_CHECK(bytes <= kArenasBytes, "more than all arenas may have");
    boost::asio::post(*io_, [bytes, numa_node, cancelled, done = std::move(done)] {
      done(Memfd::Create(bytes, numa_node < 0 ? -1 : 0, *cancelled));
    });
  }
  void AddSubgroup(SessionId, SubgroupSpec, std::function<void()> done) override {
    boost::asio::post(*io_, std::move(done));
  }
  void SetStaging(SessionId, std::byte* data, uint64_t bytes, std::function<void()> done) override {
    std::memset(data, 0x5a, bytes);
    boost::asio::post(*io_, std::move(done));
  }
  void SessionEnded(const SessionIdentity& identity) override {
    boost::asio::post(*io_, [this, id = identity.id] { server->SessionGone(id); });
  }
  void Dispose(std::shared_ptr<void>) override {}
  void BeginCheckpoint(const SessionIdentity&, const CheckpointRequest& request,
                       std::function<void(Result<CheckpointBegun>)> done) override {
    FUZZ_CHECK(request.tag.size() <= MLPO_MAX_TAG && request.directory.size() <= MLPO_MAX_DIRECTORY, "names");
    FUZZ_CHECK(request.files == nullptr || request.files->size() == 2, "files of a part");
    CheckpointBegun begun;
    begun.attempt = request.attempt;
    begun.handle = 1;
    boost::asio::post(*io_, [begun, done = std::move(done)] { done(begun); });
  }
  void BeginRestore(const SessionIdentity&, const RestoreRequest& request,
                    std::function<void(Result<RestoreBegun>)> done) override {
    FUZZ_CHECK(request.tag.size() <= MLPO_MAX_TAG && request.directory.size() <= MLPO_MAX_DIRECTORY, "names");
    RestoreBegun begun;
    begun.tag = request.tag;
    begun.handle = 1;
    boost::asio::post(*io_, [begun, done = std::move(done)] { done(begun); });
  }

 private:
  boost::asio::io_context* const io_;
};

class Server {
 public:
  Server() : host_(&io_) {
    spdlog::set_level(spdlog::level::off);  // each end would be a line
    UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    address_.sun_family = AF_UNIX;
    socklen_t bytes = sizeof address_.sun_family;  // the kernel finds a name in the abstract space
    FUZZ_CHECK(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address_), bytes) == 0, "bind");
    bytes = sizeof address_;
    FUZZ_CHECK(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address_), &bytes) == 0, "getsockname");
    address_bytes_ = bytes;
    FUZZ_CHECK(::listen(listener.get(), 16) == 0, "listen");
    SessionServer::Options options;
    options.block_elements = 4096;
    options.arenas_limit_bytes = kArenasBytes;
    options.max_sessions = 2;
    server_ = std::make_unique<SessionServer>(io_, std::move(listener), options, &host_);
    host_.server = server_.get();
    server_->Start();
    Run();
  }

  int Connect() {
    const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    FUZZ_CHECK(::connect(fd, reinterpret_cast<const sockaddr*>(&address_), address_bytes_) == 0,
               "the server does not accept any more");
    Run();
    return fd;
  }
  // Until nothing is ready any more.
  void Run() {
    do io_.restart();
    while (io_.poll() > 0);
  }
  const SessionServer& sessions() const { return *server_; }

 private:
  boost::asio::io_context io_;
  GrantingHost host_;
  sockaddr_un address_ = {};
  socklen_t address_bytes_ = 0;
  std::unique_ptr<SessionServer> server_;
};

class Scene {
 public:
  explicit Scene(Server* server) : server_(server) { clients_.fill(-1); }
  ~Scene() {
    for (size_t i = 0; i < clients_.size(); ++i) {
      Drain(i);
      Close(i);
    }
    FUZZ_CHECK(server_->sessions().session_count() == 0, "sessions are left");
    FUZZ_CHECK(server_->sessions().arenas_bytes() == 0, "arenas are left");
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  void Act(FuzzInput* input) {
    const uint8_t action = input->Byte();
    const size_t who = action / 8 % clients_.size();
    const size_t fds = action / 32 % 3;
    switch (action % 8) {
      case 0:
        Close(who);
        break;
      case 1:
        Hello(who, input->Byte(), input->Byte());
        break;
      case 2:
        SendFrame(who, input, fds);
        break;
      case 3:
        Send(who, input->Bytes(input->Take<uint16_t>()), fds);
        break;
      case 4:
        Drain(who);
        break;
      case 5:
        if (clients_[who] >= 0) (void)::shutdown(clients_[who], action & 32 ? SHUT_RD : SHUT_WR);
        server_->Run();
        break;
      default:  // what a client that has just been welcomed sends
        Bare(who, action % 8 == 6 ? MLPO_FRAME_READY : MLPO_FRAME_REGISTER_END);
        break;
    }
  }

 private:
  void Open(size_t who) {
    if (clients_[who] < 0) clients_[who] = server_->Connect();
  }
  void Close(size_t who) {
    if (clients_[who] >= 0) ::close(clients_[who]);
    clients_[who] = -1;
    server_->Run();
  }

  // A good one, of one of four jobs and ranks.
  void Hello(size_t who, uint8_t which, uint8_t arena) {
    mlpo_hello hello = {};
    hello.frame = {MLPO_MAGIC, MLPO_FRAME_HELLO, 0, sizeof hello, 1};
    hello.abi_major = MLPO_ABI_MAJOR;
    hello.abi_minor = MLPO_ABI_MINOR;
    hello.features_offered = MLPO_FEATURES_HERE;
    hello.rank = which & 1;
    hello.world_size = 2;
    hello.numa_node = -1;
    hello.ring_entries = 8u << (which >> 2 & 3);
    hello.arena_bytes = arena * 4096;
    hello.job_bytes = 1;
    hello.job[0] = which & 2 ? 'a' : 'b';
    Send(who, {reinterpret_cast<const char*>(&hello), sizeof hello}, 1);
  }
  void Bare(size_t who, uint16_t type) {
    const mlpo_frame frame = {MLPO_MAGIC, type, 0, sizeof frame, 1};
    Send(who, {reinterpret_cast<const char*>(&frame), sizeof frame}, 0);
  }
  // Bytes with a header that is right.
  void SendFrame(size_t who, FuzzInput* input, size_t fds) {
    const auto type = static_cast<uint16_t>(input->Byte() % kTypes);
    const uint32_t seq = input->Byte() % 4;
    const std::string_view body = input->Bytes(input->Take<uint16_t>());
    const auto bytes = static_cast<uint32_t>(sizeof(mlpo_frame) + body.size());
    const mlpo_frame header = {MLPO_MAGIC, type, 0, bytes, seq};
    std::string frame;
    test::Put(&frame, header);
    frame += body;
    Send(who, frame, fds);
  }

  // With our pidfd, where it has descriptors.
  void Send(size_t who, std::string_view bytes, size_t fds) {
    Open(who);
    const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0));
    FUZZ_CHECK(pidfd >= 0, "pidfd_open");
    iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fds > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(fds * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds * sizeof(int));
      const int both[] = {pidfd, pidfd};
      std::memcpy(CMSG_DATA(header), both, fds * sizeof(int));
    }
    (void)::sendmsg(clients_[who], &message, MSG_NOSIGNAL);  // the server may have closed the socket
    ::close(pidfd);
    server_->Run();
  }

  void Drain(size_t who) {
    if (clients_[who] < 0) return;
    for (;;) {
      alignas(8) char buffer[MLPO_MAX_FRAME];
      alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
      iovec part = {buffer, sizeof buffer};
      msghdr message = {};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t got = ::recvmsg(clients_[who], &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
      if (got <= 0) return;
      for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
          int fd;
          std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
          ::close(fd);
        }
      }
      mlpo_frame frame = {};
      std::memcpy(&frame, buffer, std::min(sizeof frame, static_cast<size_t>(got)));
      FUZZ_CHECK(static_cast<size_t>(got) >= sizeof frame && frame.magic == MLPO_MAGIC && frame.reserved == 0 &&
                     frame.bytes == static_cast<uint32_t>(got),
                 "the daemon's frame is malformed");
      const bool known = frame.type == MLPO_FRAME_WELCOME || frame.type == MLPO_FRAME_ARENA ||
                         frame.type == MLPO_FRAME_REGISTERED || frame.type == MLPO_FRAME_STAGED ||
                         frame.type == MLPO_FRAME_LENT || frame.type == MLPO_FRAME_CHECKPOINTING ||
                         frame.type == MLPO_FRAME_RESTORING || frame.type == MLPO_FRAME_ERROR;
      FUZZ_CHECK(known, "the daemon sent frame type " + std::to_string(frame.type));
      if (frame.type != MLPO_FRAME_ERROR) continue;
      const auto* error = reinterpret_cast<const mlpo_error*>(buffer);
      FUZZ_CHECK(static_cast<size_t>(got) == sizeof *error && error->status != 0, "an error that is none");
      FUZZ_CHECK(std::memchr(error->text, 0, sizeof error->text) != nullptr && error->text[0] != 0, "an error's text");
    }
  }

  Server* const server_;
  std::array<int, 3> clients_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Server server;
  Scene scene(&server);
  FuzzInput input(data, size);
  for (int actions = 0; actions < 100 && !input.empty(); ++actions) scene.Act(&input);
  return 0;
}

std::vector<std::string> mlpo::test::FuzzSeeds() {
  // Actions of client 0; 8 more is client 1.
  const auto frame = [](char type, const std::string& body, char how = kPlain) {
    std::string action = {how, type, '\1'};
    Put(&action, static_cast<uint16_t>(body.size()));
    return action + body;
  };
  const auto body_of = [](const auto& whole) {
    std::string bytes;
    Put(&bytes, whole);
    return bytes.substr(sizeof(mlpo_frame));
  };
  mlpo_register_begin begin = {};
  begin.dtype = begin.grad_dtype = MLPO_FLOAT32;
  begin.numel = 5'000;
  begin.tensors = 1;
  begin.key_bytes = 1;
  begin.key[0] = 'k';
  struct {
    mlpo_register_tensors header;
    mlpo_tensor_record record;
  } tensors = {};
  tensors.header.count = 1;
  tensors.record.numel = 5'000;
  tensors.record.name_bytes = 1;
  tensors.record.name[0] = 't';
  mlpo_mapped mapped = {};
  mlpo_staging staging = {};
  staging.bytes = 100'000;
  const std::string hello = {'\1', '\0', '\100'}, ready = "\6", end = "\7", answers = "\4";
  const std::string session = hello + ready + answers;
  const std::string registered =
      frame(MLPO_FRAME_REGISTER_BEGIN, body_of(begin)) + frame(MLPO_FRAME_REGISTER_TENSORS, body_of(tensors));
  const std::string map = answers + frame(MLPO_FRAME_MAPPED, body_of(mapped)) + answers;
  std::vector<std::string> seeds = {
      session + registered + end + map + frame(MLPO_FRAME_BYE, ""),
      session + frame(MLPO_FRAME_STAGING, body_of(staging)) + map + registered + end + answers,
      session + frame(MLPO_FRAME_LEND, body_of(staging)) + map + registered + frame(MLPO_FRAME_REGISTER_KEEP, "") +
          end + answers,
      session + std::string("\11\0\100\11\2\100\4\14", 8) + std::string(1, '\0') + answers,  // others come and wait
      hello + std::string("\0\1\1\0\6", 5) + registered + end,
      session + registered + end,  // MAPPED never comes
  };
  mlpo_checkpoint checkpoint = {};
  mlpo_restore restore = {};
  checkpoint.tag_bytes = restore.tag_bytes = 1;
  checkpoint.directory_bytes = restore.directory_bytes = 2;
  checkpoint.tag[0] = restore.tag[0] = 't';
  std::memcpy(checkpoint.directory, "/d", 2);
  std::memcpy(restore.directory, "/d", 2);
  seeds.push_back(session + frame(MLPO_FRAME_CHECKPOINT, body_of(checkpoint)) + answers +
                  frame(MLPO_FRAME_RESTORE, body_of(restore)) + answers);
  checkpoint.flags = MLPO_CHECKPOINT_FILES;
  checkpoint.directory_bytes = restore.tag_bytes = restore.directory_bytes = 0;
  restore.files = 4;
  mlpo_restore_files files = {};
  files.count = 2;
  const std::string two = frame(MLPO_FRAME_RESTORE_FILES, body_of(files), kWithTwoDescriptors);
  files.first = 2;
  seeds.push_back(session + frame(MLPO_FRAME_CHECKPOINT, body_of(checkpoint), kWithTwoDescriptors) + answers +
                  frame(MLPO_FRAME_RESTORE, body_of(restore)) + two +
                  frame(MLPO_FRAME_RESTORE_FILES, body_of(files), kWithTwoDescriptors) + answers);
  return seeds;
}
