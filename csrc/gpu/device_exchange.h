// A collective of the CPU on memory of a device: what it is, how it is cut into chunks, and how it ended. Pure data
// and index arithmetic: it calls no device. Filled by device_plan.h, carried out by PinnedPipeline.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/operation.h"
#include "common/exceptions.h"
#include "common/status.h"
#include "common/types.h"
#include "device/device.h"

namespace smddp {

// AllGather: `out` is one block, `in` has one block per rank, and this rank's own block of `in` is not written.
// ReduceScatter: the other way round. AllReduce: both have one block per rank, of sizes that differ by a few elements
// at most. Sizes are equal on all ranks.
// An exchange that is a part of a collective says so in its options.
struct DeviceExchange : OperationTerms {
  // A ReduceScatter whose sums the device does, by a kernel of at most `thread_blocks`. `in` has the extents'
  // sizes of this rank's block of `out`.
  bool sums_on_device = false;
  int thread_blocks = 1;
  Tuning tuning;
  Blocks out, in;
  // Where the parts of a block end that are filled and announced one by one, but for the last part, which ends
  // with the block. Increasing.
  std::vector<size_t> part_ends;
  // Inside the device, before all chunks that are copied in.
  std::vector<device::Device::Copy> copies;

  kernels::Reduction reduction() const;  // without sources
};

// How a rank of `ranks` cuts an exchange into chunks, each of which has some bytes of each rank's block: which slot
// of a chunk's buffer holds a rank's block before the chunk's collective, and which after it. Collectives of the CPU
// work in place. What another rank sends cannot overwrite what goes to it, so blocks that the device sums have slots
// of their own: first those that the other ranks get, then what they send.
class ChunkLayout {
 public:
  ChunkLayout(const DeviceExchange& exchange, Rank me, int ranks);

  // Bytes of each rank's block that one chunk carries; equal on all ranks.
  size_t slot_bytes() const { return slot_bytes_; }
  size_t block_bytes() const { return block_bytes_; }  // of the largest block
  size_t buffer_bytes() const;                         // of all slots
  size_t before(Rank r) const { return static_cast<size_t>(sums_ && r > me_ ? r - 1 : r); }
  size_t after(Rank r) const { return before(r) + static_cast<size_t>(sums_ ? ranks_ - 1 : 0); }
  // Whether the rank's block is copied out of the device, and in from the buffer to its place.
  bool goes_out(Rank r) const { return gathers_ ? r == me_ : !sums_ || r != me_; }
  bool comes_in(Rank r) const { return !sums_ && (gathers_ ? r != me_ : !scatters_ || r == me_); }
  // The block of the exchange that goes into the rank's slot, and that comes out of it.
  Rank out_block(Rank r) const { return gathers_ ? 0 : r; }
  Rank in_block(Rank r) const { return scatters_ ? 0 : r; }
  // Whether the chunk's collective has a block of this rank as input, and as output; it may have no bytes.
  bool is_input(Rank r) const { return !gathers_ || r == me_; }
  bool is_output(Rank r) const { return sums_ || !scatters_ || r == me_; }

 private:
  const bool sums_, gathers_, scatters_;
  const Rank me_;
  const int ranks_;
  const size_t block_bytes_, slot_bytes_;
};

// A chunk in the order in which all ranks submit them: of which exchange, and where in its blocks it begins.
struct ChunkTurn {
  size_t exchange, begin;
};
// The chunks of the exchanges with these layouts. Those of a second one follow `behind` after those of the first.
std::vector<ChunkTurn> turns_of(const std::vector<ChunkLayout>& layouts, size_t behind);

// The first failure of an exchange, and what it sent to other hosts. Both are known before any stream goes on.
class ExchangeOutcome {
 public:
  // Is told a reason; must neither block nor call the device.
  using Told = std::function<void(const std::string&)>;

  Status get() const {
    std::lock_guard lock(mutex_);
    return copy_of(status_);
  }
  void fail(const Status& why) {
    std::lock_guard lock(mutex_);
    if (!status_) return;
    status_ = copy_of(why);
    if (told_) told_(status_.message());
  }
  void count(const SentBytes& more) {
    std::lock_guard lock(mutex_);
    sent_ += more;
  }
  // Of the chunks that are complete.
  SentBytes sent() const {
    std::lock_guard lock(mutex_);
    return sent_;
  }
  void tell(Told whom) {
    std::lock_guard lock(mutex_);
    told_ = std::move(whom);
  }

  std::atomic<int> under_way{0};  // collectives of the CPU

 private:
  mutable std::mutex mutex_;
  Status status_;
  SentBytes sent_;
  Told told_;
};

}  // namespace smddp
