// The groups of this process that are not destroyed, for reports. Any thread may call any function.
#pragma once

#include <mutex>
#include <vector>

#include "group/group.h"

namespace smddp {

class LiveGroups {
 public:
  static LiveGroups& process() {
    static auto* groups =
        new LiveGroups();  // never freed, as threads may use it until the process ends
    return *groups;
  }
  void add(Group* group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(group);
  }
  // Before the group is destroyed.
  void remove(Group* group) {
    std::lock_guard lock(mutex_);
    std::erase(groups_, group);
  }
  std::vector<GroupState> states(bool with_connections) const {
    std::lock_guard lock(mutex_);
    std::vector<GroupState> states;
    for (Group* group : groups_) states.push_back(group->state(with_connections));
    return states;
  }

 private:
  LiveGroups() = default;
  mutable std::mutex mutex_;
  std::vector<Group*> groups_;
};

}  // namespace smddp
