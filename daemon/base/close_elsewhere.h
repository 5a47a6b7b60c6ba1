// CloseElsewhere: descriptors that somebody else has passed: counted by user, and closed in threads that nothing waits
// for.
//
// Closing a file asks whoever serves its file system, and waits for the answer; a client can be that itself (FUSE), and
// never answer. Then its thread stays, and the descriptor with it, until the client has ended. A user has kCloseThreads
// threads at most: what else it has passed waits behind them, and nobody else's does. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"

namespace mlpo {

inline constexpr uint32_t kCloseThreads = 2;  // of one user

// They count as the user's until they are closed. Where no thread can be started they wait for the user's next ones.
void CloseElsewhere(std::vector<UniqueFd> files, uint32_t uid);

using ForeignFiles = std::shared_ptr<std::vector<UniqueFd>>;

// Descriptors that several use, closed so when the last of these lets go of them: in whatever thread that is. `most`:
// so many will be in it, or have been made of them by whoever shares it; they count as the user's from now on.
// MLPO_E_QUOTA with the figures if the user, or all users together, would have too many: an eighth, and a half, of
// RLIMIT_NOFILE. `files` are then closed so.
Result<ForeignFiles> ShareForeign(std::vector<UniqueFd> files, uint32_t uid, size_t most);

// MLPO_E_QUOTA: as many of the user's wait to be closed. Who has a connection can add some that no frame has a use for.
Status CheckForeign(uint32_t uid);
// That count as the user's; for tests.
size_t CountForeign(uint32_t uid);

}  // namespace mlpo
