// The end of a broken group: it tells the peers once this rank's writes into their memory are over, and
// keeps the group's operations until theirs into its own are. Until then an operation has not ended, so
// that no byte comes after its error. Must not know why the group is broken. The Group calls it, under the
// engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "collectives/fragment.h"
#include "peers/remote_peers.h"

namespace smddp {

class Ending {
 public:
  // A peer that has not answered after so long has stopped, or has not yet heard: its right to write ends
  // without its word. A write that it makes all the same breaks its connection.
  static constexpr uint64_t kLongestNs = 2'000'000'000;

  explicit Ending(RemotePeers& remote) : remote_(remote) {}

  // The group is broken. Later calls do nothing.
  void begin(uint64_t now_ns);
  void add(std::unique_ptr<Fragment> fragment);
  // Tells peers, and returns whether the fragments can end, which then have to be taken.
  bool progress(uint64_t now_ns);
  // Ends the fragments: calls keep(fragment) for those whose memory the network may still touch, and
  // returns their operations.
  template <class Keep>
  std::set<std::shared_ptr<Operation>> take(Keep&& keep);
  // `header`: of the peer's word on what it has written.
  void on_written(const wire::Header& header);

  // Whether peers have to be told, or fragments wait for peers.
  bool busy() const { return began_ns_ != 0 && !(told_ && fragments_.empty()); }
  // When the waiting ends in any case; UINT64_MAX: nothing waits.
  uint64_t limit_ns() const { return busy() ? began_ns_ + kLongestNs : UINT64_MAX; }

 private:
  bool tell_peers();

  RemotePeers& remote_;
  std::vector<std::unique_ptr<Fragment>> fragments_;
  uint64_t began_ns_ = 0;
  bool told_ = false;  // every peer, or there is no hope of that
};

template <class Keep>
std::set<std::shared_ptr<Operation>> Ending::take(Keep&& keep) {
  std::set<std::shared_ptr<Operation>> operations;
  for (auto& fragment : fragments_) {
    operations.insert(fragment->operation_ptr());
    if (fragment->end()) keep(std::move(fragment));
  }
  fragments_.clear();
  return operations;
}

}  // namespace smddp
