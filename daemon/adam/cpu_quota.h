// CpuQuota: how many CPUs' time the process's cgroup grants, from cpu.max (v2) or cpu.cfs_quota_us (v1).
//
// The tightest limit between the process's cgroup and the root counts. Threads: pure function of the file system.
#pragma once

#include <optional>
#include <string>

namespace mlpo {

// In CPUs, such as 1.5; nothing where no limit is set or no cgroup can be read. `root` goes before /proc and before the
// mount points found there: tests give a tree of their own.
std::optional<double> ReadCpuQuota(const std::string& root = "");

}  // namespace mlpo
