// The header of a block, and how its window is chosen: the same for the coder of the CPU and for that of the GPU, in
// code that compilers for the host and for CUDA both accept.
#pragma once

#include <cstring>

#include "coding/coding.h"
#include "coding/coding_kernels.h"

// A source for a GPU defines it before it includes this.
#if !defined(SMDDP_BOTH)
#define SMDDP_BOTH inline
#endif

namespace smddp::coding {

// A header: the length of the block (2 bytes), its form, and the base of its window. The form of a coded block is
// kCodedForm and its width, and kWide if its elements have four bytes, else two.
inline constexpr unsigned kRawForm = 0, kZerosForm = 1, kCodedForm = 2, kWide = 8;
struct Header {
  uint16_t bytes;
  uint8_t form, base;
};
static_assert(sizeof(Header) == kHeaderBytes && kBlockBytes + kHeaderBytes <= UINT16_MAX);

SMDDP_BOTH unsigned form_of(size_t size, Window window) {
  return kCodedForm + window.width + (size == 4 ? kWide : 0);
}

// A group of elements of `size` bytes takes so many bytes without its far elements.
constexpr size_t fixed_bytes(size_t size, unsigned width) {
  return kCount + kPlane * (1 + width) + kGroup * (size - 1);
}

// What a header says of its block.
struct Parts {
  bool raw, zeros;
  size_t size;          // of an element
  size_t groups, tail;  // of a coded block: whole groups, and the raw bytes behind them
  Window window;
};
// False: the `coded` bytes at `from` are not a block of `bytes` raw bytes. Of a coded block, its groups must be looked
// at, too.
SMDDP_BOTH bool read_parts(const std::byte* from, size_t coded, size_t bytes, Parts* parts) {
  Header header;
  if (coded < sizeof header) return false;
  memcpy(&header, from, sizeof header);
  if (header.bytes != coded || coded > kBlockBytes + kHeaderBytes) return false;
  coded -= sizeof header;
  *parts = {header.form == kRawForm,
            header.form == kZerosForm,
            header.form < kWide ? 2u : 4u,
            0,
            0,
            {header.form % kWide - kCodedForm, header.base}};
  if (parts->raw) return coded == bytes;
  if (parts->zeros) return coded == 0 && bytes > 0;
  const Window& window = parts->window;
  if (header.form >= 2 * kWide || window.width > kMostWidth) return false;
  parts->groups = bytes / (kGroup * parts->size);
  parts->tail = bytes - parts->groups * kGroup * parts->size;
  return parts->groups > 0 && window.base + (1u << window.width) <= kTopValues &&
         coded >= parts->tail;
}

// A block's window rests on so many elements at equal distances. An odd distance meets all columns of a matrix.
// Not measured: fewer, which take less time, and more.
inline constexpr size_t kSamples = 128;
SMDDP_BOTH size_t sample_step(size_t groups, size_t size) {
  return (groups * kGroup / kSamples - 1) * size;
}

// What encode() plans for groups.
struct Plan {
  size_t expected;  // bytes
  Window window;
};
// `within(&window)`: how many elements of the sample are in the best window of its width, whose base it sets. The higher
// of two equal ones: of the values that a sample lacks, lower ones are more frequent.
template <class Within>
SMDDP_BOTH Plan plan_of(size_t groups, size_t size, Within&& within) {
  auto plan_with = [&](unsigned width) {
    Plan plan{0, {width, 0}};
    size_t far = (kSamples - within(&plan.window)) * (groups * kGroup / kSamples);
    plan.expected = groups * fixed_bytes(size, width) + far * kFarBytes;
    return plan;
  };
  Plan best = plan_with(kMostWidth);
  // Where even the widest window lacks so many elements that they take more than they save, all windows do.
  if (best.expected > groups * (kPlane * (kMostWidth + 1) + kGroup * size)) return best;
  for (unsigned width = 0; width < kMostWidth; ++width) {
    Plan plan = plan_with(width);
    if (plan.expected < best.expected) best = plan;
  }
  return best;
}

}  // namespace smddp::coding
