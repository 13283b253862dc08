// Arbitrary messages to Groups, with groups that come and go: each group gets only whole messages that
// carry its key.
#include "progress/groups.h"

#include <cstdlib>

#include "input.h"

namespace smddp {
namespace {

constexpr size_t kGroups = 3;

JobKey key_of(size_t group) {
  JobKey key{};
  key[0] = static_cast<uint8_t>(group);
  return key;
}

struct CheckingGroup : Progressable {
  bool busy() const override { return false; }
  bool progress() override { return false; }
  bool watch(uint64_t) override { return false; }
  uint64_t deadline_ns() const override { return UINT64_MAX; }
  bool on_message(const wire::Header& header, const std::byte* payload) override {
    if (header.key != key) std::abort();
    for (size_t i = 0; i < header.bytes; ++i) sum += static_cast<uint8_t>(payload[i]);
    return (sum & 1) == 0;
  }
  void on_peer_lost(transport::Peer, const Status&) override {}
  void on_fabric_failed(const Status&) override {}
  bool needs_network() const override { return true; }
  void on_network_closed() override {}
  void fail(Status) noexcept override {}
  void leave() override {}
  JobKey key{};
  unsigned sum = 0;
};

std::vector<uint8_t> message_from(fuzz::Input& input) {
  wire::Header header{};
  header.magic = wire::kMagic;
  header.type = static_cast<wire::Type>(input.up_to(6));
  header.key = key_of(input.up_to(kGroups));
  header.seq = input.offset(100);
  std::vector<uint8_t> payload = input.some(255);
  bool fits = input.up_to(7) != 7;
  header.bytes = static_cast<uint32_t>(fits ? payload.size() : input.offset(payload.size()));
  header.raw_bytes = header.bytes;
  std::vector<uint8_t> message(sizeof header + payload.size());
  std::memcpy(message.data(), &header, sizeof header);
  std::copy(payload.begin(), payload.end(), message.begin() + sizeof header);
  return message;
}

}  // namespace
}  // namespace smddp

using namespace smddp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  Groups groups;
  CheckingGroup members[kGroups];
  bool here[kGroups] = {};
  int making = 0;
  transport::Sink& sink = groups;
  while (!input.empty()) {
    size_t action = input.up_to(7), i = input.up_to(kGroups - 1);
    if (action == 0) {
      members[i].key = key_of(i);
      if (!std::exchange(here[i], true)) groups.attach(members[i].key, &members[i]);
    } else if (action == 1) {
      if (std::exchange(here[i], false)) groups.detach(members[i].key);
    } else if (action == 2) {
      groups.count_making(making > 0 && i == 0 ? -1 : 1);
      making += making > 0 && i == 0 ? -1 : 1;
    } else {
      std::vector<uint8_t> message = action == 3 ? input.some(255) : message_from(input);
      sink.on_message(reinterpret_cast<const std::byte*>(message.data()), message.size());
    }
  }
  groups.detach_all();
  return 0;
}
