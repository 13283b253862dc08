#include "progress/groups.h"

#include <cstring>
#include <string>
#include <utility>

#include "common/log.h"

namespace smddp {
namespace {

constexpr const char* kNotAuthentic = "that no rank of its group has sent";

}  // namespace

void Groups::attach(const JobKey& key, Progressable* group) {
  by_key_[key] = group;
  for (const auto& message : early_.take(key)) {
    if (!group->on_message(message.header, message.payload.data())) refuse(kNotAuthentic);
  }
}

void Groups::refuse(const char* why) {
  ++foreign_;
  if (std::exchange(warned_, true)) return;
  log(LogLevel::kWarning, std::string("a message ") + why +
                              " was dropped: another process sends to this rank's endpoint; "
                              "further ones are counted only");
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
  if (!wire::check(data, size)) return refuse("that is none of this protocol");
  wire::Header header;
  std::memcpy(&header, data, sizeof header);
  auto group = by_key_.find(header.key);
  if (group != by_key_.end()) {
    if (!group->second->on_message(header, data + sizeof header)) refuse(kNotAuthentic);
  } else if (making_ > 0) {
    early_.keep(header, data + sizeof header);
  } else {
    ++foreign_;  // without a warning: it may be the last word of a group that this rank has left
  }
}

void Groups::count_making(int groups) {
  making_ += groups;
  if (making_ == 0) early_.drop_all();
}

void Groups::on_peer_lost(fabric::Peer peer, const Status& why) {
  for (auto& [key, group] : by_key_) group->on_peer_lost(peer, why);
}

}  // namespace smddp
