#include "gpu/received_blocks.h"

namespace smddp {

Result<std::unique_ptr<ReceivedBlocks>> ReceivedBlocks::create(device::Device& device,
                                                               size_t bytes) {
  auto made = std::make_unique<ReceivedBlocks>(device, bytes);
  if (Status s = device.allocate(PinnedRing::kBuffers * (bytes + kLane)).into(made->memory_); !s)
    return s;
  for (device::Event& event : made->summed_) {
    if (Status s = device.create_event().into(event); !s) return s;
  }
  return made;
}

ReceivedBlocks::~ReceivedBlocks() {
  for (device::Event event : summed_) device_.destroy_event(event);
  device_.free(memory_);
}

// As far from a multiple of kLane as the own block is.
std::byte* ReceivedBlocks::first_of(const Part& part) const {
  size_t shift = reinterpret_cast<uintptr_t>(part.own.front().address) % kLane;
  return memory_ + part.buffer * (bytes_ + kLane) + shift;
}

Status ReceivedBlocks::copy_in(device::Stream in, const Part& part, const std::byte* pinned) const {
  Status s = device_.wait(in, summed_[part.buffer]);
  if (part.bytes == 0) return s;
  std::byte* to = first_of(part);
  // In one go if little lies between the blocks.
  bool dense = part.distance - part.bytes < kPage;
  size_t copies = dense ? 1 : part.others;
  size_t each = part.bytes + (dense ? (part.others - 1) * part.distance : 0);
  for (size_t k = 0; k < copies && s; ++k)
    s = device_.copy(in, to + k * part.distance, pinned + k * part.distance, each);
  return s;
}

Status ReceivedBlocks::sum(device::Stream stream, const Part& part, kernels::Reduction how) const {
  Status s;
  size_t element = size_of(how.dtype), at = 0;
  how.sources_count = part.others + 1;
  for (size_t e = 0; e < part.own.size() && s; ++e) {
    const std::byte* other = first_of(part) + at;
    for (size_t k = 0; k < how.sources_count; ++k) {
      bool own = k == part.own_position;
      how.sources[k] = own ? part.own[e].address : other;
      if (!own) other += part.distance;
    }
    how.destination = part.to[e].address;
    how.count = part.own[e].bytes / element;
    s = device_.reduce(stream, how);
    at += part.own[e].bytes;
  }
  return s ? device_.record(summed_[part.buffer], stream) : s;
}

}  // namespace smddp
