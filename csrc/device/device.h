// A device as the collectives see it: streams, events, copies, flags, and memory that other processes
// of the host map. Implemented by CUDA's driver (cuda_device.cc) and, for tests and for machines
// without a GPU, by threads and shared memory (host_device.cc).
//
// Nothing here waits for work of a device, but for synchronize().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "common/status.h"
#include "common/types.h"
#include "kernels/reduction.h"

namespace smddp::device {

// What the device's own library calls them: a CUstream, a CUevent.
using Stream = void*;
using Event = void*;

// A piece of memory that is mapped as a whole, and how another process of this host comes by it. Sent
// between processes of one host and one build.
struct Allocation {
  enum class Kind : uint32_t {
    kSegment,    // descriptor: one of the owner's, to be mapped by mmap()
    kIpc,        // handle: of memory that the driver allocated in one piece
    kShareable,  // descriptor: one of the owner's, of physical memory that was mapped by itself
  };
  uint64_t base = 0;  // where it begins, in the owner
  uint64_t bytes = 0;
  uint64_t id = 0;  // differs between two that lay at the same address one after the other
  Kind kind = Kind::kSegment;
  int32_t descriptor = -1;
  std::array<uint8_t, 64> handle{};
};
static_assert(std::is_trivially_copyable_v<Allocation> && sizeof(Allocation) == 96);

// Words that the host writes and streams wait for, zero at first.
class HostFlags {
 public:
  static constexpr size_t kMost = 64, kStride = 64;  // bytes
  virtual ~HostFlags() = default;
  // For Device::wait_flag().
  virtual uint32_t* on_device(size_t i) const = 0;
  // From any thread, without a call of the driver. What follows a stream's wait sees all that came before.
  virtual void set(size_t i, uint32_t value) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  // Multiprocessors: what a reduction can use at most.
  virtual int multiprocessors() const = 0;
  // The same for every process that uses this device, and for no other device of the host.
  virtual std::array<uint8_t, 16> identity() const = 0;

  virtual Result<Stream> create_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  virtual Result<Event> create_event() = 0;
  virtual void destroy_event(Event event) = 0;

  virtual Status record(Event event, Stream stream) = 0;
  // Work submitted to `stream` from now on waits for what was last recorded.
  virtual Status wait(Stream stream, Event event) = 0;
  // Whether what was last recorded is done.
  virtual Result<bool> done(Event event) = 0;
  // Blocks until all work of `stream` is done.
  virtual Status synchronize(Stream stream) = 0;
  // True while `stream` records a graph rather than runs.
  virtual Result<bool> capturing(Stream stream) = 0;

  // Between any two of this device's memory, mapped memory of peers, and pinned host memory.
  virtual Status copy(Stream stream, void* to, const void* from, size_t bytes) = 0;
  virtual Status reduce(Stream stream, const kernels::Reduction& reduction) = 0;
  // Flags lie in memory of map_host(). A write is ordered after all that the stream did before it, as
  // every device and the host see it; what follows a wait sees all that came before the write.
  virtual Status write_flag(Stream stream, uint32_t* flag, uint32_t value) = 0;
  virtual Status wait_flag(Stream stream, uint32_t* flag, uint32_t value) = 0;  // for equality
  // `function` must not use the device, and must be quick.
  virtual Status call(Stream stream, void (*function)(void*), void* argument) = 0;

  // Memory of the device; nullptr is freed, too.
  virtual Result<void*> allocate(size_t bytes) = 0;
  virtual void free(void* address) = 0;
  // What libfabric calls the device (FI_HMEM_CUDA): its number, or -1 where its memory is the host's.
  virtual int cuda_ordinal() const { return -1; }

  // The allocations in which [address, address + bytes) lies, by address.
  virtual Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes) = 0;
  // Where `allocation` of process `pid` begins here; until release_memory().
  virtual Result<void*> import_memory(const Allocation& allocation, int pid) = 0;
  virtual void release_memory(const Allocation& allocation, void* address) = 0;

  // Pins host memory, which starts and ends at pages, and says what it is called on the device.
  virtual Result<void*> map_host(void* address, size_t bytes) = 0;
  virtual void unmap_host(void* address) = 0;
  // HostFlags::kMost of them, where streams see them soonest: in pinned host memory, if nothing else.
  virtual Result<std::unique_ptr<HostFlags>> create_flags();
};

}  // namespace smddp::device
