// The simulator: real engines and groups over a network in virtual time.
#include "simulator/cluster.h"
#include "simulator/start_up.h"

#include <cmath>
#include <map>
#include <numeric>

#include "debug_setting.h"
#include "world.h"

namespace smddp::simulator {
namespace {

struct Gather {
  explicit Gather(Cluster& cluster, size_t elements) {
    int ranks = cluster.layout().ranks();
    for (int r = 0; r < ranks; ++r) {
      in.emplace_back(elements);
      std::iota(in.back().begin(), in.back().end(), 1000 * r);
      out.emplace_back(elements * static_cast<size_t>(ranks), -1);
      expected.insert(expected.end(), in.back().begin(), in.back().end());
    }
    for (size_t r = 0; r < in.size(); ++r) operations.push_back(gather_of(in[r], out[r], ranks));
  }
  std::vector<std::vector<int>> in, out;
  std::vector<int> expected;
  std::vector<std::shared_ptr<Operation>> operations;
};

std::unique_ptr<Cluster> a_cluster(const Model& model, const Layout& layout) {
  auto cluster = Cluster::create(model, layout);
  EXPECT_TRUE(cluster.ok()) << cluster.status().message();
  return std::move(cluster.value());
}

Outcome run(Cluster& cluster, const std::vector<std::shared_ptr<Operation>>& operations,
            const Tuning& tuning = {}) {
  auto outcome = cluster.run(operations, tuning);
  EXPECT_TRUE(outcome.ok()) << outcome.status().message();
  return outcome.ok() ? outcome.value() : Outcome();
}

// A gather of all ranks, and its results.
Outcome run(Cluster& cluster, const Gather& gather, const Tuning& tuning = {}) {
  Outcome outcome = run(cluster, gather.operations, tuning);
  for (const auto& out : gather.out) EXPECT_EQ(out, gather.expected);
  return outcome;
}

// The same as `tensors` tensors of equal size, one behind the other in each rank's input and output.
std::shared_ptr<Operation> in_tensors(const std::vector<int>& in, std::vector<int>& out,
                                      size_t tensors, int ranks) {
  auto op = std::make_shared<Operation>();
  op->collective = Collective::kAllGather;
  op->element_size = sizeof(int);
  op->tensors = static_cast<uint32_t>(tensors);
  op->digest = in.size();
  size_t each = in.size() / tensors;
  for (size_t t = 0; t < tensors; ++t)
    op->input.add(const_cast<int*>(in.data()) + t * each, each * sizeof(int));
  op->input.end_block();
  for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) {
    for (size_t t = 0; t < tensors; ++t) {
      op->output.add(out.data() + (t * static_cast<size_t>(ranks) + r) * each, each * sizeof(int));
    }
    op->output.end_block();
  }
  return op;
}

// A message of 4 KiB between two hosts that call together: both send at once, so it takes one overhead of
// the sender, the latency, the bytes, and one overhead of the receiver (LogGP).
TEST(Simulator, AnAllGatherOfTwoHostsTakesWhatTheModelSays) {
  Model model;
  auto cluster = a_cluster(model, {2, 1});
  // The first operation exchanges READYs besides, as the ranks have not heard of one another.
  for (int call = 0; call < 3; ++call) {
    Gather gather(*cluster, 1024);
    Outcome outcome = run(*cluster, gather);
    if (call == 0) continue;
    double message = 4096 + sizeof(wire::Header);
    double ns = 2 * model.message_ns + model.latency_ns + message / model.bytes_per_ns;
    EXPECT_NEAR(outcome.seconds * 1e9, ns, 0.01 * ns);
    EXPECT_EQ(outcome.network.messages, 2u);
  }
}

TEST(Simulator, ALargeAllGatherTakesTheTimeOfItsBytes) {
  for (bool ordered : {false, true}) {
    Model model;
    model.ordered = ordered;
    auto cluster = a_cluster(model, {4, 1});
    Gather gather(*cluster, 1 << 20);
    Outcome outcome = run(*cluster, gather);
    double bound = 3 * 4.0 * (1 << 20) / model.bytes_per_ns * 1e-9;
    EXPECT_GE(outcome.seconds, bound);
    EXPECT_LE(outcome.seconds, 1.5 * bound);
    EXPECT_NEAR(outcome.most_bytes_out, 3 * 4.0 * (1 << 20), 0.02 * 3 * 4.0 * (1 << 20));
  }
}

// Ranks that are out of step send to the same host while others get nothing: without a bound on what is with the
// NICs, or with rails that take a flow's bytes unequally, this takes twice the time of the bytes.
TEST(Simulator, RanksWithSeveralNicsStayInStep) {
  constexpr int kHosts = 8;
  DebugSetting assumed("curve", "20:1:6");
  for (int nics : {1, 2, 4}) {
    Model model;
    model.nics = nics;
    model.bytes_per_ns = 6.0 / nics;
    model.message_ns = 1'000;
    auto cluster = a_cluster(model, {kHosts, 1});
    for (int call = 0; call < 2; ++call) {
      Gather gather(*cluster, 1 << 20);
      Outcome outcome = run(*cluster, gather);
      double ns = (kHosts - 1) * sizeof(int) * double{1 << 20} / 6.0;
      EXPECT_LT(outcome.seconds * 1e9, 1.25 * ns) << nics << " NICs";
    }
  }
}

// Flows above 4 KiB keep step, but each crosses the network in less than a latency here. A rank that waited
// for each step's bytes before it sends the next would take a latency per step.
TEST(Simulator, StepsThatAreShorterThanALatencyOverlap) {
  constexpr int kHosts = 16;
  for (bool ordered : {false, true}) {
    Model model;
    model.ordered = ordered;
    auto cluster = a_cluster(model, {kHosts, 1});
    Tuning tuning;
    tuning.algorithm = Algorithm::kDirect;
    for (int call = 0; call < 2; ++call) {
      Gather gather(*cluster, 2048);
      Outcome outcome = run(*cluster, gather, tuning);
      if (call == 1) EXPECT_LT(outcome.seconds * 1e9, (kHosts - 1) * model.latency_ns);
    }
  }
}

// A rank has one processor for the messages that it sends and those that it receives.
TEST(Simulator, TheSelectorTakesThePatternWithTheLeastTime) {
  Model model;
  model.message_ns = 1'000;
  model.bytes_per_ns = 12.5;
  DebugSetting assumed("curve", "20:1:12.5");
  for (auto [hosts, shard] :
       {std::pair<int, size_t>{8, 1024}, {32, 1024}, {128, 64}, {128, 2048}}) {
    std::map<Algorithm, double> seconds;
    for (Algorithm algorithm : {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kLog}) {
      auto cluster = a_cluster(model, {hosts, 1});
      for (int call = 0; call < 2; ++call) {
        Gather gather(*cluster, shard / sizeof(int));
        Outcome outcome = run(*cluster, gather.operations, {.algorithm = algorithm});
        seconds[algorithm] = outcome.seconds;
      }
    }
    double least = std::min(seconds[Algorithm::kDirect], seconds[Algorithm::kLog]);
    EXPECT_LE(seconds[Algorithm::kAuto], 1.05 * least) << hosts << " hosts, " << shard << " bytes";
  }
}

// Tensors that are too small for fragments of their own do not lie end to end, so their bytes go as messages. Over
// some providers a longer one is a rendezvous, whose question queues behind the data that goes the other way.
TEST(Simulator, BytesOfManyTensorsGoInMessagesWithoutARendezvous) {
  constexpr size_t kTensors = 8, kElements = kTensors * (8 << 10);
  for (int hosts : {2, 4}) {
    auto cluster = a_cluster({}, {hosts, 1});
    Gather gather(*cluster, kElements);
    gather.operations.clear();
    std::vector<int> expected;
    for (size_t t = 0; t < kTensors; ++t) {
      for (const auto& in : gather.in) {
        auto first = in.begin() + static_cast<std::ptrdiff_t>(t * kElements / kTensors);
        expected.insert(expected.end(), first, first + kElements / kTensors);
      }
    }
    for (size_t r = 0; r < gather.in.size(); ++r)
      gather.operations.push_back(in_tensors(gather.in[r], gather.out[r], kTensors, hosts));
    Outcome outcome = run(*cluster, gather.operations);
    for (const auto& out : gather.out) EXPECT_EQ(out, expected);
    const auto& network = outcome.network;
    EXPECT_GT(network.messages, 0u);
    EXPECT_LE(network.message_bytes, network.messages * transport::kEagerMessage);
  }
}

TEST(Simulator, EqualRunsTakeEqualTimes) {
  std::vector<double> seconds;
  for (int turn = 0; turn < 2; ++turn) {
    auto cluster = a_cluster({}, {8, 4});
    Gather gather(*cluster, 5000);
    Outcome outcome = run(*cluster, gather);
    seconds.push_back(outcome.seconds);
  }
  EXPECT_EQ(seconds[0], seconds[1]);
}

TEST(Simulator, SumsAreTheSumsOfAllRanks) {
  auto cluster = a_cluster({}, {5, 2});
  std::vector<std::vector<int>> data;
  std::vector<std::shared_ptr<Operation>> operations;
  for (int r = 0; r < 10; ++r) data.emplace_back(30'000, r + 1);
  for (auto& of_rank : data)
    operations.push_back(all_reduce_of(of_rank, 10, Dtype::kInt32, ReduceOp::kSum));
  run(*cluster, operations);
  for (const auto& of_rank : data) EXPECT_EQ(of_rank, std::vector<int>(30'000, 55));
}

// Each rank of a host sends to all ranks of the other hosts, so the host's link carries the blocks of all.
TEST(Simulator, AnAllToAllTakesTheTimeOfItsBytes) {
  Model model;
  auto cluster = a_cluster(model, {4, 2});
  constexpr size_t kBlock = 1 << 18;
  std::vector<size_t> sizes(8, kBlock);
  std::vector<std::vector<int>> in, out;
  std::vector<std::shared_ptr<Operation>> operations;
  for (int r = 0; r < 8; ++r) {
    in.emplace_back(8 * kBlock);
    for (size_t i = 0; i < in.back().size(); ++i)
      in.back()[i] = 10 * r + static_cast<int>(i / kBlock);
    out.emplace_back(8 * kBlock, -1);
  }
  for (size_t r = 0; r < 8; ++r)
    operations.push_back(exchange_of(Collective::kAllToAll, in[r], sizes, out[r], sizes));
  Outcome outcome = run(*cluster, operations);
  for (size_t r = 0; r < 8; ++r) {
    for (size_t i = 0; i < out[r].size(); ++i)
      ASSERT_EQ(out[r][i], 10 * static_cast<int>(i / kBlock) + static_cast<int>(r));
  }
  double bytes = 2 * 6 * sizeof(int) * double{kBlock};
  double bound = bytes / model.bytes_per_ns * 1e-9;
  EXPECT_GE(outcome.seconds, bound);
  EXPECT_LE(outcome.seconds, 1.5 * bound);
  EXPECT_NEAR(outcome.most_bytes_out, bytes, 0.02 * bytes);
}

RankInfo a_rank_info() {
  RankInfo info;
  info.fabric = {FabricAddress::State::kOpen, std::vector<uint8_t>(80, 7), ""};
  return info;
}

// Not with the square of the ranks: a few small values per rank, and the table of all ranks once per host.
TEST(StartUp, WhatTheStoreServesGrowsWithTheHosts) {
  for (auto [hosts, ranks_per_host] : {std::pair(8, 8), {64, 8}, {8, 64}, {64, 1}}) {
    auto traffic = value_of(count_start_up(hosts, ranks_per_host, a_rank_info()));
    auto ranks = static_cast<uint64_t>(hosts * ranks_per_host), of_hosts = uint64_t(hosts);
    uint64_t info = encode(a_rank_info()).size() + 2 * std::string("host-00").size();
    EXPECT_LE(traffic.values, 5 * ranks + 2 * of_hosts);
    EXPECT_LE(traffic.most_values, ranks + of_hosts);
    EXPECT_LE(traffic.bytes, of_hosts * ranks * info + 4 * ranks * info);
    // Of each host that it has joined, and the count of its first rank.
    EXPECT_LE(traffic.keys_left, 2 * of_hosts + 1);
  }
}

std::vector<Rank> ranks_from_0(int count, int step = 1) {
  std::vector<Rank> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(i * step);
  return ranks;
}

// Ranks that know one another's processes tell what belongs to the group, and no more. A group of some ranks is
// served what it would be in a job of no others.
TEST(StartUp, AFurtherGroupExchangesWhatBelongsToItAlone) {
  for (int step : {1, 8}) {
    auto of_8 = value_of(count_further_group(64, 8, a_rank_info(), ranks_from_0(8, step)));
    const uint64_t hosts = step == 1 ? 0 : 8;
    EXPECT_EQ(of_8.values, 8u * (8 + hosts));
    EXPECT_EQ(of_8.sets, 8 + 2 * hosts);
    EXPECT_LE(of_8.bytes, 8u * (8 * 40 + 28) + 8 * hosts);
  }
  auto first = count_start_up(64, 8, a_rank_info());
  auto all = count_further_group(64, 8, a_rank_info(), ranks_from_0(512));
  ASSERT_TRUE(first.ok() && all.ok()) << all.status().message();
  EXPECT_EQ(all.value().values, first.value().values);
  EXPECT_LE(3 * all.value().bytes, first.value().bytes);
}

TEST(StartUp, InASmallGroupEachRankReadsAValuePerRankAndHost) {
  auto traffic = value_of(count_start_up(2, 4, a_rank_info()));
  EXPECT_EQ(traffic.values, 8u * (8 + 2));
  EXPECT_EQ(traffic.sets,
            8u + 2 * 2);  // the first rank of each host: that it lives, that it has joined
}

}  // namespace
}  // namespace smddp::simulator
