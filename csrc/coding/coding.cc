#include "coding/coding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "coding/coding_plan.h"
#include "kernels/reduce.h"

namespace smddp::coding {
namespace {

static_assert(std::endian::native == std::endian::little);

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

  // As plan_of() asks.
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
  Plan plan(size_t groups, size_t size) const {
    return plan_of(groups, size, [this](Window* window) { return within(window); });
  }
};

// Of `groups` groups, at least one.
Sample sample_of(const std::byte* from, size_t groups, size_t size) {
  const size_t step = sample_step(groups, size);
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
  const Sample sample = sample_of(from, groups, size);
  if (sample.zeros && all_zeros(from, bytes)) {
    store(to, kHeaderBytes, kZerosForm);
    return kHeaderBytes;
  }
  Plan plan = sample.plan(groups, size);
  size_t limit = most_worth(bytes);
  limit -= std::min(limit, bytes - coded);
  size_t taken = plan.expected > limit
                     ? 0
                     : coder().encode(to + kHeaderBytes, limit, from, groups, size, plan.window);
  if (taken == 0) return encode_raw(to, from, bytes);
  std::memcpy(to + kHeaderBytes + taken, from + coded, bytes - coded);
  taken += kHeaderBytes + bytes - coded;
  store(to, taken, form_of(size, plan.window), plan.window.base);
  return taken;
}

size_t estimate(const std::byte* from, size_t bytes, Dtype dtype) {
  size_t groups = groups_of(bytes, dtype);
  if (groups == 0) return kHeaderBytes + bytes;
  const Sample sample = sample_of(from, groups, size_of(dtype));
  if (sample.zeros) return kHeaderBytes;
  size_t groups_bytes = groups * kGroup * size_of(dtype);
  size_t expected = sample.plan(groups, size_of(dtype)).expected + bytes - groups_bytes;
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
  Parts parts;
  if (!read_parts(from, coded, bytes, &parts)) return false;
  from += kHeaderBytes;
  coded -= kHeaderBytes;
  if (parts.raw && bytes > 0) kernels::copy(to, from, bytes, false);
  if (parts.zeros) std::memset(to, 0, bytes);
  if (parts.raw || parts.zeros) return true;
  coded -= parts.tail;
  std::memcpy(to + bytes - parts.tail, from + coded, parts.tail);
  return coder().decode(to, from, coded, parts.groups, parts.size, parts.window);
}

}  // namespace smddp::coding
