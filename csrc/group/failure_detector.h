// Finds out that a group can't go on, and tells its peers: peers that died or gave up, connections that
// broke, ranks of this host that are stopped, deadlines. Must not know how operations move their bytes, nor how a
// stopped process is recognised. The Group calls it, under the engine's lock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flows/health.h"
#include "flows/local_peers.h"
#include "flows/remote_peers.h"
#include "group/fragment_queue.h"
#include "group/remote_watch.h"
#include "topology/members.h"

namespace smddp {

class FailureDetector {
 public:
  // `silence_ns`: 0 for no limit.
  FailureDetector(const Members& members, LocalPeers& local, RemotePeers& remote,
                  const FragmentQueue& fragments, Health& health, RemoteWatch& remote_watch,
                  uint64_t timeout_ns, uint64_t silence_ns)
      : members_(members),
        local_(local),
        remote_(remote),
        fragments_(fragments),
        health_(health),
        remote_watch_(remote_watch),
        timeout_ns_(timeout_ns),
        silence_ns_(silence_ns) {}

  // Of operations that have no timeout of their own.
  uint64_t timeout_ns() const { return timeout_ns_; }
  void set_timeout(uint64_t timeout_ns) { timeout_ns_ = timeout_ns; }

  // Breaks the group and tells all peers. Both need no memory.
  void fail(Status why) noexcept;
  // Tells them once, if the group is broken.
  void tell_peers() noexcept;

  // Fails the group if a peer gave it up.
  void check_aborts();
  // A remote rank gave the group up: it says from which fragment on, and why.
  void on_abort(const wire::Header& header, const std::byte* reason);
  // A connection broke. watch() finds out whether the process at its end lives.
  void on_peer_lost(transport::Peer peer, const Status& why) { remote_watch_.on_lost(peer, why); }
  // True if watch() has something to find out though nothing is in flight.
  bool has_suspects() const { return health_.ok() && remote_watch_.has_broken(); }
  // This rank takes no part in the group any more: peers that still need it are to know. `what`: it has done so and so.
  void leave(const std::string& what);

  // When anything of the group last moved, as far as watch() has seen.
  uint64_t moved_ns() const { return moved_ns_; }
  void on_enqueued() { moved_lately_ = true; }
  // Whether the last progress() moved anything.
  void on_progress(bool moved) {
    moved_ = moved;
    moved_lately_ = moved_lately_ || moved;
  }
  // Looks for what is late or dead, as Progressable::watch().
  bool watch(uint64_t now_ns);
  uint64_t deadline_ns() const;  // of the oldest fragment; UINT64_MAX: none

 private:
  const char* told_cause() const;
  void set_deadlines(uint64_t now);
  void check_neighbors(uint64_t now);
  // For how long the ranks of this host that are waited for have been stopped, as by SIGSTOP. A rank that
  // computes is not stopped, however long it takes.
  void check_stopped(uint64_t now);
  void check_deadline(uint64_t now);
  void remind();

  const Members& members_;
  LocalPeers& local_;
  RemotePeers& remote_;
  const FragmentQueue& fragments_;
  Health& health_;
  RemoteWatch& remote_watch_;
  uint64_t timeout_ns_;
  const uint64_t silence_ns_;
  uint64_t looked_ns_ = 0;            // when check_stopped() last looked
  std::vector<uint64_t> stopped_ns_;  // by local peer; 0: it runs, or is not waited for
  bool told_ = false;
  // Of the remote ranks that gave the group up, the one whose first such fragment is the earliest.
  uint64_t heard_abort_from_ = UINT64_MAX;
  std::string heard_abort_reason_;
  bool moved_ = false;         // in the last progress()
  bool moved_lately_ = false;  // since the last watch()
  uint64_t moved_ns_ = 0;      // when watch() last saw that, or peers were last reminded
};

}  // namespace smddp
