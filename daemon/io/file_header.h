// The first page of a state file: whose it is. Written when the file is made, checked before anything is done with it.
//
// Layout (little endian, kFileHeaderBytes in all): see FileHeaderPage in file_header.cc. The checksum is XXH3-64 of all
// bytes before it. No state; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/base/status.h"
#include "daemon/io/path.h"

namespace mlpo {

// Aligned for O_DIRECT.
struct alignas(4096) HeaderPage {
  std::array<std::byte, Path::kFileHeaderBytes> bytes{};
};

struct FileIdentity {
  std::string node;
  uint32_t daemon_uid = 0;
  FileOwner owner;
};

HeaderPage MakeFileHeader(const FileIdentity& identity);

// EINVAL with what is wrong if it is not a header of ours: magic, format version, checksum, names.
Result<FileIdentity> ParseFileHeader(const HeaderPage& page);

// Of an open file. EINVAL as ParseFileHeader.
Result<FileIdentity> ReadFileHeader(int fd);
// Reads the header of an open file and compares: EINVAL as ParseFileHeader, EPERM if it is somebody else's, naming
// both.
Status CheckFileHeader(int fd, const FileIdentity& expected);

}  // namespace mlpo
