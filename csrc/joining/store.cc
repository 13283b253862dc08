#include "joining/store.h"

#include "joining/encoding.h"

namespace smddp {
namespace {

constexpr const char* kFailed = "failed";
constexpr size_t kLongestReason = 4096;

}  // namespace

std::string key_of(const std::string& topic, int rank) {
  return topic + "/" + std::to_string(rank);
}

Result<std::vector<std::vector<uint8_t>>> collect(Store& store, const std::string& topic,
                                                  const std::vector<int>& from) {
  std::vector<std::string> keys;
  for (int peer : from) keys.push_back(key_of(topic, peer));
  auto values = store.get(keys, kFailed);
  if (!values.ok() && values.status().code() == Code::kAborted) {
    if (Status failure = published_failure(store); !failure) return failure;
  }
  if (values.ok() || values.status().code() != Code::kTimeout) return values;
  return did_not_join(store, overdue(store, topic, from));
}

std::vector<int> missing(Store& store, const std::string& topic, const std::vector<int>& from) {
  std::vector<int> ranks;
  for (int peer : from) {
    if (!store.has(key_of(topic, peer))) ranks.push_back(peer);
  }
  return ranks;
}

std::vector<int> overdue(Store& store, const std::string& topic, const std::vector<int>& from) {
  std::vector<int> ranks = missing(store, topic, from);
  if (ranks.size() > 1 && ranks[0] == 0) ranks.erase(ranks.begin());
  return ranks;
}

Status did_not_join(const Store& store, const std::vector<int>& ranks) {
  std::string names;
  for (int rank : ranks)
    names += (names.empty() ? "" : ", ") + std::to_string(store.number_of(rank));
  return {Code::kTimeout, "ranks " + names +
                              " did not join the group in time; look at their logs, or raise the "
                              "timeout of init_process_group / new_group"};
}

void publish_failure(Store& store, const Status& why) noexcept {
  try {
    if (store.has(kFailed)) return;
    std::string reason = why.message().substr(0, kLongestReason);
    Encoder w;
    w.out.reserve(reason.size() + 2 * sizeof(uint32_t));
    w(static_cast<uint32_t>(why.code()), reason);
    (void)store.set(kFailed, w.out);
  } catch (...) {  // the other ranks learn it from the timeout of the store
  }
}

Status published_failure(Store& store) {
  if (!store.has(kFailed)) return {};
  auto values = store.get({kFailed}, "");
  if (!values) return {};
  Decoder r(values.value()[0]);
  uint32_t code = 0;
  std::string reason;
  r(code, reason);
  bool known = r.good && code > 0 && code <= static_cast<uint32_t>(Code::kInternal);
  return {known ? static_cast<Code>(code) : Code::kUnavailable,
          r.good ? reason : "a rank could not join the group, and published a damaged reason"};
}

}  // namespace smddp
