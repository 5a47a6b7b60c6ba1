// Gradients and parameters between slots and streams, on the stand-in for the CUDA runtime and a scripted daemon, whose
// update is p -= lr * g.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/cuda_updates.h"

TEST_CASE("Cuda.TheArenaIsPinnedInPiecesAsItGrows") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* first = client.Register("first", 100'000);
  mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
  options.piece_bytes = 8192;
  mlpo_subgroup* second = nullptr;
  {
    Attached cuda(client, options);
    CHECK(cuda.Info().pinned_bytes == client.Info().arena_bytes);
    CHECK(fake_cuda_registered_bytes() == client.Info().arena_bytes);
    CHECK(fake_cuda_calls("cudaHostRegister") >= 400'000 / 8192);
    CHECK(cuda.Info().stream_waits == 1);
    second = client.Register("second", 50'000'000);  // another memfd
    CHECK(cuda.Info().pinned_bytes < client.Info().arena_bytes);
    cuda.Open(second);
    CHECK(cuda.Info().pinned_bytes == client.Info().arena_bytes);
    CHECK(cuda.Info().pin_code == 0);
    mlpo_cuda* refused = cuda;
    CHECK(mlpo_cuda_detach(refused) == -EBUSY);
  }
  mlpo_subgroup_free(first);
  mlpo_subgroup_free(second);
}

TEST_CASE("Cuda.EverythingWorksWherePinningFails") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
  options.piece_bytes = 4096;
  int failing = 1;
  SECTION("wholly") {}
  // The slot's header and a part of its gradient are pinned then.
  SECTION("in the middle") { failing = 3; }
  fake_cuda_fail("cudaHostRegister", failing, cudaErrorMemoryAllocation);
  {
    Attached cuda(client, options);
    const struct mlpo_cuda_info info = cuda.Info();
    CHECK(info.pinned_bytes == (failing - 1) * 4096u);
    CHECK(info.pinned_bytes < info.arena_bytes);
    CHECK(info.cuda_error == cudaErrorMemoryAllocation);
    CHECK(info.pin_code == -ENOMEM);
    CHECK(std::strstr(info.pin_text, "ulimit -l") != nullptr);
    CHECK(std::strstr(info.pin_text, "out of memory") != nullptr);
    CHECK(fake_cuda_pending_error() == 0);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream;
    fake_cuda_delays(300, 1);
    DeviceFloats param(kElements, 7);
    for (int round = 1; round <= 20; ++round) {
      Gradient(slot, stream);
      mlpo_request* update = Update(subgroup);
      REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 10 * kSecond) == 0);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
      CHECK(param.All(static_cast<float>(-round)));
      CHECK(End(update) == 0);
    }
    CHECK(mlpo_cuda_pin(cuda) == 0);
    CHECK(cuda.Info().pinned_bytes == cuda.Info().arena_bytes);
    CHECK(cuda.Info().pin_code == 0);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.StreamsKeepTheOrderAndTheThreadGoesOn") {
  const CleanCuda clean;
  Updates updates;
  FakeDaemon daemon(Scripted(&updates));
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
    options.piece_bytes = 4096;  // so that copies are cut
    Attached cuda(client, options);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream, other;
    fake_cuda_delays(2000, 2);
    updates.shut = true;
    const DeviceFloats grad(kElements, 3);
    DeviceFloats param(kElements, 7);
    mlpo_request* request = CopyGrad(slot, grad, stream);
    mlpo_result result = {};
    result.struct_size = sizeof result;
    REQUIRE(End(request, &result) == 0);
    CHECK(result.sum_of_squares == 9.0 * kElements);
    mlpo_request* update = Update(subgroup);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, other, kSecond) == 0);
    CHECK(Info(subgroup).update_outstanding == 1);
    CHECK_FALSE(other.Done());
    updates.shut = false;
    // Nobody but the library's own thread takes the completion in.
    REQUIRE(cudaStreamSynchronize(other) == cudaSuccess);
    CHECK(param.All(-3));
    CHECK(End(update) == 0);
    // Without an update outstanding: at once, a part of it.
    DeviceFloats part(10, 7);
    REQUIRE(mlpo_cuda_copy_param(slot, kElements - 10, 10, part, stream, 0) == 0);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(part.All(-3));
    REQUIRE(mlpo_cuda_wait(slot, stream, 0) == 0);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.AGradientFollowsWhatReadsTheParameters") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream, slow;
    Gradient(slot, stream);
    CHECK(End(Update(subgroup)) == 0);
    std::atomic<bool> go{false};
    Hold(slow, &go);
    DeviceFloats param(kElements, 7);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, slow, 0) == 0);
    const DeviceFloats grad(kElements, 5);
    mlpo_request* request = CopyGrad(slot, grad, stream);
    CHECK(mlpo_request_wait(request, kSecond / 20, nullptr) == -ETIMEDOUT);
    // Neither may the slot be closed, nor anything overtake the gradient.
    CHECK(mlpo_cuda_slot_close(slot, kSecond / 50) == -ETIMEDOUT);
    mlpo_request* update = nullptr;
    CHECK(mlpo_submit_update(subgroup, nullptr, kSecond, &update) == -EBUSY);
    go = true;
    CHECK(End(request) == 0);
    REQUIRE(cudaStreamSynchronize(slow) == cudaSuccess);
    CHECK(param.All(-1));
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.AStreamThatWaitsIsReleasedWhateverTheUpdateEndsWith") {
  const CleanCuda clean;
  Updates updates;
  FakeDaemon daemon(Scripted(&updates));
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream, waits;
    DeviceFloats param(kElements, 7);
    Gradient(slot, stream);
    int expected = 0;
    updates.shut = true;
    SECTION("a failure; the one that follows is not confused with it") {
      updates.status = expected = MLPO_ERR_NOT_FINITE;
    }
    SECTION("the daemon's death") {
      updates.hold = true;
      expected = MLPO_ERR_DAEMON_DIED;
    }
    SECTION("close") {
      updates.hold = true;
      expected = MLPO_ERR_CLOSED;
    }
    mlpo_request* update = Update(subgroup);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond) == 0);
    REQUIRE(mlpo_cuda_wait(slot, waits, kSecond) == 0);
    CHECK_FALSE(waits.Done());
    updates.shut = false;
    if (expected == MLPO_ERR_DAEMON_DIED) daemon.Die();
    if (expected == MLPO_ERR_CLOSED) REQUIRE(mlpo_client_close(client) == 0);
    REQUIRE(Within(10, [&] { return stream.Done() && waits.Done(); }));
    CHECK(param.All(7));  // nothing was copied
    CHECK(End(update) == expected);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond) == -ENODATA);
    if (expected == MLPO_ERR_NOT_FINITE) {
      updates.status = 0;
      update = Update(subgroup);
      REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond) == 0);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
      CHECK(param.All(-1));
      CHECK(End(update) == 0);
    } else {
      const mlpo_cuda_piece piece = Whole(param);
      CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &update) == expected);
    }
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.WhereStreamsCannotWaitTheThreadDoes") {
  const CleanCuda clean;
  Updates updates;
  FakeDaemon daemon(Scripted(&updates));
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
  bool offered_after_all = false;
  SECTION("the device does not offer it") { fake_cuda_offer_waits(0); }
  SECTION("by choice") { options.no_wait = 1; }
  SECTION("the kernels cannot be loaded ahead") {
    fake_cuda_fail("cudaFuncGetAttributes", 1, cudaErrorMemoryAllocation);
  }
  SECTION("no memory for words") { fake_cuda_fail("cudaHostAlloc", 1, cudaErrorMemoryAllocation); }
  SECTION("the driver refuses") { offered_after_all = true; }
  {
    Attached cuda(client, options);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream;
    DeviceFloats param(kElements, 7);
    Gradient(slot, stream);
    if (offered_after_all) fake_cuda_fail("cuStreamWaitValue64", 1, cudaErrorUnknown);
    updates.shut = true;
    mlpo_request* update = Update(subgroup);
    if (!offered_after_all) {
      CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond / 100) == -ETIMEDOUT);
      CHECK(mlpo_cuda_wait(slot, stream, kSecond / 100) == -ETIMEDOUT);
    }
    std::thread opens([&updates] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      updates.shut = false;
    });
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 10 * kSecond) == 0);
    opens.join();
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(param.All(-1));
    CHECK(End(update) == 0);
    Gradient(slot, stream, 2);
    updates.status = MLPO_ERR_NOT_FINITE;
    updates.shut = true;
    update = Update(subgroup);
    std::thread opens_again([&updates] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      updates.shut = false;
    });
    const int code = mlpo_cuda_copy_param(slot, 0, kElements, param, stream, 10 * kSecond);
    opens_again.join();
    // The driver refuses but once there; a pause of this process may let the update fail before.
    CHECK((code == -ECANCELED || code == -ENODATA || (code == 0 && offered_after_all)));
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(param.All(-1));
    CHECK(End(update) == MLPO_ERR_NOT_FINITE);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.AFailingCallLeavesNothingHalfDone") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream;
    const DeviceFloats grad(kElements, 3);
    mlpo_request* request = nullptr;
    for (const char* function : {"cudaMemcpyAsync", "cudaLaunchHostFunc", "cudaEventCreateWithFlags"}) {
      fake_cuda_fail(function, 1, cudaErrorMemoryAllocation);
      const mlpo_cuda_piece piece = Whole(grad);
      CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -ENOMEM);
      CHECK(LastErrorHas("cudaErrorMemoryAllocation"));
      CHECK(request == nullptr);
      CHECK(fake_cuda_pending_error() == 0);
      if (std::string(function) != "cudaEventCreateWithFlags") fake_cuda_fail(function, 0, 0);
      // The event that is made first here is kept, so it can fail but once.
      fake_cuda_fail("cudaEventCreateWithFlags", 1, cudaErrorMemoryAllocation);
    }
    fake_cuda_fail("cudaEventCreateWithFlags", 0, 0);
    REQUIRE(End(CopyGrad(slot, grad, stream)) == 0);
    CHECK(End(Update(subgroup)) == 0);
    DeviceFloats param(kElements, 7);
    fake_cuda_fail("cudaMemcpyAsync", 1, cudaErrorMemoryAllocation);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond) == -ENOMEM);
    // A failure of the program's own is still there for it.
    CHECK(cudaSetDevice(99) != cudaSuccess);
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, stream, kSecond) == 0);
    REQUIRE(End(CopyGrad(slot, grad, stream)) == 0);
    CHECK(fake_cuda_pending_error() == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.ADeviceThatFailsEndsItsGradients") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream;
    const DeviceFloats grad(kElements, 3);
    std::atomic<bool> go{false};
    Hold(stream, &go);
    mlpo_request* request = CopyGrad(slot, grad, stream);
    fake_cuda_break(cudaErrorECCUncorrectable);
    go = true;
    mlpo_result result = {};
    result.struct_size = sizeof result;
    CHECK(End(request, &result) == -EIO);
    CHECK(std::strstr(result.text, "copying a gradient") != nullptr);
    CHECK(daemon.submissions() == 0);
    // It can be closed, by a program that goes on without this device.
    cuda.Close(slot);
    fake_cuda_break(0);  // so that the test's own memory can be freed
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.AGraphThatIsCapturedMeanwhileAndTheCopiesDoNotDisturbEachOther") {
  const CleanCuda clean;
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream, slow, captured;
    Gradient(slot, stream);
    CHECK(End(Update(subgroup)) == 0);
    std::atomic<bool> read{false}, go{false};
    Hold(slow, &read);
    Hold(stream, &go);
    DeviceFloats param(kElements, 7);
    const DeviceFloats grad(kElements, 5);
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) == cudaSuccess);
    mlpo_subgroup* large = client.Register("large", 50'000'000);
    mlpo_cuda_slot* of_large = cuda.Open(large);  // pins
    REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, slow, 0) == 0);
    CHECK(mlpo_cuda_slot_close(slot, 0) == -ETIMEDOUT);  // it is being read
    for (const cudaError_t refused : {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureImplicit}) {
      fake_cuda_fail("cudaEventQuery", 1, refused);
      CHECK(mlpo_cuda_slot_close(slot, 0) == -ETIMEDOUT);
    }
    fake_cuda_fail("cudaEventQuery", 1, cudaErrorStreamCaptureUnsupported);
    mlpo_request* request = CopyGrad(slot, grad, stream);
    // Long enough for the releaser to look after the copy.
    const uint64_t asked = fake_cuda_calls("cudaEventQuery");
    CHECK(Within(5, [&] { return fake_cuda_calls("cudaEventQuery") >= asked + 2; }));
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(captured, &graph) == cudaSuccess);
    // The thread is as strict as before.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    CHECK(mode == cudaStreamCaptureModeGlobal);
    REQUIRE(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
    // A refusal all the same is no end.
    for (const cudaError_t refused : {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureImplicit}) {
      const uint64_t before = fake_cuda_calls("cudaEventQuery");
      fake_cuda_fail("cudaEventQuery", 1, refused);
      CHECK(Within(5, [&] { return fake_cuda_calls("cudaEventQuery") >= before + 2; }));
    }
    go = true;
    CHECK(mlpo_request_wait(request, kSecond / 20, nullptr) == -ETIMEDOUT);  // behind what reads the parameters
    read = true;
    CHECK(End(request) == 0);
    REQUIRE(cudaStreamSynchronize(slow) == cudaSuccess);
    CHECK(param.All(-1));
    cuda.Close(of_large);
    mlpo_subgroup_free(large);
  }
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.AFullRingInACallBackLosesNothing") {
  const CleanCuda clean;
  auto script = std::make_shared<Script>();
  FakeDaemon daemon(script);
  Connected client(daemon, /*entries=*/8);
  constexpr int kSubgroups = 6, kPieces = 5;
  std::vector<mlpo_subgroup*> subgroups;
  {
    Attached cuda(client);
    Stream streams[3];
    const DeviceFloats grad(kElements, 2);
    std::vector<mlpo_request*> requests;
    script->reads_ring.store(false);
    for (int i = 0; i < kSubgroups; ++i) {
      subgroups.push_back(client.Register(("w" + std::to_string(i)).c_str(), kElements));
      mlpo_cuda_slot* slot = cuda.Open(subgroups.back());
      std::vector<mlpo_cuda_piece> pieces;
      for (uint64_t p = 0; p < kPieces; ++p)
        pieces.push_back({p * kElements / kPieces, kElements / kPieces, grad, MLPO_GRAD_VALUE, 0});
      requests.push_back(nullptr);
      REQUIRE(mlpo_cuda_copy_grad(slot, pieces.data(), pieces.size(), streams[i % 3], &requests.back()) == 0);
    }
    for (const Stream& stream : streams) REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(daemon.submissions() == 0);
    script->reads_ring.store(true);
    for (mlpo_request* request : requests) {
      mlpo_result result = {};
      result.struct_size = sizeof result;
      CHECK(End(request, &result) == 0);
      CHECK(result.sum_of_squares == 4.0 * kElements);
    }
    CHECK(daemon.submissions() == kSubgroups * kPieces);
  }
  for (mlpo_subgroup* subgroup : subgroups) mlpo_subgroup_free(subgroup);
}

TEST_CASE("Cuda.AllIsFreedWithWorkInFlight") {
  const CleanCuda clean;
  Updates updates;
  FakeDaemon daemon(Scripted(&updates));
  for (int round = 0; round < 10; ++round) {
    Connected client(daemon);
    mlpo_subgroup* subgroup = client.Register("w", kElements);
    fake_cuda_delays(3000, static_cast<uint64_t>(round) + 1);
    const DeviceFloats grad(kElements, 3);
    DeviceFloats param(kElements, 7);
    Stream stream, other;  // outlive the client
    {
      Attached cuda(client);
      mlpo_cuda_slot* slot = cuda.Open(subgroup);
      Gradient(slot, stream);
      updates.delay_ms = round;
      mlpo_request_free(Update(subgroup));
      REQUIRE(mlpo_cuda_copy_param(slot, 0, kElements, param, other, kSecond) == 0);
      if (round % 2 == 1) REQUIRE(mlpo_client_close(client) == 0);
    }
    mlpo_subgroup_free(subgroup);
  }
}

TEST_CASE("Cuda.WrongUseIsNamed") {
  const CleanCuda clean;
  Updates updates;
  FakeDaemon daemon(Scripted(&updates));
  Connected client(daemon);
  mlpo_subgroup* subgroup = client.Register("w", kElements);
  {
    Attached cuda(client);
    mlpo_cuda_slot* slot = cuda.Open(subgroup);
    Stream stream;
    DeviceFloats device(kElements);
    mlpo_request* request = nullptr;
    mlpo_cuda_options options = MLPO_CUDA_OPTIONS_INIT;
    mlpo_cuda* none = nullptr;
    options.device = 7;
    CHECK(mlpo_cuda_attach(client, &options, &none) == -EINVAL);
    CHECK(LastErrorHas("device 7"));
    options.device = -1;
    options.piece_bytes = 1000;
    CHECK(mlpo_cuda_attach(client, &options, &none) == -EINVAL);
    CHECK(mlpo_cuda_copy_param(slot, 0, kElements, device, stream, kSecond) == -ENODATA);
    mlpo_cuda_piece piece = Whole(device);
    piece.first = 1;
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    piece = Whole(nullptr);
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    piece = Whole(device);
    piece.kind = 9;
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 0, stream, &request) == -EINVAL);
    piece = Whole(device);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == -EINVAL);
    CHECK(LastErrorHas("captured"));
    cudaGraph_t graph;
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(mlpo_cuda_copy_param(slot, kElements, 1, device, stream, kSecond) == -EINVAL);
    Gradient(slot, stream);
    updates.shut = true;
    mlpo_request* update = Update(subgroup);
    CHECK(mlpo_cuda_copy_grad(slot, &piece, 1, stream, &request) == MLPO_ERR_SLOT_BUSY);
    updates.shut = false;
    CHECK(End(update) == 0);
    mlpo_cuda_slot* again = nullptr;
    CHECK(mlpo_cuda_slot_open(cuda, subgroup, &again) == -EEXIST);
    FakeDaemon other_daemon;
    Connected other_client(other_daemon);
    mlpo_subgroup* foreign = other_client.Register("w", kElements);
    CHECK(mlpo_cuda_slot_open(cuda, foreign, &again) == -EINVAL);
    mlpo_subgroup_free(foreign);
    const pid_t child = fork();
    if (child == 0) _exit(mlpo_cuda_wait(slot, stream, 0) == MLPO_ERR_FORKED ? 0 : 1);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(mlpo_cuda_detach(nullptr) == 0);
    CHECK(mlpo_cuda_slot_close(nullptr, 0) == 0);
  }
  mlpo_subgroup_free(subgroup);
}
