// The groups of this process that are not destroyed, for reports. Any thread may call any function.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "group/group.h"

namespace smddp {

class LiveGroups {
 public:
  using States = std::function<void(std::vector<GroupState>* states)>;

  static LiveGroups& process() {
    static auto* groups =
        new LiveGroups();  // never freed, as threads may use it until the process ends
    return *groups;
  }
  void add(Group* group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(group);
  }
  // `states` appends those of groups that are not made yet. It takes locks under this object's.
  void add(const void* owner, States states) {
    std::lock_guard lock(mutex_);
    unmade_.emplace_back(owner, std::move(states));
  }
  // Before the group, or what was added as an owner, is destroyed.
  void remove(const void* group_or_owner) {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [=](const Group* group) { return group == group_or_owner; });
    std::erase_if(unmade_, [=](const auto& row) { return row.first == group_or_owner; });
  }
  std::vector<GroupState> states(bool with_connections) const {
    std::lock_guard lock(mutex_);
    std::vector<GroupState> states;
    for (Group* group : groups_) states.push_back(group->state(with_connections));
    for (const auto& [owner, append] : unmade_) append(&states);
    return states;
  }

 private:
  LiveGroups() = default;
  mutable std::mutex mutex_;
  std::vector<Group*> groups_;
  std::vector<std::pair<const void*, States>> unmade_;
};

}  // namespace smddp
