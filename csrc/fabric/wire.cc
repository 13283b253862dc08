#include "fabric/wire.h"

#include <cstring>

namespace smddp::wire {

bool check(const void* data, size_t size) {
  if (size < sizeof(Header)) return false;
  Header header;
  std::memcpy(&header, data, sizeof header);
  if (header.magic != kMagic) return false;
  switch (header.type) {
    case Type::kReady:
    case Type::kData:
    case Type::kAbort:
      return header.bytes == size - sizeof(Header);
  }
  return false;
}

bool check(const Grant& grant, uint64_t bytes) {
  return grant.region < kMaxRegions && bytes > 0 && grant.bytes == bytes && grant.chunk_bytes > 0 &&
         (bytes - 1) / grant.chunk_bytes < kMaxChunks;
}

}  // namespace smddp::wire
