#include "gpu/peer_trial.h"

#include "common/align.h"

namespace smddp {
namespace {

using intranode::MemoryOffer;

constexpr size_t kCount = 1024;  // floats of a part
constexpr size_t kBytes = kCount * sizeof(float);

// Small integers, whose sums are exact; never zero, and no two ranks' are equal.
float value(size_t rank, size_t i) { return static_cast<float>((rank + 1) * (i % 61 + 1)); }

size_t room() { return MemoryOffer::encoded_bytes({kBytes}); }

}  // namespace

PeerTrial::~PeerTrial() {
  device_.free(memory_);
  if (host_on_device_ != nullptr) device_.unmap_host(host_.data());
}

Status PeerTrial::open() {
  size_t all = parts() * kBytes;
  static_assert(kBytes % kPage == 0);
  if (Status s = Mapping::map(all, MAP_SHARED).into(host_); !s) return s;
  if (Status s = device_.map_host(host_.data(), all).into(host_on_device_); !s) return s;
  if (Status s = device_.allocate(all).into(memory_); !s) return s;
  auto* own = reinterpret_cast<float*>(host_.data());
  for (size_t i = 0; i < kCount; ++i) own[i] = value(static_cast<size_t>(peers_.own()), i);
  Status s = device_.copy(main_, memory_, host_on_device_, all);
  return s ? device_.synchronize(main_) : s;
}

std::vector<std::byte> PeerTrial::offer() {
  Status opened = open();
  std::vector<std::byte> bytes(room());
  MemoryOffer made = opened ? MemoryOffer::make(device_, {}, {{memory_, kBytes}})
                            : MemoryOffer::refuse(opened.message());
  made.encode(bytes.data(), bytes.size());
  return bytes;
}

Status PeerTrial::read(const std::vector<std::byte>& offers, bool sums) {
  intranode::Imports imports(device_);  // its mappings end before the peers free the memory
  std::vector<MemoryOffer> all;
  for (size_t r = 0; r < ranks(); ++r) {
    auto offer = MemoryOffer::decode(offers.data() + r * room(), room());
    if (!offer) return offer.status();
    const std::string& refusal = offer.value().refusal();
    if (!refusal.empty())
      return {Code::kUnavailable, peers_.name(static_cast<int>(r)) + ": " + refusal};
    if (static_cast<int>(r) == peers_.own()) offer.value().claim();
    all.push_back(std::move(offer.value()));
  }
  Status read = copies_and_sum(all, imports, sums);
  Status done = device_.synchronize(main_);
  if (read) read = std::move(done);
  return read ? compare(sums) : read;
}

Status PeerTrial::copies_and_sum(const std::vector<MemoryOffer>& offers,
                                 intranode::Imports& imports, bool sums) {
  kernels::Reduction sum;
  for (size_t r = 0; r < ranks(); ++r) {
    auto at = offers[r].locate(imports, 0, 0, kBytes);
    Status s = at.status();
    if (s && at.value().bytes < kBytes)
      s = {Code::kInternal, "a page of memory lies in two allocations"};
    if (s) s = device_.copy(main_, memory_ + (r + 1) * kBytes, at.value().address, kBytes);
    if (!s) {
      return {s.code(), "its GPU can't read the memory of " + peers_.name(static_cast<int>(r)) +
                            ": " + s.message()};
    }
    sum.sources[r] = at.value().address;
  }
  sum.destination = memory_ + (ranks() + 1) * kBytes;
  sum.sources_count = ranks();
  sum.count = kCount;
  Status s = sums ? device_.reduce(main_, sum) : Status();
  return s ? device_.copy(main_, host_on_device_, memory_, parts() * kBytes) : s;
}

Status PeerTrial::compare(bool sums) const {
  auto* read = reinterpret_cast<const float*>(host_.data());
  for (size_t i = 0; i < kCount; ++i) {
    float sum = 0;
    for (size_t r = 0; r < ranks(); ++r) {
      sum += value(r, i);
      if (read[(r + 1) * kCount + i] != value(r, i)) {
        return {Code::kUnavailable, "its GPU reads wrong bytes from the memory of " +
                                        peers_.name(static_cast<int>(r)) +
                                        "; switch off the IOMMU or PCIe ACS between the GPUs"};
      }
    }
    if (sums && read[(ranks() + 1) * kCount + i] != sum)
      return {Code::kUnavailable, "a kernel on its GPU sums the memory of its host wrongly"};
  }
  return {};
}

}  // namespace smddp
