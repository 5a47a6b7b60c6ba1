// What `status` on a daemon's control socket says, for tests.
#pragma once

#include <chrono>
#include <functional>
#include <mlpo/client.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

namespace mlpo::test {

inline nlohmann::json DaemonStatus(const std::string& socket) {
  char* text = nullptr;
  Check(mlpo_control(socket.c_str(), "status", nullptr, 10'000'000'000, &text));
  nlohmann::json status = nlohmann::json::parse(text);
  mlpo_free(text);
  return status;
}

// Whether `condition` came true within `seconds`.
inline bool Eventually(const std::function<bool()>& condition, int seconds = 20) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

inline bool LongForm() {
  const char* value = std::getenv("MLPO_LONG");
  return value != nullptr && *value == '1';
}

}  // namespace mlpo::test
