#include "progress/groups.h"

#include <cstring>

namespace smddp {

void Groups::attach(const JobKey& key, Progressable* group) {
  by_key_[key] = group;
  for (const auto& message : early_.take(key))
    group->on_message(message.header, message.payload.data());
}

void Groups::leave() {
  for (auto& [key, group] : by_key_) group->leave();
  by_key_.clear();
}

bool Groups::watch(uint64_t now_ns) {
  bool moved = false;
  for (auto& [key, group] : by_key_) {
    if (group->busy()) moved |= group->watch(now_ns);
  }
  return moved;
}

uint64_t Groups::deadline_ns() const {
  uint64_t earliest = UINT64_MAX;
  for (auto& [key, group] : by_key_) earliest = std::min(earliest, group->deadline_ns());
  return earliest;
}

void Groups::on_message(const std::byte* data, size_t size) {
  if (!wire::check(data, size)) {
    ++foreign_;
    return;
  }
  wire::Header header;
  std::memcpy(&header, data, sizeof header);
  auto group = by_key_.find(header.key);
  if (group != by_key_.end()) {
    group->second->on_message(header, data + sizeof header);
  } else {
    early_.keep(header, data + sizeof header);
  }
}

void Groups::on_peer_lost(fabric::Peer peer, const Status& why) {
  for (auto& [key, group] : by_key_) group->on_peer_lost(peer, why);
}

}  // namespace smddp
