// The interface to a device: streams, events, copies, flags, and memory that other processes of the host
// map. It is implemented with CUDA's driver (cuda_device.cc) and, for tests and for machines without a
// GPU, with threads and shared memory (host_device.cc). It knows no group, operation or network. The copy
// engine, the collectives on device memory and the torch module call it.
//
// Only synchronize() and recall() wait for work of a device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "common/status.h"
#include "device/recall.h"
#include "device/submission_order.h"
#include "kernels/reduction.h"

namespace smddp::device {

// Handles of the device's own library: for a GPU a CUstream and a CUevent.
using Stream = void*;
using Event = void*;

// A piece of memory that is mapped as a whole, with what another process of this host needs to map it.
// Processes of one host, which run the same build, send it to each other.
struct Allocation {
  enum class Kind : uint32_t {
    kSegment,  // `descriptor` is one of the owner's, to be mapped by mmap()
    kIpc,      // `handle` is for memory that the driver allocated in one piece
    kShareable,  // physical memory that was mapped separately: `descriptor` is one of the owner's, `handle`
                 // the name of its DescriptorServer
  };
  uint64_t base = 0;  // its first address in the owner
  uint64_t bytes = 0;
  uint64_t id =
      0;  // differs between two allocations that were at the same address one after the other
  Kind kind = Kind::kSegment;
  int32_t descriptor = -1;
  std::array<uint8_t, 64> handle{};
  RecallName owner{};  // the owner's server for recalls (recall.h)
};
static_assert(std::is_trivially_copyable_v<Allocation> && sizeof(Allocation) == 112);

// Words that the CPU writes and streams wait for. They are zero at first.
class HostFlags {
 public:
  static constexpr size_t kMost = 64, kStride = 64;  // bytes
  virtual ~HostFlags() = default;
  // The address of word `i` for Device::wait_flag().
  virtual uint32_t* on_device(size_t i) const = 0;
  // May be called from any thread. Does not call the driver. The work that follows a stream's wait sees
  // all writes that came before set().
  virtual void set(size_t i, uint32_t value) = 0;
};

// What a stream does with a flag: it sets the flag to `value`, or waits until the flag has it.
struct FlagStep {
  enum class Kind { kWrite, kWait };
  Kind kind;
  uint32_t* flag;
  uint32_t value;
};

class Device {
 public:
  virtual ~Device() = default;
  // destroy_...() of nullptr does nothing.
  virtual Result<Stream> create_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  virtual Result<Event> create_event() = 0;
  virtual void destroy_event(Event event) = 0;

  virtual Status record(Event event, Stream stream) = 0;
  // Work submitted to `stream` from now on waits for the last record() of the event.
  virtual Status wait(Stream stream, Event event) = 0;
  // True if the stream has reached the last record() of the event.
  virtual Result<bool> done(Event event) = 0;
  // Blocks until all work of `stream` is done.
  virtual Status synchronize(Stream stream) = 0;
  // True while `stream` records a graph and runs nothing.
  virtual Result<bool> capturing(Stream stream) = 0;

  // Each of the two addresses is in this device's memory, mapped memory of peers, or pinned host memory.
  virtual Status copy(Stream stream, void* to, const void* from, size_t bytes) = 0;
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  // Copies in any order: none writes what another one reads or writes, and none is empty. By one command of a
  // device that can. The stream must not record a graph.
  virtual Status copies(Stream stream, std::span<const Copy> all) {
    return one_by_one(stream, all);
  }
  // Copies in their order, also into a graph.
  Status one_by_one(Stream stream, std::span<const Copy> all);
  // Whether reduce() can work: a build may have no kernels.
  virtual bool can_reduce() const { return true; }
  virtual Status reduce(Stream stream, const kernels::Reduction& reduction) = 0;
  // The stream does the steps in their order, as one command. Flags are in memory of map_host(). Every device
  // and the CPU see a write after all that the stream did before it. The work that follows a wait sees all
  // that came before the write.
  static constexpr size_t kMostSteps = 128;
  virtual Status flags(Stream stream, std::span<const FlagStep> steps) = 0;
  Status write_flag(Stream stream, uint32_t* flag, uint32_t value) {
    FlagStep step{FlagStep::Kind::kWrite, flag, value};
    return flags(stream, {&step, 1});
  }
  Status wait_flag(Stream stream, uint32_t* flag, uint32_t value) {
    FlagStep step{FlagStep::Kind::kWait, flag, value};
    return flags(stream, {&step, 1});
  }

  // Calls `submit`, whose calls of this device in this thread then cost less than each on its own.
  virtual Status together(const std::function<Status()>& submit) { return submit(); }

  // Memory of the device. free(nullptr) does nothing.
  virtual Result<void*> allocate(size_t bytes) = 0;
  virtual void free(void* address) = 0;
  // The device's number for libfabric (FI_HMEM_CUDA); -1 if the device's memory is host memory.
  virtual int cuda_ordinal() const { return -1; }

  // The allocations that contain [address, address + bytes), in the order of their addresses.
  virtual Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes) = 0;
  // To be called before memory in [address, address + bytes) is freed, which cuMemFree() and an allocator's
  // release are: the processes that have mapped it end their mappings. Waits for work of the device and for
  // these processes, in all for recall_limit_ms. The number of those that have not answered by then: not zero, the
  // memory must not be freed, and may be recalled again.
  virtual size_t recall(const void* address, size_t bytes) = 0;
  // Maps `allocation` of process `pid` until release_memory(). Returns its first address in this process.
  virtual Result<void*> import_memory(const Allocation& allocation, int pid) = 0;
  virtual void release_memory(const Allocation& allocation, void* address) = 0;

  // Pins host memory, which must start and end at page boundaries. Returns its address on the device.
  virtual Result<void*> map_host(void* address, size_t bytes) = 0;
  virtual void unmap_host(void* address) = 0;
  // HostFlags::kMost flags, in the memory where streams see them soonest. The default is pinned host
  // memory.
  virtual Result<std::unique_ptr<HostFlags>> create_flags();

  SubmissionOrder& order() { return order_; }
  // Streams for copies, which all groups of the device share. A GPU has eight hardware queues, and a stream
  // that waits holds up the others of its queue: so they are few, and nothing that is submitted to them waits
  // for a peer. Made at the first call.
  static constexpr size_t kLanes = 4;
  Result<Stream> lane(size_t i);

 protected:
  // To be called by the destructor of the class that implements destroy_stream().
  void destroy_lanes();

 private:
  std::mutex lanes_mutex_;
  std::array<Stream, kLanes> lanes_{};
  SubmissionOrder order_;
};

}  // namespace smddp::device
