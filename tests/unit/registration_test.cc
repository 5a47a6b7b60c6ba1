// What a registration keeps of its tensors: which elements of the whole each is.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/session/registration.h"
#include "tests/support/catch.h"

namespace mlpo::test {
namespace {

// A frame as it comes from a client.
class Wire {
 public:
  Wire() { REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_) == 0); }
  ~Wire() {
    for (const int end : ends_) ::close(end);
  }
  template <class T>
  void Carry(const T& sent, Frame* frame) {
    REQUIRE(SendFrame(ends_[0], &sent, sizeof sent, {}).ok());
    Status status;
    REQUIRE(frame->Receive(ends_[1], ::geteuid(), &status) == Frame::Outcome::kFrame);
  }

 private:
  int ends_[2] = {-1, -1};
};

struct Three {
  mlpo_register_tensors header;
  mlpo_tensor_record records[3];
};

}  // namespace

TEST_CASE("Registration.KeepsWhichElementsOfTheWholeATensorIs") {
  auto begin = MakeFrame<mlpo_register_begin>(MLPO_FRAME_REGISTER_BEGIN, 1);
  begin.dtype = begin.grad_dtype = MLPO_FLOAT32;
  begin.numel = 12 + 5 + 7;
  begin.tensors = 3;
  begin.key_bytes = 1;
  begin.key[0] = 'k';
  auto tensors = MakeFrame<Three>(MLPO_FRAME_REGISTER_TENSORS, 1);
  tensors.header.count = 3;
  const char* names = "abc";
  for (int i = 0; i < 3; ++i) {
    tensors.records[i].name_bytes = 1;
    tensors.records[i].name[0] = names[i];
  }
  mlpo_tensor_record& box = tensors.records[0];
  box.numel = 12;
  box.ndim = 2;
  const uint64_t shape[2] = {3, 4}, global[2] = {9, 6}, offsets[2] = {5, 2};
  std::memcpy(box.shape, shape, sizeof shape);
  std::memcpy(box.global_shape, global, sizeof global);
  std::memcpy(box.offsets, offsets, sizeof offsets);
  mlpo_tensor_record& range = tensors.records[1];
  range.numel = 5;
  range.ndim = 2;
  range.flags = MLPO_TENSOR_FLAT;
  range.flat_first = 49;
  std::memcpy(range.global_shape, global, sizeof global);
  tensors.records[2].numel = 7;

  Wire wire;
  auto frame = std::make_unique<Frame>();
  Registration registration;
  wire.Carry(begin, frame.get());
  REQUIRE(registration.Begin(*frame, std::set<std::string>()).ok());
  wire.Carry(tensors, frame.get());
  const Status added = registration.AddTensors(*frame);
  INFO(added.message());
  REQUIRE(added.ok());
  REQUIRE(registration.End().ok());
  const SubgroupSpec spec = registration.TakeSpec();
  REQUIRE(spec.tensors.size() == 3);
  using Sizes = std::vector<uint64_t>;
  CHECK(spec.tensors[0].shard == TensorShard{Sizes{9, 6}, false, 0, Sizes{3, 4}, Sizes{5, 2}, 12});
  CHECK(spec.tensors[1].shard == TensorShard{Sizes{9, 6}, true, 49, Sizes{}, Sizes{}, 5});
  CHECK(spec.tensors[2].shard == TensorShard{Sizes{7}, false, 0, Sizes{7}, Sizes{0}, 7});
}

}  // namespace mlpo::test
