#include "joining/exchange.h"

#include <cstring>

#include "joining/encoding.h"

namespace smddp {
namespace {

constexpr const char* kFailed = "failed";
constexpr size_t kLongestReason = 4096;
constexpr uint32_t kRankInfoVersion = 0x534d0007, kReferenceVersion = 0x534e0007;
// Which fields of a GroupPart follow.
constexpr uint8_t kNetworkGiven = 1, kHasKey = 2, kHasProof = 4, kHasDrawn = 8;

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

void write(Writer& w, const ProcessInfo& process) {
  w.bytes(process.host);
  w.bytes(process.host_name);
  w.number(static_cast<uint8_t>(process.has_secret));
  w.number(process.token);
  w.number(process.pid);
  w.number(process.presence_fd);
  w.number(process.doorbell_fd);
  w.number(process.routes);
  write(w, process.fabric);
}

void read(Reader& r, ProcessInfo* process) {
  process->host = r.bytes<std::string>();
  process->host_name = r.bytes<std::string>();
  process->has_secret = r.number<uint8_t>() != 0;
  process->token = r.number<uint64_t>();
  process->pid = r.number<int32_t>();
  process->presence_fd = r.number<int32_t>();
  process->doorbell_fd = r.number<int32_t>();
  process->routes = r.number<uint64_t>();
  process->fabric = read_fabric(r);
}

void write(Writer& w, const GroupPart& part) {
  const bool proven = part.proof != 0, draws = part.drawn != siphash::Key{};
  w.number(static_cast<uint8_t>((part.network_given ? kNetworkGiven : 0) |
                                (part.serial == 0 ? kHasKey : 0) | (proven ? kHasProof : 0) |
                                (draws ? kHasDrawn : 0)));
  if (part.serial == 0)
    w.number(part.key);
  else
    w.number(part.serial);
  if (proven) w.number(part.proof);
  if (draws) w.number(part.drawn);
  w.number(part.outbox_fd);
  w.number(part.network);
}

void read(Reader& r, GroupPart* part) {
  auto has = r.number<uint8_t>();
  part->network_given = (has & kNetworkGiven) != 0;
  if ((has & kHasKey) != 0)
    part->key = r.number<JobKey>();
  else
    part->serial = r.number<uint32_t>();
  if ((has & kHasProof) != 0) part->proof = r.number<uint64_t>();
  if ((has & kHasDrawn) != 0) part->drawn = r.number<siphash::Key>();
  part->outbox_fd = r.number<int32_t>();
  part->network = r.number<uint64_t>();
}

Status damaged_info() { return {Code::kInternal, "a rank published damaged rank information"}; }

Status another_version() {
  return {Code::kMismatch,
          "a rank of this group runs another version of deepspeed-smddp; install the same one on "
          "every host"};
}

}  // namespace

std::string key_of(const std::string& topic, int rank) {
  return topic + "/" + std::to_string(rank);
}

JobKey own_key(uint64_t token, uint32_t serial) {
  const uint64_t halves[] = {siphash::hash({token, serial}, nullptr, 0),
                             siphash::hash({~token, serial}, nullptr, 0)};
  JobKey key;
  static_assert(sizeof halves == sizeof key);
  std::memcpy(key.data(), halves, sizeof halves);
  return key;
}

std::vector<uint8_t> encode(const RankInfo& info) {
  Writer w;
  w.number(kRankInfoVersion);
  write(w, static_cast<const ProcessInfo&>(info));
  write(w, static_cast<const GroupPart&>(info));
  return std::move(w.out);
}

Result<RankInfo> decode(const std::vector<uint8_t>& blob) {
  Reader r(blob);
  auto version = r.number<uint32_t>();
  if (!r.good || version != kRankInfoVersion) return another_version();
  RankInfo info;
  read(r, static_cast<ProcessInfo*>(&info));
  read(r, static_cast<GroupPart*>(&info));
  if (!r.good) return damaged_info();
  if (info.serial > 0) info.key = own_key(info.token, info.serial);
  return info;
}

std::vector<uint8_t> encode(const Reference& reference) {
  Writer w;
  w.number(kReferenceVersion);
  w.number(reference.directory);
  w.number(reference.offset);
  write(w, reference.part);
  return std::move(w.out);
}

bool is_reference(const std::vector<uint8_t>& blob) {
  return Reader(blob).number<uint32_t>() == kReferenceVersion;
}

Result<Reference> decode_reference(const std::vector<uint8_t>& blob) {
  if (!is_reference(blob)) return another_version();
  Reader r(blob);
  r.number<uint32_t>();
  Reference reference;
  reference.directory = r.number<uint64_t>();
  reference.offset = r.number<int32_t>();
  read(r, &reference.part);
  if (!r.good) return damaged_info();
  return reference;
}

std::vector<uint8_t> encode_process(const ProcessInfo& process) {
  Writer w;
  write(w, process);
  return std::move(w.out);
}

Result<ProcessInfo> decode_process(const std::vector<uint8_t>& blob) {
  Reader r(blob);
  ProcessInfo process;
  read(r, &process);
  if (!r.good) return damaged_info();
  return process;
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
