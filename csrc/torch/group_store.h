// The part of a c10d store that belongs to one making of a group. Made first of all that a group needs.
#pragma once

#include <chrono>
#include <string>

#include "joining/prefix_store.h"
#include "joining/rendezvous.h"
#include "torch/runtime.h"
#include "torch/store_adapter.h"

namespace smddp {

class GroupStore {
 public:
  // Waits for all ranks of the group; throws if one does not come in time.
  GroupStore(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
             std::chrono::milliseconds timeout)
      : whole_(std::move(store), timeout),
        meeting_(meet(Rendezvous(whole_, rank, ranks, timeout))),
        part_(whole_, meeting_ + "/") {}

  Store& part() { return part_; }
  // The name of this making of the group, the same on all its ranks.
  const std::string& meeting() const { return meeting_; }

 private:
  static std::string meet(Rendezvous rendezvous) {
    auto meeting = rendezvous.meet();
    if (!meeting) throw_status(meeting.status());
    return meeting.value();
  }

  StoreAdapter whole_;
  const std::string meeting_;
  PrefixStore part_;
};

}  // namespace smddp
