// CloseElsewhere: closes descriptors that somebody else has passed, in a thread that nothing waits for.
//
// Closing a file asks whoever serves its file system, and waits for the answer; a client can be that itself (FUSE), and
// never answer. Then its thread stays, and the descriptors with it, until the client has ended.
#pragma once

#include <memory>
#include <vector>

#include "daemon/base/unique_fd.h"

namespace mlpo {

// Where the limit on threads is reached they are closed here.
void CloseElsewhere(std::vector<UniqueFd> files);

// Descriptors that several use, closed so when the last of these lets go of them: in whatever thread that is.
std::shared_ptr<std::vector<UniqueFd>> ShareForeign(std::vector<UniqueFd> files);

}  // namespace mlpo
