// PartFiles: the files of one part while it is saved, from its folder to its manifest.
//
// What is on storage at each moment: until Commit's rename there is no manifest, so no part; whatever this process and
// the machine come to, what is there then is named in the journal and goes. After the rename everything that the
// manifest names is on storage. So a part is whole or is not.
//
// It is not alone there: an earlier save of the same job may go on without its trainer, another job may use the tag,
// somebody may remove. So the first data file is locked as long as the part is in the making, nothing that is locked is
// removed by anybody, and what has become of its files is looked at before the commit. Of other attempts under the same
// tag, what can never be counted goes at the beginning, and what is complete when this one is. proto/FORMAT.md has the
// rules. Owner: its save's thread; every call may block. The destructor abandons what was not committed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/journal.h"
#include "daemon/checkpoint/manifest.h"
#include "daemon/checkpoint/part_set.h"

namespace mlpo {

class PartFiles {
 public:
  struct Options {
    std::string directory;  // absolute; it is there
    PartHead head;          // without its body's figures; it began then, or after everything that is there
    bool overwrite = false;
    int journal_fd = -1;  // of the journal's folder; borrowed for the object's life
    std::string journal_shown;
    WorkingHeaderReader working;  // of files that parts have had handed over
    // Of Adopt: by what its files count as their user's. Let go of when they are closed, and not before.
    std::shared_ptr<const void> counted;
  };

  // Makes the folders, and the first data file with its header. EEXIST if another attempt has the tag complete, and it
  // is not to be overwritten; or if this attempt's part is there already, or being saved.
  static Result<std::unique_ptr<PartFiles>> Begin(Options options);
  // In files that a process of another user, `uid`, has opened: its own, empty, for reading and writing. It gives them
  // their names when they have been committed; until then they have none that counts, so there is no journal, and what
  // else its directory has is its own affair. EINVAL if they are not such, or are memory: it would be the daemon's.
  static Result<std::unique_ptr<PartFiles>> Adopt(Options options, UniqueFd data, UniqueFd manifest, uint32_t uid);
  ~PartFiles();
  PartFiles(const PartFiles&) = delete;
  PartFiles& operator=(const PartFiles&) = delete;

  // The first data file, for spans from kPartHeaderBytes on.
  int data_fd() const { return data_.get(); }
  const std::string& shown() const { return shown_; }
  // ENOSPC with the figures if the file system has less than these bytes free for this user now.
  Status CheckRoom(uint64_t bytes) const;
  // Makes the data file `bytes` long, header included, and room for all of it where the file system can. ENOSPC has the
  // figures.
  Status Allocate(uint64_t bytes);
  // Takes a working file over: from then on it is a data file of this part, under the name with the returned index. Its
  // data must be on storage already, and nobody writes to it any more. An error: EXDEV and the like, and it is as it
  // was; or *moved, and this part cannot be committed.
  Result<uint32_t> HandOver(int folder_fd, const std::string& name, int fd, const WorkingOrigin& origin,
                            const std::string& shown, bool* moved);
  // The part is there, durably. `manifest`: its head is set here; its files: the first data file and those handed over.
  // ESTALE if somebody has removed one of these. After an error there is no part, and Abandon is what is left; but if
  // only the folders above could not be synced once more, it stays: others may have counted it.
  Status Commit(Manifest* manifest);
  // Removes everything that this object made. What it could not remove stays in the journal.
  Status Abandon();

  // After Commit: whether all ranks' parts are there now, durably, and none that counts instead; false in files that
  // were adopted. Then what earlier attempts under this tag have left goes, as far as it is this user's and not being
  // saved; what could not be removed is named in *kept.
  Result<bool> IsComplete(std::vector<std::string>* kept) const;

  // What is known of a part before it is removed.
  struct Known {
    bool committed = false;                  // it has a manifest
    std::string job;                         // "": neither manifest nor header says
    std::optional<int64_t> started_unix_ns;  // likewise
  };
  struct Removal {
    uint32_t rank = 0;
    AttemptId attempt;
    WorkingHeaderReader working;
    // Asked when nobody can be saving it any more, before anything of it goes. nullptr: it goes in any case.
    std::function<Result<bool>(const Known& known)> may_go;
    // Told the data files that are about to go, and whose they are. nullptr: nobody.
    std::function<Status(const std::string& job, const std::vector<JournalRecord::File>& files)> before;
  };
  struct Removed {
    uint32_t files = 0;
    bool live = false;  // it is being saved, or removed, by somebody else
  };
  // Removes one attempt's part: the manifest first, so that no half of it ever looks whole, and the first data file,
  // with the lock, last. One that is being saved stays; so does what is not a file of that attempt and of this user.
  // Both are named in *kept.
  static Result<Removed> RemovePart(int part_fd, const Removal& removal, const std::string& shown,
                                    std::vector<std::string>* kept);
  // Removes files that clients have made in a part's folder and not given a name (IsAsideName), if whoever made them is
  // dead for sure: says how many. The others are named in *kept.
  static Result<uint32_t> RemoveAsides(int part_fd, const std::string& shown, std::vector<std::string>* kept);

 private:
  explicit PartFiles(Options options) : options_(std::move(options)) {}
  Status OpenFolders();
  Status MakeWay();
  Result<bool> RemoveCut(const AttemptId& attempt, bool hollow, std::vector<std::string>* kept);
  Status LookForComplete(std::set<AttemptId>* complete, std::set<AttemptId>* hollow);
  Status MakeDataFile();
  Status MakeNamedDataFile(const std::string& name, const std::string& shown);
  Status MakeHeader(int fd, const std::string& shown);
  Status Record() const;
  Status NoRoom(int error, uint64_t bytes, const Result<uint64_t>& free_bytes) const;
  Result<uint64_t> FreeBytes() const;
  Status CheckNames() const;
  Result<bool> IsThere(const JournalRecord::File& file) const;
  Result<bool> AllHaveManifests() const;
  Result<bool> IsSettled(const FoundAttempt& attempt) const;
  Result<bool> IsBeingSaved(const AttemptId& attempt) const;
  // In the journal as long as it takes: what is without its manifest is no part any more, and nobody would look for it.
  Result<Removed> RemoveOther(int part_fd, Removal removal, const std::string& shown,
                              std::vector<std::string>* kept) const;
  Status RemoveEarlier(const FoundTag& found, const FoundAttempt& own, std::vector<std::string>* kept) const;

  Options options_;  // first, and so the last that goes
  UniqueFd directory_;
  UniqueFd tag_;
  UniqueFd part_;
  UniqueFd data_;
  UniqueFd manifest_;  // of files that were adopted
  std::string shown_;  // of the part's folder
  JournalRecord record_;
  bool recorded_ = false;
  bool manifest_begun_ = false;  // so that only a manifest of this object's goes with it
  bool committed_ = false;
};

}  // namespace mlpo
