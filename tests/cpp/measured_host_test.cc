// Which way bytes go inside a host: what follows from the times, and that ranks which ask their host agree.
#include "group/measured_host.h"

#include <gtest/gtest.h>

#include <utility>

#include "rank_processes.h"

namespace smddp {
namespace {

// Where reads of blocks of up to so many bytes take half the time of slots, and longer ones twice.
TimeGather host_where(size_t up_to) {
  return [=](size_t bytes, bool by_reads) -> Result<double> {
    return by_reads ? (bytes <= up_to ? 5e5 : 2e6) : 1e6;
  };
}

size_t asked(int ranks, const TimeGather& time) { return measure_reads(ranks, time).value(); }

TEST(MeasuredHost, ReadsAreTakenWhereTheyPay) {
  EXPECT_EQ(asked(2, host_where(0)), 0u);
  EXPECT_EQ(asked(2, host_where(1 << 20)), 1u << 20);
  EXPECT_EQ(asked(2, host_where(64 << 20)), 16u << 20);
  TimeGather close = [](size_t, bool by_reads) -> Result<double> { return by_reads ? 0.97 : 1; };
  EXPECT_EQ(asked(2, close), 0u);  // within what a measurement can tell
}

TEST(MeasuredHost, DisturbedTurnsDecideNothing) {
  int turn = 0;
  TimeGather disturbed = [&](size_t bytes, bool by_reads) -> Result<double> {
    bool late = turn++ / 4 % 5 > 1;  // three of five turns
    return (late ? 50 : 1) * host_where(512 << 10)(bytes, by_reads).value();
  };
  EXPECT_EQ(asked(2, disturbed), 1u << 20);
}

// What the other way leaves in the caches makes a call slower or faster than those of its own way make it.
TEST(MeasuredHost, ACallAfterTheOtherWayDecidesNothing) {
  bool last = false;
  TimeGather time = [&](size_t, bool by_reads) -> Result<double> {
    bool after_other = by_reads != std::exchange(last, by_reads);
    return by_reads ? (after_other ? 2e6 : 5e5) : (after_other ? 1e5 : 1e6);
  };
  EXPECT_EQ(asked(2, time), 16u << 20);
}

TEST(MeasuredHost, RanksThatShareCoresAreNotAskedForLong) {
  int calls = 0;
  TimeGather slow = [&](size_t, bool by_reads) -> Result<double> {
    ++calls;
    return by_reads ? 1e7 : 5e7;
  };
  EXPECT_EQ(asked(8, slow), 0u);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(asked(32, host_where(64 << 20)), 1u << 20);  // 2 MiB of each rank would be too much
  EXPECT_EQ(asked(1000, host_where(64 << 20)), 0u);
}

TEST(MeasuredHost, AFailureIsPassedOn) {
  TimeGather fails = [](size_t, bool) -> Result<double> {
    return Status(Code::kPeerLost, "rank 1 is lost");
  };
  EXPECT_EQ(measure_reads(2, fails).status().message(), "rank 1 is lost");
}

TEST(MeasuredHost, AWordStandsForWhatIsKnown) {
  for (size_t up_to : {size_t{0}, size_t{256} << 10, size_t{4} << 20, SIZE_MAX}) {
    EXPECT_EQ(reads_of(word_of_reads(up_to)), up_to);
    EXPECT_NE(word_of_reads(up_to), 0u);
  }
}

// Three ranks that don't know their host yet make a group, and another one.
TEST(MeasuredHost, RanksAskTheirHostOnceAndAgree) {
  Processes ranks("AAA", {}, [](RankContext& c) -> std::string {
    std::string found = c.group.state().inside_host;
    say(c.store, std::to_string(c.rank) + found);
    for (int r = 0; r < c.ranks; ++r) {
      if (!await(c.store, std::to_string(r) + found))
        return "another rank has found something else";
    }
    if (c.group.state().submitted != 0) return "the group counts what was measured";
    auto another = c.group.subgroup(c.store, "another", {0, 1, 2});
    if (!another) return another.status().message();
    std::string again = another.value()->state().inside_host;
    return again == found && found.starts_with("gathers ") ? "" : found + ", then " + again;
  });
  ranks.expect_ends();
}

}  // namespace
}  // namespace smddp
