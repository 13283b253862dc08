// One reduction on a device: the argument of the GPU kernels and of the threads that simulate a GPU. Plain
// data that compilers for the host and for CUDA both accept. intranode/ fills it, device/ launches it.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace smddp::kernels {

// The most sources that one reduction can read: one per rank of a host, or one per host. A kernel's arguments
// may take 4 KiB.
inline constexpr size_t kMostSources = 128;

// destination[i] = op over sources, in their order, divided by `divisor` for floating types. The results
// are those of reduce() in reduce.h, to the bit, except for NaNs of fp32 and fp64.
struct Reduction {
  void* destination = nullptr;
  const void* sources[kMostSources] = {};  // no std::array: kernels can't call its functions
  size_t sources_count = 0;
  size_t count = 0;
  Dtype dtype = Dtype::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;
  int blocks = 1;  // at most; each occupies a multiprocessor
};

}  // namespace smddp::kernels
