// The groups of a process: the engine advances all of them through this class, and the network
// hands it the messages, which it gives to the group that they name. Knows no task and no thread.
// Called by Engine, under its lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>

#include "fabric/endpoint.h"
#include "progress/early_messages.h"
#include "progress/progressable.h"

namespace smddp {

class Groups : public fabric::Sink {
 public:
  // So many more groups are being made, or fewer. As long as there is one, messages of unknown groups are
  // kept, as they may be of that one. Otherwise they are dropped, so that strangers can't fill the memory of
  // early messages long before.
  void count_making(int groups);
  // Hands the group the messages that came for it before.
  void attach(const JobKey& key, Progressable* group);
  void detach(const JobKey& key) { by_key_.erase(key); }
  // The process ends: every group leaves.
  void leave();

  bool busy() const {
    return std::any_of(by_key_.begin(), by_key_.end(),
                       [](const auto& entry) { return entry.second->busy(); });
  }
  // Advances every busy group. True if anything moved.
  bool progress() {
    bool moved = false;
    for (auto& [key, group] : by_key_) {
      if (group->busy()) moved |= group->progress();
    }
    return moved;
  }
  // Progressable::watch() of every busy group.
  bool watch(uint64_t now_ns);
  uint64_t deadline_ns() const;  // the earliest, UINT64_MAX for none
  // Messages dropped because they carried no group's key, were malformed, or were not authentic.
  uint64_t foreign_messages() const { return foreign_ + early_.dropped(); }

 private:
  void on_message(const std::byte* data, size_t size) override;
  void on_peer_lost(fabric::Peer peer, const Status& why) override;
  // Counts a message that was dropped; the log tells of the first.
  void refuse(const char* why);

  std::map<JobKey, Progressable*> by_key_;
  EarlyMessages early_;
  uint64_t foreign_ = 0;
  bool warned_ = false;
  int making_ = 0;  // groups
};

}  // namespace smddp
