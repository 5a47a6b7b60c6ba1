// Exit codes of mlpo-ctl. sysexits' values where they have one.
#pragma once

namespace mlpo::ctl {

inline constexpr int kFine = 0;
inline constexpr int kFailed = 1;
inline constexpr int kDegraded = 2;      // it works, but a path is not healthy
inline constexpr int kUsage = 64;        // EX_USAGE
inline constexpr int kUnreachable = 69;  // EX_UNAVAILABLE: no daemon answers

}  // namespace mlpo::ctl
