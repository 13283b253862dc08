#include "gpu/device_exchange.h"

#include <algorithm>

#include "common/align.h"

namespace smddp {
namespace {

// Bytes of a chunk, with the parts of all ranks. With three chunks, one copy out, one copy in and the start
// of a collective are hidden behind the transfer. Not measured.
constexpr size_t kChunkBytes = 4 << 20;
// The least bytes of one rank in a chunk, as with many ranks the parts would be smaller: a message costs
// more than these bytes. Not measured.
constexpr size_t kLeastSlot = 64 << 10;
// Slots begin at cache lines and hold whole elements.
constexpr size_t kGrain = 256;

size_t slot_of(size_t block_bytes, int ranks) {
  size_t most = std::max(kLeastSlot, kChunkBytes / static_cast<size_t>(ranks) / kGrain * kGrain);
  return std::min(most, align_up(block_bytes, kGrain));
}

}  // namespace

kernels::Reduction DeviceExchange::reduction() const {
  kernels::Reduction how;
  how.dtype = dtype;
  how.op = reduce_op;
  how.divisor = reduce_op == ReduceOp::kAvg ? divisor : 1;
  how.blocks = thread_blocks;
  return how;
}

ChunkLayout::ChunkLayout(const DeviceExchange& exchange, Rank me, int ranks)
    : sums_(exchange.sums_on_device),
      gathers_(exchange.collective == Collective::kAllGather),
      scatters_(exchange.collective == Collective::kReduceScatter),
      me_(me),
      ranks_(ranks),
      block_bytes_(std::max(exchange.out.largest(), exchange.in.largest())),
      slot_bytes_(slot_of(block_bytes_, ranks)) {}

size_t ChunkLayout::buffer_bytes() const {
  return slot_bytes_ * static_cast<size_t>(sums_ ? 2 * (ranks_ - 1) : ranks_);
}

std::vector<ChunkTurn> turns_of(const std::vector<ChunkLayout>& layouts, size_t behind) {
  std::vector<ChunkTurn> turns;
  bool more = true;
  for (size_t step = 0; more; ++step) {
    more = false;
    for (size_t i = 0; i < layouts.size(); ++i) {
      size_t slot = layouts[i].slot_bytes(), before = i * behind;
      if (step * slot >= layouts[i].block_bytes() + before * slot) continue;
      more = true;
      if (step >= before) turns.push_back({i, (step - before) * slot});
    }
  }
  return turns;
}

}  // namespace smddp
