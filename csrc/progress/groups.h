// The groups of a process: the engine advances all of them through this class, and the network
// hands it the messages, which it gives to the group that they name. A call into a group that throws breaks
// that group; nothing here throws but attach(). Knows no task and no thread. Called by Engine, under its
// lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "common/exceptions.h"
#include "progress/early_messages.h"
#include "progress/progressable.h"

namespace smddp {

class Groups : public transport::Sink {
 public:
  // So many more groups are being made, or fewer. As long as there is one, messages of unknown groups are
  // kept, as they may be of that one. Otherwise they are dropped, so that strangers can't fill the memory of
  // early messages long before.
  void count_making(int groups);
  // Whether a group needs the transport, but for one that is being made.
  bool needs_network() const {
    return making_ > 1 ||
           std::any_of(in_turn_.begin(), in_turn_.end(),
                       [](const Progressable* group) { return group->needs_network(); });
  }
  // The transport is closed, which none of them needs.
  void on_network_closed() {
    for (Progressable* group : in_turn_) group->on_network_closed();
  }
  // Hands the group the messages that came for it before.
  void attach(const JobKey& key, Progressable* group);
  void detach(const JobKey& key);
  // The process ends: every group leaves. Those that are busy still send aborts.
  void leave();
  void detach_all() {
    in_turn_.clear();
    by_key_.clear();
  }

  bool busy() const {
    return std::any_of(in_turn_.begin(), in_turn_.end(),
                       [](const Progressable* group) { return group->busy(); });
  }
  // Advances every busy group, another one first each time: what the first one takes, the others find
  // taken. True if anything moved.
  bool progress() {
    if (++first_ >= in_turn_.size()) first_ = 0;
    return progress(first_, in_turn_.size()) | progress(0, first_);
  }
  // The transport has failed for good: tells all groups.
  void on_fabric_failed(const Status& why);
  // Breaks every group that is busy: an exception that no single group has caused.
  void fail_busy(const Status& why) noexcept;
  // Progressable::watch() of every busy group.
  bool watch(uint64_t now_ns);
  uint64_t deadline_ns() const;  // the earliest, UINT64_MAX for none
  // Messages dropped because they carried no group's key, were malformed, or were not authentic.
  uint64_t foreign_messages() const { return foreign_ + early_.dropped(); }

 private:
  template <class F>
  static bool guarded(Progressable& group, F&& call) noexcept {
    try {
      return call();
    } catch (...) {
      group.fail(status_of_exception());
      return true;
    }
  }
  template <class F>
  void for_each(F&& call) noexcept {
    for (auto& [key, group] : by_key_) {
      guarded(*group, [&, at = group] { return call(*at), true; });
    }
  }
  bool progress(size_t from, size_t to) {
    bool moved = false;
    for (size_t i = from; i < to; ++i) {
      Progressable* group = in_turn_[i];
      if (group->busy()) moved |= guarded(*group, [=] { return group->progress(); });
    }
    return moved;
  }
  void give(Progressable& group, const wire::Header& header, const std::byte* payload);
  void on_message(const std::byte* data, size_t size) override;
  void on_peer_lost(transport::Peer peer, const Status& why) override;
  // Counts a message that was dropped; the log tells of the first.
  void refuse(const char* why) noexcept;
  void on_exception(const Status& why) override { fail_busy(why); }

  std::map<JobKey, Progressable*> by_key_;
  std::vector<Progressable*> in_turn_;
  size_t first_ = 0;
  EarlyMessages early_;
  uint64_t foreign_ = 0;
  bool warned_ = false;
  int making_ = 0;  // groups
};

}  // namespace smddp
