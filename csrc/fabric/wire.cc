#include "fabric/wire.h"

#include <cstring>

namespace smddp::wire {

bool check(const void* data, size_t size) {
  if (size < sizeof(Header)) return false;
  Header header;
  std::memcpy(&header, data, sizeof header);
  if (header.magic != kMagic) return false;
  if (header.type != Type::kReady && header.type != Type::kData && header.type != Type::kAbort) return false;
  return header.bytes == size - sizeof(Header);
}

}  // namespace smddp::wire
