// Table: columns aligned for people, and numbers with units. Pure.
//
// Everything that comes from a daemon passes Safe() before it reaches a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mlpo::ctl {

class Table {
 public:
  // A heading that begins with '>' aligns its column to the right.
  explicit Table(std::vector<std::string> headings) : rows_{std::move(headings)} {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }  // as many cells as headings
  std::string Text() const;                                                    // lines, each indented by two blanks

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string Bytes(double bytes);            // "64.0 GiB"
std::string BytesPerS(double speed);        // "345.0 MB/s": speeds are decimal, as drives are sold
std::string Count(uint64_t count);          // "268.0 M"
std::string Seconds(double seconds);        // "3 d 4 h", "12.5 s"
std::string Safe(const std::string& text);  // without control characters

}  // namespace mlpo::ctl
