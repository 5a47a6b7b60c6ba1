// LongRun: what the long commands (fault matrix, soak) have in common: a report in JSON lines that says of which
// sources each line is, so that a run that was cut goes on where it ended, and work in processes of its own, of which
// nothing stays.
//
// A report's line counts later if it is of the same sources: the tree objects of the folders under test, and nothing
// changed in the working copy. One thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace mlpo::test {

// Of the repository that this was built from; empty where git does not answer.
struct Sources {
  std::string commit;
  std::string tree;  // of what is under test; changes with it
  bool dirty = true;
};
// `also`: files and folders under test besides those of every long command, with spaces between.
Sources FindSources(const std::string& also = "");

class Report {
 public:
  // Reads what `file` has; "" keeps none. `fresh`: as if there was nothing in it. `also`: as for FindSources. Throws
  // std::runtime_error where it cannot be read or written.
  Report(std::string file, std::string command, bool fresh, const std::string& also = "");
  // A line with all members of `like`, from these sources, that `counts`.
  bool Has(const nlohmann::json& like, const std::function<bool(const nlohmann::json&)>& counts) const;
  // Sum of a number over all such lines.
  double Sum(const nlohmann::json& like, const std::string& number) const;
  // Completes the line with command, commit, tree, dirty and time, appends it to the file and prints it.
  void Add(nlohmann::json line);

 private:
  const std::string file_;
  const std::string command_;
  const Sources sources_;
  std::vector<nlohmann::json> lines_;
};

// Runs `work` in a child that leads a process group of its own and has a folder of its own as $TMPDIR, and returns what
// it returned. When it has not ended within `seconds`, or ended otherwise, the answer is {"outcome": "failed", "why":
// ...}. Whatever it leaves goes: processes, mounts, loop devices of files in the folder, the folder; also when we are
// killed ourselves, for a third process looks after that. The child's standard output is ours.
nlohmann::json InChild(int seconds, const std::function<nlohmann::json()>& work);

// The end of a text, as much as a line of a report may have: of a daemon's log.
std::string EndOf(const std::string& text);

// A number of a flag; exits with 64 if it is none.
uint64_t NumberFlag(const char* program, const std::string& flag, const char* value);

}  // namespace mlpo::test
