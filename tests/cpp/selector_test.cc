#include "collectives/selector.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>

#include "results.h"

namespace smddp {
namespace {

TEST(Selector, AllGatherBucketBoundsTheOutputOfAFragment) {
  for (int ranks : {1, 2, 3, 7, 8, 1000}) {
    for (size_t bucket : {4096ul, 100000ul, 1ul << 20, 500000000ul}) {
      Plan plan = select({Collective::kAllGather, 1 << 28, 2}, {ranks, 1},
                         {.allgather_bucket_bytes = bucket});
      EXPECT_LE(plan.fragment_bytes * static_cast<size_t>(ranks),
                std::max<size_t>(bucket, 2 * static_cast<size_t>(ranks)));
      EXPECT_EQ(plan.fragment_bytes % 2, 0u);
      EXPECT_GT(plan.fragment_bytes, 0u);
    }
  }
}

TEST(Selector, AFragmentIsAllUnlessTheSmallerBucketCutsIt) {
  auto fragment = [](Collective collective, size_t bytes, size_t element, int ranks, int nodes,
                     const Tuning& tuning) {
    return select({collective, bytes, element}, {ranks, nodes}, tuning).fragment_bytes;
  };
  EXPECT_EQ(fragment(Collective::kAllGather, 1 << 30, 4, 8, 1, {}), 1u << 30);
  EXPECT_EQ(fragment(Collective::kReduceScatter, 1 << 30, 4, 8, 1, {}), 1u << 30);
  EXPECT_EQ(fragment(Collective::kAllGather, 0, 4, 4, 2, {}), 4u) << "also without bytes";
  Tuning elements{.allgather_bucket_elements = 1 << 20};
  EXPECT_EQ(fragment(Collective::kAllGather, 1 << 28, 4, 4, 1, elements), 1u << 20);
  EXPECT_EQ(fragment(Collective::kAllGather, 1 << 28, 2, 4, 1, elements), 1u << 19);
  Tuning both{.allgather_bucket_bytes = 1 << 16, .allgather_bucket_elements = 1 << 20};
  EXPECT_EQ(fragment(Collective::kAllGather, 1 << 28, 4, 4, 1, both), 1u << 14);
  EXPECT_EQ(fragment(Collective::kAllGather, 1 << 20, 8, 64, 8, {.allgather_bucket_bytes = 3}), 8u)
      << "one element";
}

TEST(Selector, PartialSumsOfManyHostsStayBounded) {
  for (int nodes : {2, 3, 16, 1024}) {
    Plan plan = select({Collective::kReduceScatter, 1ul << 30, 2}, {8 * nodes, nodes}, {});
    EXPECT_LE(plan.fragment_bytes * static_cast<size_t>(nodes - 1),
              std::max<size_t>(4 << 20, (64ul << 10) * static_cast<size_t>(nodes)));
  }
}

TEST(Selector, BlocksAreReadDirectlyInsideAHostWhereThatPays) {
  auto gather = Collective::kAllGather;
  const size_t up_to = 1 << 20;
  EXPECT_FALSE(read_directly(gather, 31 << 10, {4, 1, up_to}));
  EXPECT_TRUE(read_directly(gather, 32 << 10, {4, 1, up_to}));
  EXPECT_TRUE(read_directly(gather, up_to, {4, 1, up_to}));
  EXPECT_FALSE(read_directly(gather, up_to + 1, {4, 1, up_to}));
  EXPECT_FALSE(read_directly(gather, 128 << 10, {4, 1, 0}));
  EXPECT_FALSE(read_directly(gather, 128 << 10, {4, 2, up_to}));
  EXPECT_FALSE(read_directly(Collective::kReduceScatter, 32 << 10, {4, 1, up_to}));
  EXPECT_TRUE(read_directly(Collective::kReduceScatter, 64 << 10, {4, 1, up_to}));
  EXPECT_FALSE(read_directly(Collective::kReduce, 128 << 10, {4, 1, up_to}));
  EXPECT_FALSE(read_directly(Collective::kSend, 128 << 10, {4, 1, up_to}));
  EXPECT_FALSE(read_directly(Collective::kAllReduce, 512 << 10, {4, 1, up_to}));
  EXPECT_TRUE(read_directly(Collective::kAllReduce, 1 << 20, {4, 1, up_to}));
}

TEST(Selector, ThePartsOfAnAllReduceAreReadWhileTheyAreInACache) {
  Query query{Collective::kAllReduce, 16 << 20, 4};
  EXPECT_EQ(select(query, {2, 1, 16 << 20}, {}).fragment_bytes, 1u << 20);
  EXPECT_EQ(select(query, {2, 1, 0}, {}).fragment_bytes, 4u << 20);
  EXPECT_EQ(select(query, {2, 2, 16 << 20}, {}).fragment_bytes, 4u << 20);
}

TEST(Selector, SharedMemoryIsReadInPlaceExceptInSmallAllReduces) {
  EXPECT_TRUE(read_shared(Collective::kAllGather, 64 << 10));
  EXPECT_TRUE(read_shared(Collective::kReduceScatter, 64 << 10));
  EXPECT_FALSE(read_shared(Collective::kAllReduce, 512 << 10));
  EXPECT_TRUE(read_shared(Collective::kAllReduce, 1 << 20));
}

Shape cluster(int nodes, int per_node) { return {.ranks = nodes * per_node, .nodes = nodes}; }

Pattern pattern_of(size_t shard, int nodes, int per_node, const NetworkModel& network = {}) {
  Shape shape = cluster(nodes, per_node);
  shape.network = network;
  return select({Collective::kAllGather, shard, 4}, shape, {}).pattern;
}

TEST(Selector, ManyHostsAndSmallShardsTakeTheLogarithmicPattern) {
  EXPECT_EQ(pattern_of(64, 1024, 1), Pattern::kLog);
  EXPECT_EQ(pattern_of(64, 128, 1), Pattern::kLog);
  EXPECT_EQ(pattern_of(8, 1024, 8), Pattern::kLog);
  EXPECT_EQ(pattern_of(64, 2, 8), Pattern::kDirect);
  EXPECT_EQ(pattern_of(1 << 20, 1024, 8), Pattern::kDirect);
}

// A rank that sends to 511 others and receives from them has 1,022 messages to see to, in either case with copies.
TEST(Selector, AMebibyteBetween512HostsOfOneRankTakesTheLogarithmicPattern) {
  EXPECT_EQ(pattern_of(2 << 10, 512, 1), Pattern::kLog);
  EXPECT_EQ(pattern_of(2 << 10, 512, 1, {20'000, 1'000, 12.5}), Pattern::kLog);
  EXPECT_EQ(pattern_of(2 << 10, 128, 1, {5'000, 500, 50}), Pattern::kLog);
  EXPECT_EQ(pattern_of(1 << 10, 32, 1, {20'000, 1'000, 12.5}), Pattern::kDirect);
}

// What benchmarks/results/2026-11-26-forced-patterns has measured as faster; the last two are networks that these groups
// measured.
TEST(Selector, FewHostsTakeThePatternThatIsFasterThere) {
  for (auto [latency_ns, overhead_ns] :
       {std::pair{1e3, 5e3}, {71e3, 5e3}, {25e3, 14e3}, {32e3, 11e3}}) {
    for (double bytes_per_ns : {0.012, 0.11, 1.1}) {
      NetworkModel network{latency_ns, overhead_ns, bytes_per_ns};
      for (size_t bytes = 4 << 10; bytes <= 16 << 20; bytes *= 4)
        EXPECT_EQ(pattern_of(bytes / 4, 4, 1, network), Pattern::kDirect) << bytes;
      for (size_t bytes = 256 << 10; bytes <= 16 << 20; bytes *= 4)
        EXPECT_EQ(pattern_of(bytes / 8, 8, 1, network), Pattern::kDirect) << bytes;
    }
  }
  EXPECT_EQ(pattern_of(2 << 10, 8, 1, {5'000, 5'000, 0.012}), Pattern::kLog);
}

TEST(Selector, SmallShardsOfManyRanksPerHostTakeTheJointPattern) {
  EXPECT_EQ(pattern_of(64, 4, 8), Pattern::kJoint);
  EXPECT_EQ(pattern_of(64, 128, 8), Pattern::kJoint);
  EXPECT_EQ(pattern_of(256, 1024, 8), Pattern::kJoint);
  EXPECT_EQ(pattern_of(64, 8, 1), Pattern::kDirect);
  EXPECT_EQ(pattern_of(64, 2, 8), Pattern::kDirect);
  EXPECT_EQ(pattern_of(64 << 10, 128, 8), Pattern::kDirect);
}

TEST(Selector, SumsHaveNoJointPattern) {
  for (Collective collective : {Collective::kReduceScatter, Collective::kAllReduce}) {
    for (Algorithm wanted : {Algorithm::kAuto, Algorithm::kJoint}) {
      EXPECT_EQ(select({collective, 64, 4}, cluster(4, 8), {.algorithm = wanted}).pattern,
                Pattern::kDirect);
    }
  }
}

// One block is not cut, whatever the buckets; between more than two hosts it goes down a tree.
TEST(Selector, BroadcastAndReduceAreOneFragment) {
  Tuning tuning{.allgather_bucket_bytes = 1 << 16, .reduce_scatter_bucket_bytes = 1 << 16};
  for (int nodes : {1, 2, 8}) {
    Plan plan = select({Collective::kBroadcast, 1 << 28, 4}, cluster(nodes, 2), tuning);
    EXPECT_EQ(plan.fragment_bytes, 1u << 28);
    EXPECT_EQ(plan.pattern, nodes > 2 ? Pattern::kLog : Pattern::kDirect);
  }
  EXPECT_EQ(select({Collective::kReduce, 1 << 28, 4}, cluster(1, 2), tuning).fragment_bytes,
            1u << 28);
  EXPECT_EQ(select({Collective::kReduce, 64, 4}, cluster(8, 2), tuning).pattern, Pattern::kDirect);
}

// A rank does not know the other ranks' sizes, so that nothing may depend on them but what it tells itself.
TEST(Selector, BlocksOfPairsGoFromRankToRankInOneFragment) {
  Tuning tuning{.allgather_bucket_bytes = 1 << 16, .algorithm = Algorithm::kLog};
  for (Collective collective : {Collective::kAllToAll, Collective::kGather, Collective::kScatter}) {
    for (size_t bytes : {size_t{0}, size_t{64}, size_t{1} << 28}) {
      Plan plan = select({collective, bytes, 4}, cluster(8, 2), tuning);
      EXPECT_EQ(plan.pattern, Pattern::kDirect);
      EXPECT_GE(plan.fragment_bytes, bytes);
    }
  }
}

TEST(Selector, ANetworkWithCheapMessagesDoesNotTakeTheJointPattern) {
  EXPECT_EQ(pattern_of(2 << 10, 16, 8, {5'000, 100, 50}), Pattern::kDirect);
}

TEST(Selector, ASlowNetworkTakesTheJointPatternBetweenTwoHostsToSaveHeaders) {
  for (double gbit : {0.25, 1.0}) {
    NetworkModel network{20'000, 4'000, gbit / 8};
    EXPECT_EQ(pattern_of(1 << 10, 2, 8, network), Pattern::kJoint) << gbit;
    EXPECT_EQ(pattern_of(4 << 10, 2, 8, network), Pattern::kJoint) << gbit;
    EXPECT_EQ(pattern_of(16 << 10, 2, 8, network), Pattern::kDirect) << gbit;
    EXPECT_EQ(pattern_of(1 << 10, 2, 1, network), Pattern::kDirect) << gbit;
  }
}

// Where bytes take nearly all of the time, copies cost more than some headers less save.
TEST(Selector, ASlowNetworkTakesTheLogarithmicPatternForSmallShardsOnly) {
  for (double latency_ns : {11'000.0, 71'000.0}) {
    for (int nodes : {4, 8}) {
      NetworkModel network{latency_ns, 5'000, 0.012};
      EXPECT_EQ(pattern_of(64 << 10, nodes, 1, network), Pattern::kDirect) << nodes;
      EXPECT_EQ(pattern_of(32 << 10, nodes, 1, network), Pattern::kDirect) << nodes;
    }
    EXPECT_EQ(pattern_of(128, 8, 1, {latency_ns, 5'000, 0.012}),
              latency_ns < 20'000 ? Pattern::kLog : Pattern::kDirect);
  }
}

// Below 256 bytes several ranks of a host may take as long in both patterns: in one for headers, in one for a processor.
TEST(Selector, EveryLargerShardThanADirectOneIsDirect) {
  for (int nodes : {2, 3, 8, 16, 64, 256, 1024}) {
    for (int per_node : {1, 2, 8}) {
      for (NetworkModel network :
           {NetworkModel{}, NetworkModel{5'000, 500, 50}, NetworkModel{100'000, 10'000, 0.125}}) {
        bool direct = false;
        for (size_t shard = 256; shard <= 64 << 20; shard *= 2) {
          bool now = pattern_of(shard, nodes, per_node, network) == Pattern::kDirect;
          EXPECT_TRUE(now || !direct) << nodes << "x" << per_node << " " << shard;
          direct = now;
        }
        EXPECT_TRUE(direct);
      }
    }
  }
}

TEST(Selector, TheModelsChoiceIsNeverTheSlowerOne) {
  // Bruck's messages against n-1 messages, for shards of one byte: each is sent and received, each of Bruck's has a
  // READY as well.
  for (int nodes = 2; nodes <= 1024; ++nodes) {
    NetworkModel c;
    double steps = std::ceil(std::log2(nodes)), others = nodes - 1;
    double bytes_ns = 2 * others / 5, header_ns = 256 / c.bytes_per_ns;
    double log =
        steps * (c.latency_ns + 4 * c.overhead_ns + header_ns) + bytes_ns + others / c.bytes_per_ns;
    double direct = c.latency_ns + 2 * others * c.overhead_ns + bytes_ns;
    bool log_wins = log < direct && nodes > 2;
    EXPECT_EQ(pattern_of(1, nodes, 1) == Pattern::kLog, log_wins) << nodes;
  }
}

TEST(Selector, UnequalHostsNeverTakeTheLogarithmicPattern) {
  Shape shape = cluster(1024, 8);
  shape.equal_nodes = false;
  auto pattern = [&](Collective collective, Algorithm wanted) {
    return select({collective, 8, 4}, shape, {.algorithm = wanted}).pattern;
  };
  EXPECT_EQ(pattern(Collective::kAllGather, Algorithm::kLog), Pattern::kDirect);
  EXPECT_EQ(pattern(Collective::kAllGather, Algorithm::kAuto), Pattern::kJoint);
  EXPECT_EQ(pattern(Collective::kReduceScatter, Algorithm::kLog), Pattern::kDirect);
  EXPECT_EQ(pattern(Collective::kReduceScatter, Algorithm::kAuto), Pattern::kDirect);
}

TEST(Selector, TheAlgorithmCanBeForced) {
  for (size_t shard : {64ul, 64ul << 20}) {
    Query query{Collective::kAllGather, shard, 4};
    EXPECT_EQ(select(query, cluster(8, 2), {.algorithm = Algorithm::kLog}).pattern, Pattern::kLog);
    EXPECT_EQ(select(query, cluster(2, 2), {.algorithm = Algorithm::kJoint}).pattern,
              Pattern::kJoint);
    EXPECT_EQ(select(query, cluster(8, 1), {.algorithm = Algorithm::kJoint}).pattern,
              Pattern::kDirect);
    EXPECT_EQ(select(query, cluster(8, 2), {.algorithm = Algorithm::kDirect}).pattern,
              Pattern::kDirect);
  }
  EXPECT_EQ(parse_algorithm("log").value(), Algorithm::kLog);
  EXPECT_EQ(parse_algorithm("joint").value(), Algorithm::kJoint);
  EXPECT_TRUE(says(parse_algorithm("ring").status(), "auto, direct, log or joint"));
}

TEST(Selector, ChunksGrowWithTheShardAndStayInBounds) {
  for (NetworkModel network :
       {NetworkModel{}, NetworkModel{5'000, 500, 50}, NetworkModel{100'000, 10'000, 0.125}}) {
    size_t last = 0;
    for (size_t shard = 1; shard <= 1ul << 30; shard *= 2) {
      Shape shape = cluster(4, 2);
      shape.network = network;
      size_t chunk = select({Collective::kAllGather, shard, 1}, shape, {}).chunk_bytes;
      EXPECT_GE(chunk, std::max<size_t>(last, 16 << 10));
      EXPECT_LE(chunk, 128u << 10);
      last = chunk;
    }
  }
}

TEST(Selector, ASlowNetworkHasNoSmallerChunksThanOneOfTenGigabits) {
  for (size_t shard : {64 << 10, 256 << 10, 4 << 20}) {
    Query query{Collective::kAllGather, shard, 1};
    Plan usual = select(query, {2, 2, {}, true, {}}, {});
    Plan slow = select(query, {2, 2, {}, true, {20'000, 4'000, 0.125}}, {});
    EXPECT_EQ(slow.chunk_bytes, usual.chunk_bytes) << shard;
  }
}

TEST(Selector, ASlowNetworkHasStepsOf256KiBAndAReachOf32) {
  Shape slow{8, 4, {}, true, {20'000, 4'000, 0.125}};
  EXPECT_EQ(select({Collective::kAllGather, 4 << 20, 1}, slow, {}).fragment_bytes, 256u << 10);
  EXPECT_EQ(reach_bytes(slow), 16u << 10);
}

TEST(Selector, ANetworkModelIsThreeNumbersAboveZero) {
  EXPECT_EQ(parse_network_model("5,0.5,50").value().bytes_per_ns, 50);
  EXPECT_EQ(parse_network_model("5:0.5:50").value().bytes_per_ns, 50);
  for (const char* bad : {"", "5", "5,1", "5,1,0", "5,-1,2", "a,b,c", "1,2,3,4"}) {
    EXPECT_TRUE(says(parse_network_model(bad).status(), "curve in SMDDP_DEBUG"));
  }
}

std::string text_of(size_t bytes) {
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1 << 10) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

// docs/dev/one-allgather.md shows the table that this prints.
TEST(Selector, TheTableInTheDocumentationIsThatOfSelect) {
  std::string table =
      "| hosts x ranks | log up to a shard of | joint up to | direct from |\n|---|---|---|---|\n";
  const std::pair<int, int> shown[] = {{2, 8},   {4, 8},    {8, 2},   {8, 8},   {16, 8},
                                       {32, 8},  {64, 1},   {64, 8},  {128, 8}, {256, 8},
                                       {512, 8}, {1024, 1}, {1024, 8}};
  for (auto [nodes, per_node] : shown) {
    size_t shard = 1, log = 0, joint = 0;
    Pattern pattern = pattern_of(shard, nodes, per_node);
    for (; pattern != Pattern::kDirect; pattern = pattern_of(shard, nodes, per_node)) {
      (pattern == Pattern::kLog ? log : joint) = shard;
      shard *= 2;
    }
    auto up_to = [](size_t bytes) { return bytes == 0 ? std::string("never") : text_of(bytes); };
    table += "| " + std::to_string(nodes) + " x " + std::to_string(per_node) + " | " + up_to(log) +
             " | " + up_to(joint) + " | " + text_of(shard) + " |\n";
  }
  table += "\n| shard | chunk |\n|---|---|\n";
  for (size_t shard = 16 << 10; shard <= 16 << 20; shard *= 4) {
    size_t chunk = select({Collective::kAllGather, shard, 4}, cluster(2, 2), {}).chunk_bytes;
    table += "| " + text_of(shard) + " | " + text_of(chunk) + " |\n";
  }
  std::ifstream file(std::string(SMDDP_SOURCE_DIR) + "/docs/dev/one-allgather.md");
  std::string page(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(says(page, table)) << "docs/dev/one-allgather.md should hold\n" << table;
}

// What the network carries in a latency and two overheads; three latencies, and some chunks, where a write's
// completion has to be waited for. The ranks of a host share it, and no rank takes more than its receive budget.
TEST(Selector, ReachIsWhatCrossesTheNetworkUntilItIsKnownToBeThere) {
  NetworkModel network{20'000, 4'000, 1.25};
  EXPECT_EQ(reach_bytes({4, 4, {}, true, network}), 35'000u);
  EXPECT_EQ(reach_bytes({4, 4, {}, true, network}, 32 << 10, 1), 85'000u + (256 << 10));
  EXPECT_EQ(reach_bytes({4, 4, {}, true, network}, 64 << 10, 1), 85'000u + 5 * (64 << 10));
  EXPECT_EQ(reach_bytes({4, 4, {}, true, network}, 64 << 10, 2), 85'000u + 8 * (64 << 10));
  EXPECT_EQ(reach_bytes({32, 4, {}, true, network}), 35'000u / 8);
  network.latency_ns = 10e6;
  Shape far{4, 4, {}, true, network};
  EXPECT_EQ(reach_bytes(far), receive_budget_bytes(far));
}

// 4 MiB for all hosts; with many of them 256 KiB from each, then 16 MiB for all.
TEST(Selector, PartialSumsOfManyHostsWaitForLongFlows) {
  auto fragment = [](int hosts) {
    Query query{Collective::kReduceScatter, 64 << 20, 4};
    Shape shape{hosts, hosts};
    shape.network.bytes_per_ns = 50;
    return select(query, shape, {}).fragment_bytes;
  };
  EXPECT_EQ(fragment(2), 4u << 20);
  EXPECT_EQ(fragment(9), 512u << 10);
  EXPECT_EQ(fragment(33), 256u << 10);
  EXPECT_EQ(fragment(65), 256u << 10);
  EXPECT_EQ(fragment(129), 128u << 10);
  EXPECT_EQ(fragment(1025), 64u << 10);
}

TEST(Selector, TheSendWindowIsWhatCrossesTheNetworkInTwoLatenciesAndTwoChunksPerNic) {
  NetworkModel network{20'000, 4'000, 1.25};
  EXPECT_EQ(send_window_bytes({4, 4, {}, true, network}, 128 << 10, 1), 50'000u + (256 << 10));
  EXPECT_EQ(send_window_bytes({32, 4, {}, true, network}, 64 << 10, 4), 6'250u + (512 << 10));
  EXPECT_EQ(send_window_bytes({32, 4, {}, true, network}, 64 << 10, 1), 256u << 10);
}

}  // namespace
}  // namespace smddp
