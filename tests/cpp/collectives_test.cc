// Every collective on every layout of hosts: ranks as threads, real segments, real libfabric.
#include <barrier>
#include <bit>
#include <random>
#include <set>
#include <type_traits>

#include "intranode/arena.h"
#include "world.h"

namespace smddp {
namespace {

// In the node; kLog: between nodes.
enum class Way { kSegment, kSingleCopy, kLog, kArena };

bool from_arena = false;

// Gives memory of the arena while a test of that way runs, three times of four: so both kinds meet in one
// operation.
template <class T>
struct Memory {
  using value_type = T;
  Memory() = default;
  template <class U>
  Memory(const Memory<U>&) {}
  T* allocate(size_t count) {
    static std::atomic<unsigned> calls{0};
    std::byte* block = nullptr;
    if (from_arena && ++calls % 4 != 0)
      block = intranode::Arena::process().allocate(count * sizeof(T));
    return block != nullptr ? reinterpret_cast<T*>(block) : std::allocator<T>().allocate(count);
  }
  void deallocate(T* at, size_t count) {
    if (!intranode::Arena::process().free(at)) std::allocator<T>().deallocate(at, count);
  }
  template <class U>
  bool operator==(const Memory<U>&) const {
    return true;
  }
};
template <class T>
using Vector = std::vector<T, Memory<T>>;

// How the operations of a test went inside the hosts: bytes that ranks took from one another.
struct Seen {
  std::atomic<uint64_t> eager;        // of operations for which one slot of each peer sufficed
  std::atomic<uint64_t> window;       // of those that took more than all slots of each peer at once
  std::atomic<uint64_t> slots;        // of both, and of what is in between
  std::atomic<uint64_t> in_place;     // where they lay, in the arena
  std::atomic<uint64_t> single_copy;  // by single-copy reads
} seen;

void note(const RankContext& c, const Operation& op) {
  constexpr size_t kRing = intranode::kSlots * intranode::kSlotBytes;
  auto peers = static_cast<uint64_t>(c.group.local_peers());
  uint64_t slots = op.taken.slots;
  seen.slots += slots;
  if (slots <= peers * intranode::kSlotBytes) seen.eager += slots;
  if (slots > peers * kRing) seen.window += slots;
  seen.in_place += op.taken.in_place;
  seen.single_copy += op.taken.single_copy;
}

class Layouts : public testing::TestWithParam<std::tuple<std::string, Way>> {
 protected:
  void SetUp() override {
    from_arena = way() == Way::kArena;
    for (auto* bytes : {&seen.eager, &seen.window, &seen.slots, &seen.in_place, &seen.single_copy})
      *bytes = 0;
  }
  // Whatever the collective, the bytes have gone the way that the test is named after.
  void TearDown() override {
    from_arena = false;
    std::string ranks = layout();
    std::set<char> hosts(ranks.begin(), ranks.end());
    if (hosts.size() == ranks.size()) {
      EXPECT_EQ(seen.slots + seen.in_place + seen.single_copy, 0u);
      return;
    }
    EXPECT_GT(seen.eager, 0u);
    bool single_copy = way() == Way::kSingleCopy && hosts.size() == 1;
    EXPECT_EQ(seen.single_copy > 0, single_copy);
    EXPECT_EQ(seen.in_place > 0, way() == Way::kArena);
    if (fills_rings_ && !single_copy && way() != Way::kArena) EXPECT_GT(seen.window, 0u);
  }
  bool fills_rings_ = true;  // has operations larger than what all slots hold
  std::string layout() const { return std::get<0>(GetParam()); }
  Way way() const { return std::get<1>(GetParam()); }
  WorldOptions options() const { return {.single_copy = way() == Way::kSingleCopy}; }
  Tuning tuning() const {
    return {.algorithm = way() == Way::kLog ? Algorithm::kLog : Algorithm::kAuto};
  }
};

int64_t value(int rank, size_t i) {
  return static_cast<int64_t>((i * 31 + static_cast<size_t>(rank) * 17) % 1000) - 500;
}

// The last ones are more than all slots hold.
const size_t kSizes[] = {0, 1, 3, 1000, 9457, 20000, 280'000};
const size_t kSizesReduced[] = {0, 1, 3, 1000, 9457, 20000, 450'000};

TEST_P(Layouts, AllGather) {
  run_world(
      layout(),
      [tuning = tuning()](RankContext& c) {
        for (size_t size : kSizes) {
          Vector<int64_t> in(size), out(size * static_cast<size_t>(c.ranks), -1);
          for (size_t i = 0; i < size; ++i) in[i] = value(c.rank, i);
          auto op = gather_of(in, out, c.ranks);
          Status status = c.run(op, tuning);
          ASSERT_TRUE(status.ok()) << status.message();
          note(c, *op);
          for (int r = 0; r < c.ranks; ++r) {
            for (size_t i = 0; i < size; ++i)
              ASSERT_EQ(out[static_cast<size_t>(r) * size + i], value(r, i));
          }
        }
      },
      options());
}

// Between hosts the large tensors of a list get rounds of their own, and a large one more than one.
TEST_P(Layouts, AllGatherOfAList) {
  run_world(
      layout(),
      [tuning = tuning()](RankContext& c) {
        for (std::vector<size_t> sizes :
             {std::vector<size_t>{3, 20'000, 0, 1, 5, 40'000, 16'384, 7, 100, 190'000},
              std::vector<size_t>{1, 2, 3}, std::vector<size_t>{30'000}}) {
          auto op = std::make_shared<Operation>();
          op->collective = Collective::kAllGather;
          op->element_size = sizeof(int64_t);
          op->tensors = static_cast<uint32_t>(sizes.size());
          auto ranks = static_cast<size_t>(c.ranks);
          std::vector<Vector<int64_t>> in, out;
          for (size_t size : sizes) {
            auto& own = in.emplace_back(size);
            for (size_t i = 0; i < size; ++i) own[i] = value(c.rank, i + size);
            out.emplace_back(size * ranks, -1);
            op->input.add(own.data(), size * sizeof(int64_t));
          }
          op->input.end_block();
          for (size_t r = 0; r < ranks; ++r) {
            for (size_t t = 0; t < sizes.size(); ++t)
              op->output.add(out[t].data() + r * sizes[t], sizes[t] * sizeof(int64_t));
            op->output.end_block();
          }
          Status status = c.run(op, tuning);
          ASSERT_TRUE(status.ok()) << status.message();
          note(c, *op);
          // Small, large, small, two large, small, large.
          if (sizes.size() == 10 && c.group.topology().nodes() == 2) ASSERT_EQ(op->rounds, 7u);
          for (size_t t = 0; t < sizes.size(); ++t) {
            for (size_t i = 0; i < out[t].size(); ++i) {
              int rank = static_cast<int>(i / sizes[t]);
              ASSERT_EQ(out[t][i], value(rank, i % sizes[t] + sizes[t]));
            }
          }
        }
      },
      options());
}

TEST_P(Layouts, ReduceScatter) {
  run_world(
      layout(),
      [tuning = tuning()](RankContext& c) {
        for (size_t size : kSizes) {
          Vector<int64_t> in(size * static_cast<size_t>(c.ranks)), out(size, -1);
          for (size_t i = 0; i < in.size(); ++i) in[i] = value(c.rank, i);
          auto op = scatter_of(in, out, c.ranks, Dtype::kInt64, ReduceOp::kSum);
          Status status = c.run(op, tuning);
          ASSERT_TRUE(status.ok()) << status.message();
          note(c, *op);
          for (size_t i = 0; i < size; ++i) {
            int64_t sum = 0;
            for (int r = 0; r < c.ranks; ++r)
              sum += value(r, static_cast<size_t>(c.rank) * size + i);
            ASSERT_EQ(out[i], sum);
          }
        }
      },
      options());
}

TEST_P(Layouts, AllReduceInManyRounds) {
  run_world(
      layout(),
      [tuning = tuning()](RankContext& c) {
        for (size_t size : kSizesReduced) {
          Vector<double> data(size);
          for (size_t i = 0; i < size; ++i) data[i] = static_cast<double>(value(c.rank, i));
          Tuning cut = tuning;
          cut.allgather_bucket_bytes = 300'000;
          cut.reduce_scatter_bucket_bytes = 600'000;
          auto op = all_reduce_of(data, c.ranks, Dtype::kFloat64, ReduceOp::kMax);
          Status status = c.run(op, cut);
          ASSERT_TRUE(status.ok()) << status.message();
          note(c, *op);
          for (size_t i = 0; i < size; ++i) {
            int64_t most = value(0, i);
            for (int r = 1; r < c.ranks; ++r) most = std::max(most, value(r, i));
            ASSERT_EQ(data[i], static_cast<double>(most));
          }
        }
      },
      options());
}

TEST_P(Layouts, ManyInFlightOfAllKinds) {
  fills_rings_ = false;
  run_world(
      layout(),
      [tuning = tuning()](RankContext& c) {
        std::mt19937 random(7);  // the same on all ranks
        struct Flight {
          Vector<int64_t> in, out;
          std::shared_ptr<Operation> op;
        };
        std::vector<std::unique_ptr<Flight>> flights;
        for (int f = 0; f < 60; ++f) {
          auto flight = std::make_unique<Flight>();
          size_t size = random() % 5 == 0 ? random() % 60000 : random() % 3000;
          size_t ranks = static_cast<size_t>(c.ranks);
          switch (random() % 3) {
            case 0:
              flight->in.assign(size, c.rank + f);
              flight->out.resize(size * ranks);
              flight->op = gather_of(flight->in, flight->out, c.ranks);
              break;
            case 1:
              flight->in.assign(size * ranks, c.rank + f);
              flight->out.resize(size);
              flight->op =
                  scatter_of(flight->in, flight->out, c.ranks, Dtype::kInt64, ReduceOp::kSum);
              break;
            default:
              flight->out.assign(size, c.rank + f);
              flight->op = all_reduce_of(flight->out, c.ranks, Dtype::kInt64, ReduceOp::kSum);
          }
          c.group.submit(flight->op, tuning, true);
          flights.push_back(std::move(flight));
        }
        int64_t base = c.ranks * (c.ranks - 1) / 2;
        for (size_t f = flights.size(); f-- > 0;) {
          Flight& flight = *flights[f];
          c.engine.wait(*flight.op);
          ASSERT_TRUE(flight.op->status().ok()) << flight.op->status().message();
          note(c, *flight.op);
          for (size_t i = 0; i < flight.out.size(); ++i) {
            int64_t expected = flight.op->collective == Collective::kAllGather
                                   ? static_cast<int64_t>(i / flight.in.size() + f)
                                   : base + static_cast<int64_t>(f) * c.ranks;
            ASSERT_EQ(flight.out[i], expected);
          }
        }
      },
      options());
}

std::string name_of_case(const testing::TestParamInfo<Layouts::ParamType>& info) {
  const char* ways[] = {"_segment", "_single_copy", "_log", "_arena"};
  return std::get<0>(info.param) + ways[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(Hosts, Layouts,
                         testing::Combine(testing::Values("A", "AA", "AAA", "AB", "AAB", "ABC",
                                                          "AABB", "ABAB", "ABBB", "AAABBCC"),
                                          testing::Values(Way::kSegment, Way::kSingleCopy)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Arena, Layouts,
                         testing::Combine(testing::Values("A", "AA", "AAA", "AAB", "AABB",
                                                          "AAAABBB"),
                                          testing::Values(Way::kArena)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Log, Layouts,
                         testing::Combine(testing::Values("ABC", "ABCDE", "AABBCC", "ABCDABCD",
                                                          "ABCDEFGH"),
                                          testing::Values(Way::kLog)),
                         name_of_case);

// The sum of two tensors per rank, out of place or in place, in one exchange or, cut by a bucket, in
// rounds.
template <class T>
std::vector<T> all_reduced(RankContext& c, size_t size, Dtype dtype, ReduceOp reduce, bool in_place,
                           bool whole) {
  std::mt19937 random(static_cast<unsigned>(c.rank) + 5);
  std::vector<T> in(size), out(size);
  for (T& x : in) {
    if constexpr (std::is_same_v<T, uint16_t>) {
      x = static_cast<uint16_t>(0x3f00 + random() % 0x100);  // bf16 from 0.5 to 2
    } else {
      x = static_cast<T>(static_cast<int>(random() % 7) - 3);
    }
  }
  std::vector<T>& to = in_place ? in : out;
  auto op = std::make_shared<Operation>();
  op->collective = Collective::kAllReduce;
  op->dtype = dtype;
  op->reduce_op = reduce;
  op->element_size = sizeof(T);
  op->tensors = 2;
  size_t ranks = static_cast<size_t>(c.ranks), half = size / 2;
  for (size_t r = 0; r < ranks; ++r) {
    size_t from = size * r / ranks, end = size * (r + 1) / ranks;
    size_t middle = std::clamp(half, from, end);
    for (auto [begin, until] : {std::pair(from, middle), std::pair(middle, end)}) {
      op->input.add(in.data() + begin, (until - begin) * sizeof(T));
      op->output.add(to.data() + begin, (until - begin) * sizeof(T));
    }
    op->input.end_block();
    op->output.end_block();
  }
  Status status = c.run(op, {.reduce_scatter_bucket_bytes = whole ? 0 : 3 * ranks * sizeof(T)});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(op->rounds, whole || size <= 3 * ranks ? 1u : (size + 3 * ranks - 1) / (3 * ranks));
  return to;
}

template <class T>
void compare_all_reduces(RankContext& c, Dtype dtype, ReduceOp reduce) {
  for (size_t size : {0, 1, 7, 64, 501}) {
    auto one = all_reduced<T>(c, size, dtype, reduce, false, true);
    EXPECT_EQ(one, all_reduced<T>(c, size, dtype, reduce, true, true)) << size;
    EXPECT_EQ(one, all_reduced<T>(c, size, dtype, reduce, true, false)) << size;
    EXPECT_EQ(one, all_reduced<T>(c, size, dtype, reduce, false, false)) << size;
  }
}

TEST(Numerics, AllReduceInOneExchangeIsThatInRounds) {
  for (std::string layout : {"AA", "AAA", "AAAAA"}) {
    run_world(layout, [](RankContext& c) {
      for (ReduceOp reduce :
           {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
        compare_all_reduces<float>(c, Dtype::kFloat32, reduce);
        compare_all_reduces<uint16_t>(c, Dtype::kBFloat16, reduce);
        if (reduce != ReduceOp::kAvg) compare_all_reduces<int8_t>(c, Dtype::kInt8, reduce);
      }
    });
  }
}

TEST(Numerics, HalfTypesAreSummedInFp32AndRoundedOncePerHop) {
  // 1 + 2^-9 + 2^-9 + ...: in bf16 each addition alone would be lost.
  auto bf16 = [](float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); };
  run_world("AAAA", [&](RankContext& c) {
    std::vector<uint16_t> in(4, bf16(c.rank == 0 ? 1.0f : 0x1p-9f + 0x1p-10f)), out(1);
    ASSERT_TRUE(c.run(scatter_of(in, out, 4, Dtype::kBFloat16, ReduceOp::kSum)).ok());
    EXPECT_EQ(out[0], bf16(1.0f + 0x1p-7f));  // 1 + 3 * 1.5 * 2^-9 = 1.0087890625, rounded once
  });
}

TEST(Numerics, PartialSumsTravelInFp32WhenAsked) {
  auto bf16 = [](float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); };
  run_world("AABB", [&](RankContext& c) {
    // Host B's partial is 1 + 2^-9: rounded to bf16 it is 1, in fp32 it tips the final rounding.
    float mine[] = {1.0f, 0x1p-8f * 0.75f, 1.0f, 0x1p-9f};
    std::vector<uint16_t> in(4, bf16(mine[c.rank])), out(1);
    ASSERT_TRUE(c.run(scatter_of(in, out, 4, Dtype::kBFloat16, ReduceOp::kSum),
                      {.reduce_precision_fp32 = true})
                    .ok());
    EXPECT_EQ(out[0], bf16(2.0f));
    std::vector<uint16_t> again(1);
    ASSERT_TRUE(c.run(scatter_of(in, again, 4, Dtype::kBFloat16, ReduceOp::kSum)).ok());
  });
}

TEST(Failure, RanksThatDisagreeAllHearBothSides) {
  for (std::string layout : {"AA", "AB", "AABB", "AAA"}) {
    run_world(layout, [&](RankContext& c) {
      size_t size = c.rank == 1 ? 2000 : 1000;
      std::vector<float> in(size), out(size * static_cast<size_t>(c.ranks));
      Status status = c.run(gather_of(in, out, c.ranks));
      ASSERT_FALSE(status.ok());
      EXPECT_NE(status.message().find(std::to_string(4000 * c.ranks)), std::string::npos)
          << status.message();
      EXPECT_NE(status.message().find(std::to_string(8000 * c.ranks)), std::string::npos)
          << status.message();
      EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
      std::vector<float> more(1), all(static_cast<size_t>(c.ranks));
      EXPECT_FALSE(c.run(gather_of(more, all, c.ranks)).ok());  // broken stays broken
    });
  }
}

TEST(Failure, AllReducesOfDifferentSizesDisagree) {
  for (std::string layout : {"AA", "AAA"}) {
    for (size_t other : {999, 100'000}) {
      run_world(layout, [&](RankContext& c) {
        std::vector<float> data(c.rank == 1 ? other : 1000, 1.0f);
        Status status = c.run(all_reduce_of(data, c.ranks, Dtype::kFloat32, ReduceOp::kSum));
        ASSERT_FALSE(status.ok());
        EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
      });
    }
  }
}

TEST(Failure, ARankThatStaysAwayIsNamedWithinTheDeadline) {
  for (std::string layout : {"AAA", "ABC", "AAB"}) {
    run_world(layout,
              [&](RankContext& c) {
                if (c.rank == 2)
                  return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                std::vector<float> in(1000), out(3000);
                Status status = c.run(gather_of(in, out, c.ranks));
                ASSERT_FALSE(status.ok());
                EXPECT_NE(status.message().find("rank 2"), std::string::npos) << status.message();
              },
              {.timeout_seconds = 0.5});
  }
}

// More early data than a peer has room for, in flows that keep their steps: whoever may not send early
// must be told that its peer has started, though that peer's own data has to wait for its turn.
TEST(Rounds, ManyInFlightOfFlowsThatKeepStep) {
  run_world("ABCDE",
            [](RankContext& c) {
              auto ranks = static_cast<size_t>(c.ranks);
              const size_t sizes[] = {48 << 10, 2 << 10, 16 << 10, 160 << 10, 8 << 10, 32 << 10};
              for (size_t turn = 0; turn <= std::size(sizes); ++turn) {  // the last one mixes them
                std::vector<std::vector<char>> in(64), out(64);
                std::vector<std::shared_ptr<Operation>> operations;
                for (size_t i = 0; i < in.size(); ++i) {
                  size_t bytes = sizes[(turn == std::size(sizes) ? i : turn) % std::size(sizes)];
                  in[i].assign(bytes, static_cast<char>(i + static_cast<size_t>(c.rank)));
                  out[i].resize(bytes * ranks);
                  operations.push_back(gather_of(in[i], out[i], c.ranks));
                  c.group.submit(operations.back(), {}, true);
                  if (i % 8 == static_cast<size_t>(c.rank)) c.engine.wait(*operations[i / 2]);
                }
                for (size_t i = 0; i < in.size(); ++i) {
                  c.engine.wait(*operations[i]);
                  ASSERT_TRUE(operations[i]->status().ok()) << operations[i]->status().message();
                  size_t bytes = in[i].size();
                  for (size_t r = 0; r < ranks; ++r)
                    ASSERT_EQ(out[i][r * bytes + bytes / 2], static_cast<char>(i + r));
                }
              }
            },
            {.timeout_seconds = 20});
}

TEST(Failure, AbortFreesThoseWhoWait) {
  run_world("AABB", [&](RankContext& c) {
    if (c.rank == 3) {
      std::vector<float> in(1), out(4);
      auto op = gather_of(in, out, 4);
      op->digest = 99;  // never matches: whoever sees it first fails, and all others hear of it
      c.group.submit(op, {}, true);
      c.group.abort("asked to");
      c.engine.wait(*op);
      return;
    }
    std::vector<float> in(1 << 20), out(4 << 20);
    EXPECT_FALSE(c.run(gather_of(in, out, 4)).ok());
  });
}

// Rank 1 looks only when all that rank 0 will ever send is there: what finished the first operation, and
// that it gave up the second.
TEST(Failure, APeerThatGivesUpALaterOperationLeavesEarlierOnesWhole) {
  for (std::string layout : {"AB", "AA"}) {
    std::barrier both(2);
    run_world(layout, [&](RankContext& c) {
      std::vector<float> in(100, 1.0f), out(200), more(100), all(200);
      EXPECT_TRUE(c.run(gather_of(in, out, 2)).ok());  // everything is connected
      auto first = gather_of(in, out, 2), second = gather_of(more, all, 2);
      if (c.rank == 1) c.group.submit(first, {}, false);
      both.arrive_and_wait();
      if (c.rank == 0) {
        EXPECT_TRUE(c.run(first).ok());
        c.group.submit(second, {}, true);
        c.group.abort("asked to");
        c.engine.wait(*second);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it has arrived
      }
      both.arrive_and_wait();
      if (c.rank == 1) {
        c.engine.wait(*first);
        EXPECT_TRUE(first->status().ok()) << first->status().message();
        Status status = c.run(second);
        EXPECT_NE(status.message().find("asked to"), std::string::npos) << status.message();
      }
    });
  }
}

TEST(Bootstrap, AMissingRankIsNamed) {
  MemoryStore store(std::chrono::milliseconds(300));
  auto engine = Engine::create();
  ASSERT_TRUE(engine.ok());
  auto group = Communicator::create(*engine.value(), store, 0, 3,
                                    {.name = "g", .timeout_ns = 1'000'000'000, .host = "A"});
  ASSERT_FALSE(group.ok());
  EXPECT_NE(group.status().message().find("ranks 1, 2"), std::string::npos)
      << group.status().message();
}

TEST(Bootstrap, GroupsOfOneProcessShareEngineAndEndpoint) {
  MemoryStore stores[20];
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      auto engine = Engine::create();
      ASSERT_TRUE(engine.ok());
      std::vector<std::unique_ptr<Communicator>> groups;
      for (MemoryStore& store : stores) {
        auto group = Communicator::create(*engine.value(), store, r, 4,
                                          {.name = "g", .host = r < 2 ? "A" : "B"});
        ASSERT_TRUE(group.ok()) << group.status().message();
        groups.push_back(std::move(group.value()));
      }
      std::vector<std::vector<int>> in, out;
      std::vector<std::shared_ptr<Operation>> ops;
      for (size_t g = 0; g < groups.size(); ++g) {
        in.emplace_back(5000, r + static_cast<int>(g));
        out.emplace_back(20000);
      }
      for (size_t g = 0; g < groups.size(); ++g) {
        ops.push_back(gather_of(in[g], out[g], 4));
        groups[g]->submit(ops[g], {}, true);
      }
      for (size_t g = 0; g < groups.size(); ++g) {
        engine.value()->wait(*ops[g]);
        ASSERT_TRUE(ops[g]->status().ok()) << ops[g]->status().message();
        for (int q = 0; q < 4; ++q)
          ASSERT_EQ(out[g][static_cast<size_t>(q) * 5000], q + static_cast<int>(g));
      }
    });
  }
  for (auto& t : threads) t.join();
}

}  // namespace
}  // namespace smddp
