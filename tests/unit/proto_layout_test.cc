// The protocol's layout: the same from C, from C++ and in FORMAT.md's tables.
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "mlpo/client.h"
#include "proto/abi.h"
#include "proto/command.h"
#include "proto/control.h"
#include "proto/counters.h"
#include "proto/ring.h"
#include "proto/status.h"
#include "proto/tensor.h"
#include "tests/support/catch.h"
#include "tests/unit/proto_layout.h"

extern "C" {
extern const mlpo_connect_options connect_defaults;
extern const mlpo_subgroup_options subgroup_defaults;
extern const mlpo_update_options update_defaults;
}

namespace {

const layout_row kLayoutInCpp[] = {
#include "tests/unit/proto_layout_fields.h"
};

struct Row {
  long long offset;
  size_t bytes;
  bool operator==(const Row&) const = default;
};

// FORMAT.md's tables: struct -> its size and fields, and every "| NAME | number |" row.
struct Prose {
  std::map<std::string, size_t> sizes;
  std::map<std::string, std::map<std::string, Row>> fields;
  std::set<std::pair<std::string, long long>> numbers;
};

std::vector<std::string> Cells(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream in(line.substr(1));
  for (std::string cell; std::getline(in, cell, '|');) {
    const size_t first = cell.find_first_not_of(' ');
    const size_t last = cell.find_last_not_of(' ');
    cells.push_back(first == std::string::npos ? "" : cell.substr(first, last - first + 1));
  }
  return cells;
}

bool IsNumber(const std::string& text) {
  const size_t start = !text.empty() && text[0] == '-' ? 1 : 0;
  return text.size() > start && text.find_first_not_of("0123456789", start) == std::string::npos;
}

Prose ReadProse() {
  Prose prose;
  std::ifstream in(MLPO_FORMAT_FILE);
  REQUIRE(in);
  std::string current;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("`struct ", 0) == 0) {
      const size_t end = line.find('`', 1);
      current = line.substr(8, end - 8);
      const size_t open = line.find('(', end);
      prose.sizes[current] = std::stoul(line.substr(open + 1));
    } else if (line.rfind("|", 0) == 0) {
      const std::vector<std::string> cells = Cells(line);
      if (cells.size() < 3) continue;
      if (IsNumber(cells[0]) && IsNumber(cells[1])) {
        prose.fields[current][cells[2]] = {std::stoll(cells[0]), std::stoul(cells[1])};
      } else if (IsNumber(cells[1])) {
        prose.numbers.insert({cells[0], std::stoll(cells[1])});
      }
    } else if (line.rfind("#", 0) == 0) {
      current.clear();
    }
  }
  return prose;
}

}  // namespace

TEST_CASE("Layout.CAndCppAgree") {
  REQUIRE(layout_in_c_rows == std::size(kLayoutInCpp));
  for (size_t i = 0; i < layout_in_c_rows; ++i) {
    const layout_row &c = layout_in_c[i], &cpp = kLayoutInCpp[i];
    INFO((c.structure != nullptr ? c.structure : "number") << " " << (c.name != nullptr ? c.name : ""));
    CHECK(c.offset == cpp.offset);
    CHECK(c.bytes == cpp.bytes);
  }
}

TEST_CASE("Layout.ProseAndHeadersAgree") {
  const Prose prose = ReadProse();
  std::map<std::string, size_t> sizes;
  std::map<std::string, std::map<std::string, Row>> fields;
  for (const layout_row& row : kLayoutInCpp) {
    if (row.structure == nullptr) {
      INFO(row.name << " " << row.offset);
      CHECK(prose.numbers.count({row.name, row.offset}) == 1);
    } else if (row.name == nullptr) {
      sizes[row.structure] = row.bytes;
    } else {
      fields[row.structure][row.name] = {row.offset, row.bytes};
    }
  }
  CHECK(prose.sizes == sizes);
  for (const auto& [structure, rows] : fields) {
    INFO(structure);
    const auto found = prose.fields.find(structure);
    REQUIRE(found != prose.fields.end());
    CHECK(found->second.size() == rows.size());
    for (const auto& [name, row] : rows) {
      INFO(name);
      REQUIRE(found->second.count(name) == 1);
      CHECK(found->second.at(name).offset == row.offset);
      CHECK(found->second.at(name).bytes == row.bytes);
    }
  }
  CHECK(prose.fields.size() == fields.size());
}

// The fields of a struct leave no hole that a compiler could fill with what was in memory.
TEST_CASE("Layout.NoHiddenPadding") {
  size_t end = 0;
  std::string structure;
  const std::set<std::string> padded = {"mlpo_client_lines", "mlpo_daemon_lines", "mlpo_slot_header"};
  size_t size = 0;
  for (const layout_row& row : kLayoutInCpp) {
    if (row.structure == nullptr) break;
    if (padded.count(row.structure) != 0) continue;
    INFO(row.structure << "." << (row.name != nullptr ? row.name : ""));
    if (row.name == nullptr) {
      CHECK(end == size);  // of the struct before
      size = row.bytes;
      end = 0;
      continue;
    }
    CHECK(static_cast<size_t>(row.offset) == end);
    end = static_cast<size_t>(row.offset) + row.bytes;
  }
  CHECK(end == size);
}

TEST_CASE("Layout.DefaultsAreTheDocumentedOnes") {
  CHECK(connect_defaults.struct_size == sizeof(mlpo_connect_options));
  CHECK(connect_defaults.rank == -1);
  CHECK(connect_defaults.world_size == -1);
  CHECK(connect_defaults.connect_timeout_ns == 0);
  CHECK(subgroup_defaults.struct_size == sizeof(mlpo_subgroup_options));
  CHECK(subgroup_defaults.dtype == MLPO_DTYPE_FLOAT32);
  CHECK(subgroup_defaults.initial == nullptr);
  CHECK(update_defaults.struct_size == sizeof(mlpo_update_options));
  CHECK(update_defaults.lr == 1e-3);
  CHECK(update_defaults.beta1 == 0.9);
  CHECK(update_defaults.beta2 == 0.999);
  CHECK(update_defaults.eps == 1e-8);
  CHECK(update_defaults.weight_decay == 0.01);
  CHECK(update_defaults.grad_scale == 1.0);
  CHECK(update_defaults.mode == MLPO_OPTIMIZER_ADAMW);
  CHECK(update_defaults.apply_nonfinite == 0);
}

TEST_CASE("Layout.EveryCodeHasItsTextAndErrno") {
  std::set<std::string> texts;
  for (int code = -4097; code >= MLPO_STATUS_MIN; --code) {
    CHECK(std::string(mlpo_strerror(code)) != "unknown code");
    CHECK(texts.insert(mlpo_strerror(code)).second);
    CHECK(mlpo_errno(code) > 0);
  }
  CHECK(std::string(mlpo_strerror(MLPO_STATUS_MIN - 1)) == "unknown code");
  CHECK(mlpo_errno(0) == 0);
  CHECK(mlpo_errno(-ENOSPC) == ENOSPC);
  CHECK(std::string(mlpo_strerror(-ENOSPC)) == "No space left on device");
}
