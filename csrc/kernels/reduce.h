// Sums and copies on the CPU, in the best instruction set of the processor. It must not know ranks, blocks
// or operations of a group, only addresses and element types. Collectives and the copy paths inside a host
// call it.
//
// Half types are accumulated in fp32, every other type in itself. Results are the same, to the bit, with
// every instruction set, and by reduce() or in steps. Half types have one NaN, 0x7fc0 or 0x7e00. Which one
// of several NaNs is the result of an fp32 or fp64 sum is not defined.
#pragma once

#include <cstddef>
#include <string>

#include "common/types.h"

namespace smddp::kernels {

// The type that `dtype` is accumulated in.
Dtype accumulator_of(Dtype dtype);

// destination[i] = op(... op(op(sources[0][i], sources[1][i]), sources[2][i]) ...), in this order,
// divided by `divisor` if that is more than 1 and the accumulator's type is floating, then rounded to
// nearest even. The result of MIN and MAX is NaN if a source is NaN. kAvg is a sum; the caller gives the
// divisor. There is at least one source. Each is read once, and no accumulator is kept in memory. Nothing
// need be aligned. The destination may be one of the sources, but must not overlap one otherwise.
//
// `streaming` writes past the caches, if `destination` is aligned to its elements. It is for results that
// are together larger than the caches and not read again soon. After the return, other cores see the
// streamed stores in the order of the program, like ordinary stores.
void reduce(void* destination, const void* const* sources, size_t sources_count, size_t count,
            Dtype dtype, ReduceOp op, int divisor, bool streaming = false);

// The same in steps: accumulator[i] = source[i]; accumulator[i] = op(accumulator[i], source[i]);
// destination[i] = accumulator[i], rounded to nearest even. `source` and `destination` need not be
// aligned; `accumulator` holds accumulator_of(dtype).
void load(void* accumulator, const void* source, size_t count, Dtype dtype);
void accumulate(void* accumulator, const void* source, size_t count, Dtype dtype, ReduceOp op);
void store(void* destination, const void* accumulator, size_t count, Dtype dtype);
// Divides a floating accumulator: the last step of kAvg.
void divide(void* accumulator, size_t count, Dtype accumulator_type, int divisor);

// memcpy, with `streaming` as in reduce(). Only on Intel's processors it uses `rep movsb`, which glibc's memcpy uses for
// long copies. On others (Zen 3 and 4) that is several times slower if the low 12 bits of the two addresses are close
// together, as they are in pages of shared segments.
void copy(void* to, const void* from, size_t bytes, bool streaming);
// The same to two places, with one read. `streaming` applies to the first.
void copy_twice(void* to, void* also, const void* from, size_t bytes, bool streaming);

// The instruction set of all functions above: the processor's best, unless set_isa() chose another.
// kBaseline is what the compiler assumes of every processor (SSE2, NEON).
enum class Isa : uint8_t { kBaseline, kAvx2, kAvx512 };

bool has(Isa isa);
Isa isa();
// For tests and benchmarks. Returns false, and changes nothing, without has(isa).
bool set_isa(Isa isa);
std::string isa_name();
const char* name_of(Isa isa);

}  // namespace smddp::kernels
