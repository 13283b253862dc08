#include "progress/early_messages.h"

#include <utility>

#include "common/signature.h"

namespace smddp {

void EarlyMessages::keep(const wire::Header& header, const std::byte* payload) {
  // Data only follows a READY that this rank has sent, so an early message is small.
  if (header.type == wire::Type::kData || header.bytes > kReasonBytes) {
    ++dropped_;
    return;
  }
  if (messages_.size() == kMost) {
    messages_.pop_front();
    ++dropped_;
  }
  messages_.push_back({header, std::vector<std::byte>(payload, payload + header.bytes)});
}

std::vector<EarlyMessages::Message> EarlyMessages::take(const JobKey& key) {
  std::vector<Message> taken;
  for (auto& message : messages_) {
    if (message.header.key == key) taken.push_back(std::move(message));
  }
  std::erase_if(messages_, [&](const Message& message) { return message.header.key == key; });
  return taken;
}

}  // namespace smddp
