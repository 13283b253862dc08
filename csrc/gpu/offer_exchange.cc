#include "gpu/offer_exchange.h"

#include <algorithm>
#include <bit>

#include "gpu/device_group.h"

namespace smddp {
namespace {

using intranode::MemoryOffer;

constexpr size_t kLeastRoom = 4096;

}  // namespace

void OfferExchange::offer(device::Device& device, const HostPeers& peers) {
  int ranks = peers.count();
  std::vector<size_t> sizes;
  for (const Extent& e : of_.offered) sizes.push_back(e.bytes);
  // Rounded up, so that most calls that do not match exchange enough to say where they differ.
  size_t room = std::bit_ceil(std::max(MemoryOffer::encoded_bytes(sizes), kLeastRoom));
  mine_.resize(room);
  all_.resize(room * static_cast<size_t>(ranks));
  (void)device.together([&] {
    MemoryOffer::make(device, of_.what, of_.offered).encode(mine_.data(), room);
    return Status();
  });
  collective = Collective::kAllGather;
  dtype = Dtype::kBytes;
  timeout_ns = of_.limit_ns;
  tensors = of_.what.segments;
  gather(mine_.data(), room, all_.data(), ranks);
}

Result<std::vector<MemoryOffer>> OfferExchange::offers(const HostPeers& peers) const {
  const Signature& what = of_.what;
  const std::vector<Extent>& offered = of_.offered;
  auto offers = MemoryOffer::decode_all(all_.data(), mine_.size(), peers.count(), peers.own());
  if (!offers) return offers;
  for (int r = 0; r < peers.count(); ++r) {
    const MemoryOffer& offer = offers.value()[static_cast<size_t>(r)];
    if (offer.signature() != what) {
      return Status(Code::kMismatch,
                    disagreement(peers.name(r), offer.signature(), peers.name(peers.own()), what));
    }
    // All ranks see the same refusal: the group stays usable.
    if (!offer.refusal().empty())
      return Status(Code::kInvalid, peers.name(r) + ": " + offer.refusal());
    bool same = offer.extents() == offered.size();
    for (size_t i = 0; same && i < offered.size(); ++i) same = offer.bytes(i) == offered[i].bytes;
    if (!same) return Status(Code::kMismatch, peers.name(r) + " offers other sizes");
  }
  return offers;
}

void OfferExchange::on_complete() {
  Operation::on_complete();
  of_.group_->exchanged(of_);
}

}  // namespace smddp
