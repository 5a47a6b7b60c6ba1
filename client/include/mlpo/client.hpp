// mlpo: the C++ side of client.h: owners, results and errors as values of C++. Header only; C++17 or newer.
//
// Every function of the classes here throws mlpo::Error when the C function fails, and has its meaning, thread rules
// and time-outs. Objects move and do not copy; a moved-from object may only be assigned to or destroyed. Subgroups and
// requests may outlive their client: they then fail with MLPO_ERR_CLOSED.
#ifndef MLPO_CLIENT_HPP_
#define MLPO_CLIENT_HPP_

#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlpo/client.h"

namespace mlpo {

class Error : public std::runtime_error {
 public:
  explicit Error(int code) : Error(code, mlpo_last_error()) {}
  Error(int code, const std::string& text)
      : std::runtime_error(text.empty() ? mlpo_strerror(code) : text), code_(code) {}
  int code() const { return code_; }                      // negative: a negated errno or MLPO_ERR_*
  int error_number() const { return mlpo_errno(code_); }  // a positive errno

 private:
  int code_;
};

using Timeout = std::chrono::nanoseconds;
inline constexpr Timeout kForever{MLPO_FOREVER};

inline void Check(int code) {
  if (code != 0) throw Error(code);
}

// One request; freed at the end of its life, though the work goes on.
class Request {
 public:
  explicit Request(mlpo_request* request) : request_(request) {}

  // The result once it has ended with success; nullopt when the time-out passed first.
  std::optional<mlpo_result> WaitFor(Timeout timeout) {
    mlpo_result result = {};
    result.struct_size = sizeof result;
    const int code = mlpo_request_wait(request_.get(), timeout.count(), &result);
    // A request can itself have ended with -ETIMEDOUT: then the result says so.
    if (code == -ETIMEDOUT && result.status == 0) return std::nullopt;
    Check(code);
    return result;
  }
  mlpo_result Wait() {
    for (;;) {
      if (std::optional<mlpo_result> result = WaitFor(kForever)) return *result;
    }
  }
  bool done() const {
    const int code = mlpo_request_done(request_.get());
    if (code < 0) throw Error(code);
    return code == 1;
  }
  mlpo_request* get() const { return request_.get(); }

 private:
  struct Free {
    void operator()(mlpo_request* request) const { mlpo_request_free(request); }
  };
  std::unique_ptr<mlpo_request, Free> request_;
};

// Which of the requests, all of one client, has ended: the first in the vector that has; nullopt when the time-out
// passed first.
inline std::optional<size_t> WaitAny(const std::vector<const Request*>& requests, Timeout timeout = kForever) {
  std::vector<mlpo_request*> raw;
  raw.reserve(requests.size());
  for (const Request* request : requests) raw.push_back(request->get());
  size_t index = 0;
  const int code = mlpo_wait_any(raw.data(), raw.size(), timeout.count(), &index);
  if (code == -ETIMEDOUT) return std::nullopt;
  Check(code);
  return index;
}

class Subgroup {
 public:
  explicit Subgroup(mlpo_subgroup* subgroup) : subgroup_(subgroup) {}

  struct mlpo_subgroup_info info() const {
    struct mlpo_subgroup_info info = {};
    info.struct_size = sizeof info;
    Check(mlpo_subgroup_info(subgroup_.get(), &info));
    return info;
  }
  Request SubmitGrad(Timeout timeout = kForever) { return SubmitGrad({}, timeout); }
  // No pieces: all of it, VALUE.
  Request SubmitGrad(const std::vector<mlpo_grad_piece>& pieces, Timeout timeout = kForever) {
    mlpo_request* request = nullptr;
    Check(mlpo_submit_grad(subgroup_.get(), pieces.empty() ? nullptr : pieces.data(), pieces.size(), timeout.count(),
                           &request));
    return Request(request);
  }
  Request SubmitUpdate(const mlpo_update_options& options, Timeout timeout = kForever) {
    mlpo_request* request = nullptr;
    Check(mlpo_submit_update(subgroup_.get(), &options, timeout.count(), &request));
    return Request(request);
  }
  void Discard(bool overflow = false, Timeout timeout = kForever) {
    Check(mlpo_subgroup_discard(subgroup_.get(), overflow ? 1 : 0, timeout.count()));
  }
  // Arrays of `count` floats each; nullptr leaves a part out.
  void ReadState(uint64_t first, uint64_t count, float* master, float* exp_avg, float* exp_avg_sq,
                 Timeout timeout = kForever) const {
    Check(mlpo_read_state(subgroup_.get(), first, count, master, exp_avg, exp_avg_sq, timeout.count()));
  }
  void WriteState(uint64_t first, uint64_t count, const float* master, const float* exp_avg, const float* exp_avg_sq,
                  Timeout timeout = kForever) {
    Check(mlpo_write_state(subgroup_.get(), first, count, master, exp_avg, exp_avg_sq, timeout.count()));
  }
  // Of all tensors, in their order.
  std::vector<int64_t> ReadSteps(Timeout timeout = kForever) const {
    std::vector<int64_t> steps(info().tensor_count);
    Check(mlpo_read_steps(subgroup_.get(), 0, static_cast<uint32_t>(steps.size()), steps.data(), timeout.count()));
    return steps;
  }
  void WriteSteps(const std::vector<int64_t>& steps, Timeout timeout = kForever) {
    Check(mlpo_write_steps(subgroup_.get(), 0, static_cast<uint32_t>(steps.size()), steps.data(), timeout.count()));
  }
  // Of a subgroup with `keep`: see client.h.
  void LendSlot(Timeout timeout = kForever) { Check(mlpo_slot_lend(subgroup_.get(), timeout.count())); }
  void GiveSlotBack() { Check(mlpo_slot_give_back(subgroup_.get())); }
  mlpo_subgroup* get() const { return subgroup_.get(); }

 private:
  struct Free {
    void operator()(mlpo_subgroup* subgroup) const { mlpo_subgroup_free(subgroup); }
  };
  std::unique_ptr<mlpo_subgroup, Free> subgroup_;
};

class Client {
 public:
  // Begin from MLPO_CONNECT_OPTIONS_INIT.
  static Client Connect(const mlpo_connect_options& options) {
    mlpo_client* client = nullptr;
    Check(mlpo_connect(&options, &client));
    return Client(client);
  }
  static Client Connect() { return Connect(MLPO_CONNECT_OPTIONS_INIT); }

  // Begin from MLPO_SUBGROUP_OPTIONS_INIT.
  Subgroup Register(const mlpo_subgroup_options& options, Timeout timeout = kForever) {
    mlpo_subgroup* subgroup = nullptr;
    Check(mlpo_subgroup_register(client_.get(), &options, timeout.count(), &subgroup));
    return Subgroup(subgroup);
  }
  Request SubmitNop(Timeout timeout = kForever) {
    mlpo_request* request = nullptr;
    Check(mlpo_submit_nop(client_.get(), timeout.count(), &request));
    return Request(request);
  }
  void Discard(bool overflow = false, Timeout timeout = kForever) {
    Check(mlpo_client_discard(client_.get(), overflow ? 1 : 0, timeout.count()));
  }
  // Named objects of the job.
  void FlushObject(const std::string& name, const void* data, uint64_t bytes, Timeout timeout = kForever) {
    Check(mlpo_object_flush(client_.get(), name.c_str(), data, bytes, timeout.count()));
  }
  // Returns the object's size.
  uint64_t FetchObject(const std::string& name, uint64_t first, uint64_t count, void* out, Timeout timeout = kForever) {
    uint64_t bytes = 0;
    Check(mlpo_object_fetch(client_.get(), name.c_str(), first, count, out, &bytes, timeout.count()));
    return bytes;
  }
  // nullopt if there is no such object.
  std::optional<uint64_t> ObjectSize(const std::string& name, Timeout timeout = kForever) const {
    uint64_t bytes = 0;
    const int code = mlpo_object_size(client_.get(), name.c_str(), &bytes, timeout.count());
    if (code == -ENOENT) return std::nullopt;
    Check(code);
    return bytes;
  }
  void DeleteObject(const std::string& name, Timeout timeout = kForever) {
    Check(mlpo_object_delete(client_.get(), name.c_str(), timeout.count()));
  }
  struct mlpo_client_info info() const {
    struct mlpo_client_info info = {};
    info.struct_size = sizeof info;
    Check(mlpo_client_info(client_.get(), &info));
    return info;
  }
  // Why the session has ended; 0 while it lives.
  int alive() const { return mlpo_client_alive(client_.get()); }
  void Close() { Check(mlpo_client_close(client_.get())); }
  mlpo_client* get() const { return client_.get(); }

 private:
  explicit Client(mlpo_client* client) : client_(client) {}
  struct Free {
    void operator()(mlpo_client* client) const { mlpo_client_free(client); }
  };
  std::unique_ptr<mlpo_client, Free> client_;
};

}  // namespace mlpo

#endif  // MLPO_CLIENT_HPP_
