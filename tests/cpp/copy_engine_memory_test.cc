// Memory that ranks of a host offer and map, on the device that threads simulate.
#include "intranode/copy_engine_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "device/host_device.h"
#include "results.h"

namespace smddp {
namespace {

using device::HostDevice;
using intranode::Imports;

TEST(Imports, AreKeptUntilTheOwnerAllocatesTheAddressAgain) {
  HostDevice owner, reader;
  Imports imports(reader);
  void* memory = owner.allocate(8192).value();
  auto exported = value_of(owner.export_memory(memory, 100));
  device::Allocation first = exported[0];
  auto at = imports.find(getpid(), first);
  ASSERT_TRUE(at.ok());
  static_cast<char*>(memory)[5] = 'x';
  EXPECT_EQ(static_cast<char>(at.value()[5]), 'x');
  EXPECT_EQ(imports.find(getpid(), first).value(), at.value());
  EXPECT_EQ(imports.statistics().hits, 1u);
  EXPECT_EQ(imports.statistics().misses, 1u);
  owner.free(memory);
  // Other memory at the same addresses: a smaller piece inside of the range of the first one.
  void* again = owner.allocate(4096).value();
  device::Allocation second = owner.export_memory(again, 1).value()[0];
  second.base = first.base + 4096;
  ASSERT_NE(second.id, first.id);
  auto there = value_of(imports.find(getpid(), second));
  static_cast<char*>(again)[0] = 'y';
  EXPECT_EQ(static_cast<char>(there[0]), 'y');
  EXPECT_EQ(imports.statistics().replaced, 1u);
  EXPECT_EQ(imports.statistics().mapped, 4096u);
  // And memory of the same size in the same place.
  void* third = owner.allocate(4096).value();
  device::Allocation same = owner.export_memory(third, 1).value()[0];
  same.base = second.base;
  auto where = value_of(imports.find(getpid(), same));
  static_cast<char*>(third)[0] = 'z';
  EXPECT_EQ(static_cast<char>(where[0]), 'z');
  EXPECT_EQ(imports.statistics().replaced, 2u);
}

TEST(MemoryOffer, EncodesDecodesAndChecksItsRoom) {
  HostDevice gpu;
  auto* memory = static_cast<std::byte*>(gpu.allocate(10000).value());
  Signature signature;
  signature.bytes = 77;
  auto offer =
      intranode::MemoryOffer::make(gpu, signature, {{memory, 5000}, {memory + 5000, 1000}});
  size_t room = intranode::MemoryOffer::encoded_bytes({5000, 1000});
  std::vector<std::byte> wire(room);
  offer.encode(wire.data(), room);
  auto back = value_of(intranode::MemoryOffer::decode(wire.data(), room));
  EXPECT_EQ(back.extents(), 2u);
  EXPECT_EQ(back.bytes(1), 1000u);
  EXPECT_EQ(back.signature(), signature);
  EXPECT_EQ(back.refusal(), "");
  // If the pieces do not fit, the encoded offer holds a refusal instead.
  offer.encode(wire.data(), 128);
  EXPECT_FALSE(intranode::MemoryOffer::decode(wire.data(), 60).ok());
}

}  // namespace
}  // namespace smddp
