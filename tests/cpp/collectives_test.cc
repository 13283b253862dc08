// Every collective on every layout of hosts: ranks are threads, segments and libfabric are real.
#include <numeric>
#include <random>

#include "intranode/arena.h"
#include "world.h"

namespace smddp {
namespace {

// How bytes move inside a host; kLog and kJoint: between hosts.
enum class Way { kSegment, kSingleCopy, kLog, kArena, kJoint };

bool from_arena = false;

// While a test of kArena runs, three of four allocations are from the arena, so that one operation has
// memory of both kinds.
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

// How the operations of a test moved their bytes inside the hosts: bytes that ranks took from one another.
struct Seen {
  std::atomic<uint64_t> one_slot;     // of operations that needed one slot of each peer
  std::atomic<uint64_t> past_ring;    // of operations that needed more than all slots of each peer
  std::atomic<uint64_t> slots;        // of both, and of the operations in between
  std::atomic<uint64_t> in_place;     // read in the arena
  std::atomic<uint64_t> single_copy;  // by single-copy reads
} seen;

void note(const RankContext& c, const Operation& op) {
  constexpr size_t kRing = intranode::kSlots * intranode::kSlotBytes;
  const Topology& topology = c.group.topology();
  uint64_t peers = topology.node(topology.node_of(c.rank)).size() - 1;
  uint64_t slots = op.taken.slots;
  seen.slots += slots;
  if (slots <= peers * intranode::kSlotBytes) seen.one_slot += slots;
  if (slots > peers * kRing) seen.past_ring += slots;
  seen.in_place += op.taken.in_place;
  seen.single_copy += op.taken.single_copy;
}

testing::AssertionResult carry_out(RankContext& c, const std::shared_ptr<Operation>& op,
                                   const Tuning& tuning) {
  Status status = c.run(op, tuning);
  if (!status) return testing::AssertionFailure() << status.message();
  note(c, *op);
  return testing::AssertionSuccess();
}

class Layouts : public testing::TestWithParam<std::tuple<std::string, Way>> {
 protected:
  void SetUp() override {
    from_arena = way() == Way::kArena;
    for (auto* bytes :
         {&seen.one_slot, &seen.past_ring, &seen.slots, &seen.in_place, &seen.single_copy})
      *bytes = 0;
  }
  // With every collective, the bytes have moved in the way that the test's name says.
  void TearDown() override {
    from_arena = false;
    std::string ranks = layout();
    std::set<char> hosts(ranks.begin(), ranks.end());
    if (hosts.size() == ranks.size()) {
      EXPECT_EQ(seen.slots + seen.in_place + seen.single_copy, 0u);
      return;
    }
    EXPECT_GT(seen.one_slot, 0u);
    bool single_copy = way() == Way::kSingleCopy && hosts.size() == 1 && gathers_;
    EXPECT_EQ(seen.single_copy > 0, single_copy);
    EXPECT_EQ(seen.in_place > 0, way() == Way::kArena);
    if (fills_rings_ && !single_copy && way() != Way::kArena) EXPECT_GT(seen.past_ring, 0u);
  }
  bool gathers_ = true;      // has operations whose memory peers may read
  bool fills_rings_ = true;  // has operations larger than what all slots hold
  std::string layout() const { return std::get<0>(GetParam()); }
  Way way() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(RankContext&)>& body) const {
    run_world(layout(), body, {.single_copy = way() == Way::kSingleCopy});
  }
  Tuning tuning() const {
    return {.algorithm = way() == Way::kLog     ? Algorithm::kLog
                         : way() == Way::kJoint ? Algorithm::kJoint
                                                : Algorithm::kAuto};
  }
};

int64_t value(int rank, size_t i) {
  return static_cast<int64_t>((i * 31 + static_cast<size_t>(rank) * 17) % 1000) - 500;
}

// The last one of each is more than all slots hold.
const size_t kSizes[] = {0, 1, 3, 1000, 9457, 20000, 280'000};
const size_t kSizesOfPairs[] = {0, 1, 9457, 280'000};
const size_t kSizesReduced[] = {0, 1, 3, 1000, 9457, 20000, 450'000};

TEST_P(Layouts, AllGather) {
  run([tuning = tuning()](RankContext& c) {
    for (size_t size : kSizes) {
      Vector<int64_t> in(size), out(size * static_cast<size_t>(c.ranks), -1);
      for (size_t i = 0; i < size; ++i) in[i] = value(c.rank, i);
      auto op = gather_of(in, out, c.ranks);
      ASSERT_TRUE(carry_out(c, op, tuning));
      for (int r = 0; r < c.ranks; ++r) {
        for (size_t i = 0; i < size; ++i)
          ASSERT_EQ(out[static_cast<size_t>(r) * size + i], value(r, i));
      }
    }
  });
}

// Between hosts, the large tensors of a list get fragments of their own, and one large tensor gets several.
TEST_P(Layouts, AllGatherOfAList) {
  run([tuning = tuning()](RankContext& c) {
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
      ASSERT_TRUE(carry_out(c, op, tuning));
      // Small, large, small, two large, small, large.
      if (sizes.size() == 10 && c.group.topology().nodes() == 2) ASSERT_EQ(op->fragments, 7u);
      for (size_t t = 0; t < sizes.size(); ++t) {
        for (size_t i = 0; i < out[t].size(); ++i) {
          int rank = static_cast<int>(i / sizes[t]);
          ASSERT_EQ(out[t][i], value(rank, i % sizes[t] + sizes[t]));
        }
      }
    }
  });
}

TEST_P(Layouts, ReduceScatter) {
  run([tuning = tuning()](RankContext& c) {
    for (size_t size : kSizes) {
      Vector<int64_t> in(size * static_cast<size_t>(c.ranks)), out(size, -1);
      for (size_t i = 0; i < in.size(); ++i) in[i] = value(c.rank, i);
      auto op = scatter_of(in, out, c.ranks, Dtype::kInt64, ReduceOp::kSum);
      ASSERT_TRUE(carry_out(c, op, tuning));
      for (size_t i = 0; i < size; ++i) {
        int64_t sum = 0;
        for (int r = 0; r < c.ranks; ++r) sum += value(r, static_cast<size_t>(c.rank) * size + i);
        ASSERT_EQ(out[i], sum);
      }
    }
  });
}

TEST_P(Layouts, BroadcastAndReduce) {
  fills_rings_ = false;
  run([tuning = tuning()](RankContext& c) {
    for (int root : {0, c.ranks - 1}) {
      for (size_t size : kSizes) {
        Vector<int64_t> data(size);
        for (size_t i = 0; i < size; ++i) data[i] = value(c.rank, i);
        auto sum = reduce_of(data, root, c.rank, c.ranks, Dtype::kInt64, ReduceOp::kSum);
        ASSERT_TRUE(carry_out(c, sum, tuning));
        for (size_t i = 0; i < size; ++i) {
          int64_t wanted = c.rank == root ? 0 : value(c.rank, i);
          for (int r = 0; c.rank == root && r < c.ranks; ++r) wanted += value(r, i);
          ASSERT_EQ(data[i], wanted);
        }
        auto spread = broadcast_of(data, root, c.ranks);
        ASSERT_TRUE(carry_out(c, spread, tuning));
        for (size_t i = 0; i < size; ++i) {
          int64_t wanted = 0;
          for (int r = 0; r < c.ranks; ++r) wanted += value(r, i);
          ASSERT_EQ(data[i], wanted);
        }
      }
    }
  });
}

// Elements that rank `from` sends to rank `to`: none, few, and more than all slots hold.
size_t split(size_t most, int from, int to) {
  return most * static_cast<size_t>((from * 3 + to * 5) % 4) / 3;
}

TEST_P(Layouts, AllToAll) {
  run([tuning = tuning()](RankContext& c) {
    for (bool equal : {true, false}) {
      for (size_t size : kSizesOfPairs) {
        std::vector<size_t> sent, taken;
        for (int r = 0; r < c.ranks; ++r) {
          sent.push_back(equal ? size : split(size, c.rank, r));
          taken.push_back(equal ? size : split(size, r, c.rank));
        }
        Vector<int64_t> in, out(std::accumulate(taken.begin(), taken.end(), size_t{0}), -1);
        for (int r = 0; r < c.ranks; ++r) {
          for (size_t i = 0; i < sent[static_cast<size_t>(r)]; ++i)
            in.push_back(value(c.rank * c.ranks + r, i));
        }
        auto op = exchange_of(Collective::kAllToAll, in, sent, out, taken);
        ASSERT_TRUE(carry_out(c, op, tuning));
        size_t at = 0;
        for (int r = 0; r < c.ranks; ++r) {
          for (size_t i = 0; i < taken[static_cast<size_t>(r)]; ++i)
            ASSERT_EQ(out[at++], value(r * c.ranks + c.rank, i)) << "from " << r;
        }
      }
    }
  });
}

TEST_P(Layouts, GatherAndScatter) {
  fills_rings_ = false;
  run([tuning = tuning()](RankContext& c) {
    auto ranks = static_cast<size_t>(c.ranks);
    for (int root : {c.ranks - 1, c.ranks / 2}) {
      for (size_t size : kSizesOfPairs) {
        std::vector<size_t> to_root(ranks, 0), all(c.rank == root ? ranks : 0, size);
        to_root[static_cast<size_t>(root)] = size;
        all.resize(ranks, 0);
        Vector<int64_t> own(size), whole(c.rank == root ? size * ranks : 0, -1);
        for (size_t i = 0; i < size; ++i) own[i] = value(c.rank, i);
        auto op = exchange_of(Collective::kGather, own, to_root, whole, all, root);
        ASSERT_TRUE(carry_out(c, op, tuning));
        for (size_t i = 0; i < whole.size(); ++i)
          ASSERT_EQ(whole[i], value(static_cast<int>(i / size), i % size));
        for (int64_t& element : whole) ++element;
        op = exchange_of(Collective::kScatter, whole, all, own, to_root, root);
        ASSERT_TRUE(carry_out(c, op, tuning));
        for (size_t i = 0; i < size; ++i) ASSERT_EQ(own[i], value(c.rank, i) + 1);
      }
    }
  });
}

// The sizes that two ranks give for the block between them differ: neither waits for the other, whichever is
// larger, and also if one of them is empty.
TEST(Collectives, BlocksOfTwoSizesAreADisagreement) {
  const std::pair<size_t, size_t> kUnequal[] = {
      {100, 50},     {50, 100},     {0, 10},      {10, 0},      {0, 1},
      {500'000, 10}, {10, 500'000}, {500'000, 0}, {0, 500'000}, {500'000, 400'000}};
  for (const char* layout : {"AA", "AB", "AAB", "ABC"}) {
    for (auto [sent, taken] : kUnequal) {
      std::atomic<int> named = 0;
      auto sizes = std::pair(sent, taken);
      run_world(layout, [&, sizes](RankContext& c) {
        auto ranks = static_cast<size_t>(c.ranks);
        std::vector<size_t> out_sizes(ranks, 1000), in_sizes(ranks, 1000);
        if (c.rank == 0) out_sizes.back() = sizes.first;
        if (c.rank == c.ranks - 1) in_sizes[0] = sizes.second;
        std::vector<uint8_t> in(1'000'000), out(1'000'000);
        Status status = c.run(exchange_of(Collective::kAllToAll, in, out_sizes, out, in_sizes));
        // A rank may have done its own part before it hears of it.
        if (status.ok())
          status = c.run(exchange_of(Collective::kAllToAll, in, out_sizes, out, in_sizes));
        EXPECT_TRUE(status.code() == Code::kMismatch || status.code() == Code::kAborted)
            << status.message();
        std::string text = "sends " + std::to_string(sizes.first) + " bytes to rank " +
                           std::to_string(c.ranks - 1);
        std::string takes = "which takes " + std::to_string(sizes.second) + " bytes";
        if (status.message().find(text) != std::string::npos &&
            status.message().find(takes) != std::string::npos)
          ++named;
      });
      EXPECT_EQ(named, static_cast<int>(std::string(layout).size()))
          << layout << ' ' << sent << ' ' << taken;
    }
  }
}

// A rank that calls a collective without bytes waits for the others as well, so that it hears of theirs,
// whichever comes first.
TEST(Collectives, NoBytesAgainstSomeIsADisagreement) {
  auto call = [](RankContext& c, Collective collective, std::vector<float>& data) {
    auto ranks = static_cast<size_t>(c.ranks);
    std::vector<float> part(data.size() / ranks);
    switch (collective) {
      case Collective::kAllGather:
        return c.run(gather_of(part, data, c.ranks));
      case Collective::kReduceScatter:
        return c.run(scatter_of(data, part, c.ranks, Dtype::kFloat32, ReduceOp::kSum));
      case Collective::kAllReduce:
        return c.run(all_reduce_of(data, c.ranks, Dtype::kFloat32, ReduceOp::kSum));
      case Collective::kBroadcast:
        return c.run(broadcast_of(data, 0, c.ranks));
      default:
        return c.run(reduce_of(data, 0, c.rank, c.ranks, Dtype::kFloat32, ReduceOp::kSum));
    }
  };
  for (const char* layout : {"AA", "AB", "ABC", "AAB", "AABB"}) {
    for (Collective collective :
         {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce,
          Collective::kBroadcast, Collective::kReduce}) {
      for (bool comes_first : {true, false}) {
        run_world(layout,
                  [&](RankContext& c) {
                    bool has_none = c.rank == 1;
                    std::vector<float> none, some(1200);
                    ASSERT_TRUE(call(c, collective, none).ok());  // all without bytes
                    if (has_none != comes_first)
                      std::this_thread::sleep_for(std::chrono::milliseconds(30));
                    Status status = call(c, collective, has_none ? none : some);
                    // A rank may have done its own part before it hears of it.
                    if (status.ok()) status = call(c, Collective::kAllGather, some);
                    EXPECT_TRUE(status.code() == Code::kMismatch || status.code() == Code::kAborted)
                        << layout << ' ' << name_of(collective) << ": " << status.message();
                  },
                  {.timeout_seconds = 5});
      }
    }
  }
}

TEST_P(Layouts, AllReduceInManyFragments) {
  gathers_ = false;
  run([tuning = tuning()](RankContext& c) {
    for (size_t size : kSizesReduced) {
      Vector<double> data(size);
      for (size_t i = 0; i < size; ++i) data[i] = static_cast<double>(value(c.rank, i));
      Tuning cut = tuning;
      cut.allgather_bucket_bytes = 300'000;
      cut.reduce_scatter_bucket_bytes = 600'000;
      auto op = all_reduce_of(data, c.ranks, Dtype::kFloat64, ReduceOp::kMax);
      ASSERT_TRUE(carry_out(c, op, cut));
      for (size_t i = 0; i < size; ++i) {
        int64_t most = value(0, i);
        for (int r = 1; r < c.ranks; ++r) most = std::max(most, value(r, i));
        ASSERT_EQ(data[i], static_cast<double>(most));
      }
    }
  });
}

// Parts of a MiB and a smaller one, at the owner's until all have read them.
TEST(Collectives, SumsOfAnAllReduceAreReadWhereTheyAre) {
  for (const char* layout : {"AA", "AAA"}) {
    run_world(layout, [](RankContext& c) {
      std::vector<double> data(static_cast<size_t>(c.ranks) * 160'000 + 1);
      for (int turn = 1; turn < 4; ++turn) {
        for (size_t i = 0; i < data.size(); ++i)
          data[i] = static_cast<double>(value(turn * c.rank, i));
        auto op = all_reduce_of(data, c.ranks, Dtype::kFloat64, ReduceOp::kSum);
        ASSERT_TRUE(c.run(op).ok());
        EXPECT_GT(op->taken.single_copy, 0u);
        for (size_t i = 0; i < data.size(); ++i) {
          int64_t sum = 0;
          for (int r = 0; r < c.ranks; ++r) sum += value(turn * r, i);
          ASSERT_EQ(data[i], static_cast<double>(sum));
        }
        std::fill(data.begin(), data.end(), -1);  // no rank may still read it
      }
    });
  }
}

TEST_P(Layouts, ManyInFlightOfAllKinds) {
  fills_rings_ = false;
  run([tuning = tuning()](RankContext& c) {
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
      switch (random() % 4) {
        case 0:
          flight->in.assign(size, c.rank + f);
          flight->out.resize(size * ranks);
          flight->op = gather_of(flight->in, flight->out, c.ranks);
          break;
        case 1:
          flight->in.assign(size * ranks, c.rank + f);
          flight->out.resize(size);
          flight->op = scatter_of(flight->in, flight->out, c.ranks, Dtype::kInt64, ReduceOp::kSum);
          break;
        case 2: {
          std::vector<size_t> equal(ranks, size);
          flight->in.assign(size * ranks, c.rank + f);
          flight->out.resize(size * ranks);
          flight->op = exchange_of(Collective::kAllToAll, flight->in, equal, flight->out, equal);
          break;
        }
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
        // The blocks of all ranks one after the other, or their sums.
        size_t block = flight.out.size() / static_cast<size_t>(c.ranks);
        int64_t expected = !sums(flight.op->collective) ? static_cast<int64_t>(i / block + f)
                                                        : base + static_cast<int64_t>(f) * c.ranks;
        ASSERT_EQ(flight.out[i], expected);
      }
    }
  });
}

std::string name_of_case(const testing::TestParamInfo<Layouts::ParamType>& info) {
  const char* ways[] = {"_segment", "_single_copy", "_log", "_arena", "_joint"};
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
INSTANTIATE_TEST_SUITE_P(Joint, Layouts,
                         testing::Combine(testing::Values("AAB", "AABB", "AABBCC", "ABCDABCD",
                                                          "AAABBCC", "ABBBCCD"),
                                          testing::Values(Way::kJoint)),
                         name_of_case);

}  // namespace
}  // namespace smddp
