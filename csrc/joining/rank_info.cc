#include "joining/rank_info.h"

#include <cstring>

namespace smddp {
namespace {

constexpr uint32_t kRankInfoVersion = 0x534d0008, kReferenceVersion = 0x534e0008;
// Which fields of a GroupPart follow.
constexpr uint8_t kNetworkGiven = 1, kHasKey = 2, kHasProof = 4, kHasDrawn = 8;

template <class Archive>
void fields(Archive& a, FabricAddress& fabric) {
  a(fabric.state, fabric.address, fabric.reason, fabric.liveness);
  if (fabric.state > FabricAddress::State::kUnavailable) a.good = false;
}

template <class Archive>
void fields(Archive& a, ProcessInfo& process) {
  a(process.host, process.host_name, process.has_secret, process.token, process.pid,
    process.presence_fd, process.wake_fd, process.routes);
  fields(a, process.fabric);
}

template <class Archive>
void fields(Archive& a, GroupPart& part) {
  bool proven = part.proof != 0, draws = part.drawn != siphash::Key{};
  auto has = static_cast<uint8_t>((part.network.given ? kNetworkGiven : 0) |
                                  (part.serial == 0 ? kHasKey : 0) | (proven ? kHasProof : 0) |
                                  (draws ? kHasDrawn : 0));
  a(has);
  part.network.given = (has & kNetworkGiven) != 0;
  if ((has & kHasKey) != 0)
    a(part.key);
  else
    a(part.serial);
  if ((has & kHasProof) != 0) a(part.proof);
  if ((has & kHasDrawn) != 0) a(part.drawn);
  a(part.outbox_fd, part.network.digest);
}

template <class Archive>
void fields(Archive& a, RankInfo& info) {
  a.version(kRankInfoVersion);
  fields(a, static_cast<ProcessInfo&>(info));
  fields(a, static_cast<GroupPart&>(info));
  if (info.serial > 0) info.key = own_key(info.token, info.serial);
}

template <class Archive>
void fields(Archive& a, Reference& reference) {
  a.version(kReferenceVersion);
  a(reference.directory, reference.offset);
  fields(a, reference.part);
}

template <class Archive>
void fields(Archive& a, HostLeader& leader) {
  a(leader.rank, leader.ranks);
  fields(a, leader.info);
}

template <class Archive>
void fields(Archive& a, HandedTable& handed) {
  a(handed.fd, handed.bytes);
}

}  // namespace

JobKey own_key(uint64_t token, uint32_t serial) {
  const uint64_t halves[] = {siphash::hash({token, serial}, nullptr, 0),
                             siphash::hash({~token, serial}, nullptr, 0)};
  JobKey key;
  static_assert(sizeof halves == sizeof key);
  std::memcpy(key.data(), halves, sizeof halves);
  return key;
}

bool is_reference(const Blob& blob) {
  return Decoder(blob).number<uint32_t>() == kReferenceVersion;
}

template <class T>
Blob encode(const T& value) {
  Encoder w;
  T copy = value;  // fields() is the decoder's, too
  fields(w, copy);
  return std::move(w.out);
}

template <class T>
Result<T> decode(const Blob& blob) {
  Decoder r(blob);
  T value{};
  fields(r, value);
  if (r.other_version)
    return Status(Code::kMismatch,
                  "a rank of this group runs another version of deepspeed-smddp; install the same "
                  "one on every host");
  if (!r.good) return Status(Code::kInternal, "a rank published damaged rank information");
  return value;
}

template Blob encode(const ProcessInfo&);
template Blob encode(const RankInfo&);
template Blob encode(const Reference&);
template Blob encode(const FabricAddress&);
template Blob encode(const HostLeader&);
template Blob encode(const HandedTable&);
template Result<ProcessInfo> decode(const Blob&);
template Result<RankInfo> decode(const Blob&);
template Result<Reference> decode(const Blob&);
template Result<FabricAddress> decode(const Blob&);
template Result<HostLeader> decode(const Blob&);
template Result<HandedTable> decode(const Blob&);

}  // namespace smddp
