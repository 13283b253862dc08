// tests/fuzz/wire.cc has arbitrary bytes.
#include "transport/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

namespace smddp::wire {
namespace {

std::vector<uint8_t> message(Type type, size_t payload) {
  Header header = {};
  header.magic = kMagic;
  header.type = type;
  header.bytes = static_cast<uint32_t>(payload);
  header.raw_bytes = header.bytes;
  std::vector<uint8_t> bytes(sizeof header + payload, 0xab);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

bool accepts(const std::vector<uint8_t>& bytes) { return check(bytes.data(), bytes.size()); }

template <class Edit>
bool accepts_edited(std::vector<uint8_t> bytes, Edit edit) {
  Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  edit(header);
  std::memcpy(bytes.data(), &header, sizeof header);
  return accepts(bytes);
}

TEST(Wire, AcceptsEveryTypeWithAndWithoutPayload) {
  for (Type type : {Type::kReady, Type::kData, Type::kAbort, Type::kWritten, Type::kClosed,
                    Type::kAsk, Type::kSentAll, Type::kLeaving, Type::kTaken}) {
    EXPECT_TRUE(accepts(message(type, 0)));
    EXPECT_TRUE(accepts(message(type, 1)));
    EXPECT_TRUE(accepts(message(type, 128 * 1024)));
  }
}

// Every byte of the header and of a READY's or an abort's payload counts, and so does the key.
TEST(Wire, TheKeyedHashCoversTheHeaderAndShortPayloads) {
  constexpr siphash::Key key{1, 2};
  for (Type type : {Type::kReady, Type::kAbort, Type::kData}) {
    std::vector<uint8_t> good = message(type, 40);
    auto mac = [&](const std::vector<uint8_t>& bytes, const siphash::Key& with) {
      Header header;
      std::memcpy(&header, bytes.data(), sizeof header);
      return mac_of(with, header, bytes.data() + sizeof header);
    };
    uint64_t expected = mac(good, key);
    EXPECT_NE(mac(good, {1, 3}), expected);
    for (size_t at = 0; at < good.size(); ++at) {
      std::vector<uint8_t> other = good;
      other[at] ^= 0x10;
      // The hash itself, the length that says how much is hashed, and data lie outside.
      bool outside = at >= offsetof(Header, mac) && (at < sizeof(Header) || type == Type::kData);
      if (at >= offsetof(Header, bytes) && at < offsetof(Header, raw_bytes) && type != Type::kData)
        continue;
      EXPECT_EQ(mac(other, key) == expected, outside) << "byte " << at;
    }
  }
}

TEST(Wire, RejectsAMessageShorterThanAHeader) {
  std::vector<uint8_t> whole = message(Type::kData, 0);
  for (size_t size = 0; size < sizeof(Header); ++size) {
    std::vector<uint8_t> cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_FALSE(check(cut.data(), cut.size())) << size;
  }
  EXPECT_FALSE(check(nullptr, 0));
}

TEST(Wire, RejectsAnotherMagicOrVersion) {
  std::vector<uint8_t> good = message(Type::kData, 8);
  for (int bit = 0; bit < 32; ++bit) {
    EXPECT_FALSE(accepts_edited(good, [&](Header& h) { h.magic ^= 1u << bit; })) << bit;
  }
}

TEST(Wire, RejectsUnknownTypes) {
  std::vector<uint8_t> good = message(Type::kData, 8);
  for (int type = 0; type < 256; ++type) {
    bool known = type >= 1 && type <= 9;
    EXPECT_EQ(accepts_edited(good, [&](Header& h) { h.type = static_cast<Type>(type); }), known)
        << type;
  }
}

TEST(Wire, RejectsALengthThatDiffersFromThePayload) {
  std::vector<uint8_t> good = message(Type::kData, 8);
  constexpr uint32_t kTop = std::numeric_limits<uint32_t>::max(), kHeader = sizeof(Header);
  for (uint32_t wrong : {0u, 7u, 9u, 8u + kHeader, 1u << 31, (1u << 31) + 8, kTop, kTop - kHeader,
                         kTop - kHeader + 9}) {
    EXPECT_FALSE(accepts_edited(good, [&](Header& h) { h.bytes = h.raw_bytes = wrong; })) << wrong;
  }
}

TEST(Wire, DataStandsForAtLeastItsPayload) {
  for (Type type : {Type::kData, Type::kReady}) {
    for (uint32_t raw : {0u, 7u, 8u, 9u, 1u << 31}) {
      bool accepted = accepts_edited(message(type, 8), [&](Header& h) { h.raw_bytes = raw; });
      EXPECT_EQ(accepted, raw >= 8 || type != Type::kData) << raw;
    }
  }
}

TEST(Wire, ReadsAtAnyAlignment) {
  std::vector<uint8_t> good = message(Type::kReady, 3);
  for (size_t shift = 0; shift < 8; ++shift) {
    std::vector<uint8_t> moved(shift);
    moved.insert(moved.end(), good.begin(), good.end());
    EXPECT_TRUE(check(moved.data() + shift, good.size())) << shift;
  }
}

TEST(Wire, AcceptsOnlyGrantsWithinBounds) {
  Grant good = {};
  good.bytes = 1000;
  good.chunk_bytes = 300;
  EXPECT_TRUE(check(good, 1000));
  EXPECT_FALSE(check(good, 999));
  auto edited = [&](auto&& edit) {
    Grant grant = good;
    edit(grant);
    return check(grant, grant.bytes);
  };
  EXPECT_FALSE(edited([](Grant& g) { g.chunk_bytes = 0; }));
  EXPECT_FALSE(edited([](Grant& g) { g.bytes = 0; }));
  EXPECT_TRUE(edited([](Grant& g) { g.bytes = g.chunk_bytes * uint64_t{kMaxChunks}; }));
  EXPECT_FALSE(edited([](Grant& g) { g.bytes = g.chunk_bytes * uint64_t{kMaxChunks} + 1; }));
}

}  // namespace
}  // namespace smddp::wire
