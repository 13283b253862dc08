// Arbitrary bytes as a message: what wire::check() accepts has the properties that its callers rely on.
#include "transport/wire.h"

#include <cstdlib>
#include <cstring>

using namespace smddp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr siphash::Key kKey{1, 2};
  if (wire::check(data, size)) {
    wire::Header header;
    std::memcpy(&header, data, sizeof header);
    if (header.bytes != size - sizeof header) std::abort();
    (void)wire::mac_of(kKey, header, data + sizeof header);
    (void)describe(header.signature);
  }
  wire::Grant grant;
  if (size < sizeof grant) return 0;
  std::memcpy(&grant, data, sizeof grant);
  if (!wire::check(grant, grant.bytes)) return 0;
  uint64_t chunks = (grant.bytes - 1) / grant.chunk_bytes + 1;
  if (chunks > wire::kMaxChunks) std::abort();
  return 0;
}
