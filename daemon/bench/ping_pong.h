// What two cores can do without a daemon: round trips between this process and a child of its own.
#pragma once

#include <cstdint>
#include <vector>

namespace mlpo::bench {

int64_t NowNs();

// Nanoseconds of each of `count` round trips, through two words in shared memory that both sides spin on; this thread
// is on the core that it is bound to, the child on `peer_core`.
std::vector<int64_t> BarePingPong(int peer_core, uint64_t count);

// The same through two eventfds that both sides sleep in. Before each, this thread sleeps for pause_ns.
std::vector<int64_t> EventfdPingPong(int peer_core, uint64_t count, int64_t pause_ns);

void SleepNs(int64_t ns);

}  // namespace mlpo::bench
