#include "daemon/control/json_rpc.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "daemon/control/control_server.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr double kMostFigure = 1e24;  // sums and products of figures stay finite

std::string Dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

bool TooDeep(std::string_view line) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxRpcDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace

std::string RpcResultLine(const std::string& id, const std::string& result) {
  return "{\"jsonrpc\":\"2.0\",\"id\":" + id + ",\"result\":" + result + "}\n";
}

std::string RpcErrorLine(const std::string& id, RpcError code, const std::string& message) {
  return "{\"jsonrpc\":\"2.0\",\"id\":" + id + ",\"error\":{\"code\":" + std::to_string(static_cast<int>(code)) +
         ",\"message\":" + Dump(message) + "}}\n";
}

std::string ParseBench(const std::string& params, BenchRequest* request) {
  if (params.empty()) return "";
  const json parsed = json::parse(params, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return "the parameters of bench are an object";
  for (const auto& [key, value] : parsed.items()) {
    if (key == "paths" && value.is_array()) {
      for (const json& path : value) {
        if (!path.is_string()) return "\"paths\" must be an array of strings";
        request->paths.push_back(path.get<std::string>());
      }
    } else if (key == "seconds" && value.is_number()) {
      request->seconds = value.get<double>();
      if (!(request->seconds >= 0.02 && request->seconds <= 60)) return "\"seconds\" must be from 0.02 to 60";
    } else {
      return "bench takes \"paths\" (an array of names or directories) and \"seconds\" (a number)";
    }
  }
  return "";
}

std::string ParseGc(const std::string& params, GcRequest* request) {
  const json parsed = json::parse(params.empty() ? "{}" : params, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return "the parameters of gc are an object";
  for (const auto& [key, value] : parsed.items()) {
    if (key == "dry_run" && value.is_boolean()) {
      request->dry_run = value.get<bool>();
    } else if (key == "node" && value.is_string()) {
      request->node = value.get<std::string>();
    } else {
      return "gc takes \"dry_run\" (true or false) and \"node\" (a name)";
    }
  }
  return "";
}

std::string ParsePathCommand(const std::string& params, PathCommand* command) {
  const json parsed = json::parse(params.empty() ? "{}" : params, nullptr, /*allow_exceptions=*/false);
  const auto path = parsed.is_object() ? parsed.find("path") : parsed.end();
  if (!parsed.is_object() || parsed.size() != 1 || path == parsed.end() || !path->is_string())
    return "the parameters are {\"path\": its name or directory}";
  command->path = path->get<std::string>();
  return "";
}

std::string ParseCheckpointRequest(const std::string& params, std::optional<std::string>* job) {
  if (params.empty()) return "";
  const json parsed = json::parse(params, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return "the parameters of checkpoint_request are an object";
  for (const auto& [key, value] : parsed.items()) {
    if (key != "job" || !value.is_string()) return "checkpoint_request takes \"job\" (a string)";
    *job = value.get<std::string>();
  }
  return "";
}

std::string ParseShareFigures(const std::string& params, std::string* job) {
  const json parsed = json::parse(params.empty() ? "{}" : params, nullptr, /*allow_exceptions=*/false);
  const auto named = parsed.is_object() ? parsed.find("job") : parsed.end();
  if (!parsed.is_object() || parsed.size() != 1 || named == parsed.end() || !named->is_string())
    return "share_figures takes \"job\" (a string)";
  *job = named->get<std::string>();
  return "";
}

std::string ParseShare(const std::string& params, ShareRequest* request) {
  const char* const kWrong =
      "share takes \"job\" and \"path\" (strings), \"nodes\" (an array of [seen_bytes_per_s, busy_s, "
      "others_bytes_per_s, step_bytes], finite and not negative) and \"me\" (an index in it)";
  const json parsed = json::parse(params.empty() ? "{}" : params, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object() || parsed.size() != 4) return kWrong;
  for (const auto& [key, value] : parsed.items()) {
    if ((key == "job" || key == "path") && value.is_string()) {
      (key == "job" ? request->job : request->path) = value.get<std::string>();
    } else if (key == "me" && value.is_number_unsigned()) {
      request->me = value.get<size_t>();
    } else if (key == "nodes" && value.is_array()) {
      for (const json& node : value) {
        std::array<double, 4> figures{};
        if (!node.is_array() || node.size() != figures.size()) return kWrong;
        for (size_t i = 0; i < figures.size(); ++i) {
          if (!node[i].is_number()) return kWrong;
          figures[i] = node[i].get<double>();
          if (!std::isfinite(figures[i]) || figures[i] < 0 || figures[i] > kMostFigure) return kWrong;
        }
        request->nodes.push_back({figures[0], figures[1], figures[2], figures[3]});
      }
    } else {
      return kWrong;
    }
  }
  return request->me < request->nodes.size() ? "" : kWrong;
}

std::optional<RpcRequest> ParseRpc(std::string_view line, std::string* reply) {
  RpcRequest request;
  request.id = "null";
  auto refuse = [&](RpcError code, const std::string& message) {
    *reply = RpcErrorLine(request.id, code, message);
    return std::nullopt;
  };
  if (TooDeep(line)) return refuse(RpcError::kParse, "nested deeper than " + std::to_string(kMaxRpcDepth));
  const json parsed = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) return refuse(RpcError::kParse, "not JSON");
  if (parsed.is_array()) return refuse(RpcError::kInvalidRequest, "batches are not supported: one request a line");
  if (!parsed.is_object()) return refuse(RpcError::kInvalidRequest, "a request is a JSON object");

  const auto id = parsed.find("id");
  if (id == parsed.end()) {
    request.notification = true;
  } else if (id->is_string() || id->is_number() || id->is_null()) {
    request.id = Dump(*id);
  } else {
    return refuse(RpcError::kInvalidRequest, "id must be a string, a number or null");
  }
  const auto version = parsed.find("jsonrpc");
  if (version == parsed.end() || *version != "2.0")
    return refuse(RpcError::kInvalidRequest, "\"jsonrpc\" must be \"2.0\"");
  const auto method = parsed.find("method");
  if (method == parsed.end() || !method->is_string())
    return refuse(RpcError::kInvalidRequest, "\"method\" must be a string");
  request.method = method->get<std::string>();
  const auto params = parsed.find("params");
  if (params != parsed.end() && !params->is_structured())
    return refuse(RpcError::kInvalidRequest, "\"params\" must be an object or an array");
  if (params != parsed.end() && !params->empty()) request.params = Dump(*params);
  return request;
}

}  // namespace mlpo
