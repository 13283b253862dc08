// Collectives between hosts with coded chunks and messages: every result has the same bits as without, whatever
// travels.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "coding/piece.h"
#include "kernels/reduce.h"
#include "world.h"

namespace smddp {
namespace {

enum class Data { kWeights, kSpecial, kRandomBits };

// `bytes` bytes of elements of `dtype`, other ones on each rank. They repeat: tests would take most of their time here.
std::vector<std::byte> make(Data data, Dtype dtype, size_t bytes, int rank) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  std::normal_distribution<float> normal(0, 0.02f);
  const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 65504.0f, 3.4e38f};
  std::vector<std::byte> all(bytes);
  size_t size = size_of(dtype), period = std::min(bytes, 8'191 * size);
  for (size_t at = 0; at + size <= period; at += size) {
    float x = data == Data::kSpecial ? special[random() % std::size(special)] : normal(random);
    uint64_t bits = random();
    if (data != Data::kRandomBits && coding::codes(dtype)) kernels::store(&bits, &x, 1, dtype);
    std::memcpy(all.data() + at, &bits, std::min(size, sizeof bits));
  }
  for (size_t at = period; at < bytes; at += period)
    std::memcpy(all.data() + at, all.data(), std::min(period, bytes - at));
  return all;
}

struct Case {
  Dtype dtype;
  Data data;
  bool apart = false;  // two tensors, so that nothing between hosts lies end to end
};
const Case kCases[] = {
    {Dtype::kBFloat16, Data::kWeights},       {Dtype::kFloat16, Data::kWeights},
    {Dtype::kFloat32, Data::kWeights},        {Dtype::kBFloat16, Data::kSpecial},
    {Dtype::kFloat32, Data::kSpecial},        {Dtype::kBFloat16, Data::kRandomBits},
    {Dtype::kFloat16, Data::kRandomBits},     {Dtype::kInt32, Data::kWeights},
    {Dtype::kBFloat16, Data::kWeights, true}, {Dtype::kFloat32, Data::kSpecial, true},
};
// Elements: in messages alone, and around borders of chunks.
const size_t kSizes[] = {1000, 20'011, 65'536 + 16'384, 81'921, 300'007};

// Blocks of `sizes` elements end to end.
void fill(Blocks& blocks, std::vector<std::byte>& memory, const Sizes& sizes, const Case& what) {
  std::byte* at = memory.data();
  for (size_t size : sizes) {
    size_t element = size_of(what.dtype), first = what.apart ? size / 3 * element : 0;
    blocks.add(at, first);
    blocks.add(at + first, size * element - first);
    blocks.end_block();
    at += size * element;
  }
}

struct Call {
  std::shared_ptr<Operation> op;
  std::vector<std::byte> in, out;
};

// An operation of `size` elements per rank, with memory of its own.
Call make_call(const RankContext& c, Collective collective, const Case& what, size_t size) {
  Call call{std::make_shared<Operation>(), {}, {}};
  Operation& op = *call.op;
  size_t element = size_of(what.dtype), ranks = static_cast<size_t>(c.ranks);
  Sizes one{size}, each = equal_sizes(c.ranks, size), none{0};
  Sizes in = each, out = each;
  if (collective == Collective::kAllGather) in = one;
  if (collective == Collective::kReduceScatter) out = one;
  if (collective == Collective::kBroadcast) {
    in = none;
    out = size_of_one(1, c.ranks, size);
  }
  auto total = [&](const Sizes& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), size_t{0}) * element;
  };
  call.in = make(what.data, what.dtype, total(in), c.rank);
  call.out =
      make(what.data, what.dtype, total(out), collective == Collective::kBroadcast ? c.rank : 99);
  op.collective = collective;
  op.dtype = what.dtype;
  op.element_size = element;
  op.digest = size * ranks;
  if (sums(collective)) op.reduce_op = ReduceOp::kSum;
  fill(op.input, call.in, in, what);
  if (collective == Collective::kAllReduce) {
    op.output = op.input;
  } else {
    fill(op.output, call.out, out, what);
  }
  return call;
}

// Which of several NaNs a sum of fp32 keeps depends on where pieces meet (docs/numerics.md).
void make_all_nans_one(std::vector<std::byte>& memory) {
  for (size_t at = 0; at < memory.size(); at += sizeof(float)) {
    float value = 0;
    std::memcpy(&value, memory.data() + at, sizeof value);
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(memory.data() + at, &value, sizeof value);
  }
}

// Results of both, of which the second is coded.
void compare(RankContext& c, Collective collective, const Case& what, size_t size) {
  SCOPED_TRACE(std::string(name_of(collective)) + " " +
               std::to_string(static_cast<int>(what.dtype)) + " " +
               std::to_string(static_cast<int>(what.data)) + " " + std::to_string(size));
  Call plain = make_call(c, collective, what, size), coded = make_call(c, collective, what, size);
  ASSERT_TRUE(c.run(plain.op).ok());
  ASSERT_TRUE(c.run(coded.op, {.coding = Coding::kOn}).ok());
  if (sums(collective) && what.dtype == Dtype::kFloat32) {
    for (Call* call : {&plain, &coded}) {
      make_all_nans_one(call->in);
      make_all_nans_one(call->out);
    }
  }
  EXPECT_TRUE(plain.in == coded.in);
  EXPECT_TRUE(plain.out == coded.out);
  EXPECT_EQ(plain.op->sent.sent, plain.op->sent.raw);
  EXPECT_EQ(coded.op->sent.raw, plain.op->sent.raw);
  if (what.data == Data::kRandomBits || !coding::codes(what.dtype)) {
    EXPECT_EQ(coded.op->sent.sent, coded.op->sent.raw);
  }
  bool moves = collective != Collective::kReduceScatter && collective != Collective::kAllReduce;
  if (what.data == Data::kWeights && coding::codes(what.dtype) && size > 20'000 && moves &&
      coded.op->sent.raw > 0) {
    EXPECT_LT(coded.op->sent.sent, coded.op->sent.raw * 93 / 100);
  }
}

TEST(Coded, EveryCollectiveHasTheSameBits) {
  for (std::string layout : {"AB", "ABC", "AABB", "ABB"}) {
    run_world(layout, [](RankContext& c) {
      for (Collective collective :
           {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce,
            Collective::kBroadcast, Collective::kAllToAll}) {
        for (const Case& what : kCases) {
          if (what.dtype == Dtype::kInt32 && collective != Collective::kAllGather) continue;
          for (size_t size : kSizes) compare(c, collective, what, size);
        }
      }
    });
  }
}

// Fragments of both lanes and of several operations are under way at once, in two groups.
TEST(Coded, ManyOperationsAtOnce) {
  run_world("AABB", [](RankContext& c) {
    std::vector<Rank> all{0, 1, 2, 3};
    auto other = c.group.subgroup(c.store, "other", all);
    ASSERT_TRUE(other.ok());
    std::vector<Call> plain, coded;
    for (int i = 0; i < 12; ++i) {
      const Case& what = kCases[i % 3];
      auto collective = i % 2 == 0 ? Collective::kAllGather : Collective::kReduceScatter;
      size_t size = 50'000 + 10'000 * static_cast<size_t>(i);
      plain.push_back(make_call(c, collective, what, size));
      coded.push_back(make_call(c, collective, what, size));
      ASSERT_TRUE(c.run(plain.back().op).ok());
    }
    for (size_t i = 0; i < coded.size(); ++i) {
      Group& group = i % 3 == 0 ? *other.value() : c.group;
      group.submit(coded[i].op, {.coding = i % 5 == 0 ? Coding::kOff : Coding::kOn}, true);
    }
    for (size_t i = 0; i < coded.size(); ++i) {
      c.engine.wait(*coded[i].op);
      ASSERT_TRUE(coded[i].op->status().ok()) << coded[i].op->status().message();
      EXPECT_TRUE(plain[i].out == coded[i].out) << i;
    }
    other.value().reset();
  });
}

TEST(Coded, AutoCodesOverASlowNetworkWhatShrinks) {
  for (double bytes_per_ns : {0.001, 20.0}) {
    auto body = [&](RankContext& c) {
      for (Data data : {Data::kWeights, Data::kRandomBits}) {
        Case what{Dtype::kBFloat16, data};
        Call plain = make_call(c, Collective::kAllGather, what, 1'000'000);
        Call coded = make_call(c, Collective::kAllGather, what, 1'000'000);
        ASSERT_TRUE(c.run(plain.op).ok());
        ASSERT_TRUE(c.run(coded.op, {.coding = Coding::kAuto}).ok());
        EXPECT_TRUE(plain.out == coded.out);
        auto sent = static_cast<double>(coded.op->sent.sent);
        auto ratio = sent / static_cast<double>(coded.op->sent.raw);
        EXPECT_EQ(ratio < 0.75, data == Data::kWeights && bytes_per_ns < 1) << ratio;
        EXPECT_EQ(ratio == 1, data != Data::kWeights || bytes_per_ns > 1) << ratio;
      }
    };
    run_world("AB", body, {.model = NetworkModel{20'000, 4'000, bytes_per_ns}});
  }
}

TEST(CodingChoice, FollowsTheNetworkAndTheRatio) {
  CodingChoice choice;
  EXPECT_TRUE(choice.pays(0.71, 0.125));
  EXPECT_TRUE(choice.pays(0.9, 0.125));
  EXPECT_FALSE(choice.pays(0.96, 0.125));
  EXPECT_TRUE(choice.pays(0.71, 1.25));
  EXPECT_EQ(choice.last().number, 4u);
  EXPECT_FALSE(choice.pays(0.71, 12.5));
  const CodingAnswer& last = choice.last();
  EXPECT_EQ(last.number, 5u);
  EXPECT_FALSE(last.pays);
  EXPECT_EQ(last.ratio, 0.71);
  EXPECT_EQ(last.network, 12.5);
  EXPECT_NEAR(last.code, 1 / 0.15, 0.1);
}

// A latency is not worth what a tiny piece saves.
TEST(CodingChoice, CodesNoTinyPiece) {
  CodingChoice choice;
  std::vector<std::byte> values = make(Data::kWeights, Dtype::kBFloat16, 8 << 10, 0);
  for (Coding coding : {Coding::kOff, Coding::kAuto, Coding::kOn}) {
    for (size_t bytes : {size_t{0}, size_t{4095}, size_t{4096}, values.size()}) {
      CodingState flow;
      FlowCoding how{coding, Dtype::kBFloat16, 0.125, choice};
      bool codes = choice.codes(flow, how, values.data(), bytes, 0);
      EXPECT_EQ(codes, coding != Coding::kOff && bytes >= 4096) << bytes;
    }
  }
}

// --- one receiving flow, whose peer writes and says what the test says ------------------------------

class Receiving : public testing::Test {
 protected:
  static constexpr size_t kBytes = 256 << 10, kPrefix = kEagerPrefixBytes, kMessage = kPrefix / 2;

  void SetUp() override {
    ShuffledNetwork::only().orderly = true;
    for (auto* transport : {&own_, &other_})
      *transport = std::move(ShuffledTransport::open().value());
    remote_.emplace(JobKey{1}, siphash::Key{}, 0, 2, own_.get(), size_t{1} << 20);
    remote_->add(1, own_->add_peer(other_->facts().address).value());
    context_.emplace(FragmentContext{members_, shape_, local_, *remote_, turns_, tallies_, choice_,
                                     health_, staging_});
    values_ = make(Data::kWeights, Dtype::kBFloat16, kBytes, 1);
    op_->collective = Collective::kAllGather;
    op_->dtype = Dtype::kBFloat16;
    for (auto* memory : {&own_shard_, &output_}) {
      memory->resize(kBytes);
      op_->output.add(memory->data(), kBytes);
      op_->output.end_block();
    }
    op_->input.add(own_shard_.data(), kBytes);
    op_->input.end_block();
    FragmentQueue queue;
    FragmentMaker(*context_, Algorithm::kAuto, queue).plan(*op_, {});
    fragment_ = make_allgather(*context_, op_, 0, 0, kBytes);
    fragment_->start();
    chunk_ = flow().grant.chunk_bytes;
    ASSERT_TRUE(flow().granted);
  }
  void TearDown() override {
    fragment_->close_flows();
    ShuffledNetwork::only().orderly = false;
  }
  const ReceiveFlow& flow() const { return *fragment_->flows().receive_from(1); }
  size_t begin_of(uint64_t chunk) const { return flow().begin_of(chunk); }
  std::vector<std::byte> code_of(size_t begin, size_t bytes) const {
    std::vector<std::byte> coded(coding::most_coded(bytes));
    coded.resize(
        coding::encode_piece(coded.data(), values_.data() + begin, bytes, Dtype::kBFloat16));
    EXPECT_LT(coded.size(), bytes);
    return coded;
  }
  // Writes a chunk as a sender does, and returns its coded length.
  uint32_t write(uint64_t chunk) {
    size_t begin = begin_of(chunk);
    std::vector<std::byte> coded = code_of(begin, begin_of(chunk + 1) - begin);
    std::memcpy(output_.data() + begin, coded.data(), coded.size());
    return static_cast<uint32_t>(coded.size());
  }
  // A message with the code of `raw` bytes of the flow.
  Status bring(uint64_t offset, size_t raw, const std::vector<std::byte>& code) {
    wire::Header header{};
    header.type = wire::Type::kData;
    header.source = 1;
    header.offset = offset;
    header.bytes = static_cast<uint32_t>(code.size());
    header.raw_bytes = static_cast<uint32_t>(raw);
    header.signature = op_->signature();
    return fragment_->on_message(header, code.data());
  }
  Status tell(uint64_t first, const std::vector<uint32_t>& lengths) {
    wire::Header header{};
    header.type = wire::Type::kWritten;
    header.source = 1;
    header.offset = first;
    header.bytes = static_cast<uint32_t>(lengths.size() * sizeof(uint32_t));
    header.signature = op_->signature();
    return fragment_->on_message(header, reinterpret_cast<const std::byte*>(lengths.data()));
  }
  bool holds(uint64_t first, uint64_t end) const {
    return std::equal(values_.begin() + static_cast<ptrdiff_t>(begin_of(first)),
                      values_.begin() + static_cast<ptrdiff_t>(begin_of(end)),
                      output_.begin() + static_cast<ptrdiff_t>(begin_of(first)));
  }

  Members members_{0, Topology({"A", "B"}), "g", {"A", "B"}, {0, 1}};
  Shape shape_{.ranks = 2, .nodes = 2};
  LocalPeers local_;
  std::unique_ptr<transport::Transport> own_, other_;
  std::optional<RemotePeers> remote_;
  RailTurns turns_;
  PeerTallies tallies_{2};
  CodingChoice choice_;
  Health health_;
  StagingPool staging_;
  std::optional<FragmentContext> context_;
  std::shared_ptr<Operation> op_ = std::make_shared<Operation>();
  std::vector<std::byte> own_shard_, output_, values_;
  std::unique_ptr<Fragment> fragment_;
  size_t chunk_ = 0;
};

TEST_F(Receiving, DecodesEachChunkOnceInAnyOrderOfTheWords) {
  uint64_t chunks = flow().chunks();
  ASSERT_GE(chunks, 4u);
  for (uint64_t chunk = chunks; chunk-- > 0;) {
    EXPECT_TRUE(tell(chunk, {write(chunk)}).ok());
    EXPECT_TRUE(holds(chunk, chunks));
    EXPECT_EQ(flow().coverage.total(), begin_of(chunks) - begin_of(chunk));
  }
  EXPECT_FALSE(fragment_->flows().closed(false) && flow().written < chunks);
  EXPECT_EQ(tell(0, {0}).code(), Code::kMismatch);  // they come once
  EXPECT_TRUE(holds(0, chunks));
}

TEST_F(Receiving, DecodesMessages) {
  EXPECT_TRUE(bring(kMessage, kMessage, code_of(kMessage, kMessage)).ok());
  EXPECT_EQ(flow().coverage.total(), kMessage);
  EXPECT_TRUE(bring(0, kMessage, code_of(0, kMessage)).ok());
  EXPECT_EQ(flow().coverage.prefix(), kPrefix);
  EXPECT_GT(flow().saved, kPrefix / 5);
  EXPECT_TRUE(std::equal(values_.begin(), values_.begin() + kPrefix, output_.begin()));
}

TEST_F(Receiving, RefusesMessagesThatAreNoCodeOfTheirBytes) {
  std::vector<std::byte> whole = code_of(0, kMessage), cut = whole, longer = whole, two = whole;
  cut.pop_back();
  longer.push_back({});
  two.insert(two.end(), whole.begin(), whole.end());
  std::vector<std::byte> before = output_;
  for (auto [raw, code] :
       {std::pair(kMessage, cut), std::pair(kMessage, longer), std::pair(kMessage - 1, whole),
        std::pair(kMessage + 1, whole), std::pair(2 * kMessage, two)}) {
    EXPECT_EQ(bring(0, raw, code).code(), Code::kMismatch) << raw << " " << code.size();
    EXPECT_EQ(flow().saved, 0u);
    EXPECT_TRUE(output_ == before);
    TearDown();
    op_ = std::make_shared<Operation>();
    SetUp();
  }
}

TEST_F(Receiving, RefusesWhatIsNoCodeOfTheChunk) {
  for (uint32_t wrong : {1u, 3u, 4u, static_cast<uint32_t>(chunk_), UINT32_MAX}) {
    write(0);
    std::vector<std::byte> behind(output_.begin() + static_cast<ptrdiff_t>(begin_of(1)),
                                  output_.end());
    EXPECT_EQ(tell(0, {wrong}).code(), Code::kMismatch) << wrong;
    EXPECT_TRUE(std::equal(behind.begin(), behind.end(),
                           output_.begin() + static_cast<ptrdiff_t>(begin_of(1))));
    TearDown();
    op_ = std::make_shared<Operation>();
    SetUp();
  }
}

TEST_F(Receiving, RefusesALengthThatIsOffByOne) {
  EXPECT_EQ(tell(0, {write(0) - 1}).code(), Code::kMismatch);
}

TEST_F(Receiving, RefusesWordsOfOtherChunks) {
  uint64_t chunks = flow().chunks();
  for (auto [first, count] : {std::pair(chunks, size_t{1}), std::pair(UINT64_MAX, size_t{1}),
                              std::pair(uint64_t{0}, size_t{0}), std::pair(chunks - 1, size_t{2})})
    EXPECT_EQ(tell(first, std::vector<uint32_t>(count)).code(), Code::kMismatch) << first;
  EXPECT_EQ(flow().coverage.total(), 0u);
  EXPECT_EQ(flow().written, 0u);
}

}  // namespace
}  // namespace smddp
