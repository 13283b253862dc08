// The arithmetic of the GPU kernels, run on the CPU and compared with the CPU's own reductions.
#include "kernels/reduce_arithmetic.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <vector>

#include "device/cuda_api.h"
#include "device/cuda_device.h"
#include "device/cuda_kernels.h"
#include "kernels/reduce.h"
#include "results.h"

namespace smddp::kernels {
namespace {

using device::cuda_kernels;
using device::kernel_name;

constexpr Dtype kTypes[] = {Dtype::kFloat32, Dtype::kFloat64, Dtype::kBFloat16, Dtype::kFloat16,
                            Dtype::kInt8,    Dtype::kUInt8,   Dtype::kInt16,    Dtype::kUInt16,
                            Dtype::kInt32,   Dtype::kUInt32,  Dtype::kInt64,    Dtype::kUInt64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

// Compares the result of a kernel with `threads` threads with the result of reduce(). The sources begin `offset`
// bytes after a multiple of 16, the second one `askew` bytes later, the destination `apart` bytes later.
void compare(Dtype dtype, ReduceOp op, size_t count, size_t sources, size_t offset, size_t askew,
             size_t apart, size_t threads, std::mt19937& random) {
  size_t bytes = count * size_of(dtype);
  std::vector<std::vector<char>> memory(sources, std::vector<char>(bytes + 64));
  Reduction r;
  std::vector<const void*> pointers;
  for (size_t k = 0; k < sources; ++k) {
    for (char& c : memory[k]) c = static_cast<char>(random());
    char* at = memory[k].data();
    at += -reinterpret_cast<uintptr_t>(at) % 16;
    at += offset + (k == 1 ? askew : 0);
    // Random bit patterns are not enough for floating types: use numbers whose sums round.
    if (dtype == Dtype::kFloat32) {
      for (size_t i = 0; i < count; ++i) {
        float x = static_cast<float>(static_cast<int>(random())) * 0x1p-20f;
        std::memcpy(at + i * 4, &x, 4);
      }
    }
    if (dtype == Dtype::kFloat64) {
      for (size_t i = 0; i < count; ++i) {
        double x = static_cast<double>(static_cast<int>(random())) / 3;
        std::memcpy(at + i * 8, &x, 8);
      }
    }
    r.sources[k] = at;
    pointers.push_back(at);
  }
  std::vector<char> want(bytes + 64, 7), got(bytes + 64, 7);
  char* to = got.data();
  to += -reinterpret_cast<uintptr_t>(to) % 16 + offset + apart;
  int divisor = op == ReduceOp::kAvg ? static_cast<int>(sources) : 1;
  reduce(want.data(), pointers.data(), sources, count, dtype, op, divisor);
  r.destination = to;
  r.sources_count = sources;
  r.count = count;
  r.dtype = dtype;
  r.op = op;
  r.divisor = divisor;
  for (size_t t = 0; t < threads; ++t) reduce_share(r, t, threads);
  // Only the sources decide whether memory is read in lanes.
  if (askew == 0 && bytes >= 32) EXPECT_GT(parts_of(r, size_of(dtype)).lanes, 0u);
  ASSERT_EQ(std::memcmp(to, want.data(), bytes), 0)
      << name_of(dtype) << " " << name_of(op) << " " << count << " elements, " << sources
      << " sources, offset " << offset << ", askew " << askew << ", apart " << apart << ", "
      << threads << " threads";
  EXPECT_EQ(to[bytes], 7);
  if (offset > 0) EXPECT_EQ(to[-1], 7);
}

TEST(DeviceReduce, EqualsTheCpuForEveryTypeAndOperation) {
  std::mt19937 random(1);
  for (Dtype dtype : kTypes) {
    for (ReduceOp op : kOps) {
      bool integer =
          accumulator_of(dtype) == dtype && dtype != Dtype::kFloat32 && dtype != Dtype::kFloat64;
      if (op == ReduceOp::kAvg && integer) continue;
      for (size_t sources : {1, 2, 3, 4, 5, 8, 9})
        compare(dtype, op, 1000, sources, 0, 0, 0, 5, random);
    }
  }
}

TEST(DeviceReduce, AnySizeOffsetAndNumberOfThreads) {
  std::mt19937 random(2);
  for (Dtype dtype : {Dtype::kUInt8, Dtype::kBFloat16, Dtype::kFloat32, Dtype::kInt64}) {
    size_t size = size_of(dtype);
    for (size_t count : {0, 1, 3, 7, 8, 31, 64, 257, 4099}) {
      for (size_t offset : {size_t{0}, size, 16 - size}) {
        for (size_t threads : {1, 3, 32}) {
          for (size_t askew : {size_t{0}, size}) {
            for (size_t apart : {size_t{0}, size, 16 - size}) {
              for (size_t sources : {2, 3, 8})
                compare(dtype, ReduceOp::kSum, count, sources, offset, askew, apart, threads,
                        random);
            }
          }
        }
      }
    }
  }
}

TEST(DeviceReduce, ConversionsOfHalfTypesEqualTheCpu) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    auto h = static_cast<uint16_t>(bits);
    for (Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) {
      float want;
      load(&want, &h, 1, dtype);
      float got = dtype == Dtype::kFloat16 ? Float16::widen(h) : BFloat16::widen(h);
      if (want != want) {
        EXPECT_NE(got, got);
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << bits;
      }
    }
  }
  std::mt19937 random(3);
  for (int i = 0; i < 1000000; ++i) {
    auto x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    uint16_t want;
    store(&want, &x, 1, Dtype::kFloat16);
    ASSERT_EQ(Float16::narrow(x), want) << x;
    store(&want, &x, 1, Dtype::kBFloat16);
    ASSERT_EQ(BFloat16::narrow(x), want) << x;
  }
}

// If this build has kernels, checks that they are a fatbin as well.
TEST(DeviceReduce, EveryTypeAndOperationHasAKernelName) {
  for (Dtype dtype : kTypes) {
    for (ReduceOp op : kOps) {
      const char* name = kernel_name(dtype, op);
      ASSERT_NE(name, nullptr);
      EXPECT_EQ(std::string(name).rfind("smddp_reduce_", 0), 0u);
    }
  }
  EXPECT_STREQ(kernel_name(Dtype::kBFloat16, ReduceOp::kAvg), "smddp_reduce_bf16_sum");
  EXPECT_STREQ(kernel_name(Dtype::kUInt64, ReduceOp::kMax), "smddp_reduce_u64_max");
  EXPECT_EQ(kernel_name(Dtype::kBytes, ReduceOp::kSum), nullptr);
  if (device::cuda_kernels() == nullptr) GTEST_SKIP() << "this build had no nvcc";
  uint32_t magic;
  std::memcpy(&magic, cuda_kernels(), sizeof magic);
  EXPECT_EQ(magic, 0xba55ed50u);  // the magic number of a fatbin
}

TEST(CudaApi, ErrorsNameTheRemedy) {
  auto none = device::cuda::load_api("libcuda-that-is-not-there.so");
  ASSERT_FALSE(none.ok());
  EXPECT_TRUE(says(none.status(), "install NVIDIA's driver"));
  auto other = device::cuda::load_api("libm.so.6");
  ASSERT_FALSE(other.ok());
  EXPECT_TRUE(says(other.status(), "update NVIDIA's driver"));
}

}  // namespace
}  // namespace smddp::kernels
