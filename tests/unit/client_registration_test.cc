// Registering subgroups and making the arena.
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "mlpo/client.h"
#include "tests/support/catch.h"
#include "tests/support/client_fixture.h"
#include "tests/support/fake_daemon.h"

namespace {

constexpr int64_t kSecond = 1'000'000'000;
using Script = FakeDaemon::Script;

bool LastErrorHas(const std::string& text) { return std::strstr(mlpo_last_error(), text.c_str()) != nullptr; }

int TryRegister(mlpo_client* client, const mlpo_subgroup_options& options, int64_t timeout_ns = 5 * kSecond) {
  mlpo_subgroup* subgroup = nullptr;
  const int code = mlpo_subgroup_register(client, &options, timeout_ns, &subgroup);
  mlpo_subgroup_free(subgroup);
  return code;
}

mlpo_tensor_spec Spec(const char* name, uint64_t numel) {
  mlpo_tensor_spec spec = {};
  spec.struct_size = sizeof spec;
  spec.name = name;
  spec.numel = numel;
  return spec;
}

}  // namespace

TEST_CASE("Registration.SlotsDoNotOverlapAndGrowTheArena") {
  FakeDaemon daemon;
  Connected client(daemon);
  std::vector<mlpo_subgroup*> subgroups;
  std::vector<std::pair<std::byte*, std::byte*>> ranges;
  uint64_t arena = 0;
  for (int i = 0; i < 40; ++i) {
    const std::string key = "s" + std::to_string(i);
    subgroups.push_back(client.Register(key.c_str(), 5000 + static_cast<uint64_t>(i)));
    const struct mlpo_subgroup_info info = Info(subgroups.back());
    CHECK(info.grad == info.param);
    CHECK(info.numel == 5000 + static_cast<uint64_t>(i));
    CHECK(info.tensor_count == 1);
    CHECK(info.epoch == 0);
    ranges.push_back(
        {reinterpret_cast<std::byte*>(info.epoch_word), static_cast<std::byte*>(info.grad) + info.numel * 4});
    std::memset(info.grad, i, info.numel * 4);
    CHECK(client.Info().arena_bytes >= arena);
    arena = client.Info().arena_bytes;
  }
  for (size_t a = 0; a < ranges.size(); ++a) {
    for (size_t b = 0; b < a; ++b)
      REQUIRE((ranges[a].second <= ranges[b].first || ranges[b].second <= ranges[a].first));
  }
  CHECK(arena >= 40 * 5000 * 4);
  for (mlpo_subgroup* subgroup : subgroups) mlpo_subgroup_free(subgroup);
}

TEST_CASE("Registration.TypesOfDifferentSizeHaveTwoRegions") {
  FakeDaemon daemon;
  Connected client(daemon);
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "mixed";
  options.numel = 1001;
  options.dtype = MLPO_DTYPE_BFLOAT16;
  options.grad_dtype = MLPO_DTYPE_FLOAT32;
  mlpo_subgroup* subgroup = nullptr;
  REQUIRE(mlpo_subgroup_register(client, &options, 5 * kSecond, &subgroup) == 0);
  const struct mlpo_subgroup_info info = Info(subgroup);
  CHECK(static_cast<std::byte*>(info.param) >= static_cast<std::byte*>(info.grad) + 1001 * 4);
  mlpo_subgroup_free(subgroup);
  // The same size, though not the same type: one region.
  options.key = "halves";
  options.grad_dtype = MLPO_DTYPE_FLOAT16;
  REQUIRE(mlpo_subgroup_register(client, &options, 5 * kSecond, &subgroup) == 0);
  CHECK(Info(subgroup).param == Info(subgroup).grad);
  mlpo_subgroup_free(subgroup);
  options.key = "nothing";
  options.numel = 0;
  CHECK(TryRegister(client, options) == 0);
}

TEST_CASE("Registration.TensorsArriveWhole") {
  auto script = std::make_shared<Script>();
  auto tensors = std::make_shared<uint32_t>(0);
  auto frames = std::make_shared<std::vector<uint32_t>>();
  auto seqs = std::make_shared<std::vector<uint32_t>>();
  script->frame = [=](int, const mlpo_frame& frame) {
    seqs->push_back(frame.seq);
    if (frame.type == MLPO_FRAME_REGISTER_TENSORS) {
      const auto& header = reinterpret_cast<const mlpo_register_tensors&>(frame);
      frames->push_back(header.count);
      const auto* records = reinterpret_cast<const mlpo_tensor_record*>(&header + 1);
      for (uint32_t i = 0; i < header.count; ++i, ++*tensors) {
        const std::string name = "t" + std::to_string(*tensors);
        CHECK(std::string(records[i].name, records[i].name_bytes) == name);
        CHECK(records[i].numel == 6);
        CHECK(records[i].ndim == 2);
        CHECK(records[i].shape[0] == 2);
        CHECK(records[i].shape[1] == 3);
        CHECK(records[i].global_shape[0] == 8);
        CHECK(records[i].offsets[0] == 4);
        CHECK(records[i].shape[2] == 0);
        CHECK(records[i].flags == 0);
      }
    }
    return false;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  const uint64_t shape[] = {2, 3}, global_shape[] = {8, 3}, offsets[] = {4, 0};
  std::vector<std::string> names;
  std::vector<mlpo_tensor_spec> specs;
  for (int i = 0; i < 300; ++i) names.push_back("t" + std::to_string(i));
  for (const std::string& name : names) {
    specs.push_back(Spec(name.c_str(), 6));
    specs.back().ndim = 2;
    specs.back().shape = shape;
    specs.back().global_shape = global_shape;
    specs.back().offsets = offsets;
  }
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "many";
  options.numel = 1800;
  options.tensors = specs.data();
  options.tensor_count = 300;
  mlpo_subgroup* subgroup = nullptr;
  REQUIRE(mlpo_subgroup_register(client, &options, 5 * kSecond, &subgroup) == 0);
  CHECK(Info(subgroup).tensor_count == 300);
  CHECK(*frames == std::vector<uint32_t>{128, 128, 44});
  for (const uint32_t seq : *seqs) CHECK(seq == seqs->front());
  CHECK(seqs->front() != 0);
  mlpo_subgroup_free(subgroup);
}

TEST_CASE("Registration.WhatCannotBeIsRefusedHere") {
  FakeDaemon daemon;
  Connected client(daemon);
  const auto one = [&](auto change) {
    static const uint64_t shape[] = {2, 3};
    mlpo_tensor_spec spec = Spec("w", 6);
    spec.ndim = 2;
    spec.shape = shape;
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = "k";
    options.numel = 6;
    options.tensors = &spec;
    options.tensor_count = 1;
    change(options, spec);
    return TryRegister(client, options);
  };
  static const uint64_t other[] = {2, 4}, small[] = {1, 3}, offsets[] = {1, 0}, wraps[] = {UINT64_MAX, 0},
                        huge[] = {1ull << 40, 1ull << 40};
  const std::string long_name(257, 'n');
  CHECK(one([](auto& o, auto&) { o.key = nullptr; }) == -EINVAL);
  CHECK(one([](auto& o, auto&) { o.key = ""; }) == -EINVAL);
  CHECK(one([&](auto& o, auto&) { o.key = long_name.c_str(); }) == -EINVAL);
  CHECK(one([](auto& o, auto&) { o.dtype = 4; }) == -EINVAL);
  CHECK(one([](auto& o, auto&) { o.grad_dtype = -1; }) == -EINVAL);
  CHECK(one([](auto& o, auto&) { o.numel = 7; }) == -EINVAL);
  CHECK(LastErrorHas("have 6 elements"));
  CHECK(one([](auto& o, auto&) { o.tensor_count = 0; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.name = nullptr; }) == -EINVAL);
  CHECK(one([&](auto&, auto& s) { s.name = long_name.c_str(); }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.shape = other; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.shape = nullptr; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.shape = huge; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.ndim = 9; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.global_shape = small; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.offsets = offsets; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.offsets = wraps; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.flat = 2; }) == -EINVAL);
  CHECK(one([](auto&, auto& s) {
          s.flat = 1;
          s.flat_first = 1;  // [1, 7) of 6
        }) == -EINVAL);
  CHECK(one([](auto&, auto& s) { s.struct_size = 3; }) == -EINVAL);
  CHECK(one([](auto&, auto&) {}) == 0);
}

TEST_CASE("Registration.RefusalLeavesTheSessionWhole") {
  auto script = std::make_shared<Script>();
  script->slot_limit_bytes = 4000;
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup* first = client.Register("a", 100);
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "a";
  options.numel = 10;
  CHECK(TryRegister(client, options) == -EEXIST);
  CHECK(LastErrorHas("key a is taken"));
  options.key = "big";
  options.numel = 1001;
  CHECK(TryRegister(client, options) == MLPO_ERR_QUOTA);
  CHECK(LastErrorHas("needs 4004, limit is 4000"));
  CHECK(mlpo_client_alive(client) == 0);
  mlpo_subgroup* second = client.Register("b", 100);
  mlpo_subgroup_free(first);
  mlpo_subgroup_free(second);
}

TEST_CASE("Registration.EarlyRefusalAnswersTheWholeOfIt") {
  auto script = std::make_shared<Script>();
  uint32_t refused = 0;
  script->frame = [&](int socket, const mlpo_frame& frame) {
    if (frame.type == MLPO_FRAME_REGISTER_BEGIN && refused == 0) {
      refused = frame.seq;
      SendError(socket, frame.seq, -EINVAL, "not this one");
    }
    return frame.seq == refused;  // TENSORS and END of it are dropped
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "a";
  options.numel = 10;
  CHECK(TryRegister(client, options) == -EINVAL);
  CHECK(LastErrorHas("not this one"));
  mlpo_subgroup_free(client.Register("b", 10));
}

TEST_CASE("Registration.LateAnswerIsTakenBeforeTheNextRequest") {
  auto script = std::make_shared<Script>();
  std::atomic<bool> slow{true};
  script->frame = [&](int, const mlpo_frame& frame) {
    if (frame.type == MLPO_FRAME_REGISTER_END && slow.exchange(false)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    return false;
  };
  FakeDaemon daemon(script);
  Connected client(daemon);
  mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
  options.key = "late";
  options.numel = 100'000;  // its arena comes late too
  CHECK(TryRegister(client, options, kSecond / 20) == -ETIMEDOUT);
  mlpo_subgroup* next = client.Register("next", 100'000);
  std::memset(Info(next).grad, 1, 400'000);
  // It goes on: the key is taken.
  CHECK(TryRegister(client, options) == -EEXIST);
  mlpo_subgroup_free(next);
}

TEST_CASE("Registration.ThreadsRegisterOneAfterTheOther") {
  FakeDaemon daemon;
  Connected client(daemon);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        const std::string key = std::to_string(t) + "." + std::to_string(i);
        mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
        options.key = key.c_str();
        options.numel = 10;
        mlpo_request* request = nullptr;
        if (TryRegister(client, options, 20 * kSecond) != 0) ++failures;
        if (mlpo_submit_nop(client, 20 * kSecond, &request) != 0 ||
            mlpo_request_wait(request, 20 * kSecond, nullptr) != 0) {
          ++failures;
        }
        mlpo_request_free(request);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
}

TEST_CASE("Registration.SpoiltAnswersEndTheSession") {
  using Answer = std::function<void(int, uint32_t)>;
  const auto registered = [](uint32_t seq) {
    mlpo_registered answer = {};
    answer.frame = {MLPO_MAGIC, MLPO_FRAME_REGISTERED, 0, sizeof answer, seq};
    answer.subgroup = 1;
    return answer;
  };
  const auto arena = [](uint32_t seq, uint64_t bytes) {
    mlpo_arena frame = {};
    frame.frame = {MLPO_MAGIC, MLPO_FRAME_ARENA, 0, sizeof frame, seq};
    frame.bytes = bytes;
    return frame;
  };
  const auto send_arena = [arena](int socket, uint32_t seq, uint64_t announced, size_t real, bool sealed,
                                  uint32_t index = 0) {
    const int fd = MakeMemfd(real, sealed);
    mlpo_arena frame = arena(seq, announced);
    frame.index = index;
    SendRaw(socket, &frame, sizeof frame, {fd});
    close(fd);
  };
  const Answer answers[] = {
      // A slot in an arena that is not there.
      [&](int socket, uint32_t seq) {
        const mlpo_registered answer = registered(seq);
        SendRaw(socket, &answer, sizeof answer);
      },
      // A slot that reaches past its arena.
      [&](int socket, uint32_t seq) {
        send_arena(socket, seq, 4096, 4096, true);
        mlpo_registered answer = registered(seq);
        answer.grad_offset = answer.param_offset = 4096 - 64;
        SendRaw(socket, &answer, sizeof answer);
      },
      // Two regions where one is due.
      [&](int socket, uint32_t seq) {
        send_arena(socket, seq, 1 << 16, 1 << 16, true);
        mlpo_registered answer = registered(seq);
        answer.grad_offset = 128;
        answer.param_offset = 4096;
        SendRaw(socket, &answer, sizeof answer);
      },
      // Handle 0.
      [&](int socket, uint32_t seq) {
        send_arena(socket, seq, 1 << 16, 1 << 16, true);
        mlpo_registered answer = registered(seq);
        answer.subgroup = 0;
        answer.grad_offset = answer.param_offset = 128;
        SendRaw(socket, &answer, sizeof answer);
      },
      // Arenas: smaller than said, not sealed, out of order, without memory.
      [&](int socket, uint32_t seq) { send_arena(socket, seq, 1 << 16, 4096, true); },
      [&](int socket, uint32_t seq) { send_arena(socket, seq, 4096, 4096, false); },
      [&](int socket, uint32_t seq) { send_arena(socket, seq, 4096, 4096, true, 1); },
      [&](int socket, uint32_t seq) {
        const mlpo_arena frame = arena(seq, 4096);
        SendRaw(socket, &frame, sizeof frame);
      },
      // The answer to another request.
      [&](int socket, uint32_t seq) {
        const mlpo_registered answer = registered(seq + 1);
        SendRaw(socket, &answer, sizeof answer);
      },
  };
  for (const Answer& answer : answers) {
    INFO("answer " << &answer - answers);
    auto script = std::make_shared<Script>();
    script->frame = [&](int socket, const mlpo_frame& frame) {
      if (frame.type == MLPO_FRAME_REGISTER_END) answer(socket, frame.seq);
      return true;
    };
    FakeDaemon daemon(script);
    Connected client(daemon);
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = "a";
    options.numel = 100;
    CHECK(TryRegister(client, options) == MLPO_ERR_PROTOCOL);
    CHECK(mlpo_client_alive(client) == MLPO_ERR_PROTOCOL);
  }
}

TEST_CASE("Registration.SpoiltLentAreasEndTheSession") {
  constexpr uint64_t kArea = 1 << 16;
  struct Case {
    const char* name;
    int code;
    std::function<void(mlpo_staged*)> spoil;
    size_t bytes = sizeof(mlpo_staged);
  };
  const Case cases[] = {
      {"none: only so do the others show anything", 0, [](mlpo_staged*) {}},
      {"nothing", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->bytes = 0; }},
      {"reserved", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->reserved = 1; }},
      {"no such arena", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->arena = 2; }},
      {"arena 2^32-1", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->arena = UINT32_MAX; }},
      {"past the end", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->offset = MLPO_ALIGN; }},
      {"longer than its arena", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->bytes += 1; }},
      {"2^64-1 bytes", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->bytes = UINT64_MAX; }},
      {"ends at 2^64", MLPO_ERR_PROTOCOL,
       [](mlpo_staged* lent) {
         lent->offset = -uint64_t{MLPO_ALIGN};
         lent->bytes = MLPO_ALIGN;
       }},
      {"misaligned", MLPO_ERR_PROTOCOL,
       [](mlpo_staged* lent) {
         lent->offset = 64;
         lent->bytes -= MLPO_ALIGN;
       }},
      {"another request's", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { ++lent->frame.seq; }},
      {"STAGED", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->frame.type = MLPO_FRAME_STAGED; }},
      {"too short", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->frame.bytes -= 8; }, sizeof(mlpo_staged) - 8},
      {"header alone", MLPO_ERR_PROTOCOL, [](mlpo_staged* lent) { lent->frame.bytes = sizeof(mlpo_frame); },
       sizeof(mlpo_frame)},
  };
  for (const Case& c : cases) {
    INFO(c.name);
    auto script = std::make_shared<Script>();
    script->welcome = [](mlpo_welcome* welcome) { welcome->features |= MLPO_FEATURE_KEEP; };
    script->frame = [&](int socket, const mlpo_frame& frame) {
      if (frame.type == MLPO_FRAME_LEND) {
        const int fd = MakeMemfd(kArea, true);
        mlpo_arena arena = {};
        arena.frame = {MLPO_MAGIC, MLPO_FRAME_ARENA, 0, sizeof arena, frame.seq};
        arena.index = 1;  // the staging area's is 0
        arena.bytes = kArea;
        SendRaw(socket, &arena, sizeof arena, {fd});
        close(fd);
        mlpo_staged lent = {};
        lent.frame = {MLPO_MAGIC, MLPO_FRAME_LENT, 0, sizeof lent, frame.seq};
        lent.arena = 1;
        lent.bytes = kArea;
        c.spoil(&lent);
        SendRaw(socket, &lent, c.bytes);
      } else if (frame.type == MLPO_FRAME_REGISTER_END) {
        mlpo_registered registered = {};
        registered.frame = {MLPO_MAGIC, MLPO_FRAME_REGISTERED, 0, sizeof registered, frame.seq};
        registered.subgroup = 1;
        SendRaw(socket, &registered, sizeof registered);
      }
      return frame.type != MLPO_FRAME_STAGING;
    };
    FakeDaemon daemon(script);
    mlpo_connect_options connect = ConnectTo(daemon.socket());
    connect.arena_bytes = 1 << 20;
    mlpo_client* client = nullptr;
    REQUIRE(mlpo_connect(&connect, &client) == 0);
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = "a";
    options.numel = 1000;
    options.keep = 1;
    mlpo_subgroup* subgroup = nullptr;
    CHECK(mlpo_subgroup_register(client, &options, 5 * kSecond, &subgroup) == c.code);
    if (c.code == 0) {
      CHECK(mlpo_slot_lend(subgroup, 5 * kSecond) == 0);
      std::memset(Info(subgroup).grad, 1, 4000);
    }
    CHECK(mlpo_client_alive(client) == c.code);
    mlpo_subgroup_free(subgroup);
    mlpo_client_free(client);
  }
}
