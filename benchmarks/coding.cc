// Rates of the lossless coding on one core, per instruction set, and what it makes of data:
//
//   coding_benchmark [all|ISA [FILE...]]
//
// The figures are GB/s of raw bytes. "cache": block after block of 1 MiB, to and from a buffer of one block;
// "memory": of 64 MiB, to and from a buffer of as many. "ratio" is coded by raw bytes. A FILE holds raw elements;
// its name ends in .bf16, .f16 or .f32. Each figure is the best of several repetitions.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "coding/coding.h"
#include "coding_data.h"
#include "common/clock.h"
#include "kernels/reduce.h"

using namespace smddp;

namespace {

constexpr size_t kInCache = kDataBytes, kInMemory = 64 << 20;
constexpr size_t kSlot = coding::kBlockBytes + coding::kHeaderBytes;
constexpr uint64_t kMeasureNs = 60'000'000;

Data from_file(const std::string& name) {
  std::ifstream file(name, std::ios::binary);
  std::vector<char> text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  text.resize(text.size() / 4 * 4);
  Data data{name, name.ends_with(".f32") ? Dtype::kFloat32 : Dtype::kBFloat16, {}};
  if (name.ends_with(".f16")) data.dtype = Dtype::kFloat16;
  data.bytes.resize(text.size());
  std::memcpy(data.bytes.data(), text.data(), text.size());
  return data;
}

template <class F>
double seconds(F&& f) {
  uint64_t best = ~0ull, start = now_ns();
  do {
    uint64_t from = now_ns();
    f();
    best = std::min(best, now_ns() - from);
  } while (now_ns() - start < kMeasureNs);
  return static_cast<double>(std::max<uint64_t>(best, 1)) / 1e9;
}

std::vector<std::byte> raw(kInMemory), code(kInMemory / coding::kBlockBytes * kSlot);
std::vector<size_t> lengths(kInMemory / coding::kBlockBytes);

// Encodes and decodes `bytes` of `raw`, with `slots` slots for coded blocks.
void rates(size_t bytes, size_t slots, Dtype dtype) {
  size_t blocks = bytes / coding::kBlockBytes;
  auto slot = [&](size_t i) { return code.data() + i % slots * kSlot; };
  auto block = [&](size_t i) { return raw.data() + i * coding::kBlockBytes; };
  double encoding = seconds([&] {
    for (size_t i = 0; i < blocks; ++i)
      lengths[i] = coding::encode(slot(i), block(i), coding::kBlockBytes, dtype);
  });
  // With one slot its block is decoded again and again.
  size_t last = blocks - 1;
  double decoding = seconds([&] {
    for (size_t i = 0; i < blocks; ++i) {
      size_t which = slots == 1 ? last : i;
      if (!coding::decode(block(which), coding::kBlockBytes, slot(which), lengths[which]))
        std::abort();
    }
  });
  double gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf(" %9.1f %9.1f", gigabytes / encoding, gigabytes / decoding);
}

void measure(const Data& data) {
  for (size_t at = 0; at < kInMemory; at += data.bytes.size())
    std::memcpy(raw.data() + at, data.bytes.data(), std::min(data.bytes.size(), kInMemory - at));
  size_t coded = 0, bytes = std::min(data.bytes.size(), kInMemory);
  for (size_t at = 0; at < bytes; at += coding::kBlockBytes)
    coded += coding::encode(code.data(), raw.data() + at, std::min(coding::kBlockBytes, bytes - at),
                            data.dtype);
  std::printf("%-9s %-9s %-10s %6.3f", kernels::isa_name().c_str(), name_of(data.dtype),
              data.name.substr(data.name.rfind('/') + 1).c_str(),
              static_cast<double>(coded) / static_cast<double>(bytes));
  rates(kInCache, 1, data.dtype);
  rates(kInMemory, kInMemory / coding::kBlockBytes, data.dtype);
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Data> all;
  for (int i = 2; i < argc; ++i) all.push_back(from_file(argv[i]));
  if (all.empty()) all = all_data();
  std::printf("%-9s %-9s %-10s %6s %19s %19s\n", "", "", "", "", "from cache", "from memory");
  std::printf("%-9s %-9s %-10s %6s %9s %9s %9s %9s\n", "isa", "type", "data", "ratio", "encode",
              "decode", "encode", "decode");
  for (kernels::Isa isa : {kernels::Isa::kBaseline, kernels::Isa::kAvx2, kernels::Isa::kAvx512}) {
    if (argc > 1 && std::string(argv[1]) != "all" && argv[1] != std::string(name_of(isa))) continue;
    if (!kernels::set_isa(isa)) continue;
    for (const Data& data : all) measure(data);
  }
}
