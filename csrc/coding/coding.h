// Lossless coding of floating-point data, block by block, so that it takes fewer bytes on a network. It must
// not know flows, ranks or messages, only addresses and element types. The flows between hosts call it.
//
// Trained weights, gradients and activations have few different exponents. The upper byte of an element is its
// sign and seven bits: of the exponent in bf16 and fp32, of exponent and mantissa in fp16. A block replaces
// the seven bits by a distance of `width` bits from a base that it states, and lists the elements that are
// further away. All other bytes stay as they are. Every bit pattern comes back as it was.
//
// A block depends on no other one. It begins with a header, states its own length and the size of its
// elements, and is at most a header longer than its raw bytes. decode() takes any bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/types.h"

namespace smddp::coding {

// The most raw bytes of a block. A block and its code fit into a processor's first-level cache.
inline constexpr size_t kBlockBytes = 8 << 10;
inline constexpr size_t kHeaderBytes = 4;

// Whether blocks of this type can be shorter than their raw bytes. Other types are raw.
bool codes(Dtype dtype);

// The most bytes that `bytes` raw bytes take in blocks of kBlockBytes, the last of them shorter.
constexpr size_t most_coded(size_t bytes) {
  return bytes + (bytes + kBlockBytes - 1) / kBlockBytes * kHeaderBytes;
}

// The most coded bytes that are worth it for `bytes` raw bytes.
constexpr size_t most_worth(size_t bytes) { return bytes - bytes / 16; }

// Codes one block of `bytes` raw bytes, 0 to kBlockBytes, into `to`, which has bytes + kHeaderBytes bytes, and
// returns how many of them the block takes. It is raw if it would be longer than most_worth(). Nothing need be aligned,
// and `bytes` need be no multiple of an element's size. The ranges do not overlap.
size_t encode(std::byte* to, const std::byte* from, size_t bytes, Dtype dtype);

// About how many bytes encode() would return, from a sample of the elements: for a small part of its time.
size_t estimate(const std::byte* from, size_t bytes, Dtype dtype);

// The bytes of the block that the `available` bytes at `from` begin with, its header included: kHeaderBytes to
// kBlockBytes + kHeaderBytes. 0: they begin with no block, or end before it.
size_t block_at(const std::byte* from, size_t available);

// Decodes the block of `coded` bytes at `from` to the `bytes` raw bytes at `to`. False: these are not a whole
// block of so many raw bytes; what stands at `to` is then not defined. Whatever the block holds, no byte outside
// of the two ranges is read or written. A damaged block that still is a block decodes to other values. The caller
// checks that its sender is a member of the job. Nothing need be aligned; the ranges do not overlap.
bool decode(std::byte* to, size_t bytes, const std::byte* from, size_t coded);

}  // namespace smddp::coding
