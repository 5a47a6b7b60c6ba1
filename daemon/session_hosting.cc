#include <utility>  // before Asio of Boost 1.74 in C++20

#include "daemon/session_hosting.h"

#include <cerrno>
#include <optional>
#include <string>

#include "daemon/checkpoint/names.h"

namespace mlpo {

void SessionHosting::SessionReady(const SessionIdentity& identity, std::shared_ptr<Areas> areas) {
  parts_.calibrations->BenchUnwanted(DataLoop::kSessionComesFirst);
  parts_.shares->SessionReady(identity);
  parts_.loop->Post([this, identity, areas = std::move(areas)] { parts_.loop->AddSession(identity, areas); });
}

uint32_t SessionHosting::BlockCount(const SubgroupSpec& spec) const { return parts_.storages->BlockCount(spec); }

void SessionHosting::PrepareStorage(const SessionIdentity& identity, const SubgroupSpec& spec,
                                    std::function<void(Status)> done) {
  parts_.storages->PrepareStorage(identity, spec, std::move(done));
}

void SessionHosting::ReturnStorage(SessionId session, const SubgroupSpec& spec) {
  parts_.storages->ReturnStorage(session, spec);
}

void SessionHosting::AllocateArena(uint64_t bytes, int numa_node, std::shared_ptr<std::atomic<bool>> cancelled,
                                   std::function<void(Result<std::shared_ptr<Memfd>>)> done) {
  const int node = parts_.config->memory.numa == "off" ? -1 : numa_node;
  parts_.threads->PostHousekeeping([this, bytes, node, cancelled = std::move(cancelled), done = std::move(done)] {
    Result<std::shared_ptr<Memfd>> memfd = Memfd::Create(bytes, node, *cancelled);
    parts_.threads->PostMain([done, memfd] { done(memfd); });
  });
}

void SessionHosting::AddSubgroup(SessionId session, SubgroupSpec spec, std::function<void()> done) {
  parts_.loop->Post([this, session, spec = std::move(spec), done = std::move(done)] {
    parts_.loop->AddSubgroup(session, spec);
    parts_.threads->PostMain(done);
  });
}

void SessionHosting::SetStaging(SessionId session, std::byte* data, uint64_t bytes, std::function<void()> done) {
  parts_.loop->Post([this, session, data, bytes, done = std::move(done)] {
    parts_.loop->SetStaging(session, data, bytes);
    parts_.threads->PostMain(done);
  });
}

void SessionHosting::SessionEnded(const SessionIdentity& identity) {
  parts_.checkpoints->SessionEnded(identity, parts_.sessions->RanksOf(identity.uid, identity.job) == 0);
  parts_.shares->SessionEnded(identity);
  parts_.loop->Post([this, id = identity.id] { parts_.loop->EndSession(id); });
}

void SessionHosting::BeginCheckpoint(const SessionIdentity& identity, const CheckpointRequest& request,
                                     std::function<void(Result<CheckpointBegun>)> done) {
  CheckpointRuns::Save save;
  save.directory = request.directory;
  save.tag = request.tag;
  save.step = request.step;
  save.attempt = AttemptId{request.attempt};
  save.overwrite = request.overwrite;
  const auto state = parts_.storages->all().find(identity.id);
  save.bytes = state == parts_.storages->all().end() ? 0 : state->second->blocks * parts_.pool->buffer_bytes();
  save.ranks_here = request.ranks_here;
  save.newest_session = request.newest_session;
  save.files = request.files;
  parts_.checkpoints->Begin(identity, save, [bytes = save.bytes, done](Result<CheckpointRuns::Begun> begun) {
    if (!begun.ok()) return done(begun.status());
    CheckpointBegun answer;
    answer.attempt = begun->attempt.bytes;
    answer.handle = begun->handle;
    answer.bytes = bytes;
    done(answer);
  });
}

void SessionHosting::BeginRestore(const SessionIdentity& identity, const RestoreRequest& request,
                                  std::function<void(Result<RestoreBegun>)> done) {
  parts_.loop->Post([this, identity, request, done = std::move(done)] {
    parts_.threads->PostMain([this, identity, request, done, specs = parts_.loop->Specs(identity.id)]() mutable {
      // What is begun for a session that has ended meanwhile has none that it counts with.
      const ClientConnection* const session = parts_.sessions->Find(identity.id);
      if (session == nullptr || session->ended()) return done(Status(-ESHUTDOWN, "the session has ended"));
      const std::optional<std::string> tag = request.tag.empty() ? std::nullopt : std::optional(request.tag);
      parts_.checkpoints->Restore(
          identity, {request.directory, tag, AttemptId{request.attempt}, request.files}, std::move(specs),
          [done](Result<CheckpointRuns::Found> found) {
            if (!found.ok()) return done(found.status());
            done(RestoreBegun{found->attempt.bytes, found->tag, found->step, found->world_size, found->handle});
          });
    });
  });
}

void SessionHosting::Dispose(std::shared_ptr<void> memory) {
  parts_.threads->PostHousekeeping([memory = std::move(memory)]() mutable { memory.reset(); });
}

}  // namespace mlpo
