// Quotas of users and jobs, and a random walk against sums over all that was taken.
#include "daemon/session/quota_book.h"

#include <map>
#include <random>
#include <vector>

#include "tests/support/catch.h"

using namespace mlpo;

namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("QuotaBook.WithoutLimitsEverythingIsGivenAndCounted") {
  QuotaBook book({}, {});
  CHECK(book.Left(1, "a", Quota::kArenas) == UINT64_MAX);
  CHECK(book.Take(1, "a", Quota::kArenas, uint64_t{1} << 62).ok());
  CHECK(book.Take(1, "b", Quota::kArenas, 5).ok());
  CHECK(book.Left(1, "a", Quota::kArenas) == UINT64_MAX);
  const auto entries = book.Entries();
  REQUIRE(entries.size() == 3);
  CHECK(entries[0].job == "");
  CHECK(entries[0].used[2] == (uint64_t{1} << 62) + 5);
  CHECK(entries[1].job == "a");
  CHECK(entries[2].used[2] == 5);
}

TEST_CASE("QuotaBook.AJobsLimitIsItsOwnAndAUsersIsThatOfAllItsJobs") {
  QuotaBook book({4, 0, 100, 0}, {3, 0, 60, 0});
  CHECK(book.Left(1, "a", Quota::kArenas) == 60);
  REQUIRE(book.Take(1, "a", Quota::kArenas, 60).ok());
  const Status job = book.Take(1, "a", Quota::kArenas, 1);
  CHECK(job.code() == MLPO_E_QUOTA);
  for (const char* part : {"job 'a'", "needs 1 bytes of arena", "has 60", "may have 60", "job_arenas"}) {
    INFO(job.message());
    CHECK(Has(job.message(), part));
  }
  CHECK(book.Left(1, "b", Quota::kArenas) == 40);
  REQUIRE(book.Take(1, "b", Quota::kArenas, 40).ok());
  const Status user = book.Take(1, "c", Quota::kArenas, 1);
  CHECK(user.code() == MLPO_E_QUOTA);
  CHECK(Has(user.message(), "user 1"));
  CHECK(Has(user.message(), "user_arenas"));
  CHECK(book.Take(2, "a", Quota::kArenas, 60).ok());      // another user, the same name
  CHECK(book.Take(1, "a", Quota::kCapacity, 1000).ok());  // another kind
  book.Give(1, "a", Quota::kArenas, 60);
  CHECK(book.Take(1, "c", Quota::kArenas, 60).ok());
}

TEST_CASE("QuotaBook.WhatIsRefusedChangesNothing") {
  QuotaBook book({0, 0, 0, 10}, {0, 0, 0, 0});
  REQUIRE(book.Take(1, "a", Quota::kCapacity, 10).ok());
  CHECK_FALSE(book.Take(1, "b", Quota::kCapacity, 1).ok());
  CHECK(book.Entries().size() == 2);
  CHECK(book.Take(1, "b", Quota::kCapacity, 0).ok());
  CHECK(book.Entries().size() == 2);
  CHECK_FALSE(book.Take(1, "a", Quota::kCapacity, UINT64_MAX).ok());  // no sum wraps
  book.Give(1, "a", Quota::kCapacity, 10);
  CHECK(book.Entries().empty());
}

TEST_CASE("QuotaBook.RandomWalk") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    QuotaAmounts user{}, job{};
    for (size_t i = 0; i < kQuotas; ++i) {
      user[i] = random() % 3 * (random() % 100);
      job[i] = random() % 3 * (random() % 50);
    }
    QuotaBook book(user, job);
    struct Taken {
      uint32_t uid;
      std::string job;
      Quota what;
      uint64_t amount;
    };
    std::vector<Taken> all;
    const auto sum = [&](uint32_t uid, const std::string* of, Quota what) {
      uint64_t total = 0;
      for (const Taken& t : all) {
        if (t.uid == uid && t.what == what && (of == nullptr || t.job == *of)) total += t.amount;
      }
      return total;
    };
    for (int i = 0; i < 300; ++i) {
      if (all.empty() || random() % 5 < 3) {
        const Taken t{static_cast<uint32_t>(random() % 2), random() % 2 == 0 ? "a" : "b",
                      static_cast<Quota>(random() % kQuotas), random() % 40};
        const auto at = static_cast<size_t>(t.what);
        const bool fits = (user[at] == 0 || sum(t.uid, nullptr, t.what) + t.amount <= user[at]) &&
                          (job[at] == 0 || sum(t.uid, &t.job, t.what) + t.amount <= job[at]);
        REQUIRE((t.amount <= book.Left(t.uid, t.job, t.what)) == fits);
        REQUIRE(book.Take(t.uid, t.job, t.what, t.amount).ok() == fits);
        if (fits) all.push_back(t);
      } else {
        const size_t which = random() % all.size();
        book.Give(all[which].uid, all[which].job, all[which].what, all[which].amount);
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(which));
      }
      for (const QuotaBook::Entry& entry : book.Entries()) {
        for (size_t at = 0; at < kQuotas; ++at) {
          REQUIRE(entry.used[at] == sum(entry.uid, entry.job.empty() ? nullptr : &entry.job, static_cast<Quota>(at)));
        }
      }
    }
    for (const Taken& t : all) book.Give(t.uid, t.job, t.what, t.amount);
    REQUIRE(book.Entries().empty());
  }
}
