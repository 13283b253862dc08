// The coder for a GPU beside the CPU's: that both make the same bytes and read each other's, and its rates.
//
//   coding_gpu_benchmark
//
// The figures are GB/s of raw bytes from memory of the GPU to memory of the GPU, by the number of thread blocks. The exit
// status is 1 if a byte differs.
#include <algorithm>
#include <cstdio>

#include "coding/piece.h"
#include "coding_data.h"
#include "coding_kernels.cu"
#include "gpu_timing.h"

using namespace smddp;

namespace {

constexpr size_t kBytes = 256 << 20;

// Raw bytes and their code in memory of the GPU.
struct OnGpu {
  coding::Pieces pieces{};
  Dtype dtype;
  size_t count;

  OnGpu(const Data& data, size_t bytes, size_t piece_bytes) : dtype(data.dtype) {
    count = (bytes + piece_bytes - 1) / piece_bytes;
    pieces.bytes = bytes;
    pieces.piece_bytes = piece_bytes;
    pieces.distance = coding::most_coded(piece_bytes);
    CHECK(cudaMalloc(&pieces.raw, bytes));
    CHECK(cudaMalloc(&pieces.code, count * pieces.distance));
    CHECK(cudaMalloc(&pieces.lengths, count * sizeof(uint32_t)));
    CHECK(cudaMalloc(&pieces.refused, sizeof(uint32_t)));
    CHECK(cudaMemset(pieces.refused, 0, sizeof(uint32_t)));
    for (size_t at = 0; at < bytes; at += data.bytes.size())
      CHECK(cudaMemcpy(pieces.raw + at, data.bytes.data(), std::min(data.bytes.size(), bytes - at),
                       cudaMemcpyHostToDevice));
  }
  ~OnGpu() {
    for (void* memory : {static_cast<void*>(pieces.raw), static_cast<void*>(pieces.code),
                         static_cast<void*>(pieces.lengths), static_cast<void*>(pieces.refused)})
      CHECK(cudaFree(memory));
  }

  void encode(int blocks) const {
    auto kernel = size_of(dtype) == 2 ? coding::smddp_encode_2 : coding::smddp_encode_4;
    kernel<<<blocks, coding::kWarps * coding::warp::kLanes>>>(pieces);
    CHECK(cudaGetLastError());
  }
  void decode(int blocks) const {
    coding::smddp_decode<<<blocks, coding::kWarps * coding::warp::kLanes>>>(pieces);
    CHECK(cudaGetLastError());
  }
  template <class T>
  std::vector<T> fetch(const T* from, size_t n) const {
    std::vector<T> to(n);
    CHECK(cudaMemcpy(to.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
};

// Whether the GPU's code is the CPU's, comes back to the same values, and is refused if it is cut off.
bool is_right(const Data& data, size_t bytes, size_t piece_bytes) {
  OnGpu gpu(data, bytes, piece_bytes);
  const coding::Pieces& p = gpu.pieces;
  gpu.encode(4);
  std::vector<std::byte> raw = gpu.fetch(p.raw, bytes), expected(p.distance);
  std::vector<std::byte> code = gpu.fetch(p.code, gpu.count * p.distance);
  std::vector<uint32_t> lengths = gpu.fetch(p.lengths, gpu.count);
  bool right = true;
  for (size_t i = 0; i < gpu.count; ++i) {
    size_t begin = i * piece_bytes;
    size_t coded = coding::encode_piece(expected.data(), raw.data() + begin,
                                        std::min(piece_bytes, bytes - begin), data.dtype);
    right = right && lengths[i] == coded &&
            std::memcmp(code.data() + i * p.distance, expected.data(), coded) == 0;
  }
  CHECK(cudaMemset(p.raw, 0x55, bytes));
  gpu.decode(4);
  right = right && gpu.fetch(p.raw, bytes) == raw && gpu.fetch(p.refused, 1)[0] == 0;
  lengths.back() -= 1;
  CHECK(
      cudaMemcpy(p.lengths, lengths.data(), gpu.count * sizeof(uint32_t), cudaMemcpyHostToDevice));
  gpu.decode(4);
  right = right && gpu.fetch(p.refused, 1)[0] == 1;
  if (!right)
    std::printf("WRONG: %s of %s, %zu bytes in pieces of %zu\n", data.name.c_str(),
                name_of(data.dtype), bytes, piece_bytes);
  return right;
}

}  // namespace

int main() {
  const int all_blocks = multiprocessors();
  bool right = true;
  for (const Data& data : all_data()) {
    for (size_t piece : {16 << 10, 24 << 10, 128 << 10, 256 << 10}) {
      for (size_t bytes : {2 << 20, (1 << 20) + 4098, 8190, 37})
        right &= is_right(data, bytes, piece);
    }
  }
  std::printf("the bytes are %s\n", right ? "those of the CPU" : "WRONG");
  std::printf("%-9s %-10s %6s %9s %9s\n", "type", "data", "blocks", "encode", "decode");
  for (const Data& data : all_data()) {
    OnGpu gpu(data, kBytes, coding::kPieceBytes);
    for (int blocks : {4, 8, 16, all_blocks}) {
      double encoding = gigabytes_per_second(kBytes, [&] { gpu.encode(blocks); });
      double decoding = gigabytes_per_second(kBytes, [&] { gpu.decode(blocks); });
      std::printf("%-9s %-10s %6d %9.1f %9.1f\n", name_of(data.dtype), data.name.c_str(), blocks,
                  encoding, decoding);
      std::fflush(stdout);
    }
  }
  return right ? 0 : 1;
}
