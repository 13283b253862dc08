#include "bootstrap/exchange.h"

#include <cstring>

namespace smddp {
namespace {

constexpr uint32_t kCardVersion = 0x534d0001;

class Writer {
 public:
  template <class T>
  void number(T value) {
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    out.insert(out.end(), p, p + sizeof value);
  }
  void text(const std::string& s) {
    number(static_cast<uint32_t>(s.size()));
    out.insert(out.end(), s.begin(), s.end());
  }
  std::vector<uint8_t> out;
};

class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& in) : in_(in) {}
  template <class T>
  T number() {
    T value{};
    if (in_.size() - at_ < sizeof value) {
      good = false;
      return value;
    }
    std::memcpy(&value, in_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    auto size = number<uint32_t>();
    if (!good || in_.size() - at_ < size) {
      good = false;
      return {};
    }
    std::string s(in_.begin() + static_cast<std::ptrdiff_t>(at_),
                  in_.begin() + static_cast<std::ptrdiff_t>(at_ + size));
    at_ += size;
    return s;
  }
  bool good = true;

 private:
  const std::vector<uint8_t>& in_;
  size_t at_ = 0;
};

std::string key_of(const std::string& topic, int rank) {
  return topic + "/" + std::to_string(rank);
}

}  // namespace

std::vector<uint8_t> encode(const Card& card) {
  Writer w;
  w.number(kCardVersion);
  w.text(card.host);
  w.text(card.host_name);
  w.number(card.key);
  w.number(card.token);
  w.number(card.pid);
  w.number(card.presence_fd);
  w.number(card.doorbell_fd);
  w.number(card.outbox_fd);
  return std::move(w.out);
}

Result<Card> decode(const std::vector<uint8_t>& blob) {
  Reader r(blob);
  auto version = r.number<uint32_t>();
  if (!r.good || version != kCardVersion) {
    return Status(
        Code::kMismatch,
        "a rank of this group runs another version of deepspeed-smddp; install the same one "
        "on every host");
  }
  Card card;
  card.host = r.text();
  card.host_name = r.text();
  card.key = r.number<JobKey>();
  card.token = r.number<uint64_t>();
  card.pid = r.number<int32_t>();
  card.presence_fd = r.number<int32_t>();
  card.doorbell_fd = r.number<int32_t>();
  card.outbox_fd = r.number<int32_t>();
  if (!r.good) return Status(Code::kInternal, "a rank published a truncated address card");
  return card;
}

Result<std::vector<std::vector<uint8_t>>> exchange(Store& store, const std::string& topic, int rank,
                                                   const std::vector<uint8_t>& blob,
                                                   const std::vector<int>& from) {
  if (Status set = store.set(key_of(topic, rank), blob); !set) return set;
  std::vector<std::string> keys;
  for (int peer : from) keys.push_back(key_of(topic, peer));
  auto values = store.get(keys);
  if (values.ok() || values.status().code() != Code::kTimeout) return values;
  std::string missing;
  for (int peer : from) {
    if (store.has(key_of(topic, peer))) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
  }
  return Status(Code::kTimeout,
                "ranks " + missing +
                    " did not join the group in time; look at their logs, or raise the "
                    "timeout of init_process_group / new_group");
}

}  // namespace smddp
