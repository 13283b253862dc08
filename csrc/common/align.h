// Sizes and offsets in multiples of a page, a cache line or another unit.
#pragma once

#include <cstddef>

namespace smddp {

inline constexpr size_t kPage = 4096;

// The lowest multiple of `unit` that is not below `n`.
constexpr size_t align_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace smddp
