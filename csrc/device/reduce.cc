#include "device/reduce.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace smddp::device {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

float widen(Float16 x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  uint32_t magnitude = x.bits & 0x7fff;
  // Exponent and fraction moved to their fp32 places are 2^-112 too small; the multiplication also
  // makes subnormals normal. Infinity and NaN keep the largest exponent.
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  uint32_t bits = std::bit_cast<uint32_t>(value) | (magnitude >= 0x7c00 ? 0x7f800000u : 0u);
  return std::bit_cast<float>(bits | sign);
}

template <class T>
T widen(T x) {
  return x;
}

void narrow(float x, BFloat16* out) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

void narrow(float x, Float16* out) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  uint32_t half;
  if (bits > 0x7f800000) {
    half = 0x7e00;
  } else if (bits >= 0x477ff000) {  // rounds to beyond the largest finite half
    half = 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: adding 0.5 lets the FPU round at the right place
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000;
  } else {
    half = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(half | sign);
}

template <class T>
void narrow(T x, T* out) {
  *out = x;
}

template <class T>
T read(const void* source, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(source) + i * sizeof(T), sizeof(T));
  return value;
}

template <class A>
A least(A a, A b) {
  return a < b || a != a ? a : b;
}
template <class A>
A most(A a, A b) {
  return a > b || a != a ? a : b;
}
// Integers wrap: done unsigned, where wrapping is defined.
template <class A>
A plus(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}
template <class A>
A times(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <class T, class A>
struct Kernel {
  static void load(void* acc, const void* source, size_t count) {
    auto* a = static_cast<A*>(acc);
    for (size_t i = 0; i < count; ++i) a[i] = widen(read<T>(source, i));
  }
  static void accumulate(void* acc, const void* source, size_t count, ReduceOp op) {
    auto* a = static_cast<A*>(acc);
    switch (op) {
      case ReduceOp::kNone:
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        for (size_t i = 0; i < count; ++i) a[i] = plus<A>(a[i], widen(read<T>(source, i)));
        return;
      case ReduceOp::kMin:
        for (size_t i = 0; i < count; ++i) a[i] = least<A>(widen(read<T>(source, i)), a[i]);
        return;
      case ReduceOp::kMax:
        for (size_t i = 0; i < count; ++i) a[i] = most<A>(widen(read<T>(source, i)), a[i]);
        return;
      case ReduceOp::kProduct:
        for (size_t i = 0; i < count; ++i) a[i] = times<A>(a[i], widen(read<T>(source, i)));
        return;
    }
  }
  static void store(void* destination, const void* acc, size_t count) {
    const auto* a = static_cast<const A*>(acc);
    for (size_t i = 0; i < count; ++i) {
      T value;
      narrow(a[i], &value);
      std::memcpy(static_cast<char*>(destination) + i * sizeof(T), &value, sizeof(T));
    }
  }
};

template <class F>
void dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(Kernel<float, float>{});
    case Dtype::kFloat64:
      return f(Kernel<double, double>{});
    case Dtype::kBFloat16:
      return f(Kernel<BFloat16, float>{});
    case Dtype::kFloat16:
      return f(Kernel<Float16, float>{});
    case Dtype::kInt8:
      return f(Kernel<int8_t, int8_t>{});
    case Dtype::kBytes:
    case Dtype::kUInt8:
      return f(Kernel<uint8_t, uint8_t>{});
    case Dtype::kInt16:
      return f(Kernel<int16_t, int16_t>{});
    case Dtype::kUInt16:
      return f(Kernel<uint16_t, uint16_t>{});
    case Dtype::kInt32:
      return f(Kernel<int32_t, int32_t>{});
    case Dtype::kUInt32:
      return f(Kernel<uint32_t, uint32_t>{});
    case Dtype::kInt64:
      return f(Kernel<int64_t, int64_t>{});
    case Dtype::kUInt64:
      return f(Kernel<uint64_t, uint64_t>{});
  }
}

}  // namespace

Dtype accumulator_of(Dtype dtype) {
  return dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16 ? Dtype::kFloat32 : dtype;
}

void load(void* accumulator, const void* source, size_t count, Dtype dtype) {
  dispatch(dtype, [&](auto kernel) { kernel.load(accumulator, source, count); });
}

void accumulate(void* accumulator, const void* source, size_t count, Dtype dtype, ReduceOp op) {
  dispatch(dtype, [&](auto kernel) { kernel.accumulate(accumulator, source, count, op); });
}

void store(void* destination, const void* accumulator, size_t count, Dtype dtype) {
  dispatch(dtype, [&](auto kernel) { kernel.store(destination, accumulator, count); });
}

void divide(void* accumulator, size_t count, Dtype accumulator_type, int divisor) {
  if (accumulator_type == Dtype::kFloat32) {
    auto* a = static_cast<float*>(accumulator);
    for (size_t i = 0; i < count; ++i) a[i] /= static_cast<float>(divisor);
  } else if (accumulator_type == Dtype::kFloat64) {
    auto* a = static_cast<double*>(accumulator);
    for (size_t i = 0; i < count; ++i) a[i] /= static_cast<double>(divisor);
  }
}

}  // namespace smddp::device
