// The memory of a pipeline's chunks: rings of buffers in pinned host memory, rings on the device for NICs that read
// and write there, and memory on the device for blocks that the device sums. It grows with the largest exchange; older
// rings stay for the chunks that use them. PinnedPipeline makes it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gpu/pinned_ring.h"
#include "gpu/received_blocks.h"
#include "group/group.h"

namespace smddp {

// The device as the fabric must know it to register its memory.
transport::MemoryOwner owner_of(const device::Device& device);

class ChunkBuffers {
 public:
  ChunkBuffers(Process& process, device::Device& device) : process_(process), device_(device) {}
  // Takes the memory back from the network. No collective uses it any more.
  ~ChunkBuffers();

  // Makes room for buffers of so many bytes, and, unless it is 0, for so many bytes of received blocks. May wait for the
  // device.
  Status reserve(size_t buffer_bytes, bool on_device, size_t received_bytes);
  // The newest, after reserve().
  std::shared_ptr<PinnedRing> ring(bool on_device);
  const ReceivedBlocks& received();
  // Lets all streams go on that wait for chunks which were copied out.
  void release();

 private:
  Status reserve_ring(size_t bytes, bool on_device);
  Status reserve_received(size_t bytes);

  Process& process_;
  device::Device& device_;
  std::mutex mutex_;  // not held while the device is called
  // In host memory [0] and on the device [1]. The last ring is in use; each is twice as large as the one
  // before.
  std::vector<std::shared_ptr<PinnedRing>> rings_[2];
  std::vector<std::unique_ptr<ReceivedBlocks>> received_;  // as the rings
};

}  // namespace smddp
