// The results of sums, by every way in which they are computed.
#include <bit>
#include <random>
#include <type_traits>

#include "world.h"

namespace smddp {
namespace {

// An AllReduce of two tensors per rank, out of place or in place, in one exchange (`whole`) or, cut by a
// bucket, in fragments, whose partial sums travel in fp32.
template <class T>
std::vector<T> all_reduced(RankContext& c, size_t size, Dtype dtype, ReduceOp reduce, bool in_place,
                           bool whole) {
  std::mt19937 random(static_cast<unsigned>(c.rank) + 5);
  std::vector<T> in(size), out(size);
  for (T& x : in) {
    if constexpr (std::is_same_v<T, uint16_t>) {
      x = static_cast<uint16_t>(0x3f00 + random() % 0x100);  // bf16 from 0.5 to 2
    } else if constexpr (std::is_same_v<T, float>) {
      x = static_cast<float>(random()) * 0x1p-32f - 0.5f;
    } else {
      x = static_cast<T>(static_cast<int>(random() % 7) - 3);
    }
  }
  std::vector<T>& to = in_place ? in : out;
  auto op = std::make_shared<Operation>();
  op->collective = Collective::kAllReduce;
  op->dtype = dtype;
  op->reduce_op = reduce;
  op->element_size = sizeof(T);
  op->tensors = 2;
  size_t ranks = static_cast<size_t>(c.ranks), half = size / 2;
  for (size_t r = 0; r < ranks; ++r) {
    size_t from = size * r / ranks, end = size * (r + 1) / ranks;
    size_t middle = std::clamp(half, from, end);
    for (auto [begin, until] : {std::pair(from, middle), std::pair(middle, end)}) {
      op->input.add(in.data() + begin, (until - begin) * sizeof(T));
      op->output.add(to.data() + begin, (until - begin) * sizeof(T));
    }
    op->input.end_block();
    op->output.end_block();
  }
  Status status = c.run(op, {.reduce_scatter_bucket_bytes = whole ? 0 : 3 * ranks * sizeof(T),
                             .reduce_precision_fp32 = !whole});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(!whole || op->plan().whole);
  EXPECT_EQ(op->fragments, whole || size <= 3 * ranks ? 1u : (size + 3 * ranks - 1) / (3 * ranks));
  return to;
}

template <class T>
void compare_all_reduces(RankContext& c, Dtype dtype, ReduceOp reduce) {
  for (size_t size : {0, 1, 7, 64, 501}) {
    auto one = all_reduced<T>(c, size, dtype, reduce, false, true);
    EXPECT_EQ(one, all_reduced<T>(c, size, dtype, reduce, true, true)) << size;
    EXPECT_EQ(one, all_reduced<T>(c, size, dtype, reduce, true, false)) << size;
    EXPECT_EQ(one, all_reduced<T>(c, size, dtype, reduce, false, false)) << size;
  }
}

TEST(Numerics, AllReduceInOneExchangeEqualsThatInFragments) {
  for (std::string layout : {"AA", "AAA", "AAAAA", "AB", "ABC", "AABB", "ABCABC", "AAB"}) {
    run_world(layout, [](RankContext& c) {
      for (ReduceOp reduce :
           {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
        compare_all_reduces<float>(c, Dtype::kFloat32, reduce);
        compare_all_reduces<uint16_t>(c, Dtype::kBFloat16, reduce);
        if (reduce != ReduceOp::kAvg) compare_all_reduces<int8_t>(c, Dtype::kInt8, reduce);
      }
    });
  }
}

uint16_t bf16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }

TEST(Numerics, HalfTypesAreSummedInFp32AndRoundedOncePerHop) {
  // 1 + 2^-9 + 2^-9 + ...: rounded to bf16, each single addition would have no effect.
  run_world("AAAA", [&](RankContext& c) {
    std::vector<uint16_t> in(4, bf16(c.rank == 0 ? 1.0f : 0x1p-9f + 0x1p-10f)), out(1);
    ASSERT_TRUE(c.run(scatter_of(in, out, 4, Dtype::kBFloat16, ReduceOp::kSum)).ok());
    EXPECT_EQ(out[0], bf16(1.0f + 0x1p-7f));  // 1 + 3 * 1.5 * 2^-9 = 1.0087890625, rounded once
  });
}

// (2^27 + 1) - 2^27 is 0 in fp32, and 1 if the last two are added first.
TEST(Numerics, PartialSumsAreAddedInTheOrderOfHosts) {
  for (std::string layout : {"ABC", "AABBCC"}) {
    run_world(layout, [&](RankContext& c) {
      float mine[] = {0x1p27f, 1.0f, -0x1p27f};
      int host = c.group.topology().node_of(c.rank);
      bool first = c.group.topology().local_index(c.rank) == 0;
      auto ranks = static_cast<size_t>(c.ranks);
      std::vector<float> in(1000 * ranks, first ? mine[host] : 0.0f), out(1000);
      ASSERT_TRUE(c.run(scatter_of(in, out, c.ranks, Dtype::kFloat32, ReduceOp::kSum)).ok());
      EXPECT_EQ(out, std::vector<float>(1000, 0.0f));
    });
  }
}

TEST(Numerics, PartialSumsTravelInFp32IfTheTuningSaysSo) {
  run_world("AABB", [&](RankContext& c) {
    // Host B's partial sum is 1 + 2^-9: rounded to bf16 it is 1, in fp32 it changes the final rounding.
    float mine[] = {1.0f, 0x1p-8f * 0.75f, 1.0f, 0x1p-9f};
    std::vector<uint16_t> in(4, bf16(mine[c.rank])), out(1);
    ASSERT_TRUE(c.run(scatter_of(in, out, 4, Dtype::kBFloat16, ReduceOp::kSum),
                      {.reduce_precision_fp32 = true})
                    .ok());
    EXPECT_EQ(out[0], bf16(2.0f));
    std::vector<uint16_t> again(1);
    ASSERT_TRUE(c.run(scatter_of(in, again, 4, Dtype::kBFloat16, ReduceOp::kSum)).ok());
  });
}

}  // namespace
}  // namespace smddp
