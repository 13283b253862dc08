// Which way bytes go inside a host: what follows from the times, and that ranks which ask their host agree.
#include "group/measured_host.h"

#include <gtest/gtest.h>

#include "rank_processes.h"

namespace smddp {
namespace {

// Where reads take `gathers` or `sums` times as long as slots.
TimeCollective host_where(double gathers, double sums, double slots_ns = 1e6) {
  return [=](Collective collective, size_t, bool by_reads) -> Result<double> {
    double ratio = collective == Collective::kAllGather ? gathers : sums;
    return by_reads ? ratio * slots_ns : slots_ns;
  };
}

ReadsFrom asked(int ranks, const TimeCollective& time) {
  return measure_reads(ranks, time).value();
}

TEST(MeasuredHost, ReadsAreTakenWhereTheyPay) {
  EXPECT_EQ(asked(2, host_where(0.8, 0.8)), usual_reads());
  EXPECT_EQ(asked(2, host_where(1.1, 0.8)), (ReadsFrom{SIZE_MAX, 64 << 10}));
  EXPECT_EQ(asked(2, host_where(0.97, 1.1)), ReadsFrom());  // within what a measurement can tell
  TimeCollective only_large = [](Collective, size_t bytes, bool by_reads) -> Result<double> {
    return by_reads ? (bytes > (1 << 20) ? 5e5 : 2e6) : 1e6;
  };
  EXPECT_EQ(asked(4, only_large), (ReadsFrom{512 << 10, 512 << 10}));
}

TEST(MeasuredHost, ADisturbedTurnDecidesNothing) {
  int turn = 0;
  TimeCollective disturbed = [&](Collective, size_t, bool by_reads) -> Result<double> {
    bool late = turn++ / 2 % 4 == 2;  // one turn of each four
    return (late ? 50 : 1) * (by_reads ? 5e5 : 1e6);
  };
  EXPECT_EQ(asked(2, disturbed), usual_reads());
}

TEST(MeasuredHost, RanksThatShareCoresAreNotAskedForLong) {
  int calls = 0;
  TimeCollective slow = [&](Collective, size_t, bool by_reads) -> Result<double> {
    ++calls;
    return by_reads ? 1e7 : 5e7;
  };
  EXPECT_EQ(asked(8, slow), ReadsFrom());
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(asked(1000, host_where(0.1, 0.1)), ReadsFrom());  // blocks would be small
}

TEST(MeasuredHost, AFailureIsPassedOn) {
  TimeCollective fails = [](Collective, size_t, bool) -> Result<double> {
    return Status(Code::kPeerLost, "rank 1 is lost");
  };
  EXPECT_EQ(measure_reads(2, fails).status().message(), "rank 1 is lost");
}

TEST(MeasuredHost, AWordStandsForWhatIsKnown) {
  for (const ReadsFrom& reads : {ReadsFrom(), usual_reads(), ReadsFrom{512 << 10, SIZE_MAX},
                                 ReadsFrom{SIZE_MAX, 64 << 10}}) {
    EXPECT_EQ(reads_of(word_of(reads)), reads);
    EXPECT_NE(word_of(reads), 0u);
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
