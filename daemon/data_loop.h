// DataLoop: the data thread: reads every session's ring, drives the scheduler, and carries out what it asks for.
//
// A turn takes what has come (messages from main, ended transfers and jobs, submissions), shows completions, and goes
// on while there is something. Then it spins for a moment, announces in every session that it sleeps, looks once more,
// and waits in epoll for a doorbell or a queue. A time-out behind that is counted when it finds work: it never should.
//
// Threads: Post, Start and Stop from the main thread; everything else runs in the data thread, as messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/adam/worker_pool.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/loose_threads.h"
#include "daemon/base/thread.h"
#include "daemon/base/unique_fd.h"
#include "daemon/block_jobs.h"
#include "daemon/block_restore.h"
#include "daemon/checkpoint/manifest.h"
#include "daemon/checkpoint/part_reader.h"
#include "daemon/checkpoint/part_writer.h"
#include "daemon/completion/completion_writer.h"
#include "daemon/control/live_counters.h"
#include "daemon/io/buffer_pool.h"
#include "daemon/io/path_queue.h"
#include "daemon/part_manifest.h"
#include "daemon/scheduler/calibration.h"
#include "daemon/scheduler/scheduler.h"
#include "daemon/session/areas.h"
#include "daemon/session/ring_reader.h"
#include "daemon/types/session_identity.h"

namespace mlpo {

class DataLoop : private SchedulerActions {
 public:
  // Why a calibration ends before its time.
  static constexpr char kSessionComesFirst[] = "a session has connected: it comes first";
  static constexpr char kStopping[] = "the daemon is stopping";

  // Borrowed for the loop's life.
  struct Parts {
    BufferPool* pool = nullptr;
    WorkerPool* workers = nullptr;
    DoneJobs* done_jobs = nullptr;
    std::vector<PathQueue*> queues;
    TransferResults* transfers = nullptr;
    LiveCounters* live = nullptr;
  };
  // Called in the data thread.
  struct Events {
    std::function<void(SessionId, std::string reason)> broken;  // it broke the protocol; its ring is not read any more
    std::function<void(SessionId)> gone;            // after EndSession, or of a store: nothing of it is in use
    std::function<void(SessionId)> hangs;           // see SchedulerActions::SessionHangs
    std::function<void(PathIndex path)> evacuated;  // see SchedulerActions::Evacuated
    // See SchedulerActions::StartProbe; answered by ProbeDone.
    std::function<void(PathIndex path, uint64_t end)> probe;
    // See SchedulerActions::MakeRoom; answered by RoomMade.
    std::function<void(const ObjectStore& store, uint64_t bytes, uint64_t ticket)> make_room;
    std::function<void(SessionId session, PathIndex path, FileId file)> file_unused;  // see SchedulerActions
  };

  DataLoop(Scheduler::Options options, Parts parts, Events events);
  ~DataLoop() override;

  void Start();
  // Ends the thread after what was posted before. Nothing may be in flight.
  void Stop();
  void Post(std::function<void()> message);

  // ---- In the data thread ----
  // The pool has grown by a piece.
  void AddPiece(uint32_t piece);
  void AddSession(const SessionIdentity& identity, std::shared_ptr<Areas> areas);
  void SetFiles(SessionId session, std::vector<FileId> files);
  void AddSubgroup(SessionId session, const SubgroupSpec& spec);
  void SetStaging(SessionId session, std::byte* data, uint64_t bytes);
  void EndSession(SessionId session);
  void RoomMade(SessionId store, uint64_t bytes, uint64_t ticket, std::vector<FileId> files, const Status& status);
  void ProbeDone(PathIndex path, int error);
  // One file more of a session or store, if it is still there.
  void SetFile(SessionId session, PathIndex path, FileId file) { scheduler_.SetFile(session, path, file); }
  // Why the path cannot be spared; "" if it can.
  std::string WhyNeeded(PathIndex path) const { return scheduler_.WhyNeeded(path); }
  void DisablePath(PathIndex path) { scheduler_.DisablePath(path, NowNs()); }
  // Returns the bytes that are to be moved.
  uint64_t EvacuatePath(PathIndex path);
  void EnablePath(PathIndex path) { scheduler_.EnablePath(path, NowNs()); }
  // How a session's state gets into a part, called in the data thread: first `taken` or `copied` with a failure, then
  // `copied`. They post what they want done: the scheduler is in the middle of something.
  struct SaveEvents {
    CheckpointSnapshot shown;  // for status: whose it is, and what
    // The session goes on in the next files. Before `taken`, if it began with such.
    std::function<void()> left;
    // What is on persistent paths may be cloned or handed over; then CopyState, with a writer for the rest.
    std::function<void(std::shared_ptr<TakenState> state)> taken;
    // Without its head; worth nothing after a failure. Answered by SaveEnded.
    std::function<void(const Failure& failure, Manifest manifest)> copied;
  };
  // SNAPSHOT with this handle takes the session's state. `next_files`: see Scheduler::BeginSave. 0: the session has
  // ended, or has begun another.
  uint64_t BeginSave(SessionId session, uint32_t handle, const CopyPace::Options& pace, std::vector<FileId> next_files,
                     SaveEvents events);
  // `state`: as `taken` gave it, with places for all blocks. `writer` tells PartWritten, by Post; nullptr if nothing is
  // to be copied. It is kept until nothing of it is in flight any more, then given to `copied`'s caller by
  // ReleaseWriter: its end may block.
  void CopyState(uint64_t save, const std::shared_ptr<TakenState>& state, std::shared_ptr<PartWriter> writer);
  void PartWritten(const PartWriter::Written& written);
  std::shared_ptr<PartWriter> ReleaseWriter(uint64_t save);
  void FailSave(uint64_t save, const Status& status);
  void FailSaves(const Status& status);  // all of them
  // See Scheduler.
  double SaveBoundSeconds(uint64_t save) const { return scheduler_.SaveBoundSeconds(save); }
  // The part has been committed, or is gone. `complete`: all ranks' parts are there.
  void SaveEnded(uint64_t save, const Status& status, bool complete);
  std::vector<SubgroupSpec> Specs(SessionId session) const { return scheduler_.Specs(session); }
  // RESTORE with this handle fills subgroups by these readers, in these threads: which may hang with the checkpoint's
  // files, and close them. False: the session has ended.
  bool BeginRestore(SessionId session, uint32_t handle, std::map<SubgroupId, std::shared_ptr<PartReader>> readers,
                    std::shared_ptr<LooseThreads> threads);
  // Tells sessions that a checkpoint is wanted: of this user (nullopt: of all), of this job (nullopt: of all). How
  // many.
  uint64_t AskForCheckpoint(std::optional<uint32_t> uid, const std::optional<std::string>& job);
  // New submissions are refused with ESHUTDOWN; `drained` is called once everything accepted is answered.
  void Drain(std::function<void()> drained);
  // Tells every client that no completion will follow.
  void AnnounceEnd();
  void Fill(Snapshot* snapshot) const;
  // For a calibration, while no session is connected: at most `count`; none if there are sessions, or one is under way.
  std::vector<BufferIndex> LendBuffers(uint32_t count);
  void GiveBack(const std::vector<BufferIndex>& buffers);
  // Measures with these buffers; `done` gets the ended calibration in this thread, after the buffers went back. A
  // session that connects, or a drain, ends it.
  void Calibrate(Calibration::Options options, std::function<void(const Calibration&)> done);
  void CancelCalibration(const std::string& why);
  void SetPath(PathIndex path, const PathParameters& parameters);
  // See PathModel::Assume and Grant.
  void AssumePath(PathIndex path, const PathParameters& parameters) { scheduler_.AssumePath(path, parameters); }
  void GrantPath(PathIndex path, double bytes_per_s) { scheduler_.GrantPath(path, bytes_per_s); }
  void StartTrace() { scheduler_.StartTrace(NowNs()); }
  Trace StopTrace();

 private:
  struct LoopSession {
    LoopSession(const SessionIdentity& i, std::shared_ptr<Areas> a);
    const SessionIdentity identity;
    const std::shared_ptr<Areas> areas;
    RingReader reader;
    CompletionWriter writer;
    std::byte* staging = nullptr;
    uint64_t submissions = 0;
    uint64_t parameters = 0;
    bool broken = false;
  };

  void Run();
  bool HasWork() const;
  bool Turn(int64_t now_ns);
  bool TakeQueues(int64_t now_ns);
  bool ReadRing(LoopSession& session, int64_t now_ns);
  void Accept(LoopSession& session, const Request& request, int64_t now_ns);
  void Break(LoopSession& session, std::string reason);
  void Publish();
  void Start(std::unique_ptr<SchedulerJob> job, const Op& op, uint32_t block);
  void Submit(std::unique_ptr<SchedulerJob> job);
  void TraceSpans(const SchedulerJob& job);
  void FillTotals(Snapshot* snapshot, int64_t now_ns) const;
  bool RingHasWork(LoopSession& session);
  void Sleep();
  void MaybeEndCalibration();
  void Watch(int fd, uint32_t events);
  LoopSession* Find(SessionId session);

  // SchedulerActions
  void StartTransfer(const Transfer& transfer) override;
  void StartBlockWork(const Op& op, Block& block) override;
  void StartChecksums(Block& block, uint8_t check, uint8_t form) override;
  void ChecksumsWrong(const Block& block, PathIndex path, uint64_t pieces, bool again) override;
  void StartStats(Op& op) override;
  Failure CopySteps(const Op& op, std::vector<Tensor>& tensors) override;
  void CopyPiece(const Op& op, std::vector<std::byte>& memory) override;
  void Evacuated(PathIndex path) override;
  void StartProbe(PathIndex path, uint64_t end) override;
  void MakeRoom(const ObjectStore& store, uint64_t bytes, uint64_t ticket) override;
  void PublishEpoch(const Subgroup& subgroup) override;
  void Complete(const Completion& completion) override;
  void SessionGone(SessionId session) override;
  void SessionHangs(SessionId session) override { events_.hangs(session); }
  void StatePinned(const StateSave& save) override;
  void FileUnused(SessionId session, PathIndex path, FileId file) override;
  void StateTaken(const StateSave& save) override;
  void WritePart(uint64_t save, Pin& pin, BufferIndex buffer) override;
  void StateCopied(uint64_t save, const Failure& failure) override;
  Failure RestoreSteps(const Op& op, std::vector<Tensor>& tensors) override;
  void RestoreEnded(SessionId session, uint32_t handle) override;
  std::shared_ptr<PartReader> ReaderOf(const Op& op) const;
  void StartRestore(const Op& op, Block& block);
  void BlockRead(const std::shared_ptr<BlockRestore>& job);
  void GiveUpHanging(int64_t now_ns);

  // What readers' threads have of the loop: they may outlive it.
  struct Gate {
    std::mutex mutex;
    DataLoop* loop = nullptr;  // guarded by mutex; nullptr: it has gone
  };

  const Parts parts_;
  const Events events_;
  const int64_t hang_timeout_ns_;  // 0: never
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  Scheduler scheduler_;
  UniqueFd epoll_;
  MessageQueue<std::function<void()>> messages_;
  std::unordered_map<SessionId, std::unique_ptr<LoopSession>> sessions_;
  std::unordered_map<SessionId, std::byte*> staging_;  // also of sessions that are ending
  std::unordered_map<Job*, std::unique_ptr<SchedulerJob>> jobs_;
  struct LoopSave {
    SaveEvents events;
    std::shared_ptr<TakenState> state;  // from StatePinned to StateTaken
    Manifest manifest;                  // from CopyState on
    std::shared_ptr<PartWriter> writer;
  };
  struct PartWrite {
    uint64_t save = 0;
    Pin* pin = nullptr;
    BufferIndex buffer = 0;
  };
  std::unordered_map<uint64_t, LoopSave> saves_;
  std::unordered_map<uint64_t, PartWrite> part_writes_;
  uint64_t next_part_write_ = 1;
  struct LoopRestore {
    std::map<SubgroupId, std::shared_ptr<PartReader>> readers;
    std::shared_ptr<LooseThreads> threads;
  };
  struct Restoring {
    std::shared_ptr<BlockRestore> job;
    SessionId session = 0;
    int64_t since_ns = 0;
  };
  std::map<Block*, Restoring> restoring_;
  std::map<std::pair<SessionId, uint32_t>, LoopRestore> restores_;  // by handle
  std::vector<LoopSession*> to_publish_;
  LoopSession* last_found_ = nullptr;

  // Taken in a turn; kept for their capacity.
  std::vector<std::function<void()>> taken_messages_;
  std::vector<TransferResult> taken_transfers_;
  std::vector<Job*> taken_jobs_;

  int64_t next_tick_ns_ = 0;
  int64_t next_trace_ns_ = 0;  // of the pool
  RateLimit wrong_checksums_{kNsPerS}, wrong_again_{kNsPerS};
  uint64_t lost_wakeups_ = 0;
  bool lent_ = false;  // buffers are, from LendBuffers to the calibration's end
  std::unique_ptr<Calibration> calibration_;
  std::function<void(const Calibration&)> calibrated_;
  bool draining_ = false;
  std::function<void()> drained_;
  int64_t drain_patience_ns_ = 0;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace mlpo
