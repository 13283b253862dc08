// A piece of a flow as coded blocks, end to end: each of kBlockBytes raw bytes but the last. It must not know
// flows or messages. The flows between hosts call it.
//
// A coded piece may arrive in the memory that its values are for, at the beginning of their place, as it is
// shorter than they are. So a receiver needs no other memory for pieces that wait.
#pragma once

#include <cstddef>

#include "coding/coding.h"
#include "common/types.h"

namespace smddp::coding {

// The most raw bytes of a piece.
inline constexpr size_t kPieceBytes = 128 << 10;

// Codes a piece of `bytes` raw bytes into `to`, which has most_coded(bytes) bytes. How many of them it takes.
size_t encode_piece(std::byte* to, const std::byte* from, size_t bytes, Dtype dtype);

// The opposite, as decode(). False: the `coded` bytes are not a piece of `bytes` raw bytes.
bool decode_piece(std::byte* to, size_t bytes, const std::byte* from, size_t coded);

// The same for a coded piece at the beginning of the `bytes` bytes at `at`, which become its values. False: it is
// no piece, or longer than they are.
bool decode_in_place(std::byte* at, size_t bytes, size_t coded);

}  // namespace smddp::coding
