// Journal: what this daemon is about to leave in somebody's directory of checkpoints, so that a daemon that dies leaves
// nothing there for good but parts that are complete.
//
// A record is a file of its own in <path>/mlpo/<uid>/<node>/checkpoints/, written before the part's first file has a
// name and removed after the part's commit. A part that is removed has one, too, from before its manifest goes until
// all of it has gone. What a record names is removed only if it is what the record says: below the same directory, a
// regular file of ours with the same inode, with the header of that attempt and rank, and if nobody is saving the part:
// that has its lock. Everything may block: threads of saves.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "daemon/base/status.h"
#include "daemon/base/unique_fd.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint/part_set.h"
#include "daemon/types/gc_report.h"

namespace mlpo {

inline constexpr char kJournalFolder[] = "checkpoints";

struct JournalRecord {
  struct File {
    uint32_t index = 0;  // its name is DataName(attempt, index)
    uint64_t inode = 0;  // 0: was not known when the record was written
    bool working = false;
    WorkingOrigin origin;  // of a working file
  };
  std::string directory;  // absolute, as the client named it
  FolderMark mark;        // its: another one under this name now is another directory
  FolderMark parent;      // of the folder that it is in; nothing if that could not be opened
  std::string job;
  std::string tag;
  uint32_t rank = 0;
  AttemptId attempt;
  std::vector<File> files;
};

// A record's file name: "<attempt>-<rank>".
std::string JournalName(const JournalRecord& record);

// Durable when it returns; replaces the one with the same name.
Status SaveJournal(int journal_fd, const std::string& shown, const JournalRecord& record);
// Whether it could be saved there now: a file system that is full or read-only says so only when something is written.
Status ProveJournal(int journal_fd, const std::string& shown, const JournalRecord& record);
Status RemoveJournal(int journal_fd, const std::string& shown, const JournalRecord& record);
// Whether there is one with the same name.
Result<bool> IsInJournal(int journal_fd, const std::string& shown, const JournalRecord& record);
// All that are there. What is no record of ours is left alone and named in *strange; what was being written when a
// daemon died is no record, and in *unfinished.
Result<std::vector<JournalRecord>> LoadJournal(int journal_fd, const std::string& shown,
                                               std::vector<std::string>* strange, std::vector<std::string>* unfinished);
// Removes what LoadJournal has found unfinished. Only with the lock of <uid>/<node> held: nobody writes a record then.
Status RemoveUnfinished(int journal_fd, const std::string& shown, const std::vector<std::string>& unfinished);

struct JournalOutcome {
  bool committed = false;         // the part has its manifest: it stays
  uint32_t removed = 0;           // files
  uint64_t bytes = 0;             // of storage given back
  std::vector<std::string> kept;  // what is not what the record says, with the reason
};

// Carries out a record of a daemon that is gone; `dry_run` only says what it would. The record itself stays: it goes,
// by RemoveJournal, if nothing was kept; so it does if the directory has been removed, and the one above is still the
// same. An error: the directory cannot be looked at now, or is, perhaps, another one; try again later.
Result<JournalOutcome> UndoPart(const JournalRecord& record, const WorkingHeaderCheck& working, bool dry_run);

// What saves that are not under way any more have left in a journal.
struct JournalRest {
  UniqueFd journal;
  std::string shown;
  std::vector<JournalRecord> records;
  std::vector<std::string> strange;  // what is no record of ours, and stays
};
// `is_live`: records of saves that are under way in this process; nullptr: none is. `alone`: nobody writes to the
// journal meanwhile, so that what is half written there goes, too.
Result<JournalRest> FindRest(UniqueFd journal, const std::string& shown,
                             const std::function<bool(const JournalRecord& record)>& is_live, bool alone);
// Carries its records out and adds to the report; `dry_run` only says what it would.
void RemoveRest(const JournalRest& rest, const WorkingHeaderCheck& working, bool dry_run, GcReport* report);

}  // namespace mlpo
