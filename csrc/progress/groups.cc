#include "progress/groups.h"

#include <cstring>
#include <new>
#include <string>

#include "common/log.h"

namespace smddp {
namespace {

constexpr const char* kNotAuthentic = "that no rank of its group has sent";

}  // namespace

void Groups::attach(const JobKey& key, Progressable* group) {
  auto messages = early_.take(key);
  in_turn_.reserve(in_turn_.size() + 1);
  by_key_[key] = group;
  in_turn_.push_back(group);
  for (const auto& message : messages) give(*group, message.header, message.payload.data());
  if (early_.has_lost(key)) group->fail({Code::kUnavailable, "out of memory"});
}

void Groups::detach(const JobKey& key) {
  auto entry = by_key_.find(key);
  if (entry == by_key_.end()) return;
  std::erase(in_turn_, entry->second);
  by_key_.erase(entry);
}

void Groups::refuse(const char* why) noexcept {
  ++foreign_;
  if (std::exchange(warned_, true)) return;
  try {
    log(LogLevel::kWarning, std::string("a message ") + why +
                                " was dropped: another process sends to this rank's endpoint; "
                                "further ones are counted only");
  } catch (const std::bad_alloc&) {  // the counter tells
  }
}

void Groups::leave() {
  for_each([](Progressable& group) { group.leave(); });
}

void Groups::on_fabric_failed(const Status& why) {
  for_each([&](Progressable& group) { group.on_fabric_failed(why); });
}

bool Groups::watch(uint64_t now_ns) {
  bool moved = false;
  for (auto& [key, group] : by_key_) {
    if (group->busy()) moved |= guarded(*group, [&, at = group] { return at->watch(now_ns); });
  }
  return moved;
}

uint64_t Groups::deadline_ns() const {
  uint64_t earliest = UINT64_MAX;
  for (auto& [key, group] : by_key_) earliest = std::min(earliest, group->deadline_ns());
  return earliest;
}

void Groups::fail_busy(const Status& why) noexcept {
  for (auto& [key, group] : by_key_) {
    if (group->busy()) group->fail(copy_of(why));
  }
}

void Groups::give(Progressable& group, const wire::Header& header, const std::byte* payload) {
  if (!guarded(group, [&] { return group.on_message(header, payload); })) refuse(kNotAuthentic);
}

void Groups::on_message(const std::byte* data, size_t size) {
  if (!wire::check(data, size)) return refuse("that is none of this protocol");
  wire::Header header;
  std::memcpy(&header, data, sizeof header);
  auto group = by_key_.find(header.key);
  if (group != by_key_.end()) {
    give(*group->second, header, data + sizeof header);
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

void Groups::on_peer_lost(transport::Peer peer, const Status& why) {
  for_each([&](Progressable& group) { group.on_peer_lost(peer, why); });
}

}  // namespace smddp
