// Counters: what the daemon exports without being asked ("<socket>.counters", proto/counters.h), for when it does not
// answer on its control socket. The file's contents are not trusted: every number is checked before it is used.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace mlpo::ctl {

// As `status` of the daemon answers, without sessions; and in "counters" the age of the numbers (written_s) and since
// when the threads have not been seen in their loops (main_s, data_s), in seconds, with `not_answering`: the names of
// those that are late. Nothing with *problem if there is no such file, its daemon is dead, or it is no such file.
// `socket`: the daemon's, "": where the client library looks.
std::optional<nlohmann::ordered_json> ReadCounters(const std::string& socket, std::string* problem);

}  // namespace mlpo::ctl
