// fuzz_NAME [--runs N] [--seed S] [--artifacts DIR] [--write-seeds DIR] [FILE | FOLDER]...
//
// A fuzz target without libFuzzer, for any compiler: feeds it its seeds, each FILE and each file of FOLDER, then N
// changed ones of them (default 0), which follow from the seed S (default 1). With --write-seeds it only writes the
// seeds to files. An input that ends the program, or takes longer than a minute, is left in DIR (default: here) as
// crash-<target>. Exit code 0, 64 wrong usage, 66 what cannot be read or written, else the crash's.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/fuzz_target.h"

// Of the sanitizers; GCC's and clang's, where there is one.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

namespace fs = std::filesystem;
using mlpo::test::FuzzSeeds;

constexpr size_t kMostBytes = 64 * 1024;
constexpr unsigned kSecondsForOne = 60;

std::string artifact;                // file for what fails
const std::string* input = nullptr;  // that is being fed

// Async-signal-safe; where it fails there is nobody left to tell.
void SaveInput() {
  if (input == nullptr) return;
  const int fd = ::open(artifact.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const ssize_t put = ::write(fd, input->data(), input->size());
  static constexpr char kText[] = "the input was saved: ";
  if (put == static_cast<ssize_t>(input->size())) {
    (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
    (void)!::write(STDERR_FILENO, artifact.c_str(), artifact.size());
    (void)!::write(STDERR_FILENO, "\n", 1);
  }
  ::close(fd);
  input = nullptr;
}

void OnDeath(int signal) {
  SaveInput();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void Feed(const std::string& bytes) {
  input = &bytes;
  ::alarm(kSecondsForOne);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  input = nullptr;
}

class Changer {
 public:
  Changer(uint64_t seed, const std::vector<std::string>& pool) : random_(seed), pool_(pool) {}

  std::string Next() {
    std::string bytes = Any();
    for (uint64_t changes = 1 + Below(5); changes > 0; --changes) Change(&bytes);
    if (bytes.size() > kMostBytes) bytes.resize(kMostBytes);
    return bytes;
  }

 private:
  uint64_t Below(uint64_t n) { return n == 0 ? 0 : random_() % n; }
  const std::string& Any() { return pool_[Below(pool_.size())]; }
  char Byte() { return static_cast<char>(random_()); }

  void Change(std::string* bytes) {
    const size_t at = Below(bytes->size() + 1);
    switch (Below(8)) {
      case 0:
        if (at < bytes->size()) (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << Below(8)));
        return;
      case 1:
        if (at < bytes->size()) (*bytes)[at] = Byte();
        return;
      case 2:
        bytes->insert(at, 1 + Below(8), Byte());
        return;
      case 3:
        bytes->erase(at, 1 + Below(32));
        return;
      case 4: {  // a number at the edge of something
        static constexpr uint64_t kEdges[] = {0,
                                              1,
                                              0x7f,
                                              0xff,
                                              0x7fff,
                                              0xffff,
                                              0x7fffffff,
                                              0x80000000,
                                              0xffffffff,
                                              uint64_t{1} << 63,
                                              ~uint64_t{0},
                                              ~uint64_t{0} - 4095};
        const uint64_t edge = kEdges[Below(std::size(kEdges))];
        const size_t width = size_t{1} << Below(4);
        if (at + width <= bytes->size()) std::memcpy(bytes->data() + at, &edge, width);
        return;
      }
      case 5:  // a part of it again
        bytes->insert(at, bytes->substr(Below(bytes->size() + 1), 1 + Below(64)));
        return;
      case 6: {  // a part of another one
        const std::string& other = Any();
        bytes->insert(at, other.substr(Below(other.size() + 1), 1 + Below(256)));
        return;
      }
      default: {  // from here on another one
        const std::string& other = Any();
        bytes->replace(at, std::string::npos, other.substr(Below(other.size() + 1)));
        return;
      }
    }
  }

  std::mt19937_64 random_;
  const std::vector<std::string>& pool_;
};

bool ReadFile(const fs::path& path, std::vector<std::string>* pool) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file || bytes.size() > kMostBytes) {
    std::fprintf(stderr, "%s cannot be read, or has more than %zu bytes\n", path.c_str(), kMostBytes);
    return false;
  }
  pool->push_back(std::move(bytes));
  return true;
}

bool WriteSeeds(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  int number = 0;
  for (const std::string& seed : FuzzSeeds()) {
    const fs::path path = fs::path(folder) / ("seed-" + std::to_string(number++));
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file << seed;
    if (!file.flush()) {
      std::fprintf(stderr, "%s cannot be written\n", path.c_str());
      return false;
    }
  }
  return true;
}

int Usage(const char* program) {
  std::fprintf(stderr, "Usage: %s [--runs N] [--seed S] [--artifacts DIR] [--write-seeds DIR] [FILE | FOLDER]...\n",
               program);
  return 64;
}

bool TakeNumber(const std::string& text, uint64_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 0, seed = 1;
  std::string artifacts = ".";
  std::vector<fs::path> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool option = argument.rfind("--", 0) == 0;
    if (!option) {
      std::error_code error;
      if (!fs::is_directory(argument, error)) {
        files.emplace_back(argument);
        continue;
      }
      for (const auto& entry : fs::directory_iterator(argument, error)) files.push_back(entry.path());
      if (!error) continue;
      std::fprintf(stderr, "%s: %s\n", argument.c_str(), error.message().c_str());
      return 66;
    }
    if (++i == argc) return Usage(argv[0]);
    if (argument == "--write-seeds") return WriteSeeds(argv[i]) ? 0 : 66;
    if (argument == "--artifacts") {
      artifacts = argv[i];
    } else if (!(argument == "--runs" && TakeNumber(argv[i], &runs)) &&
               !(argument == "--seed" && TakeNumber(argv[i], &seed))) {
      return Usage(argv[0]);
    }
  }
  std::sort(files.begin(), files.end());  // whatever order the file system has
  const std::string target = fs::path(argv[0]).filename();
  artifact = artifacts + "/crash-" + target;
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(SaveInput);
  for (const int signal : {SIGABRT, SIGALRM}) ::signal(signal, OnDeath);

  std::vector<std::string> pool = FuzzSeeds();
  for (const fs::path& file : files) {
    if (!ReadFile(file, &pool)) return 66;
  }
  pool.emplace_back();
  for (const std::string& bytes : pool) Feed(bytes);
  Changer changer(seed, pool);
  for (uint64_t run = 0; run < runs; ++run) Feed(changer.Next());
  ::alarm(0);
  std::printf("%s: %zu inputs, %llu changed ones of seed %llu\n", target.c_str(), pool.size(),
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(seed));
  return 0;
}
