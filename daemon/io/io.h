// The door to io/: paths, their queues and the pool. What each part promises is said in its own header:
//   buffer_pool.h   BufferPool: locked, equal buffers
//   path.h          Path: one storage directory, proven at start; a session's files on it
//   path_queue.h    PathQueue: carries out Transfers on one path, one thread each; io_uring and thread back-ends
#pragma once

#include "daemon/io/buffer_pool.h"
#include "daemon/io/path.h"
#include "daemon/io/path_queue.h"
