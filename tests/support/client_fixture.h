// Short forms for tests that use the client's C API.
#pragma once

#include <cstdint>
#include <string>

#include "mlpo/client.h"
#include "tests/support/catch.h"
#include "tests/support/fake_daemon.h"

inline mlpo_connect_options ConnectTo(const std::string& socket) {
  mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  options.socket = socket.c_str();
  options.job = "test";
  options.rank = 0;
  options.world_size = 1;
  options.connect_timeout_ns = 10'000'000'000;
  return options;
}

// A client that is connected for the length of a scope.
class Connected {
 public:
  explicit Connected(const FakeDaemon& daemon, uint32_t entries = 64) {
    mlpo_connect_options options = ConnectTo(daemon.socket());
    options.ring_entries = entries;
    const int code = mlpo_connect(&options, &client_);
    INFO(mlpo_last_error());
    REQUIRE(code == 0);
  }
  Connected(const Connected&) = delete;
  Connected& operator=(const Connected&) = delete;
  ~Connected() { mlpo_client_free(client_); }

  operator mlpo_client*() const { return client_; }
  struct mlpo_client_info Info() const {
    struct mlpo_client_info info = {};
    info.struct_size = sizeof info;
    REQUIRE(mlpo_client_info(client_, &info) == 0);
    return info;
  }
  // FP32, one tensor.
  mlpo_subgroup* Register(const char* key, uint64_t numel, const float* initial = nullptr) const {
    mlpo_subgroup_options options = MLPO_SUBGROUP_OPTIONS_INIT;
    options.key = key;
    options.numel = numel;
    options.initial = initial;
    mlpo_subgroup* subgroup = nullptr;
    const int code = mlpo_subgroup_register(client_, &options, 10'000'000'000, &subgroup);
    INFO(mlpo_last_error());
    REQUIRE(code == 0);
    return subgroup;
  }

 private:
  mlpo_client* client_ = nullptr;
};

inline struct mlpo_subgroup_info Info(mlpo_subgroup* subgroup) {
  struct mlpo_subgroup_info info = {};
  info.struct_size = sizeof info;
  REQUIRE(mlpo_subgroup_info(subgroup, &info) == 0);
  return info;
}
