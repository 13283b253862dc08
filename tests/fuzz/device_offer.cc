// The offer of a local rank's device memory: its form, and the mapping of what it offers.
#include <unistd.h>

#include <cstdlib>

#include "device/host_device.h"
#include "input.h"
#include "intranode/copy_engine_memory.h"

using namespace smddp;
using namespace smddp::intranode;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  // Room for two extents, as all ranks of an operation compute it.
  size_t room = MemoryOffer::encoded_bytes({input.number<uint16_t>(), input.number<uint16_t>()});
  std::vector<uint8_t> bytes = input.bytes(room);
  bytes.resize(room);
  auto offer = MemoryOffer::decode(reinterpret_cast<const std::byte*>(bytes.data()), room);
  if (!offer.ok()) return 0;
  std::vector<uint8_t> again(room);
  offer.value().encode(reinterpret_cast<std::byte*>(again.data()), room);
  device::HostDevice device;
  Imports imports(device);
  for (size_t i = 0; i < offer.value().extents(); ++i) {
    size_t length = std::min<uint64_t>(offer.value().bytes(i), 1 << 20), found = 0;
    (void)offer.value().pieces(imports, i, 0, length, [&](std::byte*, size_t n) { found += n; });
    if (found > length) std::abort();
  }
  return 0;
}
