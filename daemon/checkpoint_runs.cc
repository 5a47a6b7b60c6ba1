#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/checkpoint_runs.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "daemon/base/log.h"
#include "daemon/checkpoint/folders.h"
#include "daemon/checkpoint_tool.h"
#include "daemon/left_file.h"

namespace mlpo {

using boost::asio::post;

namespace {

constexpr auto kStopPatience = std::chrono::seconds(5);   // at the daemon's end, for steps that are being carried out
constexpr auto kPathPatience = std::chrono::seconds(10);  // for a path that is asked by its keeper: then others are
// Saves and restores that are still under way, or hang: of a session (which may have one and four that it has not
// ended), and of a user's sessions that have ended, whose saves go on.
constexpr uint32_t kMostOfSession = 16;
constexpr uint32_t kMostOfEnded = 64;
// Of manifests that clients have passed, as their files have them; in memory they may take a few times as much. Anybody
// may make them as large as they may be, and never let the reading end.
constexpr uint64_t kManifestsOfUser = kMaxManifestBytes;
constexpr uint64_t kManifestsOfAll = 4 * kManifestsOfUser;

int64_t UnixNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The manifests that a plan needs: the rank's own, if it has all of its tensors just so; else all.
Result<RestorePlan::Parts> ReadParts(int directory_fd, const std::string& directory, const FoundAttempt& attempt,
                                     const SessionIdentity& identity,
                                     const std::vector<std::vector<TargetTensor>>& subgroups) {
  const auto read = [&](const PartHead& head) -> Result<std::shared_ptr<const Manifest>> {
    const std::string tag = directory + "/" + head.tag, name = PartFolderName(head.rank);
    Result<UniqueFd> tag_fd = OpenBelievedFolder(directory_fd, head.tag, ".", tag);
    if (!tag_fd.ok()) return tag_fd.status();
    Result<UniqueFd> part_fd = OpenBelievedFolder(tag_fd->get(), name, "..", tag + "/" + name);
    if (!part_fd.ok()) return part_fd.status();
    Result<Manifest> manifest = ReadManifest(part_fd->get(), attempt.id, tag + "/" + name);
    if (!manifest.ok()) return manifest.status();
    const Status files = CheckFiles(part_fd->get(), *manifest, CheckWorkingHeader, tag + "/" + name);
    if (!files.ok()) return files;
    return std::make_shared<const Manifest>(std::move(*manifest));
  };
  RestorePlan::Parts parts;
  const auto own = attempt.parts.find(identity.rank);
  if (identity.world_size == attempt.head().world_size && own != attempt.parts.end()) {
    Result<std::shared_ptr<const Manifest>> part = read(own->second);
    if (!part.ok()) return part.status();
    if (RestorePlan::Suffices(**part, subgroups)) return RestorePlan::Parts{*part};
  }
  for (const auto& [rank, head] : attempt.parts) {
    Result<std::shared_ptr<const Manifest>> part = read(head);
    if (!part.ok()) return part.status();
    parts.push_back(std::move(*part));
  }
  return parts;
}

std::vector<TargetTensor> TargetsOf(const SubgroupSpec& spec) {
  std::vector<TargetTensor> targets;
  for (const Tensor& tensor : spec.tensors) targets.push_back({tensor.name, tensor.shard, tensor.first});
  return targets;
}

// errno; 0: `bytes` at `to` of one file are those at `from` of the other, without having been copied.
int CloneRange(int source, uint64_t from, uint64_t bytes, int target, uint64_t to) {
  struct file_clone_range range = {};
  range.src_fd = source;
  range.src_offset = from;
  range.src_length = bytes;
  range.dest_offset = to;
  return ::ioctl(target, FICLONERANGE, &range) == 0 ? 0 : errno;
}

Result<dev_t> DeviceOf(int fd, const std::string& shown) {
  struct stat st;
  if (::fstat(fd, &st) != 0) return Status::Errno(errno, "looking at " + shown);
  return st.st_dev;
}

}  // namespace

struct CheckpointRuns::Run {
  SessionIdentity identity;
  std::shared_ptr<const Ticket> ticket;
  Save save;
  uint32_t handle = 0;
  std::function<void(Result<Begun>)> done;  // until it has been called; main thread
  std::shared_ptr<LooseThreads> thread;     // one, for its steps
  std::shared_ptr<const UniqueFd> journal;  // that `files` are recorded in
  std::unique_ptr<PartFiles> files;         // its thread
  std::vector<Way> ways;                    // per path; its thread
  dev_t device = 0;                         // of the part; its thread
  double write_bytes_per_s = 0;             // of that, if it is a path's
  std::vector<FileId> next_files;           // made by make_room
  bool left = false;                        // the session goes on in them
  bool held = false;                        // hold_files has been called; its thread
  uint64_t number = 0;                      // of the save; data thread
  bool chosen = false;                      // its attempt, by attempts_; main thread
  // Until the session may begin another one, and until what the journal has of this one is a rest.
  std::unique_ptr<Entry<SessionId>> saving;
  std::unique_ptr<Entry<std::pair<AttemptId, uint32_t>>> recorded;

  // Wherever the last one lets go of it: closing and removing files is its thread's.
  ~Run() {
    if (!files) return;
    // Its ticket counts until then.
    thread->Post([kept = journal, ticket = ticket, rest = std::shared_ptr<PartFiles>(std::move(files))]() mutable {
      rest.reset();
    });
  }
};

class CheckpointRuns::OnPaths {
 public:
  explicit OnPaths(CheckpointRuns* runs) : runs_(runs) {
    const std::lock_guard lock(runs_->mutex_);
    there_ = !runs_->stopped_;
    runs_->on_paths_ += there_ ? 1 : 0;
  }
  ~OnPaths() {
    if (!there_) return;
    const std::lock_guard lock(runs_->mutex_);
    --runs_->on_paths_;
    runs_->changed_.notify_all();
  }
  OnPaths(const OnPaths&) = delete;
  OnPaths& operator=(const OnPaths&) = delete;
  explicit operator bool() const { return there_; }

 private:
  CheckpointRuns* const runs_;
  bool there_ = false;
};

AttemptTable::Save CheckpointRuns::SaveOf(const Run& run) {
  return {run.identity.uid, run.identity.job, run.save.directory, run.save.tag, run.save.step, run.identity.world_size};
}

CheckpointRuns::CheckpointRuns(Options options) : options_(std::move(options)) {}

void CheckpointRuns::Stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  if (!changed_.wait_for(lock, kStopPatience, [this] { return steps_ == 0; }))
    spdlog::warn("event=checkpoints_hang steps={} reason=\"their directories or files do not answer\"", steps_);
  changed_.wait(lock, [this] { return on_paths_ == 0; });  // a path that hangs: the daemon's end has a deadline
}

// In the main thread. Refused while too much hangs already: each has threads, which are everybody's.
Result<std::shared_ptr<CheckpointRuns::Ticket>> CheckpointRuns::TakeTicket(const SessionIdentity& identity) {
  std::erase_if(tickets_, [](const auto& ticket) { return ticket.expired(); });
  uint32_t of_session = 0, of_ended = 0;
  for (const std::weak_ptr<Ticket>& weak : tickets_) {
    const std::shared_ptr<Ticket> ticket = weak.lock();
    if (ticket == nullptr) continue;
    of_session += ticket->session == identity.id;
    of_ended += ticket->ended && ticket->uid == identity.uid;
  }
  if (of_session >= kMostOfSession) {
    return Status(-EBUSY, std::to_string(of_session) +
                              " checkpoints and restores of the session have not ended, or their files do not answer");
  }
  if (of_ended >= kMostOfEnded) {
    return Status(MLPO_E_QUOTA, std::to_string(of_ended) + " checkpoints and restores of ended sessions of uid " +
                                    std::to_string(identity.uid) + " have not ended, at most " +
                                    std::to_string(kMostOfEnded) +
                                    " may: their directories, or who serves the files that they passed, do not answer");
  }
  auto ticket = std::make_shared<Ticket>(Ticket{identity.uid, identity.id});
  tickets_.push_back(ticket);
  return ticket;
}

// In the run's thread, behind its steps before.
void CheckpointRuns::Step(const std::shared_ptr<Run>& run, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    ++steps_;
  }
  run->thread->Post([self = shared_from_this(), run, work = std::move(work)] {
    work();
    const std::lock_guard lock(self->mutex_);
    --self->steps_;
    self->changed_.notify_all();
  });
}

void CheckpointRuns::ToMain(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (!stopped_) post(*options_.main, std::move(work));
}

void CheckpointRuns::ToData(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (!stopped_) options_.loop->Post(std::move(work));
}

// ---- The journal ----

// ENOENT, unless it is to be made, on a path that has never had one: who only looks for rests leaves nothing there.
Result<UniqueFd> CheckpointRuns::OpenJournal(const Path& path, bool make, std::string* shown) {
  Result<UniqueFd> folder = path.OpenFolder();
  if (!folder.ok()) return folder;
  *shown = path.folder_shown() + "/" + kJournalFolder;
  return make ? MakeFolder(folder->get(), kJournalFolder, *shown) : OpenFolder(folder->get(), kJournalFolder, *shown);
}

Status CheckpointRuns::NoAnswer(const Path& path) {
  return Status(-ETIMEDOUT, "the file system of path " + path.name() + " (" + path.directory() + ") does not answer");
}

// On the first path that has not been evacuated, that answers, and that it can be written to.
Result<UniqueFd> CheckpointRuns::OpenJournalFor(const JournalRecord& record, std::string* shown) {
  struct Proven {
    Result<UniqueFd> journal;
    std::string shown;
  };
  const OnPaths on_paths(this);
  if (!on_paths) return Status(-ESHUTDOWN, "the daemon is stopping");
  Status last(-EIO, "no path can be used");
  for (const Options::Place& place : options_.paths) {
    const auto prove = [path = place.path, record]() -> Proven {
      std::string name;
      Result<UniqueFd> journal = OpenJournal(*path, /*make=*/true, &name);
      const Status proven = journal.ok() ? ProveJournal(journal->get(), name, record) : journal.status();
      if (!proven.ok()) journal = proven;
      return {std::move(journal), std::move(name)};
    };
    std::optional<Proven> proven = place.keeper->Ask<Proven>(prove, kPathPatience);
    last = proven ? proven->journal.status() : NoAnswer(*place.path);
    if (!last.ok()) continue;
    *shown = std::move(proven->shown);
    return std::move(proven->journal);
  }
  return last.Within("the daemon's journal of checkpoints cannot be written");
}

void CheckpointRuns::CleanUp() {
  std::vector<JournalRest> rests;
  for (const Options::Place& place : options_.paths) {
    std::string shown;
    Result<UniqueFd> journal = OpenJournal(*place.path, /*make=*/false, &shown);
    if (journal.status().os_errno() == ENOENT) continue;
    Result<JournalRest> rest =
        journal.ok() ? FindRest(std::move(*journal), shown, nullptr, /*alone=*/true) : journal.status();
    if (rest.ok()) {
      for (const std::string& reason : rest->strange) spdlog::warn("event=journal_strange reason=\"{}\"", reason);
      if (!rest->records.empty()) rests.push_back(std::move(*rest));
    } else {
      spdlog::warn("event=journal_unusable reason=\"{}\"", rest.status().message());
    }
  }
  if (rests.empty()) return;
  const auto kept = std::make_shared<std::vector<JournalRest>>(std::move(rests));
  const Result<std::shared_ptr<LooseThreads>> thread = LooseThreads::Start("ckpt-clean", 1);
  if (!thread.ok()) return spdlog::warn("event=checkpoint_rest_kept reason=\"{}\"", thread.status().message());
  thread.value()->Post([kept] {
    GcReport report;
    for (const JournalRest& rest : *kept) RemoveRest(rest, CheckWorkingHeader, /*dry_run=*/false, &report);
    for (const GcItem& item : report.kept)
      spdlog::warn("event=checkpoint_rest_kept file={} reason=\"{}\"", item.file, item.why);
    for (const GcItem& item : report.failed)
      spdlog::warn("event=checkpoint_rest_kept file={} reason=\"{}\"", item.file, item.why);
    for (const GcItem& item : report.removed)
      spdlog::info("event=checkpoint_rest_removed file={} bytes={} reason=\"{}\"", item.file, item.bytes, item.why);
  });
}

GcReport CheckpointRuns::CollectGarbage(bool dry_run) {
  GcReport report;
  report.dry_run = dry_run;
  for (const Options::Place& place : options_.paths) {
    const auto find = [self = shared_from_this(), path = place.path]() -> Result<JournalRest> {
      std::string shown;
      Result<UniqueFd> journal = OpenJournal(*path, /*make=*/false, &shown);
      if (!journal.ok()) return journal.status();
      const auto is_live = [&self](const JournalRecord& record) {
        const std::lock_guard lock(self->mutex_);
        return self->recorded_.contains({record.attempt, record.rank});
      };
      return FindRest(std::move(*journal), shown, is_live, /*alone=*/false);
    };
    Result<JournalRest> rest = Status(-ESHUTDOWN, "the daemon is stopping");
    {
      const OnPaths on_paths(this);
      if (on_paths) {
        std::optional<Result<JournalRest>> found = place.keeper->Ask<Result<JournalRest>>(find, kPathPatience);
        if (found) {
          rest = std::move(*found);
        } else {
          rest = NoAnswer(*place.path);
        }
      }
    }
    if (rest.status().code() == -EBADF || rest.status().code() == -ENOENT) continue;  // evacuated; never had one
    if (rest.ok()) {
      for (const std::string& reason : rest->strange) report.kept.push_back({rest->shown, 0, reason});
      RemoveRest(*rest, CheckWorkingHeader, dry_run, &report);
    } else {
      report.failed.push_back({place.directory + " (the daemon's journal of checkpoints)", 0, rest.status().message()});
    }
  }
  return report;
}

// ---- Saving ----

void CheckpointRuns::Begin(const SessionIdentity& identity, const Save& save, std::function<void(Result<Begun>)> done) {
  const Result<std::shared_ptr<Ticket>> ticket = TakeTicket(identity);
  if (!ticket.ok()) return done(ticket.status());
  const auto run = std::make_shared<Run>();
  run->identity = identity;
  run->ticket = ticket.value();
  run->save = save;
  run->handle = next_handle_++;
  const Status entered = Enter(*run);
  if (!entered.ok()) return done(entered);
  run->done = std::move(done);
  if (save.files) {
    std::erase_if(passed_, [](const auto& entry) { return entry.second.expired(); });
    passed_.emplace(identity.id, run);
  }
  Step(run, [this, run] { BeginFiles(run); });
}

template <class T>
std::unique_ptr<CheckpointRuns::Entry<T>> CheckpointRuns::Enter(std::set<T> CheckpointRuns::*set, const T& key) {
  {
    const std::lock_guard lock(mutex_);
    if (!(this->*set).insert(key).second) return nullptr;
  }
  return std::make_unique<Entry<T>>(shared_from_this(), set, key);
}

// Its session, its thread, its attempt. What it has of these when it is refused goes with it.
Status CheckpointRuns::Enter(Run& run) {
  run.saving = Enter(&CheckpointRuns::saving_, run.identity.id);
  if (!run.saving) return Status(-EBUSY, "the session has a checkpoint that has not ended");
  Result<std::shared_ptr<LooseThreads>> thread = LooseThreads::Start("checkpoint", 1);
  if (!thread.ok()) return thread.status();
  run.thread = std::move(*thread);
  if (run.save.attempt.zero()) {
    std::array<uint8_t, 16> random{};
    if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
      return Status::Errno(errno, "getrandom");
    const Result<AttemptId> attempt = attempts_.Choose(
        SaveOf(run), {run.identity.rank, run.identity.id, run.save.newest_session, run.save.ranks_here}, random);
    if (!attempt.ok()) return attempt.status();
    run.save.attempt = attempt.value();
    run.chosen = true;
  }
  if (run.save.files) return Status();  // whose attempt they are is in no journal
  run.recorded = Enter(&CheckpointRuns::recorded_, std::pair(run.save.attempt, run.identity.rank));
  if (run.recorded) return Status();
  if (run.chosen) attempts_.Return(SaveOf(run), run.identity.rank, run.save.attempt);
  return Status(-EEXIST, "attempt " + AttemptText(run.save.attempt) + " of rank " + std::to_string(run.identity.rank) +
                             " is being saved by this daemon: each save needs an attempt of its own");
}

// Those that a client has passed are taken over here, where closing them may take its time.
Result<std::unique_ptr<PartFiles>> CheckpointRuns::MakeFiles(Run& run) {
  PartFiles::Options options;
  options.directory = run.save.directory;
  options.head.job = run.identity.job;
  options.head.tag = run.save.tag;
  options.head.step = run.save.step;
  options.head.world_size = run.identity.world_size;
  options.head.rank = run.identity.rank;
  options.head.attempt = run.save.attempt;
  options.head.started_unix_ns = UnixNs();
  options.overwrite = run.save.overwrite;
  options.working = ReadWorkingHeader;
  if (run.save.files) {
    options.counted = run.save.files;
    std::vector<UniqueFd> files = std::move(*run.save.files);
    return PartFiles::Adopt(std::move(options), std::move(files[0]), std::move(files[1]), run.identity.uid);
  }
  for (const Options::Place& place : options_.paths) {
    const std::string scratch = place.directory + "/mlpo";
    if (run.save.directory == scratch || run.save.directory.starts_with(scratch + "/"))
      return Status::Invalid(run.save.directory + " is among the daemon's scratch files: save beside it");
  }
  JournalRecord record;
  record.attempt = options.head.attempt;
  record.rank = options.head.rank;
  Result<UniqueFd> journal = OpenJournalFor(record, &options.journal_shown);
  if (!journal.ok()) return journal.status();
  run.journal = std::make_shared<const UniqueFd>(std::move(*journal));
  options.journal_fd = run.journal->get();
  return PartFiles::Begin(std::move(options));
}

void CheckpointRuns::BeginFiles(const std::shared_ptr<Run>& run) {
  Result<std::unique_ptr<PartFiles>> files = MakeFiles(*run);
  if (!files.ok()) return End(run, files.status());
  run->files = std::move(*files);
  const Status chosen = ChooseWays(*run);
  if (!chosen.ok()) return End(run, chosen);
  std::vector<bool> next;
  for (const Way way : run->ways) next.push_back(way == Way::kHandedOver);
  run->held = true;
  ToMain([this, run, next = std::move(next)] {
    options_.hold_files(run->identity.id, true);
    options_.make_room(run->identity, next, [this, run](Result<std::vector<FileId>> made) {
      if (!made.ok()) return Step(run, [this, run, status = made.status()] { End(run, status); });
      run->next_files = std::move(*made);
      BeginTaking(run);
    });
  });
}

// What there is of persistent paths on the part's file system stays there. Whether the file system can clone is tried
// with the part's own header. A client of another user gets no file of this one's.
Status CheckpointRuns::ChooseWays(Run& run) {
  run.ways.assign(options_.paths.size(), Way::kCopied);
  const Result<dev_t> device = DeviceOf(run.files->data_fd(), run.files->shown());
  if (!device.ok()) return device.status();
  run.device = device.value();
  const OnPaths on_paths(this);
  if (!on_paths) return Status(-ESHUTDOWN, "the daemon is stopping");
  const Way otherwise = run.save.files ? Way::kCopied : Way::kHandedOver;
  std::optional<Way> way;
  for (size_t i = 0; i < options_.paths.size(); ++i) {
    const Options::Place& place = options_.paths[i];
    const auto look = [path = place.path]() -> Result<dev_t> {
      const Result<UniqueFd> folder = path->OpenFolder();
      if (!folder.ok()) return folder.status();
      return DeviceOf(folder.value().get(), path->folder_shown());
    };
    const std::optional<Result<dev_t>> other = place.keeper->Ask<Result<dev_t>>(look, kPathPatience);
    // Evacuated: nothing of the session will be there. Or it does not answer: what is there is copied, if it can be.
    if (!other || !other->ok() || device.value() != other->value()) continue;
    run.write_bytes_per_s = std::max(run.write_bytes_per_s, place.write_bytes_per_s);
    if (!place.persistent) continue;
    if (!way) {  // what it leaves behind the header is written over
      const int data = run.files->data_fd();
      way = CloneRange(data, 0, kPartHeaderBytes, data, kPartHeaderBytes) == 0 ? Way::kCloned : otherwise;
    }
    run.ways[i] = *way;
  }
  // Before anybody stalls for it. What is on which path is known only when the state is taken: where something need not
  // be copied, Allocate tells.
  const bool all = std::all_of(run.ways.begin(), run.ways.end(), [](Way each) { return each == Way::kCopied; });
  return all ? run.files->CheckRoom(run.save.bytes) : Status();
}

void CheckpointRuns::BeginTaking(const std::shared_ptr<Run>& run) {
  options_.loop->Post([this, run] {
    CopyPace::Options pace;
    pace.share = options_.copy_share;
    pace.write_bytes_per_s = run->write_bytes_per_s;
    pace.burst_bytes = 2 * options_.buffer_bytes;
    pace.target = run->device;
    DataLoop::SaveEvents events;
    events.shown.job = run->identity.job;
    events.shown.uid = run->identity.uid;
    events.shown.rank = run->identity.rank;
    events.shown.directory = run->save.directory;
    events.shown.tag = run->save.tag;
    events.shown.step = run->save.step;
    events.left = [this, run] {
      run->left = true;
      ToMain([this, run] { options_.next_files_used(run->identity.id, true); });
    };
    events.taken = [this, run](std::shared_ptr<TakenState> state) {
      Step(run, [this, run, state = std::move(state)] { Taken(run, state); });
    };
    events.copied = [this, run](const Failure& failure, Manifest manifest) {
      auto kept = std::make_shared<Manifest>(std::move(manifest));
      Step(run, [this, run, failure, kept] { Copied(run, failure, kept); });
    };
    run->number = options_.loop->BeginSave(run->identity.id, run->handle, pace, run->next_files, std::move(events));
    if (run->number == 0) {
      return Step(run, [this, run] { End(run, Status(-ESHUTDOWN, "the session has ended")); });
    }
    ToMain([run] { std::exchange(run->done, nullptr)(Begun{run->save.attempt, run->handle}); });
  });
}

// Pinned: from here on it is known where each block is.
void CheckpointRuns::Taken(const std::shared_ptr<Run>& run, const std::shared_ptr<TakenState>& state) {
  DataLoop* const loop = options_.loop;
  const Result<Placed> placed = Place(*run, *state);
  if (!placed.ok()) {
    return ToData([loop, run, status = placed.status()] { loop->FailSave(run->number, status); });
  }
  ToData([this, loop, run, state, placed = placed.value()] {
    loop->CopyState(run->number, state, placed.writer);
    ToMain([run, copied_bytes = placed.copied_bytes, cloned_bytes = placed.cloned_bytes,
            handed_over_bytes = placed.handed_over_bytes, bound_s = loop->SaveBoundSeconds(run->number)] {
      spdlog::info(
          "event=checkpoint_taken job={} rank={} tag={} step={} attempt={} copied_bytes={} cloned_bytes={} "
          "handed_over_bytes={} bound_s={:.0f}",
          run->identity.job, run->identity.rank, run->save.tag, run->save.step, AttemptText(run->save.attempt),
          copied_bytes, cloned_bytes, handed_over_bytes, bound_s);
    });
  });
}

// Gives each block its place in the part: first the files that are handed over, then what is to be copied, behind it
// what is cloned.
Result<CheckpointRuns::Placed> CheckpointRuns::Place(Run& run, TakenState& state) {
  Placed placed;
  Manifest& manifest = state.manifest;
  manifest.files = {PartFile{}};
  std::optional<OnPaths> on_paths;  // not while a client's own files are waited for
  const auto stays = [](Way way) { return way != Way::kCopied; };
  if (std::any_of(run.ways.begin(), run.ways.end(), stays) && !on_paths.emplace(this))
    return Status(-ESHUTDOWN, "the daemon is stopping");
  const Result<std::vector<uint32_t>> handed = HandOver(run, state);  // 0: not; else the place in manifest.files
  if (!handed.ok()) return handed.status();
  uint64_t offset = kPartHeaderBytes;
  std::vector<size_t> cloned;
  const auto put = [&](size_t i) {
    const TakenState::Source& source = state.sources[i];
    PartBlock& block = manifest.subgroups[source.subgroup].blocks[source.block];
    block.offset = state.places[i].part_offset = offset;
    offset += source.bytes;
  };
  for (size_t i = 0; i < state.sources.size(); ++i) {
    const TakenState::Source& source = state.sources[i];
    if (source.path == kNone) continue;
    if (handed.value()[source.path] != 0 && state.old_files[source.path] == source.file) {
      PartBlock& block = manifest.subgroups[source.subgroup].blocks[source.block];
      block.file = handed.value()[source.path];
      block.offset = source.offset;
      state.places[i].there = true;
      placed.handed_over_bytes += source.bytes;
    } else if (run.ways[source.path] == Way::kCloned) {
      cloned.push_back(i);
    } else {
      put(i);
    }
  }
  const uint64_t copied_end = offset;
  for (const size_t i : cloned) {
    put(i);
    state.places[i].there = true;
  }
  manifest.files[0].bytes = offset;
  Status status = run.files->Allocate(copied_end);
  if (status.ok() && !cloned.empty() && !Clone(run, state)) {
    for (const size_t i : cloned) state.places[i].there = false;
    status = run.files->Allocate(offset);
    cloned.clear();
  }
  if (!status.ok()) return status;
  for (size_t i = 0; i < state.sources.size(); ++i) {
    const TakenState::Source& source = state.sources[i];
    if (source.path == kNone) continue;
    if (!state.places[i].there) {
      placed.copied_bytes += source.bytes;
      continue;
    }
    PartBlock& block = manifest.subgroups[source.subgroup].blocks[source.block];
    if (block.file == 0) placed.cloned_bytes += source.bytes;
    manifest.hashed = manifest.hashed && source.hashed;
    block.hash = source.hash;
  }
  if (placed.copied_bytes == 0) return placed;
  DataLoop* const loop = options_.loop;
  Result<std::unique_ptr<PartWriter>> writer =
      PartWriter::Start(run.files->data_fd(), /*direct=*/true, options_.writers, run.files->shown(),
                        [loop, counted = run.save.files](const PartWriter::Written& written) {
                          loop->Post([loop, written] { loop->PartWritten(written); });
                        });
  if (!writer.ok()) return writer.status();
  placed.writer = std::move(*writer);
  return placed;
}

// Per path: the place in the manifest of the file that was handed over; 0: none, and its blocks are copied.
Result<std::vector<uint32_t>> CheckpointRuns::HandOver(Run& run, TakenState& state) const {
  std::vector<uint32_t> handed(options_.paths.size());
  for (PathIndex i = 0; i < options_.paths.size(); ++i) {
    const FileId file = state.old_files[i];
    const auto is_there = [&](const TakenState::Source& source) { return source.path == i && source.file == file; };
    if (file == kNone || std::none_of(state.sources.begin(), state.sources.end(), is_there)) continue;
    PartFile part;
    part.working = true;
    bool moved = false;
    const Status status = options_.paths[i].path->HandOver(file, [&](const Path::Leaving& leaving) -> Status {
      const FileOwner& owner = leaving.owner;
      part.origin = {options_.node, ::geteuid(), owner.client_uid, owner.job, owner.rank, owner.generation};
      const Status synced = SyncData(leaving.fd, leaving.shown);
      if (!synced.ok()) return synced;
      struct stat st;
      if (::fstat(leaving.fd, &st) != 0) return Status::Errno(errno, "looking at " + leaving.shown);
      const auto size = static_cast<uint64_t>(st.st_size);
      const Result<uint32_t> index =
          run.files->HandOver(leaving.folder_fd, leaving.name, leaving.fd, part.origin, leaving.shown, &moved);
      if (!index.ok()) return index.status();
      part.index = index.value();
      std::vector<Extent> used;
      std::copy_if(state.left.begin(), state.left.end(), std::back_inserter(used),
                   [i](const Extent& extent) { return extent.path == i; });
      part.bytes = GiveBackUnused(leaving.fd, std::move(used), size, leaving.shown);
      return Status();
    });
    if (status.ok()) {
      handed[i] = static_cast<uint32_t>(state.manifest.files.size());
      state.manifest.files.push_back(part);
    } else if (moved) {
      return status;
    } else {
      spdlog::warn("event=checkpoint_copies path={} reason=\"{}\"", options_.paths[i].path->name(), status.message());
    }
  }
  return handed;
}

// What has the place already, behind what is copied. False: nothing of it counts.
bool CheckpointRuns::Clone(const Run& run, const TakenState& state) const {
  std::map<std::pair<PathIndex, FileId>, std::shared_ptr<const UniqueFd>> files;
  const auto fail = [](const std::string& reason) {
    spdlog::warn("event=checkpoint_copies reason=\"{}\"", reason);
    return false;
  };
  for (size_t i = 0; i < state.sources.size(); ++i) {
    const TakenState::Source& source = state.sources[i];
    if (source.path == kNone || !state.places[i].there || run.ways[source.path] != Way::kCloned) continue;
    std::shared_ptr<const UniqueFd>& fd = files[{source.path, source.file}];
    const std::string& name = options_.paths[source.path].path->name();
    if (!fd) {
      fd = options_.paths[source.path].path->Share(source.file);
      if (!fd) return fail("the file on path " + name + " is closed");
      const Status synced = SyncData(fd->get(), "the working file on path " + name);
      if (!synced.ok()) return fail(synced.message());
    }
    const int error =
        CloneRange(fd->get(), source.offset, source.bytes, run.files->data_fd(), state.places[i].part_offset);
    if (error != 0) return fail(Status::Errno(error, "cloning a block of path " + name).message());
  }
  return true;
}

void CheckpointRuns::Copied(const std::shared_ptr<Run>& run, const Failure& failure,
                            std::shared_ptr<Manifest> manifest) {
  Status status = failure.status == 0 ? Status() : Status(failure.status, failure.text);
  if (status.ok()) status = run->files->Commit(manifest.get());
  bool complete = false;
  if (status.ok()) {
    std::vector<std::string> kept;
    const Result<bool> all = run->files->IsComplete(&kept);
    complete = all.ok() && all.value();
    if (!all.ok()) spdlog::warn("event=checkpoint_unseen reason=\"{}\"", all.status().message());
    for (const std::string& reason : kept) spdlog::warn("event=checkpoint_rest_kept reason=\"{}\"", reason);
  }
  spdlog::info("event=checkpoint_ended job={} rank={} tag={} step={} attempt={} complete={} error=\"{}\"",
               run->identity.job, run->identity.rank, run->save.tag, run->save.step, AttemptText(run->save.attempt),
               complete, status.message());
  run->files.reset();  // abandons what was not committed
  run->recorded.reset();
  if (!run->left) DropNext(run);
  DataLoop* const loop = options_.loop;
  ToData([this, loop, run, status, complete] {
    // Its threads have nothing left to do, but their end is not waited for here. Its file may hang when it is closed:
    // until then the run's ticket counts.
    run->thread->Post([run, writer = loop->ReleaseWriter(run->number)]() mutable { writer.reset(); });
    // Before the client hears of it, and begins the next; which comes here behind this.
    run->saving.reset();
    loop->SaveEnded(run->number, status, complete);
    ToMain([this, run] { options_.hold_files(run->identity.id, false); });
  });
}

// The session was never written to them. Before the session may begin another, which is given these as long as they are
// there.
void CheckpointRuns::DropNext(const std::shared_ptr<Run>& run) {
  if (run->next_files.empty()) return;
  ToMain([this, run] { options_.next_files_used(run->identity.id, false); });
}

// Before TAKE was possible: in its thread.
void CheckpointRuns::End(const std::shared_ptr<Run>& run, const Status& status) {
  run->files.reset();
  run->save.files.reset();
  run->recorded.reset();
  DropNext(run);
  run->saving.reset();
  ToMain([this, run, status, held = run->held] {
    if (held) options_.hold_files(run->identity.id, false);
    if (run->chosen) attempts_.Return(SaveOf(*run), run->identity.rank, run->save.attempt);
    std::exchange(run->done, nullptr)(status);
  });
}

// What goes into files that its client has passed is nobody's any more.
void CheckpointRuns::SessionEnded(const SessionIdentity& identity, bool last) {
  if (last) attempts_.Forget(identity.uid, identity.job);
  for (const std::weak_ptr<Ticket>& weak : tickets_) {
    const std::shared_ptr<Ticket> ticket = weak.lock();
    if (ticket != nullptr && ticket->session == identity.id) ticket->ended = true;
  }
  const auto [begin, end] = passed_.equal_range(identity.id);
  for (auto it = begin; it != end; ++it) {
    DataLoop* const loop = options_.loop;
    if (const std::shared_ptr<Run> run = it->second.lock()) {
      loop->Post([loop, run] {
        if (run->number != 0) loop->FailSave(run->number, Status(-ESHUTDOWN, "the session has ended"));
      });
    }
  }
  passed_.erase(begin, end);
}

// ---- Restoring ----

// By name.
Result<CheckpointRuns::Parts> CheckpointRuns::FindParts(const SessionIdentity& identity, const Source& source,
                                                        const std::vector<std::vector<TargetTensor>>& subgroups) {
  const std::string& directory = source.directory;
  Result<UniqueFd> directory_fd = OpenCheckpointDirectory(directory);
  if (!directory_fd.ok()) return directory_fd.status();
  FoundTag found;
  if (source.tag) {
    Result<FoundTag> scanned = ScanTag(directory_fd->get(), *source.tag, directory);
    if (!scanned.ok()) return scanned.status();
    found = std::move(*scanned);
  } else {
    const Result<std::vector<FoundTag>> tags = ScanDirectory(directory_fd->get(), directory);
    if (!tags.ok()) return tags.status();
    if (const FoundTag* newest = NewestTag(tags.value(), identity.job)) found = *newest;
    const FoundAttempt* chosen = CompleteAttempt(found);
    if (chosen != nullptr && chosen->head().job != identity.job) {
      spdlog::warn(
          "event=checkpoint_of_another_job job={} tag={} step={} reason=\"{} has none of this job, but of {}\"",
          identity.job, found.tag, chosen->head().step, directory, chosen->head().job);
    }
  }
  const FoundAttempt* attempt = CompleteAttempt(found);
  if (!source.attempt.zero()) {
    const auto named = std::find_if(found.attempts.begin(), found.attempts.end(), [&](const FoundAttempt& other) {
      return other.id == source.attempt && other.complete();
    });
    attempt = named == found.attempts.end() ? nullptr : &*named;
  }
  if (attempt == nullptr) {
    return Status(-ENOENT, directory + " has no complete checkpoint" +
                               (source.tag ? " '" + *source.tag + "'" : std::string()) +
                               (source.attempt.zero() ? "" : " of attempt " + AttemptText(source.attempt)));
  }
  Result<RestorePlan::Parts> parts = ReadParts(directory_fd->get(), directory, *attempt, identity, subgroups);
  if (!parts.ok()) return parts.status();
  return Parts{*attempt, *parts, FolderOpener(directory, *parts)};
}

struct CheckpointRuns::PassedManifest {
  const std::shared_ptr<CheckpointRuns> runs;
  const uint32_t uid;
  const uint64_t bytes;
  Manifest manifest;

  ~PassedManifest() {
    if (bytes == 0) return;
    const std::lock_guard lock(runs->mutex_);
    const auto user = runs->manifest_bytes_.find(uid);
    user->second -= bytes;
    if (user->second == 0) runs->manifest_bytes_.erase(user);
  }
};

Result<std::shared_ptr<CheckpointRuns::PassedManifest>> CheckpointRuns::CountManifest(uint32_t uid, uint64_t bytes,
                                                                                      const std::string& shown) {
  const auto refuse = [&](const std::string& whose, uint64_t used, uint64_t most) {
    return Status(MLPO_E_QUOTA, shown + " has " + std::to_string(bytes) + " bytes, and " + whose + " of " +
                                    std::to_string(used) + " bytes are in use, of " + std::to_string(most) +
                                    ": end restores that are over, let ranks restore one after another, or run a "
                                    "daemon as uid " +
                                    std::to_string(uid));
  };
  const std::lock_guard lock(mutex_);
  uint64_t all = 0;
  for (const auto& [user, used] : manifest_bytes_) all += used;
  const auto user = manifest_bytes_.find(uid);
  const uint64_t own = user == manifest_bytes_.end() ? 0 : user->second;
  if (bytes > kManifestsOfUser - own)
    return refuse("manifests that uid " + std::to_string(uid) + " has passed", own, kManifestsOfUser);
  if (bytes > kManifestsOfAll - all) return refuse("manifests that clients have passed", all, kManifestsOfAll);
  if (bytes > 0) manifest_bytes_[uid] += bytes;
  return std::shared_ptr<PassedManifest>(new PassedManifest{shared_from_this(), uid, bytes, Manifest()});
}

// In descriptors: the manifests of all parts in the order of ranks, then the files that they name, in their order.
Result<CheckpointRuns::Parts> CheckpointRuns::PassedParts(const PassedFiles& files, uint32_t uid) {
  for (size_t i = 0; i < files->size(); ++i) {
    const int fd = (*files)[i].get(), flags = ::fcntl(fd, F_GETFL);
    struct stat st;
    const bool right = flags >= 0 && ::fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (flags & O_ACCMODE) != O_WRONLY &&
                       !(flags & O_PATH);
    if (!right) return Status::Invalid("file " + std::to_string(i) + " that was passed is none that can be read");
  }
  Parts found;
  std::vector<PartHead> heads;
  uint64_t parts = 1, next = 0;
  for (; next < parts; ++next) {
    const std::string shown = "manifest " + std::to_string(next) + " that was passed";
    if (next >= files->size()) return Status::Invalid(shown + " is missing: there are " + std::to_string(parts));
    struct stat st;
    const int fd = (*files)[next].get();
    if (::fstat(fd, &st) != 0) return Status::Errno(errno, "looking at " + shown);
    const Result<std::shared_ptr<PassedManifest>> counted =
        CountManifest(uid, static_cast<uint64_t>(st.st_size), shown);
    if (!counted.ok()) return counted.status();
    const Result<std::string> text = ReadBeginning(fd, static_cast<size_t>(st.st_size), shown);
    if (!text.ok()) return text.status();
    Result<Manifest> manifest = ParseManifest(text.value(), shown);
    if (!manifest.ok()) return manifest.status();
    if (manifest->head.rank != next) return Status::Invalid(shown + " is not that of rank " + std::to_string(next));
    parts = manifest->head.world_size;
    heads.push_back(manifest->head);
    counted.value()->manifest = std::move(*manifest);
    found.parts.emplace_back(counted.value(), &counted.value()->manifest);
  }
  const std::vector<FoundAttempt> attempts = GroupParts(heads);
  if (attempts.size() != 1 || !attempts[0].complete()) {
    return Status::Invalid("the manifests that were passed are not those of one checkpoint" +
                           (attempts[0].wrong.empty() ? std::string() : ": " + attempts[0].wrong));
  }
  found.attempt = attempts[0];
  std::map<std::pair<uint32_t, uint32_t>, int> places;  // by part and file
  for (uint32_t part = 0; part < found.parts.size(); ++part) {
    for (uint32_t file = 0; file < found.parts[part]->files.size(); ++file, ++next) {
      const std::string shown =
          "data file " + std::to_string(file) + " of rank " + std::to_string(part) + " that was passed";
      if (next >= files->size()) return Status::Invalid(shown + " is missing");
      const int fd = (*files)[next].get();
      const Status right = CheckFile(fd, heads[part], found.parts[part]->files[file], CheckWorkingHeader, shown);
      if (!right.ok()) return right;
      places[{part, file}] = fd;
    }
  }
  if (next != files->size()) return Status::Invalid("more files were passed than the manifests name");
  found.open = [files, places = std::move(places)](uint32_t part, uint32_t file) -> Result<UniqueFd> {
    UniqueFd fd(::fcntl(places.at({part, file}), F_DUPFD_CLOEXEC, 0));
    if (!fd) return Status::Errno(errno, "duplicating a descriptor");
    return fd;
  };
  return found;
}

void CheckpointRuns::Restore(const SessionIdentity& identity, const Source& source, std::vector<SubgroupSpec> subgroups,
                             std::function<void(Result<Found>)> done) {
  const Result<std::shared_ptr<Ticket>> ticket = TakeTicket(identity);
  if (!ticket.ok()) return done(ticket.status());
  Result<std::shared_ptr<LooseThreads>> thread = LooseThreads::Start("checkpoint", 1);
  if (!thread.ok()) return done(thread.status());
  auto run = std::make_shared<Run>();
  run->identity = identity;
  run->ticket = ticket.value();
  run->handle = next_handle_++;
  run->thread = std::move(*thread);
  Step(run,
       [this, run, source, subgroups = std::move(subgroups), done] { BeginRestoring(run, source, subgroups, done); });
}

void CheckpointRuns::BeginRestoring(const std::shared_ptr<Run>& run, const Source& source,
                                    const std::vector<SubgroupSpec>& subgroups,
                                    const std::function<void(Result<Found>)>& done) {
  const SessionIdentity& identity = run->identity;
  const auto fail = [&](const Status& status) { ToMain([done, status] { done(status); }); };
  std::vector<std::vector<TargetTensor>> targets;
  for (const SubgroupSpec& spec : subgroups) targets.push_back(TargetsOf(spec));
  Result<Parts> found = source.files ? PassedParts(source.files, identity.uid) : FindParts(identity, source, targets);
  if (!found.ok()) return fail(found.status());
  Result<std::vector<RestorePlan>> plans =
      RestorePlan::Make(found->parts, identity.rank, identity.world_size, std::move(targets));
  if (!plans.ok()) return fail(plans.status());
  // Not before there is something to read: until then it may hang in its manifests.
  const Result<std::shared_ptr<LooseThreads>> threads = LooseThreads::Start("ckpt-read", options_.readers);
  if (!threads.ok()) return fail(threads.status());
  // Whoever reads has it, too: also a thread that hangs in a file, long after its session has ended.
  found->open = [ticket = run->ticket, open = std::move(found->open)](uint32_t part, uint32_t file) {
    return open(part, file);
  };
  const auto open = std::make_shared<OpenParts>(found->open);
  std::map<SubgroupId, std::shared_ptr<PartReader>> readers;
  for (size_t i = 0; i < subgroups.size(); ++i) {
    readers[subgroups[i].id] =
        std::make_shared<PartReader>(std::make_shared<const RestorePlan>(std::move((*plans)[i])), open);
  }
  const PartHead& head = found->attempt.head();
  const Found answer{found->attempt.id, head.tag, head.step, head.world_size, run->handle};
  DataLoop* const loop = options_.loop;
  ToData([this, loop, id = identity.id, answer, readers = std::move(readers), own = threads.value(), done]() mutable {
    const bool begun = loop->BeginRestore(id, answer.handle, std::move(readers), own);
    ToMain([done, answer, begun] {
      if (begun) return done(answer);
      done(Status(-EBUSY, "the session has ended, or has restores that it has not ended: end these first"));
    });
  });
}

}  // namespace mlpo
