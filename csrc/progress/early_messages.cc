#include "progress/early_messages.h"

#include <new>
#include <utility>

#include "common/signature.h"

namespace smddp {

void EarlyMessages::keep(const wire::Header& header, const std::byte* payload) noexcept {
  // Data only follows a READY that this rank has sent, so an early message is small.
  if (header.type == wire::Type::kData || header.bytes > kReasonBytes) {
    ++dropped_;
    return;
  }
  for (size_t room = kMostBytes - sizeof header - header.bytes; bytes_ > room; ++dropped_) {
    bytes_ -= bytes_of(messages_.front());
    messages_.pop_front();
  }
  try {
    messages_.push_back({header, std::vector<std::byte>(payload, payload + header.bytes)});
    bytes_ += bytes_of(messages_.back());
  } catch (const std::bad_alloc&) {
    ++dropped_;
    lost_[next_lost_++ % lost_.size()] = header.key;
  }
}

std::vector<EarlyMessages::Message> EarlyMessages::take(const JobKey& key) {
  std::vector<Message> taken;
  for (auto& message : messages_) {
    if (message.header.key != key) continue;
    bytes_ -= bytes_of(message);
    taken.push_back(std::move(message));
  }
  std::erase_if(messages_, [&](const Message& message) { return message.header.key == key; });
  return taken;
}

}  // namespace smddp
