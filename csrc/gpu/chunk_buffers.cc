#include "gpu/chunk_buffers.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace smddp {
namespace {

// Small calls of any size share one. Not measured.
constexpr size_t kLeastRing = 64 << 10;

}  // namespace

transport::MemoryOwner owner_of(const device::Device& device) {
  int ordinal = device.cuda_ordinal();
  if (ordinal < 0) return {};
  return {transport::MemoryOwner::Kind::kCuda, ordinal};
}

ChunkBuffers::~ChunkBuffers() {
  if (process_.engine().forked()) return;
  Engine::Lock lock = process_.engine().lock();
  for (const auto& ring : rings_[true]) process_.network().take_back(ring->buffer(0));
}

Status ChunkBuffers::reserve(size_t buffer_bytes, bool on_device, size_t received_bytes) {
  Status s = received_bytes > 0 ? reserve_received(received_bytes) : Status();
  return s ? reserve_ring(std::bit_ceil(std::max(kLeastRing, buffer_bytes)), on_device) : s;
}

Status ChunkBuffers::reserve_ring(size_t bytes, bool on_device) {
  auto& rings = rings_[on_device];
  {
    std::lock_guard lock(mutex_);
    if (!rings.empty() && rings.back()->buffer_bytes() >= bytes) return {};
  }
  auto made = PinnedRing::create(device_, bytes, on_device);
  if (!made) return made.status();
  const std::shared_ptr<PinnedRing>& ring = made.value();
  if (on_device) {
    Engine::Lock lock = process_.engine().lock();
    Status lent = process_.network().lend(ring->buffer(0), ring->all_buffers(), owner_of(device_));
    if (!lent) return lent;
  }
  std::lock_guard lock(mutex_);
  rings.push_back(ring);
  return {};
}

Status ChunkBuffers::reserve_received(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (!received_.empty() && received_.back()->bytes() >= bytes) return {};
  }
  auto made = ReceivedBlocks::create(device_, std::bit_ceil(std::max(kLeastRing, bytes)));
  if (!made) return made.status();
  std::lock_guard lock(mutex_);
  received_.push_back(std::move(made.value()));
  return {};
}

std::shared_ptr<PinnedRing> ChunkBuffers::ring(bool on_device) {
  std::lock_guard lock(mutex_);
  return rings_[on_device].back();
}

const ReceivedBlocks& ChunkBuffers::received() {
  std::lock_guard lock(mutex_);
  return *received_.back();
}

void ChunkBuffers::release() {
  std::lock_guard lock(mutex_);
  for (const auto& rings : rings_) {
    for (const auto& ring : rings) {
      for (size_t i = 0; i < PinnedRing::kBuffers; ++i) ring->set_arrived(i, ring->filled(i));
    }
  }
}

}  // namespace smddp
