#include "daemon/checkpoint/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "daemon/base/name.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/json_text.h"
#include "daemon/checkpoint/part_header.h"

namespace mlpo {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "mlpo-journal";
constexpr uint64_t kVersion = 1;
constexpr uint64_t kMaxBytes = 1u << 20;
constexpr char kNew[] = ".new";

json ToJson(const JournalRecord& record) {
  json files = json::array();
  for (const JournalRecord::File& file : record.files) {
    json out = {{"index", file.index}, {"inode", file.inode}, {"kind", file.working ? "working" : "part"}};
    if (file.working) PutOrigin(file.origin, &out);
    files.push_back(std::move(out));
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"directory", NameToJson(record.directory)},
          {"directory_inode", record.mark.inode},
          {"directory_file_system", record.mark.file_system},
          {"parent_inode", record.parent.inode},
          {"parent_file_system", record.parent.file_system},
          {"job", record.job},
          {"tag", record.tag},
          {"rank", record.rank},
          {"attempt", AttemptText(record.attempt)},
          {"files", std::move(files)}};
}

Result<JournalRecord> FromText(const std::string& text, const std::string& who) {
  const json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  JsonReader reader(parsed, who);
  if (reader.Text("format") != kFormat || reader.Whole("version", UINT32_MAX) != kVersion)
    reader.Fail("is no record of a part in the making, of a format that is known");
  JournalRecord record;
  record.directory = reader.Name("directory");
  record.mark.inode = reader.Whole("directory_inode", UINT64_MAX);
  record.mark.file_system = reader.Whole("directory_file_system", UINT64_MAX);
  record.parent.inode = reader.Whole("parent_inode", UINT64_MAX);
  record.parent.file_system = reader.Whole("parent_file_system", UINT64_MAX);
  record.job = reader.Text("job");
  record.tag = reader.Text("tag");
  record.rank = static_cast<uint32_t>(reader.Whole("rank", kMaxWorldSize));
  const std::optional<AttemptId> attempt = ParseAttempt(reader.Text("attempt"));
  record.attempt = attempt.value_or(AttemptId());
  if (!attempt || !IsName(record.job) || !IsName(record.tag) || record.directory.empty() || record.directory[0] != '/')
    reader.Fail("has names that no daemon writes");
  for (const json& each : reader.Array("files")) {
    JsonReader member(each, who);
    JournalRecord::File file;
    file.index = static_cast<uint32_t>(member.Whole("index", UINT32_MAX));
    file.inode = member.Whole("inode", UINT64_MAX);
    file.working = member.Text("kind") == "working";
    if (file.working) file.origin = TakeOrigin(member);
    if (!member.status().ok()) return member.status();
    record.files.push_back(std::move(file));
  }
  if (!reader.status().ok()) return reader.status();
  return record;
}

// Undoes one part, from the inside out.
class Undo {
 public:
  Undo(const JournalRecord& record, const WorkingHeaderCheck& working, bool dry_run)
      : record_(record), working_(working), dry_run_(dry_run) {}

  Result<JournalOutcome> Run() {
    Result<UniqueFd> directory = OpenCheckpointDirectory(record_.directory);
    if (directory.status().os_errno() == ENOENT && IsRemoved()) return outcome_;
    if (!directory.ok()) return directory.status();
    const Result<FolderMark> mark = MarkOf(directory->get(), record_.directory);
    if (!mark.ok()) return mark.status();
    const Status another(-ESTALE, record_.directory +
                                      " is another directory than the one that a part was begun in, or another "
                                      "file system is mounted there");
    if (mark.value().inode != record_.mark.inode) return another;
    // The roots of two file systems have one inode number. What is found is known by more than that, but what is not
    // found may be on the other one.
    const bool surely = mark.value() == record_.mark;
    const Status undone = UndoIn(directory->get(), surely);
    if (!undone.ok()) return undone;
    const bool found = outcome_.committed || outcome_.removed > 0 || !outcome_.kept.empty();
    if (!surely && !found) return another;
    return outcome_;
  }

 private:
  // The directory is not there: whether it has gone for good, not the file system that it is on.
  bool IsRemoved() const {
    std::string name = record_.directory;
    while (name.size() > 1 && name.back() == '/') name.pop_back();
    const std::string above = name.substr(0, std::max<size_t>(name.rfind('/'), 1));
    const UniqueFd parent(::open(above.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!parent) return false;
    const Result<FolderMark> mark = MarkOf(parent.get(), above);
    return mark.ok() && mark.value() == record_.parent;
  }

  Status UndoIn(int directory_fd, bool surely) {
    const std::string tag = record_.directory + "/" + record_.tag;
    Result<UniqueFd> tag_fd = OpenFolder(directory_fd, record_.tag, tag);
    if (tag_fd.status().os_errno() == ENOENT) return Status();
    if (!tag_fd.ok()) return tag_fd.status();
    const std::string part_name = PartFolderName(record_.rank), part = tag + "/" + part_name;
    Result<UniqueFd> part_fd = OpenFolder(tag_fd->get(), part_name, part);
    if (part_fd.status().os_errno() != ENOENT) {
      if (!part_fd.ok()) return part_fd.status();
      const Status undone = UndoFiles(part_fd->get(), part);
      if (!undone.ok()) return undone;
    }
    if (outcome_.committed || dry_run_ || (!surely && outcome_.removed == 0)) return Status();
    // Folders in which others have something stay.
    const Result<bool> removed = RemoveEmptyFolder(tag_fd->get(), part_name, part);
    if (!removed.ok()) return removed.status();
    const Result<bool> emptied = RemoveEmptyFolder(directory_fd, record_.tag, tag);
    return emptied.ok() ? Status() : emptied.status();
  }

  // Whoever saves the part has the lock of its first data file, in whatever process: a daemon whose path was evacuated
  // has its record there, too. So this one has it until the end, and that file goes last (proto/FORMAT.md, 3).
  Status UndoFiles(int part_fd, const std::string& part) {
    const std::string first = DataName(record_.attempt, 0), first_shown = part + "/" + first;
    const Result<UniqueFd> locked = OpenFile(part_fd, first, O_RDWR, first_shown);
    if (locked.ok()) {
      const int fd = locked.value().get();
      const Result<FileLock> lock = LockFile(fd, /*shared=*/false, first_shown);
      if (!lock.ok()) return lock.status();
      const Result<bool> named = IsNamed(part_fd, first, fd, first_shown);
      if (!named.ok()) return named.status();
      if (lock.value() == FileLock::kHeld || !named.value())
        return Keep(first_shown + " is being saved, or removed, by somebody else");
    } else if (locked.status().os_errno() != ENOENT) {  // without the lock nobody knows
      return Keep(locked.status().message());
    }
    const Result<Manifest> manifest = ReadManifest(part_fd, record_.attempt, part);
    outcome_.committed = manifest.ok();
    if (manifest.ok()) return Status();
    if (manifest.status().code() == -EINVAL) {  // a manifest is renamed whole; this one was harmed later
      outcome_.kept.push_back(manifest.status().message());
      return Status();
    }
    if (manifest.status().os_errno() != ENOENT) return manifest.status();
    Status undone = UndoNewManifest(part_fd, part + "/" + NewManifestName(record_.attempt));
    for (auto file = record_.files.rbegin(); undone.ok() && file != record_.files.rend(); ++file) {
      const std::string name = DataName(record_.attempt, file->index);
      undone = UndoFile(part_fd, *file, name, part + "/" + name);
    }
    return undone;
  }

  Status CheckHeader(int fd, const JournalRecord::File& file, const std::string& shown) const {
    const Result<PartIdentity> identity = ReadPartHeader(fd, shown);
    if (!identity.ok()) return identity.status();
    const PartIdentity& found = identity.value();
    if (found.attempt != record_.attempt || found.rank != record_.rank || found.index != file.index ||
        found.job != record_.job || found.tag != record_.tag || found.uid != ::geteuid())
      return Status::Invalid(shown + " has the header of another part");
    return Status();
  }

  // A record whose inode is not known was written before its file: then the header says whose it is. A file that never
  // got its header, or lost it in a power cut, says nothing of itself.
  Status UndoFile(int part_fd, const JournalRecord::File& file, const std::string& name, const std::string& shown) {
    Result<UniqueFd> fd = OpenFile(part_fd, name, O_RDONLY, shown);
    if (fd.status().os_errno() == ENOENT) return Status();
    if (!fd.ok()) return Keep(fd.status().message());
    struct stat st;
    if (::fstat(fd->get(), &st) != 0) return Status::Errno(errno, "looking at " + shown);
    if (st.st_uid != ::geteuid()) return Keep(shown + " belongs to uid " + std::to_string(st.st_uid));
    if (file.inode != 0 && file.inode != static_cast<uint64_t>(st.st_ino))
      return Keep(shown + " is another file than the one that was made there");
    if (file.working) {
      const Status right = working_(fd->get(), file.origin);
      if (!right.ok()) return Keep(shown + ": " + right.message());
    } else {
      const Result<bool> bare = file.inode == 0 ? LacksPartHeader(fd->get(), shown) : Result<bool>(false);
      if (!bare.ok()) return Keep(bare.status().message());
      const Status right = bare.value() ? Status() : CheckHeader(fd->get(), file, shown);
      if (!right.ok()) return Keep(right.message());
    }
    return Remove(part_fd, name, shown, static_cast<uint64_t>(st.st_blocks) * 512);
  }

  Status UndoNewManifest(int part_fd, const std::string& shown) {
    const std::string name = NewManifestName(record_.attempt);
    struct stat st;
    if (::fstatat(part_fd, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
      return errno == ENOENT ? Status() : Status::Errno(errno, "looking at " + shown);
    if (!S_ISREG(st.st_mode) || st.st_uid != ::geteuid()) return Keep(shown + " is not a file of ours");
    return Remove(part_fd, name, shown, static_cast<uint64_t>(st.st_blocks) * 512);
  }

  Status Remove(int part_fd, const std::string& name, const std::string& shown, uint64_t bytes) {
    if (!dry_run_) {
      const Result<bool> removed = RemoveFile(part_fd, name, shown);
      if (!removed.ok()) return removed.status();
      if (!removed.value()) return Status();
    }
    ++outcome_.removed;
    outcome_.bytes += bytes;
    return Status();
  }

  Status Keep(std::string reason) {
    outcome_.kept.push_back(std::move(reason));
    return Status();
  }

  const JournalRecord& record_;
  const WorkingHeaderCheck& working_;
  const bool dry_run_;
  JournalOutcome outcome_;
};

}  // namespace

std::string JournalName(const JournalRecord& record) {
  return AttemptText(record.attempt) + "-" + std::to_string(record.rank);
}

Status SaveJournal(int journal_fd, const std::string& shown, const JournalRecord& record) {
  const std::string name = JournalName(record);
  return CommitText(journal_fd, name + kNew, name, ToJson(record).dump() + "\n", shown);
}

Status ProveJournal(int journal_fd, const std::string& shown, const JournalRecord& record) {
  const std::string name = JournalName(record) + kNew, shown_new = shown + "/" + name;
  const Result<bool> rest = RemoveFile(journal_fd, name, shown_new);
  if (!rest.ok()) return rest.status();
  const Result<UniqueFd> fd = MakeFile(journal_fd, name, shown_new);
  if (!fd.ok()) return fd.status();
  const std::string page(4096, '\n');
  Status status = WriteAll(fd.value().get(), page.data(), page.size(), 0, shown_new);
  if (status.ok()) status = SyncData(fd.value().get(), shown_new);
  const Result<bool> removed = RemoveFile(journal_fd, name, shown_new);
  return status.ok() ? removed.status() : status;
}

Status RemoveJournal(int journal_fd, const std::string& shown, const JournalRecord& record) {
  const std::string name = JournalName(record);
  const Result<bool> removed = RemoveFile(journal_fd, name, shown + "/" + name);
  if (!removed.ok()) return removed.status();
  return SyncFolder(journal_fd, shown);
}

Result<bool> IsInJournal(int journal_fd, const std::string& shown, const JournalRecord& record) {
  const std::string name = JournalName(record);
  return IsThere(journal_fd, name, shown + "/" + name);
}

Result<std::vector<JournalRecord>> LoadJournal(int journal_fd, const std::string& shown,
                                               std::vector<std::string>* strange,
                                               std::vector<std::string>* unfinished) {
  const Result<std::vector<std::string>> names = ListFolder(journal_fd, shown);
  if (!names.ok()) return names.status();
  std::vector<JournalRecord> records;
  for (const std::string& name : names.value()) {
    if (name.ends_with(kNew)) {
      unfinished->push_back(name);
      continue;
    }
    const std::string file = shown + "/" + name;
    const Result<std::string> text = ReadText(journal_fd, name, kMaxBytes, file);
    Result<JournalRecord> record = text.ok() ? FromText(text.value(), file) : Result<JournalRecord>(text.status());
    if (record.ok() && JournalName(*record) != name)
      record = Status::Invalid(file + " is the record of another part: " + JournalName(*record));
    if (record.ok()) {
      records.push_back(std::move(*record));
    } else {
      strange->push_back(record.status().message());
    }
  }
  return records;
}

Status RemoveUnfinished(int journal_fd, const std::string& shown, const std::vector<std::string>& unfinished) {
  for (const std::string& name : unfinished) {
    const Result<bool> removed = RemoveFile(journal_fd, name, shown + "/" + name);
    if (!removed.ok()) return removed.status();
  }
  return unfinished.empty() ? Status() : SyncFolder(journal_fd, shown);
}

Result<JournalOutcome> UndoPart(const JournalRecord& record, const WorkingHeaderCheck& working, bool dry_run) {
  return Undo(record, working, dry_run).Run();
}

Result<JournalRest> FindRest(UniqueFd journal, const std::string& shown,
                             const std::function<bool(const JournalRecord& record)>& is_live, bool alone) {
  JournalRest rest;
  rest.journal = std::move(journal);
  rest.shown = shown;
  std::vector<std::string> unfinished;
  Result<std::vector<JournalRecord>> records = LoadJournal(rest.journal.get(), shown, &rest.strange, &unfinished);
  if (!records.ok()) return records.status();
  const Status removed = alone ? RemoveUnfinished(rest.journal.get(), shown, unfinished) : Status();
  if (!removed.ok()) return removed;
  for (JournalRecord& record : *records) {
    if (!is_live || !is_live(record)) rest.records.push_back(std::move(record));
  }
  return rest;
}

void RemoveRest(const JournalRest& rest, const WorkingHeaderCheck& working, bool dry_run, GcReport* report) {
  for (const JournalRecord& record : rest.records) {
    const std::string part =
        record.directory + "/" + record.tag + " (part of rank " + std::to_string(record.rank) + ")";
    const Result<JournalOutcome> outcome = UndoPart(record, working, dry_run);
    if (!outcome.ok()) {  // the directory is not there now: the next start, or gc, tries again
      report->kept.push_back({part, 0, outcome.status().message()});
      continue;
    }
    const JournalOutcome& done = outcome.value();
    for (const std::string& reason : done.kept) report->kept.push_back({part, 0, reason});
    if (done.removed > 0)
      report->removed.push_back({part, done.bytes, std::to_string(done.removed) + " files of a save that was cut"});
    if (!done.kept.empty() || dry_run) continue;
    const Status forgotten = RemoveJournal(rest.journal.get(), rest.shown, record);
    if (!forgotten.ok()) report->failed.push_back({part, 0, forgotten.message()});
  }
}

}  // namespace mlpo
