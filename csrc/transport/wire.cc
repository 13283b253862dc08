#include "transport/wire.h"

#include <cstring>

namespace smddp::wire {

bool check(const void* data, size_t size) {
  if (size < sizeof(Header)) return false;
  Header header;
  std::memcpy(&header, data, sizeof header);
  bool known = header.type >= Type::kReady && header.type <= Type::kTaken;
  bool raw_fits = header.type != Type::kData || header.raw_bytes >= header.bytes;
  return header.magic == kMagic && known && header.bytes == size - sizeof(Header) && raw_fits;
}

uint64_t mac_of(const siphash::Key& key, const Header& header, const void* payload) {
  siphash::Hash hash(key);
  hash.add(&header, offsetof(Header, mac));
  if (header.type != Type::kData) hash.add(payload, header.bytes);
  return hash.value();
}

bool check(const Grant& grant, uint64_t bytes) {
  return bytes > 0 && grant.bytes == bytes && grant.chunk_bytes > 0 &&
         (bytes - 1) / grant.chunk_bytes < kMaxChunks;
}

}  // namespace smddp::wire
