// What one thread of the reduction kernel computes, in code that compilers for the host and for CUDA both
// accept. device/ makes GPU kernels of it, and calls it for the threads that simulate a GPU. Tests on the
// host compare it with the CPU's sums, to the bit.
//
// Half types are summed in fp32 and rounded once, every other type is summed in itself, in the order of the
// sources. Integers wrap. The result of MIN and MAX is NaN if a source is NaN. Half types have one NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/reduction.h"

// A source for a GPU defines both macros and includes the headers of the half types before it includes this.
#if !defined(SMDDP_BOTH)
#define SMDDP_BOTH inline
#define SMDDP_UNROLL
#endif

namespace smddp::kernels {

struct alignas(16) Lane {
  uint32_t word[4];
};

template <class To, class From>
SMDDP_BOTH To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// --- element types: their form in memory, and the type that sums them -------------------------------

template <class T>
struct Native {
  using Memory = T;
  using Sum = T;
  SMDDP_BOTH static Sum widen(Memory x) { return x; }
  SMDDP_BOTH static Memory narrow(Sum x) { return x; }
};

struct BFloat16 {
  using Memory = uint16_t;
  using Sum = float;
  SMDDP_BOTH static float widen(uint16_t x) {
    return bits_of<float>(static_cast<uint32_t>(x) << 16);
  }
  SMDDP_BOTH static uint16_t narrow(float x) {
    if (x != x) return 0x7fc0;
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    uint32_t bits = bits_of<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
  }
  SMDDP_BOTH static void widen_pair(uint32_t pair, float* to) {
    to[0] = bits_of<float>(pair << 16);
    to[1] = bits_of<float>(pair & 0xffff0000);
  }
#if defined(__CUDA_ARCH__)
  SMDDP_BOTH static uint32_t narrow_pair(float low, float high) {
    return bits_of<uint32_t>(__floats2bfloat162_rn(low, high));
  }
#endif
};

struct Float16 {
  using Memory = uint16_t;
  using Sum = float;
  SMDDP_BOTH static float widen(uint16_t x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x));
#else
    uint32_t magnitude = x & 0x7fffu;
    // With exponent and fraction shifted to their fp32 places, the value is too small by 2^112. The
    // multiplication corrects that, and makes subnormals normal. Infinity and NaN keep the largest exponent.
    uint32_t bits = bits_of<uint32_t>(bits_of<float>(magnitude << 13) * 0x1p112f);
    if (magnitude >= 0x7c00) bits |= 0x7f800000;
    if (magnitude > 0x7c00) bits |= 0x00400000;
    return bits_of<float>(bits | static_cast<uint32_t>(x & 0x8000u) << 16);
#endif
  }
  SMDDP_BOTH static uint16_t narrow(float x) {
    if (x != x) return 0x7e00;
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#else
    uint32_t sign = bits_of<uint32_t>(x) >> 16 & 0x8000;
    uint32_t bits = bits_of<uint32_t>(x) & 0x7fffffff;
    uint32_t half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    // The result is a subnormal half: adding 0.5 makes the FPU round at the right bit.
    if (bits < 0x38800000) half = bits_of<uint32_t>(bits_of<float>(bits) + 0.5f) - 0x3f000000;
    if (bits >= 0x477ff000) half = 0x7c00;  // x rounds to more than the largest finite half
    return static_cast<uint16_t>(half | sign);
#endif
  }
  SMDDP_BOTH static void widen_pair(uint32_t pair, float* to) {
    to[0] = widen(static_cast<uint16_t>(pair));
    to[1] = widen(static_cast<uint16_t>(pair >> 16));
  }
#if defined(__CUDA_ARCH__)
  SMDDP_BOTH static uint32_t narrow_pair(float low, float high) {
    return bits_of<uint32_t>(__floats2half2_rn(low, high));
  }
#endif
};

// The elements of a lane, two at once where the type is a half.
template <class Element>
inline constexpr int kInLane = static_cast<int>(sizeof(Lane) / sizeof(typename Element::Memory));
template <class Element>
inline constexpr bool kIsHalf = !std::is_same_v<typename Element::Memory, typename Element::Sum>;

template <class Element>
SMDDP_BOTH void widen_lane(const Lane& lane, typename Element::Sum (&to)[kInLane<Element>]) {
  if constexpr (kIsHalf<Element>) {
    SMDDP_UNROLL
    for (int w = 0; w < 4; ++w) Element::widen_pair(lane.word[w], to + 2 * w);
  } else {
    memcpy(to, &lane, sizeof lane);
  }
}

template <class Element>
SMDDP_BOTH Lane narrow_lane(const typename Element::Sum (&from)[kInLane<Element>]) {
  Lane lane;
#if defined(__CUDA_ARCH__)
  if constexpr (kIsHalf<Element>) {
    // The conversion of a pair gives a NaN other bits.
    bool numbers = true;
    SMDDP_UNROLL
    for (int e = 0; e < kInLane<Element>; ++e) numbers &= from[e] == from[e];
    if (numbers) {
      SMDDP_UNROLL
      for (int w = 0; w < 4; ++w) lane.word[w] = Element::narrow_pair(from[2 * w], from[2 * w + 1]);
      return lane;
    }
  }
#endif
  typename Element::Memory x[kInLane<Element>];
  SMDDP_UNROLL
  for (int e = 0; e < kInLane<Element>; ++e) x[e] = Element::narrow(from[e]);
  memcpy(&lane, x, sizeof lane);
  return lane;
}

// --- operations -------------------------------------------------------------------------------------

// Sums and products of integers are computed unsigned and no narrower than int, where wrapping is defined.
template <class T, bool kInteger = std::is_integral_v<T>>
struct Wrapping {
  using Type = std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;
};
template <class T>
struct Wrapping<T, false> {
  using Type = T;
};
template <class T>
using Wraps = typename Wrapping<T>::Type;

struct SumOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return static_cast<T>(static_cast<Wraps<T>>(a) + static_cast<Wraps<T>>(x));
  }
};
struct ProductOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return static_cast<T>(static_cast<Wraps<T>>(a) * static_cast<Wraps<T>>(x));
  }
};
struct MinimumOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return x < a || x != x ? x : a;
  }
};
struct MaximumOf {
  template <class T>
  SMDDP_BOTH static T apply(T a, T x) {
    return x > a || x != x ? x : a;
  }
};

// What becomes of a sum: itself, or its quotient. Multiplication by the inverse of a power of two gives the
// quotient to the bit. Integers are not divided.
struct Whole {
  template <class S>
  SMDDP_BOTH S operator()(S sum) const {
    return sum;
  }
};
template <class S>
struct Scaled {
  S by;
  SMDDP_BOTH S operator()(S sum) const { return sum * by; }
};
template <class S>
struct Divided {
  S by;
  SMDDP_BOTH S operator()(S sum) const { return sum / by; }
};

// --- the share of one thread -------------------------------------------------------------------------

SMDDP_BOTH size_t place_in_lane(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Lane);
}

// Which elements are read in lanes of 16 bytes: `lanes` lanes after the first `head` elements. The others, at
// the beginning and at the end, are reduced one by one. Every address is a multiple of the element's size. There
// are lanes if all sources have the same remainder by 16, as equal parts of equal tensors have.
struct Parts {
  size_t head, lanes;
};
SMDDP_BOTH Parts parts_of(const Reduction& r, size_t element_size) {
  size_t first = place_in_lane(r.sources[0]);
  bool alike = true;
  for (size_t k = 1; k < r.sources_count; ++k)
    alike = alike && place_in_lane(r.sources[k]) == first;
  size_t head = alike ? (sizeof(Lane) - first) % sizeof(Lane) / element_size : r.count;
  if (head > r.count) head = r.count;
  return {head, (r.count - head) * element_size / sizeof(Lane)};
}

// Adds up the lanes of the next sources; the first of all sources is taken as it is.
template <class Element, class Op, int kSources>
SMDDP_BOTH void add_lanes(typename Element::Sum (&sum)[kInLane<Element>],
                          const Lane (&lane)[kSources], int sources, bool first) {
  SMDDP_UNROLL
  for (int j = 0; j < kSources; ++j) {
    if (j >= sources) continue;
    typename Element::Sum element[kInLane<Element>];
    widen_lane<Element>(lane[j], element);
    SMDDP_UNROLL
    for (int e = 0; e < kInLane<Element>; ++e)
      sum[e] = first && j == 0 ? element[e] : Op::apply(sum[e], element[e]);
  }
}

template <class Element, class Quotient>
SMDDP_BOTH void write_lane(typename Element::Sum (&sum)[kInLane<Element>], char* to, bool in_lanes,
                           Quotient quotient) {
  SMDDP_UNROLL
  for (int e = 0; e < kInLane<Element>; ++e) sum[e] = quotient(sum[e]);
  Lane lane = narrow_lane<Element>(sum);
  if (in_lanes) {
    *reinterpret_cast<Lane*>(to) = lane;
  } else {
    typename Element::Memory x[kInLane<Element>];
    memcpy(x, &lane, sizeof lane);
    SMDDP_UNROLL
    for (int e = 0; e < kInLane<Element>; ++e)
      reinterpret_cast<typename Element::Memory*>(to)[e] = x[e];
  }
}

SMDDP_BOTH Lane lane_at(const Reduction& r, size_t source, size_t at) {
  return *reinterpret_cast<const Lane*>(static_cast<const char*>(r.sources[source]) + at);
}

// Reduces the elements of kLanes lanes of 16 bytes, `stride` bytes apart, from byte `at` on. The sources have
// aligned lanes there. If the destination has not, its elements are written one by one. All reads of
// kSources sources, which are all there are, are under way together.
template <class Element, class Op, int kSources, int kLanes, class Quotient>
SMDDP_BOTH void reduce_lanes(const Reduction& r, size_t at, size_t stride, Quotient quotient) {
  char* to = static_cast<char*>(r.destination) + at;
  const bool in_lanes = place_in_lane(to) == 0;
  Lane lane[kLanes][kSources];
  SMDDP_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    SMDDP_UNROLL
    for (int j = 0; j < kSources; ++j)
      lane[i][j] = lane_at(r, static_cast<size_t>(j), at + static_cast<size_t>(i) * stride);
  }
  SMDDP_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    typename Element::Sum sum[kInLane<Element>];
    add_lanes<Element, Op>(sum, lane[i], kSources, true);
    write_lane<Element>(sum, to + static_cast<size_t>(i) * stride, in_lanes, quotient);
  }
}

// The same of any number of sources, of which kTogether are read at a time.
template <class Element, class Op, int kTogether, class Quotient>
SMDDP_BOTH void reduce_lane(const Reduction& r, size_t at, Quotient quotient) {
  char* to = static_cast<char*>(r.destination) + at;
  typename Element::Sum sum[kInLane<Element>] = {};
  for (size_t k = 0; k < r.sources_count; k += kTogether) {
    Lane lane[kTogether];
    const size_t left = r.sources_count - k;
    SMDDP_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      if (static_cast<size_t>(j) < left) lane[j] = lane_at(r, k + static_cast<size_t>(j), at);
    }
    add_lanes<Element, Op>(sum, lane, static_cast<int>(left), k == 0);
  }
  write_lane<Element>(sum, to, place_in_lane(to) == 0, quotient);
}

// Reduces element i alone.
template <class Element, class Op, class Quotient>
SMDDP_BOTH void reduce_one(const Reduction& r, size_t i, Quotient quotient) {
  using Memory = typename Element::Memory;
  using Sum = typename Element::Sum;
  Sum sum = Element::widen(static_cast<const Memory*>(r.sources[0])[i]);
  for (size_t k = 1; k < r.sources_count; ++k) {
    sum = Op::apply(sum, Element::widen(static_cast<const Memory*>(r.sources[k])[i]));
  }
  static_cast<Memory*>(r.destination)[i] = Element::narrow(quotient(sum));
}

// Reduces the share of thread `thread` of `threads`: of kSources sources kLanes lanes at a time, or (0) of any number
// of sources one.
template <class Element, class Op, int kSources, int kLanes, class Quotient>
SMDDP_BOTH void reduce_share_of(const Reduction& r, size_t thread, size_t threads,
                                Quotient quotient) {
  constexpr size_t kSize = sizeof(typename Element::Memory);
  const auto [head, lanes] = parts_of(r, kSize);
  for (size_t i = thread; i < head; i += threads) reduce_one<Element, Op>(r, i, quotient);
  size_t lane = thread;
  if constexpr (kSources > 0) {
    for (; lane + (kLanes - 1) * threads < lanes; lane += kLanes * threads) {
      reduce_lanes<Element, Op, kSources, kLanes>(r, head * kSize + lane * sizeof(Lane),
                                                  threads * sizeof(Lane), quotient);
    }
  }
  for (; lane < lanes; lane += threads)
    reduce_lane<Element, Op, 4>(r, head * kSize + lane * sizeof(Lane), quotient);
  for (size_t i = head + lanes * sizeof(Lane) / kSize + thread; i < r.count; i += threads) {
    reduce_one<Element, Op>(r, i, quotient);
  }
}

// For sums in fp32 of as many ranks as hosts have, the number of sources is known to the compiler. That, and pairs in
// place of single halves, doubles the rate of bf16; with as many lanes as here it is highest, of those that the
// registers of 1,024 threads hold (benchmarks/results/2026-11-27-gpu-h200).
template <class Element, class Op, class Quotient>
SMDDP_BOTH void reduce_share_by(const Reduction& r, size_t thread, size_t threads,
                                Quotient quotient) {
  if constexpr (std::is_same_v<typename Element::Sum, float> && std::is_same_v<Op, SumOf>) {
    if (r.sources_count == 2)
      return reduce_share_of<Element, Op, 2, 4>(r, thread, threads, quotient);
    if (r.sources_count == 4)
      return reduce_share_of<Element, Op, 4, 2>(r, thread, threads, quotient);
    if (r.sources_count == 8)
      return reduce_share_of<Element, Op, 8, 2>(r, thread, threads, quotient);
  }
  reduce_share_of<Element, Op, 0, 1>(r, thread, threads, quotient);
}

template <class Element, class Op>
SMDDP_BOTH void reduce_share_as(const Reduction& r, size_t thread, size_t threads) {
  using Sum = typename Element::Sum;
  if constexpr (std::is_floating_point_v<Sum> && std::is_same_v<Op, SumOf>) {
    const auto by = static_cast<Sum>(r.divisor);
    if (r.divisor > 1 && (r.divisor & (r.divisor - 1)) == 0)
      return reduce_share_by<Element, Op>(r, thread, threads, Scaled<Sum>{1 / by});
    if (r.divisor > 1) return reduce_share_by<Element, Op>(r, thread, threads, Divided<Sum>{by});
  }
  reduce_share_by<Element, Op>(r, thread, threads, Whole{});
}

// The operations, with their part of a kernel's name: smddp_reduce_<type>_<operation>.
#define SMDDP_REDUCING_OPS(X, type, element, name) \
  X(type, element, name, SumOf, sum)               \
  X(type, element, name, ProductOf, product)       \
  X(type, element, name, MinimumOf, min)           \
  X(type, element, name, MaximumOf, max)

#if !defined(__CUDACC__)
inline void reduce_share(const Reduction& r, size_t thread, size_t threads) {
  auto as = [&](auto element) {
    using Element = decltype(element);
    switch (r.op) {
      case ReduceOp::kNone:
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        return reduce_share_as<Element, SumOf>(r, thread, threads);
      case ReduceOp::kProduct:
        return reduce_share_as<Element, ProductOf>(r, thread, threads);
      case ReduceOp::kMin:
        return reduce_share_as<Element, MinimumOf>(r, thread, threads);
      case ReduceOp::kMax:
        return reduce_share_as<Element, MaximumOf>(r, thread, threads);
    }
  };
  switch (r.dtype) {
#define SMDDP_CASE(type, element, name) \
  case Dtype::type:                     \
    return as(element{});
    SMDDP_REDUCED_TYPES(SMDDP_CASE)
#undef SMDDP_CASE
    case Dtype::kBytes:
      return as(Native<uint8_t>{});
  }
}
#endif

}  // namespace smddp::kernels
