#include "collectives/selector.h"

#include <algorithm>

namespace smddp {
namespace {

// Up to two slots of the outbox a copy in and a copy out cost less than the system call.
constexpr size_t kDirectAbove = 64 << 10;
// Partial sums of other nodes wait at the owner until all are in: this bounds that memory.
constexpr size_t kStagingBytes = 16 << 20;
constexpr size_t kSmallestRound = 256 << 10;
// An AllReduce is cut so that one part's gather overlaps the next part's sums.
constexpr size_t kAllReduceRound = 4 << 20;

size_t bound(size_t limit, size_t bucket, int ranks) {
  if (bucket == 0) return limit;
  return std::min(limit, std::max<size_t>(1, bucket / static_cast<size_t>(ranks)));
}

}  // namespace

Plan select(const Query& query, const Shape& shape, const Tuning& tuning) {
  size_t limit = std::max(query.block_bytes, query.element_size);
  bool sums =
      query.collective == Collective::kReduceScatter || query.collective == Collective::kAllReduce;
  if (sums && shape.nodes > 1) {
    limit = std::min(
        limit, std::max(kSmallestRound, kStagingBytes / static_cast<size_t>(shape.nodes - 1)));
  }
  if (query.collective == Collective::kAllReduce) limit = std::min(limit, kAllReduceRound);
  if (query.collective != Collective::kReduceScatter) {
    limit = bound(limit, tuning.allgather_bucket_bytes, shape.ranks);
    limit = bound(limit, tuning.allgather_bucket_elements * query.element_size, shape.ranks);
  }
  if (sums) limit = bound(limit, tuning.reduce_scatter_bucket_bytes, shape.ranks);
  // Whole elements, and whole cache lines where there is more than one.
  size_t grain = limit >= 64 && limit < query.block_bytes ? std::max<size_t>(64, query.element_size)
                                                          : query.element_size;
  return {std::max(query.element_size, limit / grain * grain)};
}

bool read_directly(size_t round_bytes, const Shape& shape) {
  return shape.single_copy && round_bytes > kDirectAbove;
}

}  // namespace smddp
