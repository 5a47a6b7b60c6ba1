// Witness: a good client beside a bad one: what happens to the bad one must not touch it.
#pragma once

#include <string>

#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/reference_trainer.h"

namespace mlpo::test {

class Witness {
 public:
  explicit Witness(DaemonProcess& daemon)
      : daemon_(daemon), client_(Connect(daemon.socket(), "witness")), trainer_(client_, {"w", 30'011}) {
    trainer_.Step();
  }
  void Step() { trainer_.Step(); }
  // "" if the daemon runs, this session goes on, and all its bits are right.
  std::string Complaint() {
    if (!daemon_.running()) return "the daemon has ended:\n" + daemon_.log();
    trainer_.Step();
    return trainer_.Difference();
  }
  uint64_t ProtocolErrors() const { return DaemonStatus(daemon_.socket()).at("protocol_errors"); }
  size_t Sessions() const { return DaemonStatus(daemon_.socket()).at("sessions").size(); }
  // Only ours is left, and nothing of the others.
  bool Alone() const {
    return Eventually([&] { return Sessions() == 1; });
  }

 private:
  DaemonProcess& daemon_;
  Client client_;
  ReferenceTrainer trainer_;
};

}  // namespace mlpo::test
