#include "intranode/copy_engine_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace smddp::intranode {
namespace {

constexpr size_t kRefusalBytes = 512;
// torch's expandable segments consist of pieces of this size, or more (c10/core/AllocatorConfig.h). Those for tensors of
// up to 1 MiB have pieces of 2 MiB: such a tensor lies in two of them at most.
constexpr size_t kPieceBytes = 20 << 20;

}  // namespace

Imports::Imports(device::Device& device)
    : device_(device),
      recalls_(std::make_unique<device::RecallClient>(
          [this](int pid, const device::RecalledMemory& memory) { forget(pid, memory); })) {}

Imports::~Imports() {
  recalls_.reset();
  for (auto& [key, entry] : entries_) device_.release_memory(entry.allocation, entry.address);
}

Result<std::byte*> Imports::find(int pid, const device::Allocation& wanted) {
  std::lock_guard lock(mutex_);
  auto known = entries_.find({pid, wanted.base});
  if (known != entries_.end() && known->second.allocation.id == wanted.id &&
      known->second.allocation.bytes == wanted.bytes &&
      known->second.allocation.kind == wanted.kind) {
    ++statistics_.hits;
    return static_cast<std::byte*>(known->second.address);
  }
  // The owner has freed all known allocations that overlap `wanted`. Entries of one owner do not
  // overlap.
  auto at = entries_.lower_bound({pid, wanted.base});
  if (at != entries_.begin()) {
    auto before = std::prev(at);
    const device::Allocation& a = before->second.allocation;
    if (before->first.first == pid && a.base + a.bytes > wanted.base) at = before;
  }
  while (at != entries_.end() && at->first.first == pid &&
         at->first.second < wanted.base + wanted.bytes)
    at = unmap(at);
  recalls_->follow(pid, wanted.owner);
  auto address = device_.import_memory(wanted, pid);
  if (!address) return address.status();
  ++statistics_.misses;
  statistics_.mapped += wanted.bytes;
  entries_[{pid, wanted.base}] = {wanted, address.value()};
  return static_cast<std::byte*>(address.value());
}

void Imports::forget(int pid, const device::RecalledMemory& memory) {
  std::lock_guard lock(mutex_);
  auto known = entries_.find({pid, memory.base});
  if (known == entries_.end() || known->second.allocation.id != memory.id) return;
  unmap(known);
}

Imports::Entries::iterator Imports::unmap(Entries::iterator at) {
  device_.release_memory(at->second.allocation, at->second.address);
  statistics_.mapped -= at->second.allocation.bytes;
  ++statistics_.replaced;
  return entries_.erase(at);
}

Imports::Statistics Imports::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

size_t MemoryOffer::encoded_bytes(const std::vector<size_t>& sizes) {
  size_t room = sizeof(Header) + kRefusalBytes;
  for (size_t bytes : sizes) {
    room += sizeof(Place) + (bytes / kPieceBytes + 2) * sizeof(device::Allocation);
  }
  return room;
}

MemoryOffer MemoryOffer::make(device::Device& device, const Signature& signature,
                              const std::vector<Extent>& extents) {
  MemoryOffer offer;
  offer.signature_ = signature;
  offer.pid_ = getpid();
  offer.own_ = true;
  for (const Extent& e : extents) {
    offer.extents_.push_back({reinterpret_cast<uintptr_t>(e.address), e.bytes});
    if (e.bytes == 0) continue;
    auto found = device.export_memory(e.address, e.bytes);
    if (!found) {
      MemoryOffer refused = refuse(found.status().message());
      refused.signature_ = signature;
      return refused;
    }
    for (const device::Allocation& a : found.value()) {
      auto same = [&](const device::Allocation& b) { return a.base == b.base; };
      if (std::none_of(offer.allocations_.begin(), offer.allocations_.end(), same))
        offer.allocations_.push_back(a);
    }
  }
  return offer;
}

MemoryOffer MemoryOffer::refuse(const std::string& reason) {
  MemoryOffer offer;
  offer.pid_ = getpid();
  offer.own_ = true;
  offer.refusal_ = reason.substr(0, kRefusalBytes);
  return offer;
}

void MemoryOffer::encode(std::byte* to, size_t room) const {
  Header header{0,
                signature_,
                pid_,
                static_cast<uint32_t>(extents_.size()),
                static_cast<uint32_t>(allocations_.size()),
                static_cast<uint32_t>(refusal_.size())};
  std::string refusal = refusal_;
  size_t places = extents_.size() * sizeof(Place);
  size_t allocations = allocations_.size() * sizeof(device::Allocation);
  if (sizeof header + places + allocations + refusal.size() > room) {
    refusal =
        "GPU memory lies in more pieces than expected; set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False";
    header.extents = header.allocations = 0;
    header.refusal = static_cast<uint32_t>(refusal.size());
    places = allocations = 0;
  }
  auto put = [&](const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    to += bytes;
  };
  put(&header, sizeof header);
  put(extents_.data(), places);
  put(allocations_.data(), allocations);
  put(refusal.data(), refusal.size());
}

Result<MemoryOffer> MemoryOffer::decode(const std::byte* from, size_t room) {
  Header header;
  std::memcpy(&header, from, sizeof header);
  size_t places = header.extents * sizeof(Place);
  size_t allocations = header.allocations * sizeof(device::Allocation);
  if (sizeof header + places + allocations + header.refusal > room) {
    return Status(Code::kInternal, "the memory offer of a peer is malformed");
  }
  MemoryOffer offer;
  offer.signature_ = header.signature;
  offer.pid_ = header.pid;
  from += sizeof header;
  offer.extents_.resize(header.extents);
  if (places > 0) std::memcpy(offer.extents_.data(), from, places);
  from += places;
  offer.allocations_.resize(header.allocations);
  if (allocations > 0) std::memcpy(offer.allocations_.data(), from, allocations);
  from += allocations;
  offer.refusal_.assign(reinterpret_cast<const char*>(from), header.refusal);
  return offer;
}

Result<std::vector<MemoryOffer>> MemoryOffer::decode_all(const std::byte* from, size_t room,
                                                         int ranks, int own) {
  std::vector<MemoryOffer> offers;
  for (int r = 0; r < ranks; ++r) {
    auto offer = decode(from + static_cast<size_t>(r) * room, room);
    if (!offer) return offer.status();
    offer.value().own_ = r == own;
    offers.push_back(std::move(offer.value()));
  }
  return offers;
}

void MemoryOffer::note_call(std::byte* encoded, uint64_t ns) {
  std::memcpy(encoded + offsetof(Header, called_ns), &ns, sizeof ns);
}

uint64_t MemoryOffer::last_call(const std::byte* from, size_t room, int ranks) {
  uint64_t last = 0;
  for (int r = 0; r < ranks; ++r, from += room) {
    uint64_t ns = 0;
    std::memcpy(&ns, from + offsetof(Header, called_ns), sizeof ns);
    last = std::max(last, ns);
  }
  return last;
}

Result<Extent> MemoryOffer::locate(Imports& imports, size_t extent, size_t offset,
                                   size_t bytes) const {
  uint64_t at = extents_[extent].address + offset;
  if (own_) return Extent{reinterpret_cast<std::byte*>(at), bytes};
  for (const device::Allocation& a : allocations_) {
    if (at < a.base || at >= a.base + a.bytes) continue;
    auto base = imports.find(pid_, a);
    if (!base) return base.status();
    size_t inside = at - a.base;
    return Extent{base.value() + inside, std::min<size_t>(bytes, a.bytes - inside)};
  }
  return Status(Code::kInternal, "the memory offer of a peer has a gap");
}

}  // namespace smddp::intranode
