// What one reduction of a device computes: the argument of the GPU kernels and of the threads that play a
// GPU. Plain data, as compilers for the host and for CUDA both take it.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace smddp::kernels {

// Peers that one reduction can read: ranks of a host.
inline constexpr size_t kMostSources = 32;

// destination[i] = op over sources, in their order, divided by `divisor` for floating types: see
// reduce() in reduce.h, whose results these are to the bit, NaNs of fp32 and fp64 aside.
struct Reduction {
  void* destination = nullptr;
  const void* sources[kMostSources] = {};  // no std::array: kernels can't call its functions
  size_t sources_count = 0;
  size_t count = 0;
  Dtype dtype = Dtype::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;
  int blocks = 1;  // at most: each takes a multiprocessor
};

}  // namespace smddp::kernels
