// Sums on the CPU. Half types are accumulated in fp32, every other type in itself.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace smddp::device {

// The type that `dtype` is accumulated in.
Dtype accumulator_of(Dtype dtype);

// accumulator[i] = source[i]; accumulator[i] = op(accumulator[i], source[i]); destination[i] =
// accumulator[i], rounded to nearest even. kAvg accumulates as a sum. MIN and MAX hand a NaN on.
// `source` and `destination` need not be aligned; `accumulator` holds accumulator_of(dtype).
void load(void* accumulator, const void* source, size_t count, Dtype dtype);
void accumulate(void* accumulator, const void* source, size_t count, Dtype dtype, ReduceOp op);
void store(void* destination, const void* accumulator, size_t count, Dtype dtype);
// Divides a floating accumulator: the last step of kAvg.
void divide(void* accumulator, size_t count, Dtype accumulator_type, int divisor);

}  // namespace smddp::device
