// The kernels for the instruction set that the including source is compiled for, in the namespace that it
// names by SMDDP_KERNELS. Only reduce_<instruction set>.cc includes this. There is no scalar code: less than
// a vector is padded to one.
#pragma once

#ifndef SMDDP_KERNELS
#error "name the namespace of these kernels"
#endif

#include "kernels/reduce_kernels.h"
#include "kernels/reduce_vectors.inc.h"
#include "kernels/reduction.h"

namespace smddp::kernels::SMDDP_KERNELS {
namespace {

constexpr size_t kFloatLanes = kWidth / sizeof(float);

// Multiplication by the inverse of a power of two gives the quotient to the bit, several times as fast as
// division. Integers are not divided.
template <class S>
class Divisor {
 public:
  explicit Divisor(int by) {
    if constexpr (std::is_floating_point_v<S>) {
      if (by <= 1) return;
      kind_ = (by & (by - 1)) == 0 ? kPowerOfTwo : kOther;
      value_ = kind_ == kPowerOfTwo ? 1 / static_cast<S>(by) : static_cast<S>(by);
    }
  }
  template <class Wide>
  SMDDP_INLINE void apply(Wide* x) const {
    if constexpr (std::is_floating_point_v<S>) {
      if (kind_ == kOne) return;
      for (auto& part : x->part) part = kind_ == kPowerOfTwo ? part * value_ : part / value_;
    }
  }

 private:
  enum { kOne, kPowerOfTwo, kOther } kind_ = kOne;
  S value_ = 1;
};

struct Sources {
  const void* const* pointers;
  size_t count;
  SMDDP_INLINE const char* operator[](size_t k) const {
    return static_cast<const char*>(pointers[k]);
  }
};

template <class T, class Op>
struct Reduction {
  using Sum = typename T::Sum;

  // Reduces kVectors vectors of memory from `at` on, of all sources. Several are in flight at once, to
  // hide the latency of one.
  template <int kVectors>
  SMDDP_INLINE static void step(char* to, const Sources& from, size_t at, Divisor<Sum> divisor,
                                bool streaming) {
    typename T::Wide sum[kVectors];
    for (int i = 0; i < kVectors; ++i) sum[i] = T::widen(from[0] + at + i * kWidth);
    for (size_t k = 1; k < from.count; ++k) {
      const char* source = from[k] + at;
      for (int i = 0; i < kVectors; ++i) {
        typename T::Wide x = T::widen(source + i * kWidth);
        for (int p = 0; p < T::kParts; ++p) {
          sum[i].part[p] = Op::apply(sum[i].part[p], x.part[p]);
        }
      }
    }
    for (auto& each : sum) divisor.apply(&each);
    for (int i = 0; i < kVectors; ++i) {
      Bytes result = T::narrow(sum[i]);
      if (streaming) {
        put_streaming(to + at + i * kWidth, result);
      } else {
        put(to + at + i * kWidth, result);
      }
    }
  }

  // Reduces less than a vector.
  static void part(char* to, const Sources& from, size_t at, size_t bytes, Divisor<Sum> divisor) {
    char padded[kWidth] = {};
    auto widen = [&](size_t k) {
      std::memcpy(padded, from[k] + at, bytes);
      return T::widen(padded);
    };
    typename T::Wide sum = widen(0);
    for (size_t k = 1; k < from.count; ++k) {
      typename T::Wide x = widen(k);
      for (int p = 0; p < T::kParts; ++p) sum.part[p] = Op::apply(sum.part[p], x.part[p]);
    }
    divisor.apply(&sum);
    put(padded, T::narrow(sum));
    std::memcpy(to + at, padded, bytes);
  }

  static void run(char* to, const Sources& from, size_t bytes, int by, bool streaming) {
    // At once. Of bf16 2 took up to 1.07 of its time, 8 up to 1.12; fp32 is the same (2026-11-29-constants, AMD EPYC).
    constexpr int kVectors = 4;
    Divisor<Sum> divisor(by);
    size_t at = 0;
    size_t head = -reinterpret_cast<uintptr_t>(to) % kWidth;
    streaming = streaming && head % sizeof(typename T::Memory) == 0 && bytes >= 2 * kWidth;
    if (streaming && head != 0) {
      part(to, from, 0, head, divisor);
      at = head;
    }
    for (; bytes - at >= kVectors * kWidth; at += kVectors * kWidth) {
      step<kVectors>(to, from, at, divisor, streaming);
    }
    for (; bytes - at >= kWidth; at += kWidth) step<1>(to, from, at, divisor, streaming);
    if (at < bytes) part(to, from, at, bytes - at, divisor);
    if (streaming) end_streaming();
  }
};

// Calls f(accumulator, source) for each vector of an accumulator of floats, with the source's half type.
template <class F>
void onto_floats(float* sum, const char* source, size_t count, F&& f) {
  size_t i = 0;
  for (; count - i >= kFloatLanes; i += kFloatLanes) {
    f(reinterpret_cast<char*>(sum + i), source + i * 2);
  }
  if (i == count) return;
  char x[kWidth / 2] = {}, a[kWidth] = {};
  std::memcpy(x, source + i * 2, (count - i) * 2);
  std::memcpy(a, sum + i, (count - i) * sizeof(float));
  f(a, x);
  std::memcpy(sum + i, a, (count - i) * sizeof(float));
}

template <class T>
void store_half(char* to, const float* sum, size_t count) {
  size_t i = 0;
  for (; count - i >= kFloatLanes; i += kFloatLanes) {
    put_half(to + i * 2, T::narrow_half((Floats)fetch(reinterpret_cast<const char*>(sum + i))));
  }
  if (i == count) return;
  char x[kWidth / 2], a[kWidth] = {};
  std::memcpy(a, sum + i, (count - i) * sizeof(float));
  put_half(x, T::narrow_half((Floats)fetch(a)));
  std::memcpy(to + i * 2, x, (count - i) * 2);
}

template <class F>
void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
#define SMDDP_CASE(type, element, name) \
  case Dtype::type:                     \
    return f(element{});
    SMDDP_REDUCED_TYPES(SMDDP_CASE)
#undef SMDDP_CASE
    case Dtype::kBytes:
      return f(Native<uint8_t>{});
  }
}

// Integers wrap: sums and products are computed unsigned, where wrapping is defined.
template <class T>
struct Wrapping {
  using Type = T;
};
template <class I>
  requires std::is_integral_v<I>
struct Wrapping<Native<I>> {
  using Type = Native<std::make_unsigned_t<I>>;
};

template <class T, class F>
void with_op(T, ReduceOp op, F&& f) {
  using Wraps = typename Wrapping<T>::Type;
  switch (op) {
    case ReduceOp::kNone:
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return f(Wraps{}, Plus{});
    case ReduceOp::kProduct:
      return f(Wraps{}, Times{});
    case ReduceOp::kMin:
      return f(T{}, Minimum{});
    case ReduceOp::kMax:
      return f(T{}, Maximum{});
  }
}

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

void reduce(void* destination, const void* const* sources, size_t sources_count, size_t count,
            Dtype dtype, ReduceOp op, int divisor, bool streaming) {
  with_type(dtype, [&](auto type) {
    with_op(type, op, [&](auto kind, auto operation) {
      using T = decltype(kind);
      Reduction<T, decltype(operation)>::run(
          static_cast<char*>(destination), Sources{sources, sources_count},
          count * sizeof(typename T::Memory), divisor, streaming);
    });
  });
}

void load(void* accumulator, const void* source, size_t count, Dtype dtype) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kIsHalf<T>) {
      onto_floats(static_cast<float*>(accumulator), static_cast<const char*>(source), count,
                  [](char* a, const char* x) { put(a, (Bytes)T::widen_half(x)); });
    } else {
      std::memcpy(accumulator, source, count * sizeof(typename T::Memory));
    }
  });
}

void accumulate(void* accumulator, const void* source, size_t count, Dtype dtype, ReduceOp op) {
  with_type(dtype, [&](auto type) {
    with_op(type, op, [&](auto kind, auto operation) {
      using T = decltype(kind);
      using Op = decltype(operation);
      if constexpr (kIsHalf<T>) {
        onto_floats(static_cast<float*>(accumulator), static_cast<const char*>(source), count,
                    [](char* a, const char* x) {
                      put(a, (Bytes)Op::apply((Floats)fetch(a), T::widen_half(x)));
                    });
      } else {
        const void* both[] = {accumulator, source};
        Reduction<T, Op>::run(static_cast<char*>(accumulator), Sources{both, 2},
                              count * sizeof(typename T::Memory), 1, false);
      }
    });
  });
}

void store(void* destination, const void* accumulator, size_t count, Dtype dtype) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kIsHalf<T>) {
      store_half<T>(static_cast<char*>(destination), static_cast<const float*>(accumulator), count);
    } else {
      std::memcpy(destination, accumulator, count * sizeof(typename T::Memory));
    }
  });
}

// `also`: a second destination, or nullptr.
template <bool kStreaming, bool kTwice>
void copy_aligned(char* out, char* also, const char* in, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 4 * kWidth) {
    Bytes x[4];
    for (int i = 0; i < 4; ++i) x[i] = fetch(in + at + i * kWidth);
    for (int i = 0; i < 4; ++i) {
      if constexpr (kStreaming) {
        put_streaming(out + at + i * kWidth, x[i]);
      } else {
        put(out + at + i * kWidth, x[i]);
      }
      if constexpr (kTwice) put(also + at + i * kWidth, x[i]);
    }
  }
}

template <bool kTwice>
void copy_any(char* out, char* also, const char* in, size_t bytes, bool streaming) {
  size_t at = -reinterpret_cast<uintptr_t>(out) % kWidth;
  if (bytes < at) at = bytes;
  std::memcpy(out, in, at);
  if (kTwice) std::memcpy(also, in, at);
  size_t whole = (bytes - at) / (4 * kWidth) * (4 * kWidth);
  if (streaming) {
    copy_aligned<true, kTwice>(out + at, kTwice ? also + at : nullptr, in + at, whole);
    end_streaming();
  } else {
    copy_aligned<false, kTwice>(out + at, kTwice ? also + at : nullptr, in + at, whole);
  }
  at += whole;
  std::memcpy(out + at, in + at, bytes - at);
  if (kTwice) std::memcpy(also + at, in + at, bytes - at);
}

void copy(void* to, const void* from, size_t bytes, bool streaming) {
  copy_any<false>(static_cast<char*>(to), nullptr, static_cast<const char*>(from), bytes,
                  streaming);
}

void copy_twice(void* to, void* also, const void* from, size_t bytes, bool streaming) {
  copy_any<true>(static_cast<char*>(to), static_cast<char*>(also), static_cast<const char*>(from),
                 bytes, streaming);
}

constexpr Kernels kKernels = {reduce, load, accumulate, store, copy, copy_twice};

}  // namespace
}  // namespace smddp::kernels::SMDDP_KERNELS
