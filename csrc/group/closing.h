// How a broken group is closed: it tells the peers once this rank's writes into their memory have ceased, and
// holds the group's fragments back until theirs into its own have. Until then an operation has no status, so
// that no byte comes after its error. Needs no memory, and must not know why the group is broken. The Group
// calls it, under the engine's lock.
#pragma once

#include <cstdint>

#include "flows/remote_peers.h"
#include "group/fragment_queue.h"
#include "progress/task.h"

namespace smddp {

class Closing {
 public:
  // A peer that has not told after so long has stopped, or has not yet heard: its right to write is withdrawn
  // without its word, as is that of a peer that answers no questions (RemoteWatch). A write that it makes all the
  // same breaks its connection.
  static constexpr uint64_t kLongestNs = 2'000'000'000;

  Closing(RemotePeers& remote, FragmentQueue& fragments) : remote_(remote), fragments_(fragments) {}

  // The group is broken: its fragments stop. Later calls do nothing, and return false.
  bool begin(uint64_t now_ns);
  // Tells peers, and returns whether nothing of the fragments moves any more, or it takes too long: then
  // close_flows(), and they have to be taken out of the queue.
  bool progress(uint64_t now_ns);
  // Withdraws the right of every peer to write into memory of the group's fragments.
  void close_flows();
  // `header`: of the peer's word on what it has written.
  void on_written(const wire::Header& header, const std::byte* payload);

  // Takes a task that came after the error, to fail with the fragments: peers may still write into memory of
  // theirs, and an error says that they don't. False: there is no fragment left.
  bool holds(const std::shared_ptr<Task>& task, Status why);
  TaskQueue take_held() { return std::move(held_); }

  // Whether peers have to be told, or fragments wait for peers.
  bool busy() const { return began_ns_ != 0 && !closed(); }
  // Peers were told, or can't be, and no fragment is left.
  bool closed() const { return told_ && fragments_.empty(); }
  // Until when it waits at the most; UINT64_MAX: nothing waits.
  uint64_t limit_ns() const { return busy() ? began_ns_ + kLongestNs : UINT64_MAX; }

 private:
  bool tell_peers();

  RemotePeers& remote_;
  FragmentQueue& fragments_;
  TaskQueue held_;
  uint64_t began_ns_ = 0;
  bool told_ = false;  // every peer, or there is no hope of that
};

}  // namespace smddp
