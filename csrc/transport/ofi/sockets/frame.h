// How a message stands in the stream of a TCP connection: a prefix, the message, and zeros up to a multiple of
// eight bytes, so that every message that is received begins at one. The first frame of a connection holds a
// Hello, and comes from the side that has opened it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace smddp::fabric {

struct FramePrefix {
  uint32_t magic;  // kFrameMagic
  uint32_t bytes;  // of the message, from 1
};
static_assert(sizeof(FramePrefix) == 8);

inline constexpr uint32_t kFrameMagic = 0x4644534d;  // "MSDF"

constexpr size_t frame_of(size_t message) { return sizeof(FramePrefix) + (message + 7) / 8 * 8; }

// Random bytes that an endpoint publishes in its address: who shows them has read the job's store.
using Token = std::array<uint8_t, 16>;

struct Hello {
  Token to;    // of the endpoint that has accepted the connection
  Token from;  // of the one that has opened it
};
static_assert(sizeof(Hello) == 32);

}  // namespace smddp::fabric
