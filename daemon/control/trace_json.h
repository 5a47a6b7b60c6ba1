// A trace in Chrome's trace event format (JSON), as https://ui.perfetto.dev and chrome://tracing read it, in pieces.
//
// A process is a path (threads: its slots, reads and writes apart), all workers, or a session (its steps, and as
// nestable asynchronous events its GRAD windows and UPDATEs); the pool's blocks and the paths' bytes per second are
// counters. Of sessions that the viewer may not see there are transfers and work without names, so that what they take
// shows. Pure.
#pragma once

#include <cstddef>
#include <string>

#include "daemon/control/status_json.h"
#include "daemon/types/trace.h"

namespace mlpo {

// Of records [from, from + count): {"events": [...], "next": index or null}, and in the first piece besides "seconds",
// "records", "dropped".
std::string TraceJson(const Trace& trace, Viewer viewer, size_t from, size_t count);

}  // namespace mlpo
