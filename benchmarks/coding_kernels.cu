// The coder for a GPU (coding_warp.h), of many pieces at once: a thread block codes the pieces of its turn, a warp for
// each of their blocks. The pieces are those of encode_piece() and decode_piece(), to the bit.
#if defined(__CUDACC__)  // a test makes functions of the host of them
#define SMDDP_BOTH __host__ __device__ __forceinline__
#define SMDDP_UNROLL _Pragma("unroll")
#endif
#include "coding_warp.h"

namespace smddp::coding {

inline constexpr unsigned kWarps = 32;  // of a thread block, which has a multiprocessor to itself

// Pieces of `piece_bytes` raw bytes, a multiple of kBlockBytes up to kWarps blocks, of which the last may have fewer: at
// most so many thread blocks code them.
struct Pieces {
  std::byte* raw;  // at a multiple of an element's size
  size_t bytes, piece_bytes;
  // The code of piece i, of lengths[i] bytes, begins i * distance bytes behind the beginning; both are even.
  std::byte* code;
  size_t distance;
  uint32_t* lengths;
  uint32_t* refused;  // becomes 1 if a piece can't be decoded
};

// The block of a warp in a turn that begins with piece `first`.
struct Share {
  size_t piece, begin, end;  // of the block's raw bytes
  unsigned block;            // of the piece
  bool any, last;

  __device__ Share(const Pieces& pieces, size_t first, unsigned warp) {
    unsigned blocks = pieces.piece_bytes / kBlockBytes;
    piece = first + warp / blocks;
    block = warp % blocks;
    begin = piece * pieces.piece_bytes + block * kBlockBytes;
    any = warp < kWarps / blocks * blocks && begin < pieces.bytes;
    end = begin + kBlockBytes < pieces.bytes ? begin + kBlockBytes : pieces.bytes;
    last = any && (block + 1 == blocks || end == pieces.bytes);
  }
};

// Calls turn(first piece) for each turn of this thread block.
template <class F>
__device__ void for_turns(const Pieces& pieces, F&& turn) {
  size_t each = kWarps / (pieces.piece_bytes / kBlockBytes);
  for (size_t first = blockIdx.x * each; first * pieces.piece_bytes < pieces.bytes;
       first += gridDim.x * each) {
    turn(first);
    __syncthreads();
  }
}

template <size_t kSize>
__device__ void encode_pieces(const Pieces& pieces) {
  __shared__ unsigned counts[kWarps][kTopValues], lengths[kWarps];
  const unsigned warp = threadIdx.x / warp::kLanes;
  for_turns(pieces, [&](size_t first) {
    Share share(pieces, first, warp);
    const std::byte* from = pieces.raw + share.begin;
    Header header{};
    if (share.any) header = warp::header_of<kSize>(from, share.end - share.begin, counts[warp]);
    lengths[warp] = header.bytes;
    __syncthreads();
    if (!share.any) return;
    unsigned at = 0;
    for (unsigned i = warp - share.block; i < warp; ++i) at += lengths[i];
    warp::encode<kSize>(pieces.code + share.piece * pieces.distance + at, from,
                        share.end - share.begin, header);
    if (share.last) pieces.lengths[share.piece] = at + header.bytes;
  });
}

extern "C" __global__ void __launch_bounds__(kWarps* warp::kLanes, 1)
    smddp_encode_2(const __grid_constant__ Pieces pieces) {
  encode_pieces<2>(pieces);
}
extern "C" __global__ void __launch_bounds__(kWarps* warp::kLanes, 1)
    smddp_encode_4(const __grid_constant__ Pieces pieces) {
  encode_pieces<4>(pieces);
}

// Where a piece's blocks begin only their headers say: the warp's first lane follows them.
extern "C" __global__ void __launch_bounds__(kWarps* warp::kLanes, 1)
    smddp_decode(const __grid_constant__ Pieces pieces) {
  const unsigned warp = threadIdx.x / warp::kLanes;
  for_turns(pieces, [&](size_t first) {
    Share share(pieces, first, warp);
    if (!share.any) return;
    const std::byte* from = pieces.code + share.piece * pieces.distance;
    size_t left = pieces.lengths[share.piece];
    uint16_t length = 0;
    bool good = true;
    for (unsigned i = 0; i <= share.block && good; ++i) {
      from += length;
      left -= length;
      good = left >= kHeaderBytes;
      if (good) length = warp::load16(from);
      good = good && length <= left && (i == share.block || length % 2 == 0);
    }
    if (share.last) good = good && length == left;
    good = good && warp::decode(pieces.raw + share.begin, share.end - share.begin, from, length);
    if (!good) atomicExch(pieces.refused, 1u);
  });
}

}  // namespace smddp::coding
