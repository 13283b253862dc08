#include "bootstrap/exchange.h"

#include "bootstrap/encoding.h"

namespace smddp {
namespace {

constexpr const char* kFailed = "failed";
constexpr size_t kLongestReason = 4096;
constexpr uint32_t kRankInfoVersion = 0x534d0006;

void write(Writer& w, const FabricAddress& fabric) {
  w.number(fabric.state);
  w.bytes(fabric.address);
  w.bytes(fabric.reason);
  w.bytes(fabric.liveness);
}

FabricAddress read_fabric(Reader& r) {
  FabricAddress fabric;
  fabric.state = r.number<FabricAddress::State>();
  if (fabric.state > FabricAddress::State::kUnavailable) r.good = false;
  fabric.address = r.bytes<std::vector<uint8_t>>();
  fabric.reason = r.bytes<std::string>();
  fabric.liveness = r.bytes<std::vector<uint8_t>>();
  return fabric;
}

Status another_version() {
  return {Code::kMismatch,
          "a rank of this group runs another version of deepspeed-smddp; install the same one on "
          "every host"};
}

}  // namespace

std::string key_of(const std::string& topic, int rank) {
  return topic + "/" + std::to_string(rank);
}

std::vector<uint8_t> encode(const RankInfo& info) {
  Writer w;
  w.number(kRankInfoVersion);
  w.bytes(info.host);
  w.bytes(info.host_name);
  w.number(info.key);
  w.number(static_cast<uint8_t>(info.has_secret));
  w.number(info.proof);
  w.number(info.drawn);
  w.number(info.token);
  w.number(info.pid);
  w.number(info.presence_fd);
  w.number(info.doorbell_fd);
  w.number(info.outbox_fd);
  write(w, info.fabric);
  w.number(info.routes);
  w.bytes(info.network);
  w.number(static_cast<uint8_t>(info.network_given));
  return std::move(w.out);
}

Result<RankInfo> decode(const std::vector<uint8_t>& blob) {
  Reader r(blob);
  auto version = r.number<uint32_t>();
  if (!r.good || version != kRankInfoVersion) return another_version();
  RankInfo info;
  info.host = r.bytes<std::string>();
  info.host_name = r.bytes<std::string>();
  info.key = r.number<JobKey>();
  info.has_secret = r.number<uint8_t>() != 0;
  info.proof = r.number<uint64_t>();
  info.drawn = r.number<siphash::Key>();
  info.token = r.number<uint64_t>();
  info.pid = r.number<int32_t>();
  info.presence_fd = r.number<int32_t>();
  info.doorbell_fd = r.number<int32_t>();
  info.outbox_fd = r.number<int32_t>();
  info.fabric = read_fabric(r);
  info.routes = r.number<uint64_t>();
  info.network = r.bytes<std::string>();
  info.network_given = r.number<uint8_t>() != 0;
  if (!r.good) return Status(Code::kInternal, "a rank published damaged rank information");
  return info;
}

std::vector<uint8_t> encode(const FabricAddress& fabric) {
  Writer w;
  w.number(kRankInfoVersion);
  write(w, fabric);
  return std::move(w.out);
}

Result<FabricAddress> decode_fabric(const std::vector<uint8_t>& blob) {
  Reader r(blob);
  auto version = r.number<uint32_t>();
  if (!r.good || version != kRankInfoVersion) return another_version();
  FabricAddress fabric = read_fabric(r);
  if (!r.good) return Status(Code::kInternal, "a rank published a damaged fabric address");
  return fabric;
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
  return did_not_join(missing(store, topic, from));
}

std::vector<int> missing(Store& store, const std::string& topic, const std::vector<int>& from) {
  std::vector<int> ranks;
  for (int peer : from) {
    if (!store.has(key_of(topic, peer))) ranks.push_back(peer);
  }
  return ranks;
}

Status did_not_join(const std::vector<int>& ranks) {
  std::string names;
  for (int rank : ranks) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  return {Code::kTimeout, "ranks " + names +
                              " did not join the group in time; look at their logs, or raise the "
                              "timeout of init_process_group / new_group"};
}

void publish_failure(Store& store, const Status& why) noexcept {
  try {
    if (store.has(kFailed)) return;
    std::string reason = why.message().substr(0, kLongestReason);
    Writer w;
    w.out.reserve(reason.size() + 2 * sizeof(uint32_t));
    w.number(static_cast<uint32_t>(why.code()));
    w.bytes(reason);
    (void)store.set(kFailed, w.out);
  } catch (...) {  // the other ranks learn it from the timeout of the store
  }
}

Status published_failure(Store& store) {
  if (!store.has(kFailed)) return {};
  auto values = store.get({kFailed}, "");
  if (!values) return {};
  Reader r(values.value()[0]);
  auto code = r.number<uint32_t>();
  auto reason = r.bytes<std::string>();
  bool known = r.good && code > 0 && code <= static_cast<uint32_t>(Code::kInternal);
  return {known ? static_cast<Code>(code) : Code::kUnavailable,
          r.good ? reason : "a rank could not join the group, and published a damaged reason"};
}

}  // namespace smddp
