// Small operations inside a host, whichever rank is late: with all ranks at once they need no fragment, and else become
// one in whatever state they are.
#include <barrier>
#include <random>

#include "world.h"

namespace smddp {
namespace {

using std::chrono::milliseconds;

constexpr int64_t value(int rank, size_t i) { return rank * 1000 + static_cast<int64_t>(i % 1000); }

// `count` blocks of a list of two tensors.
void add_in_two(Blocks& blocks, std::vector<int64_t>& data, int count) {
  size_t size = data.size() / static_cast<size_t>(count);
  for (size_t b = 0; b < static_cast<size_t>(count); ++b) {
    blocks.add(data.data() + b * size, size / 3 * sizeof(int64_t));
    blocks.add(data.data() + b * size + size / 3, (size - size / 3) * sizeof(int64_t));
    blocks.end_block();
  }
}

struct Call {
  Collective collective = Collective::kAllGather;
  size_t size = 0;  // elements of a block
  bool in_place = false;
};

testing::AssertionResult call(RankContext& c, const Call& what) {
  const auto ranks = static_cast<size_t>(c.ranks), me = static_cast<size_t>(c.rank);
  const bool gathers = what.collective == Collective::kAllGather;
  const bool scatters = what.collective == Collective::kReduceScatter;
  const size_t from = gathers ? 1 : ranks, to = scatters ? 1 : ranks;
  std::vector<int64_t> in(from * what.size), out(to * what.size, -1);
  for (size_t i = 0; i < in.size(); ++i) in[i] = value(c.rank, i);
  auto op = std::make_shared<Operation>();
  op->collective = what.collective;
  op->element_size = sizeof(int64_t);
  op->digest = what.size;
  op->tensors = 2;
  if (!gathers) {
    op->dtype = Dtype::kInt64;
    op->reduce_op = ReduceOp::kSum;
  }
  add_in_two(op->input, in, static_cast<int>(from));
  const bool in_place = what.in_place && !gathers;
  if (in_place && scatters) {  // the sum takes the place of this rank's own block
    op->output.add(in.data() + me * what.size, what.size * sizeof(int64_t));
    op->output.end_block();
  } else {
    add_in_two(op->output, in_place ? in : out, static_cast<int>(to));
  }
  if (Status status = c.run(op); !status) return testing::AssertionFailure() << status.message();
  const int64_t* result = !in_place ? out.data() : in.data() + (scatters ? me * what.size : 0);
  for (size_t i = 0; i < out.size(); ++i) {
    int64_t expected = 0;
    if (gathers) {
      expected = value(static_cast<int>(i / what.size), i % what.size);
    } else {
      for (int r = 0; r < c.ranks; ++r) expected += value(r, i + (scatters ? me * what.size : 0));
    }
    if (result[i] != expected)
      return testing::AssertionFailure()
             << "element " << i << " is " << result[i] << " and not " << expected;
  }
  EXPECT_EQ(op->fragments, 1u);
  EXPECT_EQ(op->taken.slots, (ranks - 1) * what.size * sizeof(int64_t) *
                                 (what.collective == Collective::kAllReduce ? ranks : 1));
  return testing::AssertionSuccess();
}

// The same on all ranks.
std::vector<Call> calls(int ranks, unsigned seed) {
  std::mt19937 random(seed);
  const size_t slot = intranode::kSlotBytes / sizeof(int64_t);
  std::vector<Call> all;
  for (Collective collective :
       {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce}) {
    const auto all_ranks = static_cast<size_t>(ranks);
    const size_t most = collective == Collective::kAllGather ? slot
                        : collective == Collective::kReduceScatter
                            ? std::min(slot / 4 - 1, slot / all_ranks)
                            : std::min(slot, 2 * slot / (all_ranks - 1)) / all_ranks;
    for (size_t size : {size_t{0}, size_t{1}, random() % most, most})
      for (bool in_place : {false, true}) all.push_back({collective, size, in_place});
  }
  std::shuffle(all.begin(), all.end(), random);
  return all;
}

TEST(SlotExchange, IsRightWhicheverRankIsLate) {
  for (int ranks = 2; ranks <= 9; ++ranks) {
    SCOPED_TRACE(ranks);
    auto body = [&](RankContext& c) {
      unsigned number = 0;
      for (const Call& what : calls(ranks, static_cast<unsigned>(ranks))) {
        // Once together, once after a moment, once when the others sleep.
        const auto late = static_cast<int>(number % static_cast<unsigned>(ranks));
        if (c.rank == late)
          std::this_thread::sleep_for(std::chrono::microseconds(number % 3 * 300));
        ASSERT_TRUE(call(c, what)) << name_of(what.collective) << " of " << what.size;
        ++number;
      }
    };
    run_world(std::string(static_cast<size_t>(ranks), 'A'), body, {.single_copy = false});
  }
}

std::shared_ptr<Operation> message_of(std::vector<char>& data, bool sends) {
  auto op = std::make_shared<Operation>();
  op->collective = sends ? Collective::kSend : Collective::kReceive;
  op->root = 1;
  fill_blocks(op->input, data, {0, sends ? data.size() : 0});
  fill_blocks(op->output, data, {sends ? 0 : data.size(), 0});
  return op;
}

TEST(SlotExchange, CarriesMessages) {
  run_world("AA", [](RankContext& c) {
    unsigned number = 0;
    for (size_t size : {0u, 1u, 1000u, 8192u, 8193u, 100'000u}) {
      for (int late : {-1, 0, 1}) {
        if (c.rank == late) std::this_thread::sleep_for(milliseconds(1));
        std::vector<char> data(size, static_cast<char>(c.rank == 0 ? ++number : 99));
        auto op = message_of(data, c.rank == 0);
        Status status = c.run(op);
        ASSERT_TRUE(status.ok()) << status.message();
        if (c.rank == 1) EXPECT_EQ(data, std::vector<char>(size, static_cast<char>(++number)));
      }
    }
  });
}

// A rank that is late meets the piece of another operation, and one that is early meets it while it looks.
TEST(SlotExchange, OfAnotherOperationIsADisagreement) {
  for (int late = 0; late < 3; ++late) {
    run_world("AA", [&](RankContext& c) {
      if (c.rank == late) std::this_thread::sleep_for(milliseconds(2));
      Status status;
      if (c.rank == 0) {
        std::vector<float> in(100), out(200);
        status = c.run(gather_of(in, out, 2));
      } else {
        std::vector<float> data(200);
        status = c.run(all_reduce_of(data, 2, Dtype::kFloat32, ReduceOp::kSum));
      }
      EXPECT_FALSE(status.ok());
      EXPECT_TRUE(says(status, "all_gather"));
      EXPECT_TRUE(says(status, "all_reduce"));
    });
  }
}

// Of two peers one has come in the first looks.
TEST(SlotExchange, AwaitsOnlyWhoseDataIsNotHere) {
  std::barrier all(3);
  run_world("AAA", [&](RankContext& c) {
    std::vector<float> in(10), out(30);
    auto op = gather_of(in, out, 3);
    if (c.rank == 1) c.group.submit(op, {}, true);
    all.arrive_and_wait();
    if (c.rank == 0) {
      c.group.submit(op, {}, false);
      std::vector<AwaitedRank> awaited(2);  // rank 1 until it has read this rank's piece
      for (int looks = 0; looks < 2000 && awaited.size() != 1; ++looks) {
        std::this_thread::sleep_for(milliseconds(1));
        awaited = c.group.state().oldest.value().awaited;
      }
      ASSERT_EQ(awaited.size(), 1u);
      EXPECT_EQ(awaited[0].rank, 2);
      EXPECT_EQ(awaited[0].expected, 40u);
      EXPECT_EQ(awaited[0].arrived, 0u);
    }
    all.arrive_and_wait();
    if (c.rank == 2) c.group.submit(op, {}, false);
    EXPECT_TRUE(c.engine.await(*op).ok());
  });
}

// Rank 0 is in an operation of one group when another of its threads calls the one that rank 1 waits for.
TEST(SlotExchange, LetsOtherThreadsOfItsRankHaveTheEngine) {
  run_world("AA",
            [](RankContext& c) {
              auto other = value_of(c.group.subgroup(c.store, "other", {0, 1}));
              auto run = [&](Group& group) {
                std::vector<float> in(10), out(20);
                auto op = gather_of(in, out, 2);
                group.submit(op, {}, false);
                c.engine.wait(*op);
                EXPECT_TRUE(op->status().ok()) << op->status().message();
              };
              for (int i = 0; i < 20; ++i) {
                if (c.rank == 1) {
                  run(*other);
                  run(c.group);
                } else {
                  std::barrier begun(2);
                  std::thread thread([&] {
                    begun.arrive_and_wait();
                    std::this_thread::sleep_for(milliseconds(1));
                    run(*other);
                  });
                  begun.arrive_and_wait();
                  run(c.group);
                  thread.join();
                }
              }
            },
            {.timeout_seconds = 10});
}

// The piece is out when the group fails: its slot is not written again, and the operation has the group's error.
TEST(SlotExchange, EndsWithItsGroup) {
  std::barrier both(2);
  run_world("AA", [&](RankContext& c) {
    if (c.rank == 0) {
      std::vector<float> in(10), out(20);
      auto op = gather_of(in, out, 2);
      c.group.submit(op, {}, false);
      GroupState state = c.group.state();
      ASSERT_TRUE(state.oldest.has_value());
      EXPECT_TRUE(says(state.oldest->text, "all_gather"));
      c.group.abort("enough");
      c.engine.wait(*op);
      EXPECT_TRUE(says(op->status(), "enough"));
    }
    both.arrive_and_wait();
    if (c.rank == 1) {
      std::vector<float> in(10), out(20);
      EXPECT_TRUE(says(c.run(gather_of(in, out, 2)), "enough"));
    }
    both.arrive_and_wait();
  });
}

}  // namespace
}  // namespace smddp
