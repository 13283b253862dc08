// The kernels of the coder for a GPU, carried out by threads of the host: each stands for a warp, whose lanes run one after
// the other.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>

#include "coding/piece.h"
#include "coding_data.h"

namespace {

struct Place {
  unsigned x = 0;
};
thread_local Place threadIdx;
Place blockIdx, gridDim;
std::barrier<>* all_warps;
void __syncthreads() { all_warps->arrive_and_wait(); }
void atomicExch(uint32_t* to, uint32_t x) { std::atomic_ref(*to).exchange(x); }

}  // namespace

#define __global__
#define __device__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#include "coding_kernels.cu"

namespace smddp {
namespace {

using coding::Pieces;

// One thread block after the other.
void launch(void (*kernel)(const Pieces), unsigned blocks, const Pieces& pieces) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    std::barrier<> warps(coding::kWarps);
    all_warps = &warps;
    std::vector<std::thread> threads;
    for (unsigned warp = 0; warp < coding::kWarps; ++warp) {
      threads.emplace_back([&, warp] {
        threadIdx.x = warp * coding::warp::kLanes;
        kernel(pieces);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

struct Memory {
  std::vector<std::byte> raw, code;
  std::vector<uint32_t> lengths;
  uint32_t refused = 0;
  Pieces pieces;

  Memory(const Data& data, size_t bytes, size_t piece_bytes)
      : raw(data.bytes.end() - static_cast<ptrdiff_t>(bytes), data.bytes.end()),
        code((bytes + piece_bytes - 1) / piece_bytes * coding::most_coded(piece_bytes)),
        lengths(code.size() / coding::most_coded(piece_bytes)),
        pieces{raw.data(),     bytes,   piece_bytes, code.data(), coding::most_coded(piece_bytes),
               lengths.data(), &refused} {}
};

TEST(CodingGpu, PiecesAreThoseOfTheCpuAndComeBack) {
  for (const Data& data : all_data()) {
    auto encode = size_of(data.dtype) == 2 ? coding::smddp_encode_2 : coding::smddp_encode_4;
    for (size_t piece : {8 << 10, 24 << 10, 128 << 10}) {
      for (size_t bytes : {(600 << 10) + 4098, 256 << 10, 37}) {
        SCOPED_TRACE(data.name + " of " + name_of(data.dtype) + ", " + std::to_string(bytes) +
                     " bytes in pieces of " + std::to_string(piece));
        Memory memory(data, bytes, piece);
        const std::vector<std::byte> raw = memory.raw;
        launch(encode, 2, memory.pieces);
        std::vector<std::byte> expected(memory.pieces.distance);
        for (size_t i = 0; i < memory.lengths.size(); ++i) {
          size_t coded = coding::encode_piece(expected.data(), raw.data() + i * piece,
                                              std::min(piece, bytes - i * piece), data.dtype);
          ASSERT_EQ(memory.lengths[i], coded) << i;
          ASSERT_EQ(std::memcmp(&memory.code[i * expected.size()], expected.data(), coded), 0) << i;
        }
        std::fill(memory.raw.begin(), memory.raw.end(), std::byte{0x55});
        launch(coding::smddp_decode, 3, memory.pieces);
        ASSERT_EQ(memory.refused, 0u);
        ASSERT_EQ(memory.raw, raw);
        for (uint32_t wrong : {memory.lengths.back() - 1, memory.lengths.back() + 1, 3u}) {
          memory.lengths.back() = wrong;
          memory.refused = 0;
          launch(coding::smddp_decode, 2, memory.pieces);
          ASSERT_EQ(memory.refused, 1u) << wrong;
        }
      }
    }
  }
}

}  // namespace
}  // namespace smddp
