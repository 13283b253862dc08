// Memory on the device for the blocks that chunks bring from other hosts, until a kernel has summed them with
// this rank's own block. One stream copies the blocks in, while another sums those of the chunk before. It knows
// no network and no flags. ChunkBuffers makes it; PinnedPipeline orders the chunks.
#pragma once

#include <memory>
#include <vector>

#include "collectives/blocks.h"
#include "device/device.h"
#include "gpu/pinned_ring.h"

namespace smddp {

class ReceivedBlocks {
 public:
  // For `bytes` of all other ranks' blocks in a chunk.
  static Result<std::unique_ptr<ReceivedBlocks>> create(device::Device& device, size_t bytes);
  ReceivedBlocks(device::Device& device, size_t bytes) : device_(device), bytes_(bytes) {}
  ReceivedBlocks(const ReceivedBlocks&) = delete;
  ReceivedBlocks& operator=(const ReceivedBlocks&) = delete;
  ~ReceivedBlocks();

  size_t bytes() const { return bytes_; }

  // The part of each rank's block that one chunk carries.
  struct Part {
    size_t buffer = 0;  // of the ring
    size_t bytes = 0;
    size_t others = 0;        // other ranks
    size_t distance = 0;      // of two ranks' blocks in pinned memory
    size_t own_position = 0;  // of the own block among all ranks'
    // The own block, and where the sum goes: extents of equal sizes. They may be the same.
    std::vector<Extent> own, to;
  };
  // `pinned`: the other ranks' blocks, in the order of the ranks. `in` waits until the memory is free.
  Status copy_in(device::Stream in, const Part& part, const std::byte* pinned) const;
  // After copy_in(), in the order of the ranks. `how`: type, operation, divisor and thread blocks.
  Status sum(device::Stream stream, const Part& part, kernels::Reduction how) const;

 private:
  static constexpr size_t kLane = 16;  // what a kernel reads at once, if all blocks begin alike
  std::byte* first_of(const Part& part) const;

  device::Device& device_;
  const size_t bytes_;
  std::byte* memory_ = nullptr;
  device::Event summed_[PinnedRing::kBuffers] = {};
};

}  // namespace smddp
