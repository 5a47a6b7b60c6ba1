// Quotas of a real daemon: each refuses with need, use, limit and its name, holds nobody else up, and is given back by
// whatever ends a session.
#include <unistd.h>

#include <functional>
#include <optional>

#include "tests/support/catch.h"
#include "tests/support/daemon_process.h"
#include "tests/support/daemon_status.h"
#include "tests/support/rank_process.h"
#include "tests/support/reference_trainer.h"

using namespace mlpo::test;
using mlpo::Client;

namespace {

DaemonProcess::Options With(const std::string& quota) { return {.config = "[quota]\n" + quota + "\n"}; }

// The error of a call that must fail with MLPO_ERR_QUOTA.
std::string Refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const mlpo::Error& error) {
    CHECK(error.code() == MLPO_ERR_QUOTA);
    return error.what();
  }
  FAIL("it was not refused");
  return "";
}

void CheckWords(const std::string& text, const std::vector<std::string>& words) {
  INFO(text);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

// What status says of a job's, or with "" of our user's.
nlohmann::json QuotaOf(const DaemonProcess& daemon, const std::string& job) {
  const nlohmann::json status = DaemonStatus(daemon.socket());
  for (const nlohmann::json& entry : status.at("quotas")) {
    if (job.empty() ? entry.at("job").is_null() : entry.at("job") == job) return entry;
  }
  return nullptr;
}

bool AllGivenBack(const DaemonProcess& daemon) {
  return Eventually([&] { return DaemonStatus(daemon.socket()).at("quotas").empty(); });
}

}  // namespace

TEST_CASE("Quota.SessionsOfAJobAndAUser") {
  DaemonProcess daemon(With("job_sessions = 2\nuser_sessions = 3"));
  {
    Client first = Connect(daemon.socket(), "a", 0, 3);
    std::optional<Client> second = Connect(daemon.socket(), "a", 1, 3);
    CheckWords(Refused([&] { Connect(daemon.socket(), "a", 2, 3); }),
               {"job 'a'", "needs 1 sessions", "has 2", "may have 2", "job_sessions"});
    Client other = Connect(daemon.socket(), "b");
    CheckWords(Refused([&] { Connect(daemon.socket(), "c"); }),
               {"user " + std::to_string(::geteuid()), "user_sessions"});
    CHECK(QuotaOf(daemon, "a").at("sessions").at("used") == 2);
    CHECK(QuotaOf(daemon, "").at("sessions").at("used") == 3);
    CHECK(QuotaOf(daemon, "").at("sessions").at("limit") == 3);
    second.reset();
    REQUIRE(Eventually([&] { return QuotaOf(daemon, "a").at("sessions").at("used") == 1; }));
    Client again = Connect(daemon.socket(), "a", 2, 3);
  }
  CHECK(AllGivenBack(daemon));
}

// The same rank again, at once: the one that ends hands its place over.
TEST_CASE("Quota.ARankThatIsStartedAgainHasItsPlace") {
  DaemonProcess daemon(With("job_sessions = 1\nuser_sessions = 1"));
  for (int round = 0; round < 20; ++round) {
    RankProcess rank(daemon.socket(), {.job = "a"});
    rank.Go();
    INFO(rank.output());
    REQUIRE(rank.WaitFor("step 2"));
    rank.Kill();
  }
  CHECK(AllGivenBack(daemon));
}

// Fewer ring entries than wanted while there are some, then a refusal: before any memory is made.
TEST_CASE("Quota.RequestsInFlight") {
  DaemonProcess daemon(With("job_requests = 100"));
  const auto entries = [](const Client& client) {
    struct mlpo_client_info info = {};
    info.struct_size = sizeof info;
    mlpo::Check(mlpo_client_info(client.get(), &info));
    return info.ring_entries;
  };
  Client first = Connect(daemon.socket(), "a", 0, 4);
  CHECK(entries(first) == 64);
  Client second = Connect(daemon.socket(), "a", 1, 4);
  CHECK(entries(second) == 32);
  CheckWords(Refused([&] { Connect(daemon.socket(), "a", 2, 4); }),
             {"job 'a'", "needs 8 ring entries", "has 96", "may have 100", "job_requests"});
  ReferenceTrainer trainer(second, {});
  for (int i = 0; i < 3; ++i) trainer.Step();
  CHECK(trainer.Difference() == "");
  CHECK(entries(Connect(daemon.socket(), "b")) > 32);
}

TEST_CASE("Quota.Arenas") {
  // An arena grows by 64 MiB at least.
  DaemonProcess daemon(With("job_arenas = \"64MiB\"\nuser_arenas = \"192MiB\""));
  Client a = Connect(daemon.socket(), "a", 0, 2);
  ReferenceTrainer trainer(a, {});
  CHECK(QuotaOf(daemon, "a").at("arenas").at("used") == uint64_t{64} << 20);
  const auto capacity = [&] { return QuotaOf(daemon, "a").at("capacity").at("used").get<uint64_t>(); };
  const uint64_t of_one = capacity();
  CHECK(of_one > 0);
  Client rank = Connect(daemon.socket(), "a", 1, 2);
  CheckWords(Refused([&] { ReferenceTrainer refused(rank, {}); }), {"job 'a'", "bytes of arena", "job_arenas"});
  CHECK(capacity() == of_one);  // what was refused has no room on the paths either
  Client b = Connect(daemon.socket(), "b");
  ReferenceTrainer other(b, {});
  for (int i = 0; i < 3; ++i) {
    trainer.Step();
    other.Step();
  }
  CHECK(trainer.Difference() == "");
  CHECK(other.Difference() == "");
  a.Close();
  REQUIRE(Eventually([&] { return QuotaOf(daemon, "a").at("arenas").at("used") == 0; }));
  ReferenceTrainer now(rank, {});
  now.Step();
  CHECK(now.Difference() == "");
}

TEST_CASE("Quota.Capacity") {
  // A block of 4096 parameters takes 48 KiB.
  DaemonProcess daemon(With("job_capacity = \"480KiB\""));
  Client client = Connect(daemon.socket(), "a");
  ReferenceTrainer trainer(client, {"first", 8 * 4096});
  CheckWords(Refused([&] {
               ReferenceTrainer refused(client, {"second", 3 * 4096});
             }),
             {"job 'a'", "needs " + std::to_string(3 * 49152) + " bytes on the paths",
              "has " + std::to_string(8 * 49152), "may have " + std::to_string(480 << 10), "job_capacity"});
  trainer.Step();
  CHECK(trainer.Difference() == "");
  ReferenceTrainer fits(client, {"third", 2 * 4096});
  fits.Step();
  CHECK(fits.Difference() == "");
  CHECK(QuotaOf(daemon, "a").at("capacity").at("used") == 10 * 49152);
  const std::vector<char> bytes(100'000, 'x');
  CheckWords(Refused([&] {
               mlpo::Check(mlpo_object_flush(client.get(), "object", bytes.data(), bytes.size(), 10'000'000'000));
             }),
             {"bytes on the paths", "job_capacity"});
  trainer.Step();
  CHECK(trainer.Difference() == "");
  client.Close();
  CHECK(AllGivenBack(daemon));
}

TEST_CASE("Quota.WhoeverIsKilledGivesBack") {
  DaemonProcess daemon(With("job_sessions = 1\njob_arenas = \"64MiB\"\njob_capacity = \"64MiB\"\njob_requests = 1024"));
  for (int round = 0; round < 3; ++round) {
    RankProcess rank(daemon.socket(), {.job = "killed"});
    rank.Go();
    REQUIRE(rank.WaitFor("step 2"));
    CHECK(QuotaOf(daemon, "killed").at("capacity").at("used") > 0);
    rank.Kill();
    CHECK(AllGivenBack(daemon));
  }
}
