// What a group knows of the way to each other rank that it exchanges data with directly, for people who ask
// why a job hangs. The Group calls it, under the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "group/group_state.h"
#include "group/remote_watch.h"
#include "flows/local_peers.h"
#include "flows/remote_peers.h"

namespace smddp {

// In the order of their ranks. Asks no process anything.
std::vector<Connection> connections(LocalPeers& local, const RemotePeers& remote,
                                    const RemoteWatch& watch, uint64_t now);

}  // namespace smddp
