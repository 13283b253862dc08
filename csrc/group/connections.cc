#include "group/connections.h"

#include <algorithm>

namespace smddp {

std::vector<Connection> connections(LocalPeers& local, const RemotePeers& remote,
                                    const RemoteWatch& watch, uint64_t now) {
  using State = Connection::State;
  std::vector<Connection> all;
  for (int i = 0; i < local.count(); ++i) {
    const intranode::Neighbor& neighbor = local.neighbor(i);
    State state = neighbor.dead()         ? State::kEnded
                  : neighbor.is_stopped() ? State::kStopped
                                          : State::kConnected;
    all.push_back({local.rank(i), state, {}, 0, {}, "shared memory"});
  }
  for (Rank rank : remote.ranks()) all.push_back(watch.connection(rank, now));
  std::sort(all.begin(), all.end(),
            [](const Connection& a, const Connection& b) { return a.rank < b.rank; });
  return all;
}

}  // namespace smddp
