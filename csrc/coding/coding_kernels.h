// The form of a coded block, and the table of functions that each instruction set's source exports. Like
// kernels/reduce_kernels.h, it contains nothing that emits code.
//
// A coded block is a header, groups of 512 elements, and the raw bytes that fill no group. The form is the same
// for every instruction set:
//
//   group       count of far elements (2 bytes), sign plane, distance planes, rest, far elements
//   row         64 elements; a group has eight. Two halves of a row (bf16, fp16), or four quarters in the order
//               0 2 1 3 (fp32), are interleaved element by element: that is how whole vectors of a row become
//               vectors of bytes without a step across lanes. So byte t of a row is that of element_of(t).
//   plane       64 bytes; bit i of byte t belongs to byte t of row i
//   distances   of a width of 5 bits: a plane-of-four (4 x 64 bytes; two rows each) for the lower four bits, a
//               plane-of-one for the upper; of 3: a plane-of-two (2 x 64 bytes; four rows each) and one of one
//   rest        row by row: the second byte of each element; in fp32 for all rows before that the two lowest bytes
//   far element 2 bytes: its place in the group (9 bits), and the distance's bits above the width (7 bits)
#pragma once

#include <cstddef>
#include <cstdint>

namespace smddp::coding {

inline constexpr size_t kRow = 64;                  // elements
inline constexpr size_t kRows = 8;                  // of a group
inline constexpr size_t kGroup = kRows * kRow;      // elements
inline constexpr size_t kPlane = kGroup / 8;        // bytes
inline constexpr size_t kCount = 2, kFarBytes = 2;  // bytes
inline constexpr unsigned kMostWidth = 5;           // a wider one would save at most 1/16
inline constexpr unsigned kTopValues = 128;         // of seven bits

// The seven bits of an element that is not far are base .. base + 2^width - 1. base + 2^width <= kTopValues.
struct Window {
  unsigned width, base;
};

struct Coder {
  // Codes `groups` groups of elements of `size` bytes, 2 or 4. The bytes written, at most `limit`; 0: they
  // would be more.
  size_t (*encode)(std::byte* to, size_t limit, const std::byte* from, size_t groups, size_t size,
                   Window window);
  // The opposite. False: the `bytes` bytes are not exactly so many groups.
  bool (*decode)(std::byte* to, const std::byte* from, size_t bytes, size_t groups, size_t size,
                 Window window);
};

// nullptr if the compiler of this build cannot make them.
const Coder* baseline_coder();
const Coder* avx2_coder();
const Coder* avx512_coder();

}  // namespace smddp::coding
