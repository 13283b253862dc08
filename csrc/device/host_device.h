// A device simulated by threads and shared memory. Each stream is a thread that does its work in order,
// and the memory is in segments that other processes map. Its speed means nothing; it lets all code above
// it run, with several processes, on machines without a GPU. It is as strict as a GPU's driver: streams hold
// few commands and share hardware queues (host_streams.h), a thread that submits to a full one blocks all
// threads that call the device, and a test can have copies take time, peers absent and descriptors run out. It
// knows no CUDA, group or operation. The torch module and the tests make it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/host_streams.h"

namespace smddp::device {

class HostDevice final : public Device {
 public:
  // Of the hardware, which streams share. The fewer, the more of them a stream that waits holds up; with one, all are in
  // the order in which they are submitted.
  static constexpr size_t kQueues = 8;
  explicit HostDevice(size_t queues = kQueues) : queues_(queues) {}
  ~HostDevice() override;

  // Its bytes are no values that a test expects, as a GPU clears nothing; see set_keeps_bytes().
  Result<void*> allocate(size_t bytes) override;
  void free(void* address) override;
  // How often memory was freed that another process still had mapped, which no device allows.
  size_t freed_while_mapped() const { return freed_while_mapped_; }
  // What devices without access to one another do: import_memory() fails, or its memory holds other bytes, or keeps
  // those that the peer's has when it is mapped.
  enum class Peers { kReachable, kAbsent, kWrong, kStale };
  void set_peers(Peers peers) { peers_ = peers; }
  // How long each copy and each sum takes that is submitted from now on. It reads and writes one half at its
  // beginning and the other at its end, so what streams do not order shows as wrong bytes.
  void set_duration(std::chrono::microseconds duration) { duration_ = sum_duration_ = duration; }
  void set_sum_duration(std::chrono::microseconds duration) { sum_duration_ = duration; }
  // Each copy that is submitted from now on begins once gate(to, from) is true.
  using Gate = std::function<bool(const void* to, const void* from)>;
  void set_gate(Gate gate) { gate_ = std::move(gate); }
  // Copies that are submitted from now on may meet others that no stream orders them with, as after a failure that
  // releases streams: each byte is then one of those that were written there, and ThreadSanitizer says nothing.
  void set_unordered(bool unordered) { unordered_ = unordered; }
  // As while another's kernel has every multiprocessor: no sum goes on, and no copy from the device's memory to its own,
  // which some drivers make by a kernel.
  void hold_multiprocessors(bool held) { held_ = held; }
  // As a process's limit of open files: so many allocations can be exported at a time. Freed ones make room.
  void set_most_exported(size_t most) { most_exported_ = most; }
  // As where memory is short: an allocation of more bytes fails.
  void set_largest_allocation(size_t bytes) { largest_allocation_ = bytes; }
  // As an allocator with a cache: new memory has the bytes of the last that was freed with its size.
  void set_keeps_bytes(bool keeps) { keeps_bytes_ = keeps; }
  // What a driver, or a GPU, may do with all commands of a kind that are submitted from now on.
  enum class Command : size_t { kCopy, kCopies, kSum, kFlags, kEvent, kOther, kKinds };
  enum class Fault { kNone, kRefused, kLost };
  void set_fault(Command kind, Fault fault) { faults_[static_cast<size_t>(kind)] = fault; }
  // A device whose build has no kernels.
  void set_kernels(bool any) { kernels_ = any; }
  size_t sums() const { return sums_; }  // that have run
  // What torch.cuda.graph does: from begin_recording() to end_recording() the stream's commands, and those of
  // streams that join it, go into a graph; launch() runs them.
  using Graph = std::shared_ptr<const std::vector<HostCommand>>;
  Status begin_recording(Stream stream);
  Result<Graph> end_recording(Stream stream);
  Status launch(const Graph& graph, Stream stream);
  // True if one allocation contains [address, address + bytes).
  bool owns(const void* address, size_t bytes) const;

  Result<Stream> create_stream() override;
  void destroy_stream(Stream stream) override;
  Result<Event> create_event() override;
  void destroy_event(Event event) override;
  Status record(Event event, Stream stream) override;
  Status wait(Stream stream, Event event) override;
  Result<bool> done(Event event) override;
  Status synchronize(Stream stream) override;
  Result<bool> capturing(Stream stream) override;
  Status copy(Stream stream, void* to, const void* from, size_t bytes) override;
  // One command, whose copies run at the same time. A recording refuses it.
  Status copies(Stream stream, std::span<const Copy> all) override;
  bool can_reduce() const override { return kernels_; }
  Status reduce(Stream stream, const kernels::Reduction& reduction) override;
  Status flags(Stream stream, std::span<const FlagStep> steps) override;
  Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes) override;
  size_t recall(const void* address, size_t bytes) override;
  Result<void*> import_memory(const Allocation& allocation, int pid) override;
  void release_memory(const Allocation& allocation, void* address) override;
  Result<void*> map_host(void* address, size_t bytes) override;
  void unmap_host(void* address) override;

 private:
  Status submit(Stream stream, Command kind, HostCommand command);
  // Whether a command of this kind is not to be run, and what its caller then gets.
  std::optional<Status> fault(Command kind) const;
  HostCommand copying(const Copy& copy) const;

  // Held through every call but synchronize(), also while a call waits for room in a stream.
  std::mutex context_;
  std::vector<std::unique_ptr<HardwareQueue>> queues_;  // made for their first streams
  size_t streams_ = 0;                                  // that were created
  mutable std::mutex mutex_;
  std::map<uintptr_t, Allocation> allocations_;  // by base
  uint64_t next_id_ = 1;
  std::unique_ptr<RecallServer> recalls_;  // made for the first memory that is exported
  std::atomic<size_t> freed_while_mapped_{0};
  Peers peers_ = Peers::kReachable;
  std::chrono::microseconds duration_{0}, sum_duration_{0};
  Gate gate_;
  bool unordered_ = false;
  std::atomic<bool> held_{false};
  size_t most_exported_ = SIZE_MAX, largest_allocation_ = SIZE_MAX;
  bool keeps_bytes_ = false;
  std::map<size_t, std::vector<std::byte>> kept_bytes_;  // by size
  std::array<Fault, static_cast<size_t>(Command::kKinds)> faults_{};
  bool kernels_ = true;
  std::atomic<size_t> sums_{0};
};

}  // namespace smddp::device
