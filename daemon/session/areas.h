// Areas: the shared memory of one session's ring, daemon side: client area (read-only here), daemon area, doorbell.
//
// Created by the main thread; afterwards the data thread uses it through RingReader and CompletionWriter. Immutable but
// for the shared words. The descriptors are kept until they have been sent and sealed.
#pragma once

#include <cstdint>
#include <memory>

#include "daemon/base/mapped_region.h"
#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "proto/control.h"
#include "proto/ring.h"

namespace mlpo {

class Areas {
 public:
  // `entries`: a power of two in [MLPO_MIN_RING_ENTRIES, MLPO_MAX_RING_ENTRIES].
  static Result<std::unique_ptr<Areas>> Create(uint32_t entries);

  // Sizes and offsets, as WELCOME tells them.
  void Describe(mlpo_welcome* welcome) const;
  // After READY: the client has mapped what it writes, and gets no other way to change it.
  Status SealClientArea();

  uint32_t entries() const { return entries_; }
  int client_area_fd() const { return client_fd_.get(); }
  int daemon_area_fd() const { return daemon_fd_.get(); }
  int doorbell_fd() const { return doorbell_.get(); }

  const mlpo_client_lines* client_lines() const { return At<mlpo_client_lines>(client_, 0); }
  const mlpo_submission* submissions() const { return At<mlpo_submission>(client_, MLPO_RING_HEADER_BYTES); }
  const mlpo_hyper* hyper() const { return At<mlpo_hyper>(client_, hyper_offset_); }
  mlpo_daemon_lines* daemon_lines() const { return At<mlpo_daemon_lines>(daemon_, 0); }
  mlpo_completion* completions() const { return At<mlpo_completion>(daemon_, MLPO_RING_HEADER_BYTES); }
  mlpo_error_record* errors() const { return At<mlpo_error_record>(daemon_, errors_offset_); }

 private:
  Areas() = default;
  template <class T>
  static T* At(const MappedRegion& region, uint64_t offset) {
    return reinterpret_cast<T*>(region.data() + offset);
  }

  uint32_t entries_ = 0;
  uint64_t hyper_offset_ = 0;
  uint64_t errors_offset_ = 0;
  UniqueFd client_fd_;
  UniqueFd daemon_fd_;
  UniqueFd doorbell_;
  MappedRegion client_;
  MappedRegion daemon_;
};

}  // namespace mlpo
