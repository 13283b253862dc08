#include "coding/piece.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "coding_warp.h"
#include "common/align.h"
#include "kernels/reduce.h"

namespace smddp {
namespace {

using coding::kBlockBytes;
using coding::kHeaderBytes;
using Memory = std::vector<std::byte>;

constexpr Dtype kCoded[] = {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32};
// In the header's third byte.
constexpr int kRawForm = 0, kZerosForm = 1, kCodedForm = 2;
constexpr size_t kGroup = 512;  // elements

// Memory that begins or ends at a page that may not be touched.
class Guarded {
 public:
  explicit Guarded(size_t bytes, bool at_end = true)
      : size_(bytes), mapped_(align_up(bytes, kPage) + 2 * kPage) {
    void* at = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    pages_ = static_cast<std::byte*>(at);
    EXPECT_EQ(mprotect(pages_ + kPage, mapped_ - 2 * kPage, PROT_READ | PROT_WRITE), 0);
    data_ = at_end ? pages_ + mapped_ - kPage - bytes : pages_ + kPage;
  }
  explicit Guarded(std::span<const std::byte> bytes, bool at_end = true)
      : Guarded(bytes.size(), at_end) {
    if (!bytes.empty()) std::memcpy(data_, bytes.data(), bytes.size());
  }
  ~Guarded() { munmap(pages_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  std::byte* data() const { return data_; }
  bool holds(std::span<const std::byte> bytes) const {
    return bytes.size() == size_ && (size_ == 0 || std::memcmp(data_, bytes.data(), size_) == 0);
  }

 private:
  size_t size_, mapped_;
  std::byte* pages_;
  std::byte* data_;
};

// --- data -------------------------------------------------------------------------------------------

enum class Data { kZeros, kNormal, kScales, kSparse, kSpecial, kRandomBits };
constexpr Data kAllData[] = {Data::kZeros,  Data::kNormal,  Data::kScales,
                             Data::kSparse, Data::kSpecial, Data::kRandomBits};

uint32_t bits_of(float x, Dtype dtype) {
  uint32_t bits;
  if (size_of(dtype) == sizeof bits) {
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  uint16_t half;
  kernels::store(&half, &x, 1, dtype);
  return half;
}

Memory make(Data data, size_t bytes, Dtype dtype, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  const float special[] = {0.0f, -0.0f, 1.0f, -INFINITY, INFINITY, 1e-40f, 6e-8f, 3.4e38f, NAN};
  size_t size = size_of(dtype);
  Memory memory(bytes + size);
  float scale = 1;
  for (size_t i = 0; i * size < bytes; ++i) {
    if (i % 64 == 0) scale = std::ldexp(1.0f, static_cast<int>(random() % 24) - 16);
    uint32_t bits = random();  // NaNs of all payloads among them
    if (data == Data::kZeros) bits = 0;
    if (data == Data::kNormal) bits = bits_of(normal(random), dtype);
    if (data == Data::kScales) bits = bits_of(normal(random) * scale, dtype);
    if (data == Data::kSparse) bits = random() % 8 != 0 ? 0 : bits_of(normal(random), dtype);
    if (data == Data::kSpecial && random() % 4 != 0)
      bits = bits_of(special[random() % std::size(special)], dtype);
    std::memcpy(memory.data() + i * size, &bits, size);
  }
  memory.resize(bytes);
  return memory;
}

// Elements whose seven bits below the sign take 2^width values, but for one in 64.
Memory of_width(unsigned width, size_t bytes, Dtype dtype) {
  std::mt19937 random(width);
  size_t size = size_of(dtype);
  Memory memory(bytes);
  for (auto& byte : memory) byte = static_cast<std::byte>(random());
  for (size_t at = size - 1; at < bytes; at += size) {
    if (random() % 64 == 0) continue;
    unsigned value = 50 + random() % (1u << width);
    memory[at] = static_cast<std::byte>(value | (random() % 2 << 7));
  }
  return memory;
}

// --- tests ------------------------------------------------------------------------------------------

// With each instruction set of this processor.
template <class F>
void with_each_isa(F&& f) {
  kernels::Isa best = kernels::isa();
  for (auto isa : {kernels::Isa::kBaseline, kernels::Isa::kAvx2, kernels::Isa::kAvx512}) {
    if (!kernels::set_isa(isa)) continue;
    SCOPED_TRACE(kernels::isa_name());
    f();
  }
  kernels::set_isa(best);
}

Memory encoded(const Memory& raw, Dtype dtype) {
  Memory coded(raw.size() + kHeaderBytes);
  coded.resize(coding::encode(coded.data(), raw.data(), raw.size(), dtype));
  return coded;
}

// By a GPU's coder, whose lanes run one after the other.
Memory encoded_by_warp(const Memory& raw, Dtype dtype) {
  unsigned counts[coding::kTopValues];
  Memory coded(raw.size() + kHeaderBytes);
  auto encode = [&]<size_t kSize> {
    coding::Header header = coding::warp::header_of<kSize>(raw.data(), raw.size(), counts);
    coding::warp::encode<kSize>(coded.data(), raw.data(), raw.size(), header);
    coded.resize(header.bytes);
  };
  size_of(dtype) == 2 ? encode.template operator()<2>() : encode.template operator()<4>();
  return coded;
}
// Into memory that ends at a page that may not be touched, as the code does, where that keeps their alignment.
bool decode_by_warp(Memory* to, size_t bytes, const Memory& coded) {
  Guarded from(coded, coded.size() % 2 == 0), raw(bytes, bytes % 4 == 0);
  bool good = coding::warp::decode(raw.data(), bytes, from.data(), coded.size());
  to->assign(raw.data(), raw.data() + bytes);
  return good;
}

// Without the size of the elements.
int form_of(const Memory& coded) { return static_cast<int>(coded[2]) % 8; }

// Memory to memory, between guard pages, with every instruction set: the same code, and the same values again.
void expect_round_trip(const Memory& raw, Dtype dtype, bool at_end = true) {
  Memory first;
  with_each_isa([&] {
    Guarded from(raw, at_end), code(raw.size() + kHeaderBytes, at_end);
    size_t coded = coding::encode(code.data(), from.data(), raw.size(), dtype);
    ASSERT_LE(coded, raw.size() + kHeaderBytes);
    Memory now(code.data(), code.data() + coded);
    if (first.empty()) first = now;
    ASSERT_EQ(now, first);
    ASSERT_EQ(coding::block_at(now.data(), now.size()), coded);
    ASSERT_TRUE(coded <= coding::most_worth(raw.size()) + kHeaderBytes || form_of(now) == kRawForm);
    Guarded received(now, at_end), to(raw.size(), at_end);
    ASSERT_TRUE(coding::decode(to.data(), raw.size(), received.data(), coded));
    ASSERT_TRUE(to.holds(raw));
  });
  ASSERT_EQ(encoded_by_warp(raw, dtype), first);
  Memory again;
  ASSERT_TRUE(decode_by_warp(&again, raw.size(), first));
  ASSERT_EQ(again, raw);
}

TEST(Coding, ValuesComeBackToTheBit) {
  uint32_t seed = 0;
  for (Dtype dtype : kCoded) {
    size_t group = kGroup * size_of(dtype);
    for (Data data : kAllData) {
      for (size_t near : {size_t{0}, size_t{64}, group, 2 * group, kBlockBytes / 2, kBlockBytes}) {
        for (size_t bytes = near - std::min<size_t>(near, 5);
             bytes <= std::min(near + 5, kBlockBytes); ++bytes) {
          SCOPED_TRACE(std::string(name_of(dtype)) + ", data " +
                       std::to_string(static_cast<int>(data)) + ", bytes " + std::to_string(bytes));
          expect_round_trip(make(data, bytes, dtype, ++seed), dtype, bytes % 2 == 0);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Coding, EveryValueOfTheHalfTypesComesBack) {
  for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    for (uint32_t first = 0; first < 65536; first += kBlockBytes / 2) {
      Memory raw;
      for (uint32_t bits = first; bits < first + kBlockBytes / 2; ++bits) {
        raw.push_back(static_cast<std::byte>(bits));
        raw.push_back(static_cast<std::byte>(bits >> 8));
      }
      expect_round_trip(raw, dtype);
    }
  }
}

TEST(Coding, EveryWidthComesBack) {
  for (Dtype dtype : kCoded) {
    for (unsigned width = 0; width <= 5; ++width) {
      Memory raw = of_width(width, kBlockBytes, dtype);
      // Six bits of 32 are not enough.
      bool saves = dtype != Dtype::kFloat32 || width < 5;
      EXPECT_EQ(form_of(encoded(raw, dtype)),
                saves ? kCodedForm + static_cast<int>(width) : kRawForm);
      expect_round_trip(raw, dtype);
    }
  }
}

// All elements of the sample are zero.
TEST(Coding, ASampleThatMissesWhatMattersCostsNoMoreThanRaw) {
  for (Dtype dtype : kCoded) {
    size_t size = size_of(dtype), step = kBlockBytes / size / 128 - 1;
    for (uint32_t others : {0u, 0xffffffffu, 0x7f7f7f7fu}) {
      Memory raw(kBlockBytes);
      for (size_t i = 0; i < kBlockBytes / size; ++i) {
        uint32_t bits = i % step == 0 ? 0 : others;
        std::memcpy(raw.data() + i * size, &bits, size);
      }
      expect_round_trip(raw, dtype);
      EXPECT_EQ(form_of(encoded(raw, dtype)), others == 0 ? kZerosForm : kRawForm);
    }
  }
}

TEST(Coding, SavesWhatItStates) {
  auto share = [](Data data, Dtype dtype) {
    Memory raw = make(data, kBlockBytes, dtype, 9), coded = encoded(raw, dtype);
    double bytes = static_cast<double>(raw.size());
    double expected = static_cast<double>(coding::estimate(raw.data(), raw.size(), dtype));
    EXPECT_NEAR(expected / bytes, static_cast<double>(coded.size()) / bytes, 0.03);
    return static_cast<double>(coded.size()) / bytes;
  };
  EXPECT_LT(share(Data::kNormal, Dtype::kBFloat16), 0.72);
  EXPECT_LT(share(Data::kNormal, Dtype::kFloat16), 0.9);
  EXPECT_LT(share(Data::kNormal, Dtype::kFloat32), 0.86);
  for (Dtype dtype : kCoded) {
    EXPECT_EQ(share(Data::kRandomBits, dtype), 1 + 1.0 * kHeaderBytes / kBlockBytes);
    EXPECT_EQ(share(Data::kZeros, dtype), 1.0 * kHeaderBytes / kBlockBytes);
  }
  EXPECT_EQ(share(Data::kNormal, Dtype::kInt32), 1 + 1.0 * kHeaderBytes / kBlockBytes);
}

TEST(Coding, RefusesEveryTruncatedBlock) {
  for (Dtype dtype : kCoded) {
    for (Data data : {Data::kNormal, Data::kScales, Data::kZeros, Data::kRandomBits}) {
      size_t bytes = 3 * kGroup * size_of(dtype) + 7;
      Memory coded = encoded(make(data, bytes, dtype, 3), dtype);
      Guarded from(coded.size()), to(bytes);
      Memory by_warp;
      for (size_t left = 0; left < coded.size(); left += left < 16 ? 1 : 7) {
        Memory part(coded.begin(), coded.begin() + static_cast<ptrdiff_t>(left));
        ASSERT_FALSE(decode_by_warp(&by_warp, bytes, part)) << left;
        if (left < 2) continue;
        auto stated = static_cast<uint16_t>(left);
        std::memcpy(part.data(), &stated, sizeof stated);
        ASSERT_FALSE(decode_by_warp(&by_warp, bytes, part)) << left;
      }
      with_each_isa([&] {
        for (size_t left = 0; left < coded.size(); ++left) {
          std::byte* part = from.data() + coded.size() - left;
          std::memcpy(part, coded.data(), left);
          ASSERT_FALSE(coding::decode(to.data(), bytes, part, left)) << left;
          if (left < 2) continue;
          auto stated = static_cast<uint16_t>(left);
          std::memcpy(part, &stated, sizeof stated);
          ASSERT_FALSE(coding::decode(to.data(), bytes, part, left)) << left;
        }
      });
    }
  }
}

TEST(Coding, RefusesABlockOfAnotherLength) {
  for (Dtype dtype : kCoded) {
    size_t bytes = 2 * kGroup * size_of(dtype);
    for (Data data : {Data::kNormal, Data::kRandomBits}) {
      Memory coded = encoded(make(data, bytes, dtype, 3), dtype);
      for (size_t other : {size_t{0}, bytes / 2, bytes - 1, bytes + 1, 2 * bytes}) {
        Guarded from(coded), to(other);
        EXPECT_FALSE(coding::decode(to.data(), other, from.data(), coded.size())) << other;
      }
      for (size_t more = 1; more <= 4; ++more) {
        coded.push_back({});
        Guarded from(coded), to(bytes);
        EXPECT_FALSE(coding::decode(to.data(), bytes, from.data(), coded.size()));
        auto stated = static_cast<uint16_t>(coded.size());
        std::memcpy(from.data(), &stated, sizeof stated);
        EXPECT_FALSE(coding::decode(to.data(), bytes, from.data(), coded.size()));
      }
    }
  }
}

TEST(Coding, AHeaderStatesALengthThatIsThere) {
  Memory coded = encoded(make(Data::kNormal, kBlockBytes, Dtype::kFloat32, 1), Dtype::kFloat32);
  for (size_t available = 0; available < coded.size(); ++available) {
    Guarded from(std::span<const std::byte>(coded).first(available));
    EXPECT_EQ(coding::block_at(from.data(), available), 0u) << available;
  }
  size_t before = coded.size();
  coded.resize(1 << 16);
  EXPECT_EQ(coding::block_at(coded.data(), coded.size()), before);
  for (size_t stated : {size_t{0}, kHeaderBytes - 1, kBlockBytes + kHeaderBytes + 1}) {
    std::memcpy(coded.data(), &stated, 2);
    EXPECT_EQ(coding::block_at(coded.data(), coded.size()), 0u) << stated;
  }
}

// Far elements are counted in the first bytes of each group: any number is refused, or stays inside.
TEST(Coding, ADamagedBlockTouchesNothingElse) {
  std::mt19937 random(17);
  for (Dtype dtype : kCoded) {
    size_t bytes = 2 * kGroup * size_of(dtype) + 6;
    for (Data data : {Data::kNormal, Data::kScales, Data::kZeros, Data::kRandomBits}) {
      Memory coded = encoded(make(data, bytes, dtype, 5), dtype);
      for (int round = 0; round < 400; ++round) {
        Memory damaged = coded;
        size_t first = round % 2 == 0 ? 2 : 0;  // the length stays, or not
        size_t last = std::min(damaged.size(), round % 4 < 2 ? size_t{8} : damaged.size());
        for (int k = 0; k <= round % 3; ++k)
          damaged[first + random() % (last - std::min(last - 1, first))] =
              static_cast<std::byte>(random());
        Memory result;
        bool accepted = false, is_first = true;
        with_each_isa([&] {
          bool at_end = round % 2 == 0;
          Guarded from(damaged, at_end), to(Memory(bytes), at_end);
          bool now = coding::decode(to.data(), bytes, from.data(), damaged.size());
          if (std::exchange(is_first, false)) {
            accepted = now;
            result.assign(to.data(), to.data() + bytes);
          }
          ASSERT_EQ(now, accepted);
          if (now) ASSERT_TRUE(to.holds(result));
        });
        ASSERT_EQ(decode_by_warp(&result, bytes, damaged), accepted);
      }
    }
  }
}

TEST(Coding, RefusesAWindowThatDoesNotExist) {
  Memory raw = make(Data::kNormal, kBlockBytes, Dtype::kBFloat16, 1);
  Memory coded = encoded(raw, Dtype::kBFloat16), to(kBlockBytes);
  ASSERT_EQ(form_of(coded), kCodedForm + 2);
  auto accepts = [&](unsigned base) {
    coded[3] = static_cast<std::byte>(base);
    return coding::decode(to.data(), to.size(), coded.data(), coded.size());
  };
  EXPECT_TRUE(accepts(124));
  EXPECT_FALSE(accepts(125));
  EXPECT_FALSE(accepts(255));
  for (int form : {kCodedForm + 6, kCodedForm + 16, 8, 9, 255}) {
    coded[2] = static_cast<std::byte>(form);
    EXPECT_FALSE(accepts(0)) << form;
  }
}

// --- pieces -----------------------------------------------------------------------------------------

// Blocks of several kinds of data in turn; the first is raw if `raw_first`.
Memory piece_of(size_t bytes, Dtype dtype, bool raw_first) {
  Memory raw;
  for (uint32_t i = raw_first ? 0 : 1; raw.size() < bytes; ++i) {
    Data data = i % 4 == 1 ? Data::kNormal : i % 4 == 3 ? Data::kZeros : Data::kRandomBits;
    Memory block = make(data, std::min(kBlockBytes, bytes - raw.size()), dtype, i);
    raw.insert(raw.end(), block.begin(), block.end());
  }
  return raw;
}

TEST(CodedPiece, ComesBackElsewhereAndInPlace) {
  for (Dtype dtype : kCoded) {
    for (bool raw_first : {false, true}) {
      for (size_t blocks : {0, 1, 2, 3, 4, 9, 16}) {
        for (size_t less : {size_t{0}, size_t{3}, kBlockBytes / 2}) {
          size_t bytes = blocks * kBlockBytes - std::min(blocks * kBlockBytes, less);
          Memory raw = piece_of(bytes, dtype, raw_first);
          Guarded code(coding::most_coded(bytes)), to(bytes), place(bytes);
          size_t coded = coding::encode_piece(code.data(), raw.data(), bytes, dtype);
          ASSERT_LE(coded, coding::most_coded(bytes));
          ASSERT_TRUE(coding::decode_piece(to.data(), bytes, code.data(), coded));
          ASSERT_TRUE(to.holds(raw));
          bool shorter = coded <= bytes;
          if (bytes > 0) std::memcpy(place.data(), code.data(), std::min(coded, bytes));
          ASSERT_EQ(coding::decode_in_place(place.data(), bytes, coded), shorter);
          if (shorter) ASSERT_TRUE(place.holds(raw)) << bytes;
        }
      }
    }
  }
}

// A raw block takes more than its values: its last bytes lie where the values of the next block go.
TEST(CodedPiece, InPlaceAfterManyRawBlocks) {
  Memory raw = make(Data::kRandomBits, coding::kPieceBytes, Dtype::kBFloat16, 1);
  std::memset(raw.data() + raw.size() - kBlockBytes, 0, kBlockBytes);
  Memory code(coding::most_coded(raw.size()));
  size_t coded = coding::encode_piece(code.data(), raw.data(), raw.size(), Dtype::kBFloat16);
  ASSERT_LT(coded, raw.size());
  Guarded place(raw.size());
  std::memcpy(place.data(), code.data(), coded);
  ASSERT_TRUE(coding::decode_in_place(place.data(), raw.size(), coded));
  EXPECT_TRUE(place.holds(raw));
}

TEST(CodedPiece, DamagedOrTruncatedTouchesNothingElse) {
  std::mt19937 random(23);
  size_t bytes = 3 * kBlockBytes + 100;
  Memory raw = piece_of(bytes, Dtype::kFloat32, false);
  Memory code(coding::most_coded(bytes));
  code.resize(coding::encode_piece(code.data(), raw.data(), bytes, Dtype::kFloat32));
  ASSERT_LT(code.size(), bytes);
  for (int round = 0; round < 1000; ++round) {
    Memory damaged = code;
    if (round % 2 == 0) damaged.resize(random() % code.size());
    // In every second round the header of a block.
    size_t second = coding::block_at(code.data(), code.size());
    size_t at = round % 4 < 2 ? second + random() % 4 : random() % code.size();
    if (at < damaged.size()) damaged[at] = static_cast<std::byte>(random());
    Guarded from(damaged), to(bytes), place(bytes);
    bool accepted = coding::decode_piece(to.data(), bytes, from.data(), damaged.size());
    ASSERT_FALSE(accepted && round % 2 == 0);
    std::memcpy(place.data(), damaged.data(), damaged.size());
    ASSERT_EQ(coding::decode_in_place(place.data(), bytes, damaged.size()), accepted);
    if (accepted) ASSERT_TRUE(place.holds(std::span<const std::byte>(to.data(), bytes)));
  }
  Guarded place(bytes), to(bytes);
  code.push_back({});
  EXPECT_FALSE(coding::decode_piece(to.data(), bytes, code.data(), code.size()));
  std::memcpy(place.data(), code.data(), code.size());
  EXPECT_FALSE(coding::decode_in_place(place.data(), bytes, code.size()));
  EXPECT_FALSE(coding::decode_in_place(place.data(), bytes, bytes + 1));
}

}  // namespace
}  // namespace smddp
