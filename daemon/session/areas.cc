#include "daemon/session/areas.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

namespace mlpo {
namespace {

uint64_t WholePages(uint64_t bytes) { return (bytes + MLPO_ALIGN - 1) / MLPO_ALIGN * MLPO_ALIGN; }

// A memfd with its memory taken now, mapped.
Status MakeArea(const char* name, uint64_t bytes, Access access, UniqueFd* fd, MappedRegion* region) {
  Result<UniqueFd> made = CreateSealedMemfd(name, bytes);
  if (!made.ok()) return made.status();
  Status status = AllocateMemfd(made->get(), 0, bytes);
  if (!status.ok()) return status;
  Result<MappedRegion> mapped = MappedRegion::Map(made->get(), bytes, access);
  if (!mapped.ok()) return mapped.status();
  *fd = std::move(*made);
  *region = std::move(*mapped);
  return Status();
}

}  // namespace

Result<std::unique_ptr<Areas>> Areas::Create(uint32_t entries) {
  std::unique_ptr<Areas> areas(new Areas);
  areas->entries_ = entries;
  areas->hyper_offset_ = MLPO_RING_HEADER_BYTES + WholePages(uint64_t{entries} * sizeof(mlpo_submission));
  areas->errors_offset_ = MLPO_RING_HEADER_BYTES + WholePages(uint64_t{entries} * sizeof(mlpo_completion));
  const uint64_t client_bytes = areas->hyper_offset_ + WholePages(uint64_t{entries} * sizeof(mlpo_hyper));
  const uint64_t daemon_bytes = areas->errors_offset_ + WholePages(uint64_t{entries} * sizeof(mlpo_error_record));
  Status status = MakeArea("mlpo-client", client_bytes, Access::kReadOnly, &areas->client_fd_, &areas->client_);
  if (status.ok()) {
    status = MakeArea("mlpo-daemon", daemon_bytes, Access::kReadWrite, &areas->daemon_fd_, &areas->daemon_);
  }
  // We hold the only writable mapping of it that there will ever be.
  if (status.ok()) status = SealFutureWrites(areas->daemon_fd_.get());
  if (!status.ok()) return status;
  areas->doorbell_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!areas->doorbell_) return Status::Errno(errno, "eventfd for a session's doorbell");
  return areas;
}

void Areas::Describe(mlpo_welcome* welcome) const {
  welcome->entries = entries_;
  welcome->client_area_bytes = client_.size();
  welcome->daemon_area_bytes = daemon_.size();
  welcome->submissions_offset = MLPO_RING_HEADER_BYTES;
  welcome->hyper_offset = hyper_offset_;
  welcome->completions_offset = MLPO_RING_HEADER_BYTES;
  welcome->errors_offset = errors_offset_;
}

Status Areas::SealClientArea() {
  Status status = SealFutureWrites(client_fd_.get());
  client_fd_.reset();
  daemon_fd_.reset();
  return status;
}

}  // namespace mlpo
