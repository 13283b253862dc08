// The coder for the instruction set that the including source is compiled for, in the namespace that it names
// by SMDDP_KERNELS. Only coding_<instruction set>.cc includes this. coding_kernels.h has the form of a group.
#pragma once

#ifndef SMDDP_KERNELS
#error "name the namespace of these kernels"
#endif

#include <cstring>
#include <utility>

#include "coding/coding_kernels.h"
#include "kernels/reduce_vectors.inc.h"

namespace smddp::coding::SMDDP_KERNELS {
namespace {

using namespace kernels::SMDDP_KERNELS;

using Pairs = V<uint16_t>;

SMDDP_INLINE Bytes all(unsigned byte) { return Bytes{} + static_cast<uint8_t>(byte); }

// Moves bits of each byte up by kBy, or down by -kBy; those that come from the neighbours are undefined.
template <int kBy>
SMDDP_INLINE Bytes moved(Bytes x) {
  if constexpr (kBy >= 0) return (Bytes)((Pairs)x << kBy);
  if constexpr (kBy < 0) return (Bytes)((Pairs)x >> -kBy);
}

// Bit i is set if byte i is not zero.
SMDDP_INLINE uint64_t not_zero(Bytes x) {
#if defined(__AVX512BW__)
  return _mm512_test_epi8_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(~_mm256_movemask_epi8((__m256i)(x == 0)));
#elif defined(__SSE2__)
  return static_cast<uint16_t>(~_mm_movemask_epi8((__m128i)(x == 0)));
#else
  V<uint64_t> bits = (V<uint64_t>)((Bytes)(x != 0)) & 0x8040201008040201;
  uint64_t mask = 0;
  for (size_t i = 0; i < kWidth / 8; ++i) mask |= bits[i] * 0x0101010101010101 >> 56 << 8 * i;
  return mask;
#endif
}

SMDDP_INLINE uint16_t load16(const char* from) {
  uint16_t x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
SMDDP_INLINE void store16(char* to, unsigned x) {
  uint16_t narrow = static_cast<uint16_t>(x);
  std::memcpy(to, &narrow, sizeof narrow);
}

// Elements of kSize bytes. A row's column is a vector of upper bytes; the other bytes of its elements are the
// rest. `row` is the row's first element.
template <size_t kSize>
struct Elements;

template <>
struct Elements<2> {
  static constexpr size_t kRest = kGroup;
  SMDDP_INLINE static size_t element_of(size_t t) {
    return (t / kRow * kRow) + (t % 2 * (kRow / 2)) + (t % kRow / 2);
  }
  SMDDP_INLINE static Bytes split(const char* row, size_t at, char* rest, size_t i) {
    return split((Pairs)fetch(row + at), (Pairs)fetch(row + kRow + at), rest + i * kRow + at);
  }
  SMDDP_INLINE static void join(char* row, size_t at, const char* rest, size_t i, Bytes top) {
    Pairs a, b;
    join(rest + i * kRow + at, top, &a, &b);
    put(row + at, (Bytes)a);
    put(row + kRow + at, (Bytes)b);
  }
  // The lower and the upper bytes of two vectors.
  SMDDP_INLINE static Bytes split(Pairs a, Pairs b, char* lower) {
    put(lower, (Bytes)((a & 0xff) | (b << 8)));
    return (Bytes)((a >> 8) | (b & 0xff00));
  }
  SMDDP_INLINE static void join(const char* lower, Bytes top, Pairs* a, Pairs* b) {
    Pairs low = (Pairs)fetch(lower), high = (Pairs)top;
    *a = (low & 0xff) | (high << 8);
    *b = (low >> 8) | (high & 0xff00);
  }
};

template <>
struct Elements<4> {
  static constexpr size_t kRest = 3 * kGroup;
  SMDDP_INLINE static size_t element_of(size_t t) {
    return (t / kRow * kRow) + (t % 2 * 2 + t / 2 % 2) * (kRow / 4) + (t % kRow / 4);
  }
  SMDDP_INLINE static Bytes split(const char* row, size_t at, char* rest, size_t i) {
    Words x[4];
    for (size_t k = 0; k < 4; ++k) x[k] = (Words)fetch(row + k * kRow + at);
    char* lower = rest + i * 2 * kRow + at;
    Pairs upper[2];
    for (size_t k = 0; k < 2; ++k) {
      put(lower + k * kRow, (Bytes)((x[2 * k] & 0xffff) | (x[2 * k + 1] << 16)));
      upper[k] = (Pairs)((x[2 * k] >> 16) | (x[2 * k + 1] & 0xffff0000));
    }
    return Elements<2>::split(upper[0], upper[1], rest + 2 * kGroup + i * kRow + at);
  }
  SMDDP_INLINE static void join(char* row, size_t at, const char* rest, size_t i, Bytes top) {
    Pairs upper[2];
    Elements<2>::join(rest + 2 * kGroup + i * kRow + at, top, &upper[0], &upper[1]);
    const char* lower = rest + i * 2 * kRow + at;
    for (size_t k = 0; k < 2; ++k) {
      Words low = (Words)fetch(lower + k * kRow), high = (Words)upper[k];
      put(row + 2 * k * kRow + at, (Bytes)((low & 0xffff) | (high << 16)));
      put(row + (2 * k + 1) * kRow + at, (Bytes)((low >> 16) | (high & 0xffff0000)));
    }
  }
};

// Bits kFrom .. kFrom + kBits - 1 of a column's bytes, of all rows, in kBits vectors; kBits divides 8, and may
// be 0.
template <int kFrom, int kBits>
struct Field {
  static constexpr unsigned kMask = ((1u << kBits) - 1) << kFrom;
  Bytes planes[kBits]{};

  template <int kRowIndex>
  SMDDP_INLINE void take(Bytes x) {
    constexpr int kBit = kRowIndex * kBits;
    planes[kBit / 8] |= moved<kBit % 8 - kFrom>(x & all(kMask));
  }
  template <int kRowIndex>
  SMDDP_INLINE Bytes give() const {
    constexpr int kBit = kRowIndex * kBits;
    return moved<kFrom - kBit % 8>(planes[kBit / 8]) & all(kMask);
  }
  SMDDP_INLINE char* store(char* to) const {
    for (int i = 0; i < kBits; ++i) put(to + static_cast<size_t>(i) * kPlane, planes[i]);
    return to + kBits * kPlane;
  }
  SMDDP_INLINE const char* load(const char* from) {
    for (int i = 0; i < kBits; ++i) planes[i] = fetch(from + static_cast<size_t>(i) * kPlane);
    return from + kBits * kPlane;
  }
};
template <int kFrom>
struct Field<kFrom, 0> {
  template <int kRowIndex>
  SMDDP_INLINE void take(Bytes) {}
  template <int kRowIndex>
  SMDDP_INLINE Bytes give() const {
    return Bytes{};
  }
  SMDDP_INLINE char* store(char* to) const { return to; }
  SMDDP_INLINE const char* load(const char* from) { return from; }
};

// Writes the numbers of the bits that are set, and up to two more values. How many bits are set.
SMDDP_INLINE size_t places_of(const uint64_t (&bits)[kRows], uint16_t* places) {
  size_t count = 0;
  for (size_t i = 0; i < kRows; ++i) {
    uint64_t left = bits[i];
    size_t set = static_cast<size_t>(__builtin_popcountll(left));
    // Most rows have at most two: without a branch that depends on their number.
    for (size_t k = 0; k < 2 || k < set; ++k, left &= left - 1)
      places[count + k] =
          static_cast<uint16_t>(i * kRow + static_cast<size_t>(__builtin_ctzll(left | 1ull << 63)));
    count += set;
  }
  return count;
}

template <size_t kSize, int kBits>
struct Group {
  using Type = Elements<kSize>;
  // What a group takes without its far elements, and where the rest begins.
  static constexpr size_t kRestAt = kCount + (1 + kBits) * kPlane;
  static constexpr size_t kFixed = kRestAt + Type::kRest;
  static constexpr unsigned kDistances = 1u << kBits;

  // The planes of one column.
  struct Planes {
    Field<7, 1> sign;
    Field<0, kBits & 4> four;
    Field<kBits & 4, kBits & 2> two;
    Field<kBits & 6, kBits & 1> one;

    SMDDP_INLINE void store(char* to) const { one.store(two.store(four.store(sign.store(to)))); }
    SMDDP_INLINE void load(const char* from) { one.load(two.load(four.load(sign.load(from)))); }
  };

  template <int kRowIndex>
  SMDDP_INLINE static void encode_row(Planes& planes, const char* from, char* rest, size_t at,
                                      Bytes base, uint64_t* far) {
    Bytes top = Type::split(from + kRowIndex * kRow * kSize, at, rest, kRowIndex);
    Bytes distance = (top & all(0x7f)) - base;
    planes.sign.template take<kRowIndex>(top);
    planes.four.template take<kRowIndex>(distance);
    planes.two.template take<kRowIndex>(distance);
    planes.one.template take<kRowIndex>(distance);
    far[kRowIndex] |= not_zero(distance & all(0x100 - kDistances)) << at;
  }

  template <int kRowIndex>
  SMDDP_INLINE static void decode_row(const Planes& planes, char* to, const char* rest, size_t at,
                                      Bytes base) {
    Bytes distance = planes.four.template give<kRowIndex>() |
                     planes.two.template give<kRowIndex>() | planes.one.template give<kRowIndex>();
    Bytes top = (base + distance) | planes.sign.template give<kRowIndex>();
    Type::join(to + kRowIndex * kRow * kSize, at, rest, kRowIndex, top);
  }

  template <int... kRowIndex>
  SMDDP_INLINE static void encode_rows(std::integer_sequence<int, kRowIndex...>, char* to,
                                       const char* from, Bytes base, uint64_t* far) {
    for (size_t at = 0; at < kRow; at += kWidth) {
      Planes planes;
      (encode_row<kRowIndex>(planes, from, to + kRestAt, at, base, far), ...);
      planes.store(to + kCount + at);
    }
  }

  template <int... kRowIndex>
  SMDDP_INLINE static void decode_rows(std::integer_sequence<int, kRowIndex...>, char* to,
                                       const char* from, Bytes base) {
    for (size_t at = 0; at < kRow; at += kWidth) {
      Planes planes;
      planes.load(from + kCount + at);
      (decode_row<kRowIndex>(planes, to, from + kRestAt, at, base), ...);
    }
  }

  using AllRows = std::make_integer_sequence<int, kRows>;

  // The upper byte of the element at place t of the group that begins at `group`.
  template <class Char>
  SMDDP_INLINE static Char* top_of(Char* group, size_t t) {
    return group + Type::element_of(t) * kSize + kSize - 1;
  }

  static size_t encode(char* to, size_t limit, const char* from, size_t groups, unsigned base) {
    char* const begin = to;
    const char* const end = to + limit;
    for (; groups > 0; --groups, from += kGroup * kSize) {
      if (static_cast<size_t>(end - to) < kFixed) return 0;
      uint64_t far[kRows] = {};
      encode_rows(AllRows{}, to, from, all(base), far);
      uint16_t places[kGroup + 2];
      size_t count = places_of(far, places);
      char* list = to + kFixed;
      if (count > static_cast<size_t>(end - list) / kFarBytes) return 0;
      store16(to, static_cast<unsigned>(count));
      for (size_t i = 0; i < count; ++i, list += kFarBytes) {
        unsigned distance = (static_cast<uint8_t>(*top_of(from, places[i])) - base) & 0x7f;
        store16(list, places[i] | distance >> kBits << 9);
      }
      to = list;
    }
    return static_cast<size_t>(to - begin);
  }

  static bool decode(char* to, const char* from, size_t bytes, size_t groups, unsigned base) {
    const char* const end = from + bytes;
    for (; groups > 0; --groups, to += kGroup * kSize) {
      if (static_cast<size_t>(end - from) < kFixed) return false;
      size_t count = load16(from);
      if (count > (static_cast<size_t>(end - from) - kFixed) / kFarBytes) return false;
      decode_rows(AllRows{}, to, from, all(base));
      from += kFixed;
      // A place has nine bits: it lies within the group.
      for (; count > 0; --count, from += kFarBytes) {
        unsigned far = load16(from);
        char* top = top_of(to, far % kGroup);
        unsigned near = static_cast<uint8_t>(*top);
        *top = static_cast<char>((near & 0x80) | ((near + (far >> 9 << kBits)) & 0x7f));
      }
    }
    return from == end;
  }
};

// f(Group) for the size and the width.
template <class F>
SMDDP_INLINE auto with_group(size_t size, unsigned width, F&& f) {
  auto with_width = [&]<size_t kSize> {
    switch (width) {
      case 0:
        return f(Group<kSize, 0>{});
      case 1:
        return f(Group<kSize, 1>{});
      case 2:
        return f(Group<kSize, 2>{});
      case 3:
        return f(Group<kSize, 3>{});
      case 4:
        return f(Group<kSize, 4>{});
      default:
        return f(Group<kSize, 5>{});
    }
  };
  return size == 2 ? with_width.template operator()<2>() : with_width.template operator()<4>();
}

size_t encode(std::byte* to, size_t limit, const std::byte* from, size_t groups, size_t size,
              Window window) {
  return with_group(size, window.width, [&](auto group) {
    return group.encode(reinterpret_cast<char*>(to), limit, reinterpret_cast<const char*>(from),
                        groups, window.base);
  });
}

bool decode(std::byte* to, const std::byte* from, size_t bytes, size_t groups, size_t size,
            Window window) {
  return with_group(size, window.width, [&](auto group) {
    return group.decode(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes,
                        groups, window.base);
  });
}

constexpr Coder kCoder = {encode, decode};

}  // namespace
}  // namespace smddp::coding::SMDDP_KERNELS
