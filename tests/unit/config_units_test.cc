// Sizes, counts, speeds and durations: values worked out by hand, and that printing loses nothing.
#include <cmath>
#include <cstdint>
#include <string>

#include "daemon/base/name.h"
#include "daemon/config/settings.h"
#include "daemon/config/text.h"
#include "daemon/config/units.h"
#include "tests/support/catch.h"

using namespace mlpo;

TEST_CASE("Units.SizesAreExact") {
  CHECK(*ParseSize("0") == 0);
  CHECK(*ParseSize("4096") == 4096);
  CHECK(*ParseSize("64GiB") == 68719476736ull);
  CHECK(*ParseSize("64Gi") == 68719476736ull);
  CHECK(*ParseSize("600MB") == 600000000ull);
  CHECK(*ParseSize("600 MB") == 600000000ull);
  CHECK(*ParseSize("1.5TiB") == 1649267441664ull);
  CHECK(*ParseSize("1.33KiB") == 1361);  // 1361.92, cut
  CHECK(*ParseSize("0.1GB") == 100000000ull);
  CHECK(*ParseSize("7kB") == 7000);
  CHECK(*ParseSize("12B") == 12);
  CHECK(*ParseSize("9223372036854775807") == 9223372036854775807ull);
}

TEST_CASE("Units.BadSizesAreRefused") {
  for (const char* text : {"",        "-1",     "-64GiB",
                           "+1",      "GiB",    "64XB",
                           "64gib",   "1e9",    "0x10",
                           "nan",     "inf",    "1.",
                           ".5",      "1 2",    "64GiBB",
                           "64GiB ",  " 64GiB", "9223372036854775808",
                           "8192PiB", "1,5GB",  "99999999999999999999999999999999999999999999999999",
                           "1MB/s",   "12Bi"}) {
    INFO(text);
    CHECK(ParseSize(text).status().code() == -EINVAL);
  }
  CHECK(ParseSize("64XB").status().message().find("GiB") != std::string::npos);
  CHECK(ParseSize("-1").status().message().find("negative") != std::string::npos);
}

TEST_CASE("Units.CountsSpeedsDurations") {
  CHECK(*ParseCount("1Mi") == 1048576);
  CHECK(*ParseCount("500K") == 500000);
  CHECK_FALSE(ParseCount("1MiB").ok());  // elements are not bytes
  CHECK(*ParseParameters("70B") == 70'000'000'000);
  CHECK(*ParseParameters("1.5B") == 1'500'000'000);
  CHECK(*ParseParameters("268M") == 268'000'000);
  CHECK(*ParseParameters("256Mi") == 268'435'456);
  CHECK(*ParseParameters("7") == 7);
  for (const char* text : {"", "B", "70b", "70GB", "268MB", "-1B", "7e9", "70B/s", "70 billion"}) {
    INFO(text);
    CHECK(ParseParameters(text).status().code() == -EINVAL);
  }
  CHECK(*ParseSpeed("345MB/s") == 345e6);
  CHECK(*ParseSpeed("1.2GiB/s") == std::floor(1.2 * 1073741824));
  CHECK(*ParseSpeed("345e6") == 345e6);
  for (const char* text : {"345MB", "nan", "inf", "-1", "-3MB/s", "1MB/h", "", "/s", "-0.0"})
    CHECK_FALSE(ParseSpeed(text).ok());
  CHECK(*ParseDuration("30s") == 30);
  CHECK(*ParseDuration("30") == 30);
  CHECK(*ParseDuration("5min") == 300);
  CHECK(*ParseDuration("2h") == 7200);
  CHECK(*ParseDuration("1d") == 86400);
  for (const char* text : {"", "-1s", "500ms", "1.5min", "s", "1h30min", "99999999999999999999d"})
    CHECK_FALSE(ParseDuration(text).ok());
}

TEST_CASE("Units.PrintingLosesNothing") {
  for (uint64_t value : {0ull, 1ull, 17ull, 1000ull, 1024ull, 600000000ull, 68719476736ull, 68719476737ull, 1000000ull,
                         9223372036854775807ull}) {
    CHECK(*ParseSize(FormatSize(value)) == value);
    CHECK(*ParseCount(FormatCount(value)) == value);
  }
  for (int shift = 0; shift < 62; ++shift) CHECK(*ParseSize(FormatSize(3ull << shift >> 1)) == 3ull << shift >> 1);
  CHECK(FormatSize(68719476736ull) == "64GiB");
  CHECK(FormatSize(600000000) == "600MB");
  CHECK(FormatCount(1u << 20) == "1Mi");
  CHECK(FormatSpeed(345e6) == "345MB/s");
  for (double value : {0.0, 1.0, 0.1, 345e6, 1e15, 123456789.5, 1e-3}) CHECK(*ParseSpeed(FormatSpeed(value)) == value);
  for (int64_t value : {0, 1, 59, 60, 90, 300, 3600, 86400, 604800})
    CHECK(*ParseDuration(FormatDuration(value)) == value);
  CHECK(FormatDuration(300) == "5min");
}

TEST_CASE("C30_Names.OnlyWhatCanBeAFileName") {
  for (const char* good : {"a", "_x", "node-17.cluster", "step-100", "0", "A.b_c-d"}) CHECK(IsName(good));
  for (const char* bad : {"", ".", "..", "-x", ".x", "a/b", "a\nb", "a\n", "a b", "\xc3\xa9", "a\\"})
    CHECK_FALSE(IsName(bad));
  CHECK(IsName(std::string(128, 'x')));
  CHECK_FALSE(IsName(std::string(129, 'x')));
  CHECK_FALSE(IsName(std::string("a\0b", 3)));
}

TEST_CASE("Text.WhatCannotBePrintedIsEscaped") {
  CHECK(IsPrintableUtf8("/mnt/\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80"));
  for (const char* bad : {"\n", "a\x1b[0m", "\x7f", "\xff", "\xc0\xaf", "\xed\xa0\x80", "\xe2\x82", "\xc2\x85",
                          "\xf4\x90\x80\x80", "\x80"}) {
    CHECK_FALSE(IsPrintableUtf8(bad));
    CHECK(IsPrintableUtf8(Printable(bad)));
  }
  CHECK(Printable("a\nb\xff") == "a\\x0ab\\xff");
}

TEST_CASE("Keys.TheNearestOneIsNamed") {
  const std::vector<std::string> known = {"memory.pool", "memory.block", "adam.workers", "daemon.socket"};
  CHECK(NearestKey("memory.poool", known) == "memory.pool");
  CHECK(NearestKey("memry.pool", known) == "memory.pool");
  CHECK(NearestKey("daemon.pool", known) == "memory.pool");
  CHECK(NearestKey("pool", known) == "memory.pool");
  CHECK(NearestKey("adam.worker", known) == "adam.workers");
  CHECK(NearestKey("xyzzy.plugh_frotz", known) == "");
}
