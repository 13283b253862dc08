// Rates of the reductions on one core, per instruction set, beside memcpy:
//
//   reduce_benchmark [all|ISA [KiB...]]
//
// The figures are GB/s of memory read and written: (sources + 1) times the size. "steps" is load,
// accumulate and store, block by block; "reduce" is one call; "streaming" is one call with
// streaming stores. The last line of an instruction set has copies from a window of 256 KiB into 64
// MiB. Each figure is the best of several repetitions.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/clock.h"
#include "kernels/reduce.h"

using namespace smddp;

namespace {

constexpr size_t kLargest = 64 << 20;
constexpr size_t kMostSources = 8;
constexpr size_t kBlock = 16 << 10;  // elements
constexpr uint64_t kMeasureNs = 8'000'000;

struct Case {
  Dtype dtype;
  size_t sources, bytes;
  size_t count() const { return bytes / size_of(dtype); }
};

std::vector<char> memory((kMostSources + 1) * (kLargest + 4096) + 4096);
// Buffers of one size, one after the other, each at a different offset within its page.
char* buffer(const Case& what, size_t i) {
  size_t room = what.bytes + 4096 / (kMostSources + 1) / 64 * 64;
  return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) % 4096) + i * room;
}

template <class F>
double seconds(F&& f) {
  uint64_t best = ~0ull;
  uint64_t start = now_ns();
  uint64_t repetitions = 1, now = start;
  do {
    uint64_t from = now;
    for (uint64_t i = 0; i < repetitions; ++i) f();
    now = now_ns();
    uint64_t each = (now - from) / repetitions;
    best = std::min(best, each);
    if (now - from < 100'000) repetitions *= 2;  // limits the share of the clock's own time
  } while (now - start < kMeasureNs);
  return static_cast<double>(std::max<uint64_t>(best, 1)) / 1e9;
}

void in_steps(const Case& what, char* to, const void* const* sources) {
  alignas(64) static float accumulator[kBlock];
  size_t size = size_of(what.dtype);
  for (size_t at = 0; at < what.count(); at += kBlock) {
    size_t n = std::min(kBlock, what.count() - at);
    auto source = [&](size_t k) { return static_cast<const char*>(sources[k]) + at * size; };
    kernels::load(accumulator, source(0), n, what.dtype);
    for (size_t k = 1; k < what.sources; ++k) {
      kernels::accumulate(accumulator, source(k), n, what.dtype, ReduceOp::kSum);
    }
    kernels::store(to + at * size, accumulator, n, what.dtype);
  }
}

void reductions(const Case& what) {
  const void* sources[kMostSources];
  for (size_t i = 0; i < what.sources; ++i) sources[i] = buffer(what, i);
  char* to = buffer(what, what.sources);
  auto fused = [&](bool streaming) {
    return seconds([&] {
      kernels::reduce(to, sources, what.sources, what.count(), what.dtype, ReduceOp::kSum, 1,
                      streaming);
    });
  };
  double bytes = static_cast<double>(what.bytes) / 1e9;
  double moved = bytes * static_cast<double>(what.sources + 1);
  std::printf("%-9s %-9s %7zu %9zu %9.1f %9.1f", kernels::isa_name().c_str(), name_of(what.dtype),
              what.sources, what.bytes, moved / seconds([&] { in_steps(what, to, sources); }),
              moved / fused(false));
  std::printf(" %9.1f %9.1f\n", moved / fused(true),
              2 * bytes / seconds([&] { std::memcpy(to, sources[0], what.bytes); }));
  std::fflush(stdout);
}

void copies() {
  Case window{Dtype::kBytes, 1, 256 << 10};
  char* to = memory.data() + 4096;
  char* from = memory.data() + kLargest + 8192;
  auto rate = [&](bool streaming) {
    return static_cast<double>(kLargest) / 1e9 / seconds([&] {
             for (size_t at = 0; at < kLargest; at += window.bytes) {
               kernels::copy(to + at, from, window.bytes, streaming);
             }
           });
  };
  std::printf("%-9s copies: memcpy %.1f, streaming %.1f GB/s written\n",
              kernels::isa_name().c_str(), rate(false), rate(true));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<size_t> sizes = {4 << 10, 64 << 10, 1 << 20, kLargest};
  if (argc > 2) sizes.clear();
  for (int i = 2; i < argc; ++i) sizes.push_back(std::strtoul(argv[i], nullptr, 10) << 10);
  std::memset(memory.data(), 0, memory.size());
  std::printf("%-9s %-9s %7s %9s %9s %9s %9s %9s\n", "isa", "type", "sources", "bytes", "steps",
              "reduce", "streaming", "memcpy");
  for (kernels::Isa isa : {kernels::Isa::kBaseline, kernels::Isa::kAvx2, kernels::Isa::kAvx512}) {
    if (argc > 1 && std::string(argv[1]) != "all" && argv[1] != std::string(name_of(isa))) continue;
    if (!kernels::set_isa(isa)) continue;
    for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (size_t sources : {2, 4, 8}) {
        for (size_t bytes : sizes) reductions({dtype, sources, std::min(bytes, kLargest)});
      }
    }
    copies();
  }
}
