#include "daemon/io/mount_info.h"

#include <sstream>

namespace mlpo {
namespace {

// Space, tab, newline and backslash are written as \ooo.
std::string Unescape(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain.push_back(static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0')));
      i += 3;
    } else {
      plain.push_back(text[i]);
    }
  }
  return plain;
}

}  // namespace

std::vector<Mount> ParseMountInfo(const std::string& text) {
  std::vector<Mount> mounts;
  std::istringstream lines(text);
  for (std::string line;
       std::getline(lines, line);) {  // id parent device root point options [tags] - type source options
    const size_t separator = line.find(" - ");
    if (separator == std::string::npos) continue;
    std::istringstream before(line.substr(0, separator)), after(line.substr(separator + 3));
    std::string id, parent, source;
    Mount mount;
    if (!(before >> id >> parent >> mount.device >> mount.root >> mount.point)) continue;
    if (!(after >> mount.type >> source >> mount.options)) continue;
    mount.root = Unescape(mount.root);
    mount.point = Unescape(mount.point);
    mounts.push_back(std::move(mount));
  }
  return mounts;
}

}  // namespace mlpo
