// LooseThreads: a few threads for the steps of one thing, each of which may hang for ever in somebody's file system.
//
// Nothing waits for them, and their end neither: with one thread, steps run in the order in which they were posted;
// what was posted is carried out also when the object has gone, and then the threads end. So a step owns what it uses,
// or asks somebody who knows whether it is still there.
//
// Any thread may post. Posting never blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "daemon/base/status.h"

namespace mlpo {

class LooseThreads {
 public:
  // Fails where the limit on threads is reached before there is one of them.
  static Result<std::shared_ptr<LooseThreads>> Start(const std::string& name, uint32_t count);
  ~LooseThreads();
  LooseThreads(const LooseThreads&) = delete;
  LooseThreads& operator=(const LooseThreads&) = delete;

  void Post(std::function<void()> step);

 private:
  struct Shared;
  explicit LooseThreads(std::shared_ptr<Shared> shared);

  const std::shared_ptr<Shared> shared_;
};

}  // namespace mlpo
