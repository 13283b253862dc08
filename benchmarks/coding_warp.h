// The coder for a GPU: a warp codes a block as coding.h says, to the same bytes as the CPU, and decodes it. Compilers
// for CUDA and for the host both accept it: on the host the lanes of a warp run one after the other, and tests compare
// the code with encode()'s. coding_kernels.h has the form of a group.
//
// Lane l of a warp has bytes 2l and 2l + 1 of each row, those of two elements. Raw values begin at a multiple of an
// element's size, blocks at even addresses, which all blocks of a piece do.
#pragma once

#include "coding/coding_plan.h"

#if !defined(SMDDP_UNROLL)
#define SMDDP_UNROLL
#endif

namespace smddp::coding::warp {

inline constexpr unsigned kLanes = 32;

// --- lanes: `for (unsigned lane = first_lane(); lane < kLanes; lane += kLanesAtOnce)` is the work of all ---------------

#if defined(__CUDA_ARCH__)
inline constexpr unsigned kLanesAtOnce = kLanes;
SMDDP_BOTH unsigned first_lane() { return threadIdx.x % kLanes; }
// What each lane keeps.
template <class T>
struct PerLane {
  T own;
  SMDDP_BOTH T& operator[](unsigned) { return own; }
};
// Bit l: f(l).
template <class F>
SMDDP_BOTH uint32_t ballot(F&& f) {
  return __ballot_sync(~0u, f(first_lane()));
}
template <class F>
SMDDP_BOTH unsigned most(F&& f) {
  return __reduce_max_sync(~0u, f(first_lane()));
}
SMDDP_BOTH unsigned bits_in(uint32_t bits) { return __popc(bits); }
SMDDP_BOTH void add_one(unsigned* to) { atomicAdd(to, 1u); }
// What lanes wrote before it, the others read after it.
SMDDP_BOTH void meet() { __syncwarp(); }
#else
inline constexpr unsigned kLanesAtOnce = 1;
SMDDP_BOTH unsigned first_lane() { return 0; }
template <class T>
struct PerLane {
  T all[kLanes];
  SMDDP_BOTH T& operator[](unsigned lane) { return all[lane]; }
};
template <class F>
SMDDP_BOTH uint32_t ballot(F&& f) {
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(f(lane)) << lane;
  return bits;
}
template <class F>
SMDDP_BOTH unsigned most(F&& f) {
  unsigned largest = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) largest = f(lane) > largest ? f(lane) : largest;
  return largest;
}
SMDDP_BOTH unsigned bits_in(uint32_t bits) {
  return static_cast<unsigned>(__builtin_popcount(bits));
}
SMDDP_BOTH void add_one(unsigned* to) { ++*to; }
SMDDP_BOTH void meet() {}
#endif

template <class F>
SMDDP_BOTH void each_lane(F&& f) {
  for (unsigned lane = first_lane(); lane < kLanes; lane += kLanesAtOnce) f(lane);
}

// --- a lane's part of a group ------------------------------------------------------------------------

SMDDP_BOTH uint16_t load16(const std::byte* from) {
  return *reinterpret_cast<const uint16_t*>(from);
}
SMDDP_BOTH void store16(std::byte* to, unsigned x) {
  *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(x);
}
// A value in both bytes.
SMDDP_BOTH unsigned both(unsigned byte) { return byte * 0x0101; }

// `bits` bits from `from` on of the bytes of all rows, in `bits` planes.
template <unsigned kBits>
SMDDP_BOTH std::byte* store_planes(std::byte* to, unsigned lane, const unsigned (&x)[kRows],
                                   unsigned from) {
  constexpr unsigned kEach = 8 / kBits;  // rows
  SMDDP_UNROLL
  for (unsigned p = 0; p < kBits; ++p) {
    unsigned plane = 0;
    SMDDP_UNROLL
    for (unsigned i = 0; i < kEach; ++i)
      plane |= (x[p * kEach + i] >> from & both((1 << kBits) - 1)) << i * kBits;
    store16(to + p * kPlane + 2 * lane, plane);
  }
  return to + kBits * kPlane;
}
template <unsigned kBits>
SMDDP_BOTH const std::byte* load_planes(const std::byte* at, unsigned lane, unsigned (&x)[kRows],
                                        unsigned from) {
  constexpr unsigned kEach = 8 / kBits;
  SMDDP_UNROLL
  for (unsigned p = 0; p < kBits; ++p) {
    unsigned plane = load16(at + p * kPlane + 2 * lane);
    SMDDP_UNROLL
    for (unsigned i = 0; i < kEach; ++i)
      x[p * kEach + i] |= (plane >> i * kBits & both((1 << kBits) - 1)) << from;
  }
  return at + kBits * kPlane;
}

// The element of a row to which byte 2 * lane + k belongs.
template <size_t kSize>
SMDDP_BOTH unsigned element_of(unsigned lane, unsigned k) {
  return k * kRow / 2 + (kSize == 2 ? lane : lane % 2 * (kRow / 4) + lane / 2);
}
template <size_t kSize>
SMDDP_BOTH uint32_t load_element(const std::byte* row, unsigned lane, unsigned k) {
  const std::byte* at = row + element_of<kSize>(lane, k) * kSize;
  if constexpr (kSize == 2) return load16(at);
  if constexpr (kSize == 4) return *reinterpret_cast<const uint32_t*>(at);
}
template <size_t kSize>
SMDDP_BOTH void store_element(std::byte* row, unsigned lane, unsigned k, uint32_t x) {
  std::byte* at = row + element_of<kSize>(lane, k) * kSize;
  if constexpr (kSize == 2) store16(at, x);
  if constexpr (kSize == 4) *reinterpret_cast<uint32_t*>(at) = x;
}

// The upper bytes of a lane's elements, and their distances from the base.
struct Column {
  unsigned top[kRows], distance[kRows];
  // Whether byte k of a row is further away than the width has bits for.
  SMDDP_BOTH bool far(unsigned row, unsigned k, unsigned width) const {
    return (distance[row] >> 8 * k & 0xff) >> width != 0;
  }
};

// Of the group at `group`; its other bytes go to `rest`, if it is given.
template <size_t kSize>
SMDDP_BOTH void split(Column* column, std::byte* rest, const std::byte* group, unsigned lane,
                      unsigned base) {
  SMDDP_UNROLL
  for (unsigned i = 0; i < kRows; ++i) {
    const std::byte* row = group + i * kRow * kSize;
    uint32_t a = load_element<kSize>(row, lane, 0), b = load_element<kSize>(row, lane, 1);
    constexpr unsigned kTop = 8 * kSize - 8, kNext = 8 * kSize - 16;
    unsigned top = (a >> kTop) | (b >> kTop) << 8;
    column->top[i] = top;
    column->distance[i] = ((top & both(0x7f)) + both(0x80) - both(base)) & both(0x7f);
    if (rest == nullptr) continue;
    std::byte* next = rest + (kSize - 2) * kGroup;
    store16(next + i * kRow + 2 * lane, (a >> kNext & 0xff) | (b >> kNext & 0xff) << 8);
    if constexpr (kSize == 2) continue;
    store16(rest + i * 2 * kRow + 2 * lane, a);
    store16(rest + i * 2 * kRow + kRow + 2 * lane, b);
  }
}

// --- groups -----------------------------------------------------------------------------------------

// How many elements of a group are far.
template <size_t kSize>
SMDDP_BOTH unsigned count_far(const std::byte* group, Window window) {
  PerLane<Column> columns;
  each_lane(
      [&](unsigned lane) { split<kSize>(&columns[lane], nullptr, group, lane, window.base); });
  unsigned count = 0;
  SMDDP_UNROLL
  for (unsigned i = 0; i < 2 * kRows; ++i)
    count += bits_in(
        ballot([&](unsigned lane) { return columns[lane].far(i / 2, i % 2, window.width); }));
  return count;
}

// The end of the group's code.
template <size_t kSize>
SMDDP_BOTH std::byte* encode_group(std::byte* to, const std::byte* group, Window window) {
  const unsigned width = window.width;
  std::byte* const list = to + fixed_bytes(kSize, width);
  PerLane<Column> columns;
  each_lane([&](unsigned lane) {
    Column& column = columns[lane];
    split<kSize>(&column, list - kGroup * (kSize - 1), group, lane, window.base);
    std::byte* at = store_planes<1>(to + kCount, lane, column.top, 7);
    if (width & 4) at = store_planes<4>(at, lane, column.distance, 0);
    if (width & 2) at = store_planes<2>(at, lane, column.distance, width & 4);
    if (width & 1) store_planes<1>(at, lane, column.distance, width & 6);
  });
  unsigned count = 0;
  SMDDP_UNROLL
  for (unsigned i = 0; i < kRows; ++i) {
    uint32_t far[2];
    for (unsigned k = 0; k < 2; ++k)
      far[k] = ballot([&](unsigned lane) { return columns[lane].far(i, k, width); });
    if ((far[0] | far[1]) == 0) continue;
    each_lane([&](unsigned lane) {
      uint32_t lower = (1u << lane) - 1;
      unsigned at = count + bits_in(far[0] & lower) + bits_in(far[1] & lower);
      for (unsigned k = 0; k < 2; ++k) {
        if ((far[k] >> lane & 1) == 0) continue;
        unsigned distance = columns[lane].distance[i] >> 8 * k & 0xff;
        store16(list + at++ * kFarBytes, (i * kRow + 2 * lane + k) | distance >> width << 9);
      }
    });
    count += bits_in(far[0]) + bits_in(far[1]);
  }
  if (first_lane() == 0) store16(to, count);
  return list + count * kFarBytes;
}

// False: the bytes from *from to `end` do not begin with a group. *from becomes its end.
template <size_t kSize>
SMDDP_BOTH bool decode_group(std::byte* group, const std::byte** from, const std::byte* end,
                             Window window) {
  const unsigned width = window.width;
  const size_t fixed = fixed_bytes(kSize, width);
  auto left = static_cast<size_t>(end - *from);
  if (left < fixed) return false;
  const unsigned count = load16(*from);
  if (count > (left - fixed) / kFarBytes) return false;
  const std::byte* list = *from + fixed;
  each_lane([&](unsigned lane) {
    unsigned sign[kRows] = {}, distance[kRows] = {};
    const std::byte* at = load_planes<1>(*from + kCount, lane, sign, 7);
    if (width & 4) at = load_planes<4>(at, lane, distance, 0);
    if (width & 2) at = load_planes<2>(at, lane, distance, width & 4);
    if (width & 1) load_planes<1>(at, lane, distance, width & 6);
    const std::byte *rest = list - kGroup * (kSize - 1), *next = list - kGroup;
    SMDDP_UNROLL
    for (unsigned i = 0; i < kRows; ++i) {
      unsigned top = sign[i] | (distance[i] + both(window.base));
      unsigned low = load16(next + i * kRow + 2 * lane);
      for (unsigned k = 0; k < 2; ++k) {
        uint32_t x = (top >> 8 * k & 0xff) << 8 | (low >> 8 * k & 0xff);
        if constexpr (kSize == 4) x = x << 16 | load16(rest + i * 2 * kRow + k * kRow + 2 * lane);
        store_element<kSize>(group + i * kRow * kSize, lane, k, x);
      }
    }
  });
  meet();
  // A place has nine bits: it lies within the group.
  each_lane([&](unsigned lane) {
    for (unsigned i = lane; i < count; i += kLanes) {
      unsigned far = load16(list + i * kFarBytes), place = far % kGroup, t = place % kRow;
      size_t element = place / kRow * kRow + element_of<kSize>(t / 2, t % 2);
      std::byte* top = group + element * kSize + kSize - 1;
      auto near = static_cast<unsigned>(*top);
      *top = static_cast<std::byte>((near & 0x80) | ((near + (far >> 9 << width)) & 0x7f));
    }
  });
  *from = list + count * kFarBytes;
  return true;
}

// --- blocks -----------------------------------------------------------------------------------------

// Both at even addresses.
SMDDP_BOTH void copy(std::byte* to, const std::byte* from, size_t bytes) {
  each_lane([&](unsigned lane) {
    for (size_t i = lane; i < bytes / 2; i += kLanes) store16(to + 2 * i, load16(from + 2 * i));
    if (lane == 0 && bytes % 2 != 0) to[bytes - 1] = from[bytes - 1];
  });
}

SMDDP_BOTH bool all_zeros(const std::byte* from, size_t bytes) {
  return ballot([&](unsigned lane) {
           for (size_t i = lane; i < bytes; i += kLanes)
             if (from[i] != std::byte{0}) return true;
           return false;
         }) == 0;
}

// The header of the block that encode() writes. `counts`: memory that the lanes share, for kTopValues values.
template <size_t kSize>
SMDDP_BOTH Header header_of(const std::byte* from, size_t bytes, unsigned* counts) {
  const Header raw{static_cast<uint16_t>(kHeaderBytes + bytes), kRawForm, 0};
  const size_t groups = bytes / (kGroup * kSize), tail = bytes - groups * kGroup * kSize;
  if (groups == 0) return raw;
  each_lane([&](unsigned lane) {
    for (unsigned i = lane; i < kTopValues; i += kLanes) counts[i] = 0;
  });
  meet();
  const size_t step = sample_step(groups, kSize);
  uint32_t any = ballot([&](unsigned lane) {
    unsigned set = 0;
    for (size_t i = lane; i < kSamples; i += kLanes) {
      auto top = static_cast<unsigned>(from[i * step + kSize - 1]);
      set |= top | static_cast<unsigned>(from[i * step]);
      add_one(&counts[top % kTopValues]);
    }
    return set != 0;
  });
  meet();
  if (any == 0 && all_zeros(from, bytes)) return {kHeaderBytes, kZerosForm, 0};
  // Over the values of a lane.
  auto most_of = [&](auto&& f) {
    return most([&](unsigned lane) {
      unsigned best = 0;
      for (unsigned v = lane; v < kTopValues; v += kLanes) best = f(v) > best ? f(v) : best;
      return best;
    });
  };
  const unsigned highest = most_of([&](unsigned v) { return counts[v] > 0 ? v : 0; });
  Plan plan = plan_of(groups, kSize, [&](Window* window) {
    const unsigned values = 1u << window->width;
    // How many are in the window whose last value is v, and v.
    unsigned best = most_of([&](unsigned v) {
      unsigned within = 0;
      for (unsigned i = 0; i < values && i <= v && v <= highest; ++i) within += counts[v - i];
      return within << 8 | v;
    });
    unsigned end = (best & 0xff) + 1;
    window->base = end < values ? 0 : end - values;
    return best >> 8;
  });
  size_t limit = most_worth(bytes);
  limit -= limit < tail ? limit : tail;
  if (plan.expected > limit) return raw;
  size_t length = groups * fixed_bytes(kSize, plan.window.width);
  for (size_t g = 0; g < groups && length <= limit; ++g)
    length += kFarBytes * count_far<kSize>(from + g * kGroup * kSize, plan.window);
  if (length > limit) return raw;
  return {static_cast<uint16_t>(kHeaderBytes + length + tail),
          static_cast<uint8_t>(form_of(kSize, plan.window)),
          static_cast<uint8_t>(plan.window.base)};
}

// Codes one block, as coding::encode(). `header`: header_of() it.
template <size_t kSize>
SMDDP_BOTH void encode(std::byte* to, const std::byte* from, size_t bytes, const Header& header) {
  if (first_lane() == 0) {
    store16(to, header.bytes);
    store16(to + 2, header.form | header.base << 8);
  }
  to += kHeaderBytes;
  if (header.form == kRawForm) return copy(to, from, bytes);
  if (header.form == kZerosForm) return;
  const Window window{header.form % kWide - kCodedForm, header.base};
  for (; bytes >= kGroup * kSize; bytes -= kGroup * kSize, from += kGroup * kSize)
    to = encode_group<kSize>(to, from, window);
  copy(to, from, bytes);
}

// As coding::decode().
SMDDP_BOTH bool decode(std::byte* to, size_t bytes, const std::byte* from, size_t coded) {
  Parts parts;
  if (!read_parts(from, coded, bytes, &parts)) return false;
  const std::byte* end = from + coded - parts.tail;
  from += kHeaderBytes;
  if (parts.raw) copy(to, from, bytes);
  if (parts.zeros) {
    each_lane([&](unsigned lane) {
      for (size_t i = lane; i < bytes; i += kLanes) to[i] = std::byte{0};
    });
  }
  if (parts.raw || parts.zeros) return true;
  copy(to + bytes - parts.tail, end, parts.tail);
  for (; parts.groups > 0; --parts.groups, to += kGroup * parts.size) {
    bool good = parts.size == 2 ? decode_group<2>(to, &from, end, parts.window)
                                : decode_group<4>(to, &from, end, parts.window);
    if (!good) return false;
  }
  return from == end;
}

}  // namespace smddp::coding::warp
