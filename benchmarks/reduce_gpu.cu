// The reduction kernels of a GPU alone: that they make the bytes that the CPU makes, and their rates.
//
//   reduce_gpu_benchmark
//
// The figures are GB/s that a kernel reads and writes, with all sources in the GPU's own memory, by type, number of
// sources and number of thread blocks. Each block occupies a multiprocessor. The exit status is 1 if a byte differs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "device/reduce_kernels.cu"
#include "gpu_timing.h"
#include "kernels/reduce.h"

using namespace smddp;

namespace {

constexpr size_t kBytes = 96 << 20, kMost = 8;

struct Type {
  Dtype dtype;
  void (*kernel)(Reduction);
};
const Type kTypes[] = {{Dtype::kBFloat16, smddp_reduce_bf16_sum},
                       {Dtype::kFloat16, smddp_reduce_f16_sum},
                       {Dtype::kFloat32, smddp_reduce_f32_sum}};

// Numbers of about 1, whose sums round, and now and then a NaN or an infinity.
template <class T>
void fill(std::vector<char>& bytes, unsigned seed) {
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    seed = seed * 1664525 + 1013904223;
    float x = static_cast<float>(static_cast<int>(seed)) * 0x1p-31f;
    if (seed % 4099 == 0) x = seed & 4096 ? NAN : INFINITY;
    auto value = static_cast<T>(x);
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
}

struct Memory {
  std::vector<char*> sources;
  char* result = nullptr;
  std::vector<std::vector<char>> host = std::vector<std::vector<char>>(kMost);

  explicit Memory(Dtype dtype) {
    for (size_t k = 0; k < kMost; ++k) {
      host[k].resize(4 << 20);
      if (dtype == Dtype::kBFloat16) fill<__nv_bfloat16>(host[k], static_cast<unsigned>(k));
      if (dtype == Dtype::kFloat16) fill<__half>(host[k], static_cast<unsigned>(k));
      if (dtype == Dtype::kFloat32) fill<float>(host[k], static_cast<unsigned>(k));
      char* memory = nullptr;
      CHECK(cudaMalloc(&memory, kBytes + 64));
      for (size_t at = 0; at < kBytes; at += host[k].size())
        CHECK(cudaMemcpy(memory + at, host[k].data(), host[k].size(), cudaMemcpyHostToDevice));
      sources.push_back(memory);
    }
    CHECK(cudaMalloc(&result, kBytes + 64));
  }
  ~Memory() {
    for (char* memory : sources) CHECK(cudaFree(memory));
    CHECK(cudaFree(result));
  }
};

Reduction reduction(const Type& type, const Memory& memory, size_t sources, int divisor) {
  Reduction r;
  r.dtype = type.dtype;
  r.sources_count = sources;
  r.divisor = divisor;
  for (size_t k = 0; k < sources; ++k) r.sources[k] = memory.sources[k];
  r.destination = memory.result;
  r.count = kBytes / size_of(type.dtype);
  return r;
}

bool is_right(const Type& type, const Memory& memory, size_t sources, int divisor, size_t off) {
  const size_t size = size_of(type.dtype);
  Reduction r = reduction(type, memory, sources, divisor);
  r.count = (1 << 20) - 13;
  r.destination = memory.result + off * size;
  std::vector<char> got(r.count * size), want(got.size());
  std::vector<const void*> from;
  for (size_t k = 0; k < sources; ++k) {
    r.sources[k] = memory.sources[k] + size;
    from.push_back(memory.host[k].data() + size);
  }
  type.kernel<<<9, 1024>>>(r);
  CHECK(cudaMemcpy(got.data(), r.destination, got.size(), cudaMemcpyDeviceToHost));
  kernels::reduce(want.data(), from.data(), sources, r.count, type.dtype,
                  divisor > 1 ? ReduceOp::kAvg : ReduceOp::kSum, divisor);
  size_t differs = 0;
  for (size_t i = 0; i < r.count; ++i) {
    size_t at = i * size;
    float x = 0, y = 0;  // of fp32, NaNs differ in their bits
    if (type.dtype == Dtype::kFloat32) {
      std::memcpy(&x, &got[at], sizeof x);
      std::memcpy(&y, &want[at], sizeof y);
    }
    bool both_nan = x != x && y != y;
    differs += !both_nan && std::memcmp(&got[at], &want[at], size) != 0;
  }
  if (differs > 0)
    std::printf("WRONG: %zu elements of %s, %zu sources, divisor %d\n", differs,
                name_of(type.dtype), sources, divisor);
  return differs == 0;
}

}  // namespace

int main() {
  const int all_blocks = multiprocessors();
  bool right = true;
  for (const Type& type : kTypes) {
    Memory memory(type.dtype);
    for (size_t sources : {1, 2, 3, 4, 5, 8}) {
      for (int divisor : {1, 3, 8}) {
        for (size_t off : {0, 1}) right &= is_right(type, memory, sources, divisor, off);
      }
    }
  }
  std::printf("the sums are %s\n", right ? "those of the CPU" : "WRONG");
  std::printf("%-9s %7s %7s %6s %9s\n", "type", "sources", "divisor", "blocks", "GB/s");
  for (const Type& type : kTypes) {
    Memory memory(type.dtype);
    for (size_t sources : {2, 3, 4, 8}) {
      for (int blocks : {4, 9, 16, 32, all_blocks}) {
        for (int divisor : {1, static_cast<int>(sources)}) {
          const Reduction r = reduction(type, memory, sources, divisor);
          std::printf("%-9s %7zu %7d %6d %9.1f\n", name_of(type.dtype), sources, divisor, blocks,
                      gigabytes_per_second((sources + 1) * kBytes,
                                           [&] { type.kernel<<<blocks, 1024>>>(r); }));
        }
      }
    }
    std::fflush(stdout);
  }
  return right ? 0 : 1;
}
