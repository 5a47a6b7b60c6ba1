// JSON-RPC 2.0, one request a line: what a peer asked, and the lines that answer. Pure; no input makes these throw.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace mlpo {

enum class RpcError : int {
  kParse = -32700,
  kInvalidRequest = -32600,
  kNoMethod = -32601,
  kInvalidParams = -32602,
  kNotPermitted = -32001,
  kTimeout = -32002,
  kBusy = -32003,
  kNotPossible = -32004,
};

struct RpcRequest {
  std::string method;
  std::string id;             // JSON text: a string, a number or null
  bool notification = false;  // no id: must not be answered
  std::string params;         // JSON text; "": none
};

// The request in `line` (without its newline). Nothing if it is none: then *reply is the error's line, with newline.
// Nesting deeper than kMaxRpcDepth is refused before it is parsed.
inline constexpr int kMaxRpcDepth = 16;
std::optional<RpcRequest> ParseRpc(std::string_view line, std::string* reply);

// The parameters of "bench"; returns what is wrong with them, "" if nothing.
struct BenchRequest;
std::string ParseBench(const std::string& params, BenchRequest* request);
// Those of "gc".
struct GcRequest;
std::string ParseGc(const std::string& params, GcRequest* request);
// Those of "paths_disable" and the like.
struct PathCommand;
std::string ParsePathCommand(const std::string& params, PathCommand* command);

// Likewise of "checkpoint_request". *job: nullopt without one.
std::string ParseCheckpointRequest(const std::string& params, std::optional<std::string>* job);

// Of "share_figures" and "share"; these fill all but the uid.
std::string ParseShareFigures(const std::string& params, std::string* job);
struct ShareRequest;
std::string ParseShare(const std::string& params, ShareRequest* request);

// `result` is JSON text.
std::string RpcResultLine(const std::string& id, const std::string& result);
std::string RpcErrorLine(const std::string& id, RpcError code, const std::string& message);

}  // namespace mlpo
