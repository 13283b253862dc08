// Vectors of the instruction set that the including source is compiled for, and the conversion of elements
// of each type to and from them. reduce_kernels.inc.h and coding/coding_kernels.inc.h include this. Everything is
// in an unnamed namespace; reduce_kernels.h says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define SMDDP_INLINE [[gnu::always_inline]] inline

namespace smddp::kernels::SMDDP_KERNELS {
namespace {

#if defined(__AVX512BW__)
constexpr size_t kWidth = 64;
#elif defined(__AVX2__)
constexpr size_t kWidth = 32;
#else
constexpr size_t kWidth = 16;
#endif

template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(kWidth)));
};
template <class T>
using V = typename Vector<T>::type;
using Words = V<uint32_t>;
using Floats = V<float>;
// As many 16-bit elements as one Floats has, in half the bytes.
typedef uint16_t Halves __attribute__((vector_size(kWidth / 2)));

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
typedef uint8_t LooseBytes __attribute__((vector_size(kWidth), aligned(1), may_alias));
typedef uint8_t LooseHalf __attribute__((vector_size(kWidth / 2), aligned(1), may_alias));

SMDDP_INLINE Bytes fetch(const char* from) { return *reinterpret_cast<const LooseBytes*>(from); }
SMDDP_INLINE Halves fetch_half(const char* from) {
  return (Halves) * reinterpret_cast<const LooseHalf*>(from);
}
SMDDP_INLINE void put(char* to, Bytes x) { *reinterpret_cast<LooseBytes*>(to) = x; }
SMDDP_INLINE void put_half(char* to, Halves x) { *reinterpret_cast<LooseHalf*>(to) = (LooseHalf)x; }

// Writes past the caches; `to` is a multiple of kWidth.
SMDDP_INLINE void put_streaming(char* to, Bytes x) {
#if defined(__AVX512BW__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)x);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)x);
#else
  put(to, x);
#endif
}
SMDDP_INLINE void end_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Elements of one type, in the type that sums them. A vector of memory becomes kParts vectors.
template <class T>
struct Native {
  using Memory = T;
  using Sum = T;
  static constexpr int kParts = 1;
  struct Wide {
    V<T> part[1];
  };
  SMDDP_INLINE static Wide widen(const char* from) { return {{(V<T>)fetch(from)}}; }
  SMDDP_INLINE static Bytes narrow(const Wide& x) { return (Bytes)x.part[0]; }
};

// A 16-bit element is one half of a 32-bit word. Whole words are read: their lower halves become one vector
// of floats and their upper halves another, so no element changes its lane.
struct BFloat16 {
  using Memory = uint16_t;
  using Sum = float;
  static constexpr int kParts = 2;
  struct Wide {
    Floats part[2];
  };
  // The rounded result is in the upper half of each word; the lower half is undefined. AVX512-BF16 has an
  // instruction for this, but it flushes subnormal numbers to zero and keeps a NaN's payload.
  SMDDP_INLINE static Words round(Floats x) {
    Words bits = (Words)x;
    Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return x != x ? Words{} + 0x7fc00000 : rounded;
  }
  SMDDP_INLINE static Wide widen(const char* from) {
    Words x = (Words)fetch(from);
    return {{(Floats)(x << 16), (Floats)(x & 0xffff0000)}};
  }
  SMDDP_INLINE static Bytes narrow(const Wide& x) {
    return (Bytes)((round(x.part[0]) >> 16) | (round(x.part[1]) & 0xffff0000));
  }
  SMDDP_INLINE static Floats widen_half(const char* from) {
    return (Floats)(__builtin_convertvector(fetch_half(from), Words) << 16);
  }
  SMDDP_INLINE static Halves narrow_half(Floats x) {
    return __builtin_convertvector(round(x) >> 16, Halves);
  }
};

struct Float16 {
  using Memory = uint16_t;
  using Sum = float;
  static constexpr int kParts = 2;
  struct Wide {
    Floats part[2];
  };
#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__F16C__))
  SMDDP_INLINE static Floats widen_half(const char* from) {
#if defined(__AVX512BW__)
    // maskz: GCC 12 reports the undefined vector of the plain form as an uninitialized variable (GCC bug
    // 105593).
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)fetch_half(from));
#else
    return (Floats)_mm256_cvtph_ps((__m128i)fetch_half(from));
#endif
  }
  SMDDP_INLINE static Halves narrow_half(Floats x) {
    x = x != x ? (Floats)(Words{} + 0x7fc00000) : x;
#if defined(__AVX512BW__)
    return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)x,
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  }
  SMDDP_INLINE static Wide widen(const char* from) {
    return {{widen_half(from), widen_half(from + kWidth / 2)}};
  }
  SMDDP_INLINE static Bytes narrow(const Wide& x) {
    Halves low = narrow_half(x.part[0]), high = narrow_half(x.part[1]);
#if defined(__AVX512BW__)
    return (Bytes)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512((__m256i)low),
                                           (__m256i)high, 1);
#else
    return (Bytes)_mm256_set_m128i((__m128i)high, (__m128i)low);
#endif
  }
#else
  // Widens the lower half of each word; the upper half is zero.
  SMDDP_INLINE static Floats widen_low(Words x) {
    Words sign = (x & 0x8000) << 16;
    Words magnitude = x & 0x7fff;
    // With exponent and fraction shifted to their fp32 places, the value is too small by 2^112. The
    // multiplication corrects that, and makes subnormals normal. Infinity and NaN keep the largest exponent.
    Words bits = (Words)((Floats)(magnitude << 13) * 0x1p112f);
    bits |= (Words)(magnitude >= 0x7c00) & 0x7f800000;
    bits |= (Words)(magnitude > 0x7c00) & 0x00400000;
    return (Floats)(bits | sign);
  }
  SMDDP_INLINE static Words narrow_low(Floats x) {
    Words sign = ((Words)x >> 16) & 0x8000;
    Words bits = (Words)x & 0x7fffffff;
    // The result is a subnormal half: adding 0.5 makes the FPU round at the right bit.
    Words tiny = (Words)((Floats)bits + 0.5f) - 0x3f000000;
    Words half = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
    half = bits < 0x38800000 ? tiny : half;
    // From here on, x rounds to more than the largest finite half.
    half = bits >= 0x477ff000 ? Words{} + 0x7c00 : half;
    return x != x ? Words{} + 0x7e00 : (half | sign);
  }
  SMDDP_INLINE static Floats widen_half(const char* from) {
    return widen_low(__builtin_convertvector(fetch_half(from), Words));
  }
  SMDDP_INLINE static Halves narrow_half(Floats x) {
    return __builtin_convertvector(narrow_low(x), Halves);
  }
  SMDDP_INLINE static Wide widen(const char* from) {
    Words x = (Words)fetch(from);
    return {{widen_low(x & 0xffff), widen_low(x >> 16)}};
  }
  SMDDP_INLINE static Bytes narrow(const Wide& x) {
    return (Bytes)(narrow_low(x.part[0]) | (narrow_low(x.part[1]) << 16));
  }
#endif
};

// a: the result so far; x: the next source.
struct Plus {
  template <class A>
  SMDDP_INLINE static A apply(A a, A x) {
    return a + x;
  }
};
struct Times {
  template <class A>
  SMDDP_INLINE static A apply(A a, A x) {
    return a * x;
  }
};
struct Minimum {
  template <class A>
  SMDDP_INLINE static A apply(A a, A x) {
    return (x < a) | (x != x) ? x : a;
  }
};
struct Maximum {
  template <class A>
  SMDDP_INLINE static A apply(A a, A x) {
    return (x > a) | (x != x) ? x : a;
  }
};

}  // namespace
}  // namespace smddp::kernels::SMDDP_KERNELS
