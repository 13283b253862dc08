#include "coding/piece.h"

#include <algorithm>
#include <cstring>

namespace smddp::coding {
namespace {

constexpr size_t kMostBlocks = kPieceBytes / kBlockBytes;

constexpr size_t blocks_of(size_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

}  // namespace

size_t encode_piece(std::byte* to, const std::byte* from, size_t bytes, Dtype dtype) {
  size_t coded = 0;
  for (size_t at = 0; at < bytes; at += kBlockBytes)
    coded += encode(to + coded, from + at, std::min(bytes - at, kBlockBytes), dtype);
  return coded;
}

bool decode_piece(std::byte* to, size_t bytes, const std::byte* from, size_t coded) {
  size_t begin = 0;
  for (size_t at = 0; at < bytes; at += kBlockBytes) {
    size_t block = block_at(from + begin, coded - begin);
    if (!decode(to + at, std::min(bytes - at, kBlockBytes), from + begin, block)) return false;
    begin += block;
  }
  return begin == coded;
}

// From the last block to the first, by way of a buffer. The code of a block begins before its values, but for
// the headers of raw blocks before it: the values overwrite code of this block, and maybe the last bytes of the
// one before it, which is in the other buffer by then.
bool decode_in_place(std::byte* at, size_t bytes, size_t coded) {
  if (coded > bytes || bytes > kPieceBytes) return false;
  static_assert(kMostBlocks * kHeaderBytes < kBlockBytes);
  const size_t blocks = blocks_of(bytes);
  size_t begins[kMostBlocks + 1] = {};
  for (size_t i = 0; i < blocks; ++i) {
    size_t block = block_at(at + begins[i], coded - begins[i]);
    if (block == 0) return false;
    begins[i + 1] = begins[i] + block;
  }
  if (begins[blocks] != coded) return false;
  std::byte code[2][kBlockBytes + kHeaderBytes];
  auto fetch = [&](size_t i) {
    std::memcpy(code[i % 2], at + begins[i], begins[i + 1] - begins[i]);
  };
  if (blocks > 0) fetch(blocks - 1);
  for (size_t i = blocks; i-- > 0;) {
    if (i > 0) fetch(i - 1);
    size_t first = i * kBlockBytes;
    if (!decode(at + first, std::min(bytes - first, kBlockBytes), code[i % 2],
                begins[i + 1] - begins[i]))
      return false;
  }
  return true;
}

}  // namespace smddp::coding
