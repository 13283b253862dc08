// The fabric's settings, limits and counters, as far as a rail needs them as well. Shows nothing of
// libfabric's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace smddp::fabric {

// The most NICs that one endpoint may be striped over.
inline constexpr size_t kMaxRails = 8;

// With their headers: the largest message of all, and the largest that is sent at once, without a
// rendezvous, unless the user has set another limit.
inline constexpr size_t kMaxMessage = (128 << 10) + 128;
inline constexpr size_t kEagerMessage = (16 << 10) + 128;

// How chunks travel. kMessages: there are no chunks, only messages.
enum class Transfer : uint8_t { kMessages, kTagged, kWrites };

// Whose memory the network reads and writes by itself.
struct MemoryOwner {
  enum class Kind : uint8_t { kHost, kCuda };  // kHost: memory of a simulated device
  Kind kind = Kind::kHost;
  int ordinal = 0;  // CUDA's number of the device
};

struct Counters {
  uint64_t messages_sent = 0, bytes_sent = 0;  // handed to libfabric
  uint64_t messages_received = 0, bytes_received = 0;
  uint64_t retries = 0;         // -FI_EAGAIN answers
  uint64_t receive_errors = 0;  // messages lost on arrival: truncated, or their connection broke
  uint64_t chunks_sent = 0, chunk_bytes_sent = 0;
  uint64_t chunks_received = 0;
  uint64_t foreign_chunks = 0;                        // arrived for no region, or were not written
                                                      // as members of the job write
  uint64_t registrations = 0, registration_hits = 0;  // asked of the provider; found in the cache
};

struct Library;

struct Options {
  std::string library;   // path of libfabric; empty: SMDDP_LIBFABRIC, /opt/amazon/efa, the loader
  std::string provider;  // empty: the best that fi_getinfo offers
  // Domain name, interface or source IP address, or several with commas between. Empty: all NICs of
  // the provider if they are real (efa, verbs), otherwise the first that is not loopback.
  std::string interface;
  std::string transfer = {};  // "writes", "tagged", "messages"; empty: the provider's faster one
  bool device_memory = false;       // NICs are to read and write GPUs' memory (FI_HMEM) if they can
  const Library* opened = nullptr;  // a simulation's, instead of one that is loaded
};

// Names a libfabric that a Python package brought; empty: there is none. loader.h says when it is taken.
// Called before the first library is opened.
void set_packaged_library(const std::string& path);

}  // namespace smddp::fabric
