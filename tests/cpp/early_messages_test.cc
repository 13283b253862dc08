// Messages of groups that a rank has not made yet: kept in order, bounded, and small.
#include "progress/early_messages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "common/signature.h"

namespace smddp {
namespace {

JobKey key_of(uint8_t group) {
  JobKey key{};
  key[0] = group;
  return key;
}

void keep(EarlyMessages& early, wire::Type type, uint8_t group, uint64_t seq,
          const std::string& payload = "") {
  wire::Header header{};
  header.magic = wire::kMagic;
  header.type = type;
  header.key = key_of(group);
  header.seq = seq;
  header.bytes = payload.size();
  early.keep(header, reinterpret_cast<const std::byte*>(payload.data()));
}

TEST(EarlyMessages, AreHandedOutOncePerGroupInTheirOrder) {
  EarlyMessages early;
  keep(early, wire::Type::kReady, 1, 10);
  keep(early, wire::Type::kReady, 2, 20);
  keep(early, wire::Type::kAbort, 1, 11, "why");
  auto first = early.take(key_of(1));
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].header.seq, 10u);
  EXPECT_TRUE(first[0].payload.empty());
  EXPECT_EQ(first[1].header.seq, 11u);
  ASSERT_EQ(first[1].payload.size(), 3u);
  EXPECT_EQ(std::memcmp(first[1].payload.data(), "why", 3), 0);
  EXPECT_TRUE(early.take(key_of(1)).empty());
  EXPECT_EQ(early.take(key_of(2)).size(), 1u);
  EXPECT_EQ(early.dropped(), 0u);
}

TEST(EarlyMessages, DataAndLongMessagesAreDropped) {
  EarlyMessages early;
  keep(early, wire::Type::kData, 1, 0);
  keep(early, wire::Type::kAbort, 1, 0, std::string(kReasonBytes + 1, 'x'));
  EXPECT_EQ(early.dropped(), 2u);
  keep(early, wire::Type::kAbort, 1, 0, std::string(kReasonBytes, 'x'));
  EXPECT_EQ(early.dropped(), 2u);
  EXPECT_EQ(early.take(key_of(1)).size(), 1u);
}

TEST(EarlyMessages, TheOldestIsDroppedIfThereAreTooMany) {
  EarlyMessages early;
  for (uint64_t seq = 0; seq < 4100; ++seq) keep(early, wire::Type::kReady, 1, seq);
  EXPECT_EQ(early.dropped(), 4u);
  auto messages = early.take(key_of(1));
  ASSERT_EQ(messages.size(), 4096u);
  EXPECT_EQ(messages.front().header.seq, 4u);
  EXPECT_EQ(messages.back().header.seq, 4099u);
}

}  // namespace
}  // namespace smddp
