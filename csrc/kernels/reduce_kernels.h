// The table of functions that each instruction set's source exports; reduce.cc chooses one. It contains
// nothing that emits code: a source compiled for more than the baseline must not share an inline function
// with other sources, because the linker might keep that source's copy of it for all.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace smddp::kernels {

struct Kernels {
  // The functions of reduce.h, with a divisor of at least 1.
  void (*reduce)(void* destination, const void* const* sources, size_t sources_count, size_t count,
                 Dtype dtype, ReduceOp op, int divisor, bool streaming);
  void (*load)(void* accumulator, const void* source, size_t count, Dtype dtype);
  void (*accumulate)(void* accumulator, const void* source, size_t count, Dtype dtype, ReduceOp op);
  void (*store)(void* destination, const void* accumulator, size_t count, Dtype dtype);
  void (*copy)(void* to, const void* from, size_t bytes, bool streaming);
  void (*copy_twice)(void* to, void* also, const void* from, size_t bytes, bool streaming);
};

// nullptr if the compiler of this build cannot make them.
const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace smddp::kernels
