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

// The types that are summed, by X(Dtype, what reads and writes elements, its part of a kernel's name). The sources of
// kernels define Native<T>, BFloat16 and Float16.
#define SMDDP_REDUCED_TYPES(X)      \
  X(kFloat32, Native<float>, f32)   \
  X(kFloat64, Native<double>, f64)  \
  X(kBFloat16, BFloat16, bf16)      \
  X(kFloat16, Float16, f16)         \
  X(kInt8, Native<int8_t>, i8)      \
  X(kUInt8, Native<uint8_t>, u8)    \
  X(kInt16, Native<int16_t>, i16)   \
  X(kUInt16, Native<uint16_t>, u16) \
  X(kInt32, Native<int32_t>, i32)   \
  X(kUInt32, Native<uint32_t>, u32) \
  X(kInt64, Native<int64_t>, i64)   \
  X(kUInt64, Native<uint64_t>, u64)

}  // namespace smddp::kernels
