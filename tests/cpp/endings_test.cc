// What a rank has sent arrives, also when the rank destroys its group and ends right afterwards, while the others
// compute: between hosts, over each version of libfabric.
#include "rank_processes.h"

namespace smddp {
namespace {

constexpr int kBroadcasts = 15;  // of 16 KiB: less than the credit of a peer
using Data = std::vector<int>;

Status meet(RankContext& c) {
  Data in(1), out(static_cast<size_t>(c.ranks));
  return c.run(gather_of(in, out, c.ranks));
}

// What was wrong, or "".
std::string broadcast_all(RankContext& c) {
  for (int i = 0; i < kBroadcasts; ++i) {
    Data data(4096, c.rank == 0 ? i + 1 : 0);
    Status status = c.run(broadcast_of(data, 0, c.ranks));
    if (!status) return "broadcast " + std::to_string(i) + ": " + status.message();
    if (data != Data(4096, i + 1)) return "broadcast " + std::to_string(i) + " is wrong";
  }
  return "";
}

void compute() { usleep(700'000); }

std::string root_and_late_ranks(RankContext& c) {
  if (Status met = meet(c); !met) return met.message();
  if (c.rank > 0) compute();
  return broadcast_all(c);
}

TEST(Endings, TheRootMayEndBeforeTheOthersReceive) {
  Processes ranks("ABC", root_and_late_ranks);
  ranks.expect_ends();
}

// As a program that ends without destroying its group.
TEST(Endings, TheRootsProcessMayEndWithItsGroup) {
  Processes ranks("AB", [](RankContext& c) {
    std::string wrong = root_and_late_ranks(c);
    if (c.rank == 0) c.engine.shutdown();
    return wrong;
  });
  ranks.expect_ends();
}

}  // namespace
}  // namespace smddp
