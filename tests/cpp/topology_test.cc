#include "topology/topology.h"

#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <set>

#include "topology/pattern.h"

namespace smddp {
namespace {

std::vector<std::string> hosts(const std::string& letters) {
  std::vector<std::string> out;
  for (char c : letters) out.emplace_back(1, c);
  return out;
}

TEST(Topology, NumbersHostsByLowestRankAndRanksInOrder) {
  Topology t(hosts("BABAC"));
  EXPECT_EQ(t.ranks(), 5);
  EXPECT_EQ(t.nodes(), 3);
  EXPECT_EQ(t.node(0), (std::vector<Rank>{0, 2}));
  EXPECT_EQ(t.node(1), (std::vector<Rank>{1, 3}));
  EXPECT_EQ(t.node(2), (std::vector<Rank>{4}));
  EXPECT_EQ(t.local_index(3), 1);
  EXPECT_EQ(t.node_of(0), t.node_of(2));
  EXPECT_NE(t.node_of(0), t.node_of(1));
}

TEST(Topology, GatewayHasEqualLocalIndexAndWrapsOnSmallerHosts) {
  Topology t(hosts("AAABB"));
  EXPECT_EQ(t.gateway(0, 1), 3);
  EXPECT_EQ(t.gateway(1, 1), 4);
  EXPECT_EQ(t.gateway(2, 1), 3);
  EXPECT_EQ(t.gateway(4, 0), 1);
}

// Made-up clusters: hosts of equal and unequal size, ranks in blocks and round-robin.
std::vector<std::vector<std::string>> clusters() {
  std::vector<std::vector<std::string>> all = {hosts("A"),       hosts("AB"),     hosts("AAB"),
                                               hosts("ABAB"),    hosts("AAABBC"), hosts("ABCABCA"),
                                               hosts("ABBBBBBB")};
  for (int nodes : {4, 32, 128}) {
    std::vector<std::string> blocks, dealt;
    for (int r = 0; r < nodes * 8; ++r) {
      blocks.push_back(std::to_string(r / 8));
      dealt.push_back(std::to_string(r % nodes));
    }
    all.push_back(blocks);
    all.push_back(dealt);
  }
  return all;
}

using pattern::Pattern;

std::vector<Pattern> patterns_of(const Topology& t) {
  if (!pattern::equal_nodes(t)) return {Pattern::kDirect, Pattern::kJoint};
  return {Pattern::kDirect, Pattern::kLog, Pattern::kJoint};
}

TEST(Pattern, EveryShardReachesEveryHostExactlyOnce) {
  for (const auto& cluster : clusters()) {
    Topology t(cluster);
    for (Pattern p : patterns_of(t)) {
      std::vector<int> arrivals(static_cast<size_t>(t.ranks() * t.nodes()));
      for (Rank r = 0; r < t.ranks(); ++r) {
        for (const auto& flow : pattern::gather_flows(t, r, p).in) {
          for (Rank shard : flow.shards) {
            ++arrivals[static_cast<size_t>(shard * t.nodes() + t.node_of(r))];
            EXPECT_EQ(pattern::entry(t, t.node_of(r), shard, p), r);
            if (p != Pattern::kJoint) EXPECT_EQ(pattern::reducer(t, t.node_of(r), shard), r);
          }
        }
      }
      for (Rank r = 0; r < t.ranks(); ++r) {
        for (int n = 0; n < t.nodes(); ++n) {
          EXPECT_EQ(arrivals[static_cast<size_t>(r * t.nodes() + n)], n == t.node_of(r) ? 0 : 1);
        }
      }
    }
  }
}

TEST(Pattern, EverySentFlowIsOneThatItsReceiverExpects) {
  for (const auto& cluster : clusters()) {
    Topology t(cluster);
    for (Pattern p : patterns_of(t)) {
      std::map<std::pair<Rank, Rank>, std::vector<Rank>> sent, expected;
      for (Rank r = 0; r < t.ranks(); ++r) {
        auto flows = pattern::gather_flows(t, r, p);
        for (const auto& flow : flows.out) {
          EXPECT_TRUE(sent.emplace(std::pair(r, flow.peer), flow.shards).second);
        }
        for (const auto& flow : flows.in) {
          EXPECT_TRUE(expected.emplace(std::pair(flow.peer, r), flow.shards).second);
        }
      }
      EXPECT_EQ(sent, expected);
    }
  }
}

TEST(Pattern, JointFlowsCarryAllShardsOfAHostAndFollowRails) {
  for (const auto& cluster : clusters()) {
    Topology t(cluster);
    std::set<std::pair<int, int>> pairs;
    std::set<Rank> gateways;
    for (Rank r = 0; r < t.ranks(); ++r) {
      std::set<Rank> rails, sources;
      auto direct = pattern::gather_flows(t, r, Pattern::kDirect);
      for (const auto* side : {&direct.in, &direct.out}) {
        for (const auto& flow : *side) rails.insert(flow.peer);
      }
      auto flows = pattern::gather_flows(t, r, Pattern::kJoint);
      for (const auto& flow : flows.in) sources.insert(flow.peer);
      for (const auto& flow : flows.out) {
        EXPECT_EQ(flow.shards, t.node(t.node_of(r)));
        EXPECT_TRUE(pairs.emplace(t.node_of(r), t.node_of(flow.peer)).second);
        EXPECT_TRUE(rails.count(flow.peer));
        EXPECT_TRUE(sources.count(flow.peer)) << "a rank receives from each rank that it sends to";
        gateways.insert(r);
      }
    }
    EXPECT_EQ(pairs.size(), static_cast<size_t>(t.nodes() * (t.nodes() - 1)));
    // The pairs of hosts are spread over all ranks, as far as there are enough pairs.
    if (pattern::equal_nodes(t)) {
      size_t each = std::min(t.node(0).size(), static_cast<size_t>(t.nodes() / 2));
      EXPECT_EQ(gateways.size(), each * static_cast<size_t>(t.nodes()));
    }
  }
}

// Hosts of three ranks and of two, in turns: those three apart have a third rank at one end only.
TEST(Pattern, TheTwoEndsOfAJointFlowHaveTheSameLocalIndexOnHostsOfAnySize) {
  std::vector<std::string> cluster;
  for (int host = 0; host < 8; ++host) {
    for (int rank = 0; rank < 2 + host % 2; ++rank) cluster.push_back(std::to_string(host));
  }
  Topology t(cluster);
  for (Rank r = 0; r < t.ranks(); ++r) {
    for (const auto& flow : pattern::gather_flows(t, r, Pattern::kJoint).out)
      EXPECT_EQ(t.local_index(flow.peer), t.local_index(r)) << r;
  }
}

TEST(Pattern, ARankSendsOnlyShardsThatItAlreadyHas) {
  for (const auto& cluster : clusters()) {
    Topology t(cluster);
    if (!pattern::equal_nodes(t)) continue;
    for (Rank r = 0; r < t.ranks(); ++r) {
      auto flows = pattern::gather_flows(t, r, Pattern::kLog);
      std::set<Rank> here{r};
      for (size_t step = 0; step < flows.out.size(); ++step) {
        for (Rank shard : flows.out[step].shards) EXPECT_TRUE(here.count(shard));
        here.insert(flows.in[step].shards.begin(), flows.in[step].shards.end());
      }
      EXPECT_EQ(here.size(), static_cast<size_t>(t.nodes()));
      EXPECT_EQ(flows.out.size(), t.nodes() == 1 ? 0u : std::bit_width(unsigned(t.nodes() - 1)));
    }
  }
}

TEST(Pattern, InEachStepAHostReceivesFromOneOtherHostOnly) {
  Topology t(clusters().back());
  for (size_t step = 0; step + 1 < static_cast<size_t>(t.nodes()); ++step) {
    std::vector<int> from(static_cast<size_t>(t.nodes()), -1);
    for (Rank r = 0; r < t.ranks(); ++r) {
      auto flows = pattern::gather_flows(t, r, Pattern::kDirect);
      auto to = static_cast<size_t>(t.node_of(flows.out[step].peer));
      if (from[to] == -1) from[to] = t.node_of(r);
      EXPECT_EQ(from[to], t.node_of(r));
    }
  }
}

// Each pair of ranks of two hosts has one flow each way, of the same step at both ends, and in each step a host
// receives from one other host.
TEST(Pattern, EachPairOfRanksOfTwoHostsHasAFlow) {
  for (const char* letters : {"AB", "AABB", "ABAB", "ABBB", "AAABBCC", "ABBBCCD", "ABCDEFGH"}) {
    Topology t(hosts(letters));
    std::map<std::pair<Rank, Rank>, int> sent, received;
    for (Rank rank = 0; rank < t.ranks(); ++rank) {
      pattern::Flows flows = pattern::pair_flows(t, rank);
      std::map<int, int> source_of_step;
      for (const pattern::Flow& flow : flows.out)
        EXPECT_TRUE(sent.emplace(std::pair(rank, flow.peer), flow.step).second);
      for (const pattern::Flow& flow : flows.in) {
        EXPECT_TRUE(received.emplace(std::pair(flow.peer, rank), flow.step).second);
        int host = t.node_of(flow.peer);
        EXPECT_EQ(source_of_step.emplace(flow.step, host).first->second, host);
      }
    }
    EXPECT_EQ(sent, received);
    for (Rank a = 0; a < t.ranks(); ++a) {
      for (Rank b = 0; b < t.ranks(); ++b)
        EXPECT_EQ(sent.count({a, b}), t.node_of(a) == t.node_of(b) ? 0u : 1u);
    }
  }
}

TEST(Pattern, ABlockIsSummedByItsOwnerOnItsHostAndByItsGatewayElsewhere) {
  for (const auto& cluster : clusters()) {
    Topology t(cluster);
    for (Rank block = 0; block < t.ranks(); ++block) {
      for (int n = 0; n < t.nodes(); ++n) {
        Rank by = pattern::reducer(t, n, block);
        EXPECT_EQ(t.node_of(by), n);
        if (n == t.node_of(block)) EXPECT_EQ(by, block);
      }
    }
  }
}

TEST(Pattern, EqualPartsCoverEverythingAndDifferByOneGranule) {
  for (size_t count : {0ul, 1ul, 63ul, 64ul, 65ul, 1000ul, 123456789ul}) {
    for (int ranks : {1, 2, 3, 7, 9, 64}) {
      auto starts = pattern::equal_parts(count, ranks, 64);
      ASSERT_EQ(starts.size(), static_cast<size_t>(ranks) + 1);
      EXPECT_EQ(starts.front(), 0u);
      EXPECT_EQ(starts.back(), count);
      for (size_t r = 0; r + 1 < starts.size(); ++r) {
        EXPECT_LE(starts[r], starts[r + 1]);
        EXPECT_LE(starts[r + 1] - starts[r], (count / static_cast<size_t>(ranks) / 64 + 2) * 64);
      }
    }
  }
}

}  // namespace
}  // namespace smddp
