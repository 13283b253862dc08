#include "coding/coding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "coding/coding_kernels.h"
#include "kernels/reduce.h"

namespace smddp::coding {
namespace {

static_assert(std::endian::native == std::endian::little);

// A header: the length of the block (2 bytes), its form, and the base of its window. The form of a coded block is
// kCodedForm and its width, and kWide if its elements have four bytes, else two.
constexpr unsigned kRawForm = 0, kZerosForm = 1, kCodedForm = 2, kWide = 8;
constexpr size_t kSamples = 128;

struct Header {
  uint16_t bytes;
  uint8_t form, base;
};
static_assert(sizeof(Header) == kHeaderBytes && kBlockBytes + kHeaderBytes <= UINT16_MAX);

const Coder& coder() {
  switch (kernels::isa()) {
    case kernels::Isa::kAvx512:
      return *avx512_coder();
    case kernels::Isa::kAvx2:
      return *avx2_coder();
    case kernels::Isa::kBaseline:
      break;
  }
  return *baseline_coder();
}

// The values below the sign of some elements.
struct Sample {
  unsigned low, high;              // of the values
  unsigned below[kTopValues + 1];  // how many are below a value; from `low` to high + 1
  bool zeros;                      // all elements are zero, but for bytes that it does not look at

  // How many are within the best window of a width. The higher of two equal ones: of the values that a sample
  // lacks, lower ones are more frequent.
  unsigned within(Window* window) const {
    const unsigned values = 1u << window->width;
    unsigned most = 0;
    for (unsigned end = high + 1; end > low; --end) {
      unsigned begin = end - std::min(end, values);
      unsigned count = below[end] - below[std::max(begin, low)];
      if (count > most) {
        most = count;
        window->base = begin;
      }
      if (begin <= low) break;
    }
    return most;
  }
};

// Of `groups` groups, at least one: elements at equal distances. An odd distance meets all columns of a matrix.
Sample sample_of(const std::byte* from, size_t groups, size_t size) {
  const size_t step = (groups * kGroup / kSamples - 1) * size;
  uint8_t counts[2][kTopValues] =
      {};  // in turn: an increment waits for the one before it of the same value
  unsigned any = 0;
  Sample sample{kTopValues, 0, {}, false};
  for (size_t i = 0; i < kSamples; ++i, from += step) {
    unsigned top = static_cast<unsigned>(from[size - 1]), value = top % kTopValues;
    any |= top | static_cast<unsigned>(from[0]);
    sample.low = std::min(sample.low, value);
    sample.high = std::max(sample.high, value);
    ++counts[i % 2][value];
  }
  for (unsigned v = sample.low; v <= sample.high; ++v)
    sample.below[v + 1] = sample.below[v] + counts[0][v] + counts[1][v];
  sample.zeros = any == 0;
  return sample;
}

// What encode() plans for groups.
struct Plan {
  size_t expected;  // bytes
  Window window;
  bool zeros;  // maybe all elements are zero
};

Plan plan_of(const std::byte* from, size_t groups, size_t size) {
  const Sample sample = sample_of(from, groups, size);
  const size_t elements = groups * kGroup;
  auto bytes_with = [&](Window* window) {
    size_t far = (kSamples - sample.within(window)) * (elements / kSamples);
    return groups * (kCount + kPlane * (1 + window->width)) + far * kFarBytes +
           elements * (size - 1);
  };
  Plan best{SIZE_MAX, {kMostWidth, 0}, sample.zeros};
  best.expected = bytes_with(&best.window);
  // Where even the widest window lacks so many elements that they take more than they save, all windows do.
  if (best.expected > groups * kPlane * (kMostWidth + 1) + elements * size) return best;
  for (unsigned width = 0; width < kMostWidth; ++width) {
    Window window{width, 0};
    size_t bytes = bytes_with(&window);
    if (bytes < best.expected) best = {bytes, window, best.zeros};
  }
  return best;
}

bool all_zeros(const std::byte* from, size_t bytes) {
  return bytes == 0 || (from[0] == std::byte{0} && std::memcmp(from, from + 1, bytes - 1) == 0);
}

size_t groups_of(size_t bytes, Dtype dtype) {
  return codes(dtype) ? bytes / (kGroup * size_of(dtype)) : 0;
}

void store(std::byte* to, size_t bytes, unsigned form, unsigned base = 0) {
  Header header{static_cast<uint16_t>(bytes), static_cast<uint8_t>(form),
                static_cast<uint8_t>(base)};
  std::memcpy(to, &header, sizeof header);
}

size_t encode_raw(std::byte* to, const std::byte* from, size_t bytes) {
  store(to, kHeaderBytes + bytes, kRawForm);
  if (bytes > 0) kernels::copy(to + kHeaderBytes, from, bytes, false);
  return kHeaderBytes + bytes;
}

}  // namespace

bool codes(Dtype dtype) {
  return dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16 || dtype == Dtype::kFloat32;
}

size_t encode(std::byte* to, const std::byte* from, size_t bytes, Dtype dtype) {
  size_t groups = groups_of(bytes, dtype);
  if (groups == 0) return encode_raw(to, from, bytes);
  size_t size = size_of(dtype), coded = groups * kGroup * size;
  Plan plan = plan_of(from, groups, size);
  if (plan.zeros && all_zeros(from, bytes)) {
    store(to, kHeaderBytes, kZerosForm);
    return kHeaderBytes;
  }
  size_t limit = most_worth(bytes);
  limit -= std::min(limit, bytes - coded);
  size_t taken = plan.expected > limit
                     ? 0
                     : coder().encode(to + kHeaderBytes, limit, from, groups, size, plan.window);
  if (taken == 0) return encode_raw(to, from, bytes);
  std::memcpy(to + kHeaderBytes + taken, from + coded, bytes - coded);
  taken += kHeaderBytes + bytes - coded;
  store(to, taken, kCodedForm + plan.window.width + (size == 4 ? kWide : 0), plan.window.base);
  return taken;
}

size_t estimate(const std::byte* from, size_t bytes, Dtype dtype) {
  size_t groups = groups_of(bytes, dtype);
  if (groups == 0) return kHeaderBytes + bytes;
  Plan plan = plan_of(from, groups, size_of(dtype));
  if (plan.zeros) return kHeaderBytes;
  size_t expected = plan.expected + bytes - groups * kGroup * size_of(dtype);
  return kHeaderBytes + (expected > most_worth(bytes) ? bytes : expected);
}

size_t block_at(const std::byte* from, size_t available) {
  Header header;
  if (available < sizeof header) return 0;
  std::memcpy(&header, from, sizeof header);
  bool fits = header.bytes >= kHeaderBytes &&
              header.bytes <= std::min(available, kBlockBytes + kHeaderBytes);
  return fits ? header.bytes : 0;
}

bool decode(std::byte* to, size_t bytes, const std::byte* from, size_t coded) {
  if (coded == 0 || block_at(from, coded) != coded) return false;
  Header header;
  std::memcpy(&header, from, sizeof header);
  from += kHeaderBytes;
  coded -= kHeaderBytes;
  if (header.form == kRawForm) {
    if (coded == bytes && bytes > 0) kernels::copy(to, from, bytes, false);
    return coded == bytes;
  }
  if (header.form == kZerosForm) {
    if (coded != 0 || bytes == 0) return false;
    std::memset(to, 0, bytes);
    return true;
  }
  const size_t size = header.form < kWide ? 2 : 4;
  const unsigned width = header.form % kWide - kCodedForm;
  if (header.form >= 2 * kWide || width > kMostWidth) return false;
  const size_t groups = bytes / (kGroup * size);
  if (groups == 0 || header.base + (1u << width) > kTopValues) return false;
  size_t in_groups = groups * kGroup * size, tail = bytes - in_groups;
  if (coded < tail) return false;
  coded -= tail;
  std::memcpy(to + in_groups, from + coded, tail);
  return coder().decode(to, from, coded, groups, size, {width, header.base});
}

}  // namespace smddp::coding
