#include "daemon/base/close_elsewhere.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/base/log.h"
#include "daemon/base/thread.h"

namespace mlpo {

void CloseElsewhere(std::vector<UniqueFd> files) {
  std::erase_if(files, [](const UniqueFd& file) { return !file; });
  if (files.empty()) return;
  const auto kept = std::make_shared<std::vector<UniqueFd>>(std::move(files));
  try {
    std::thread([kept] {
      SetThreadName("mlpo-close");
      kept->clear();
    }).detach();
  } catch (const std::system_error& error) {
    spdlog::warn("event=closed_here files={} errno={}", kept->size(), error.code().value());
  }
}

std::shared_ptr<std::vector<UniqueFd>> ShareForeign(std::vector<UniqueFd> files) {
  return {new std::vector<UniqueFd>(std::move(files)), [](std::vector<UniqueFd>* shared) {
            CloseElsewhere(std::move(*shared));
            delete shared;
          }};
}

}  // namespace mlpo
