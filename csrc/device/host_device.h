// A device simulated by threads and shared memory. Each stream is a thread that does its work in order,
// and the memory is in segments that other processes map. Its speed means nothing; it lets all code above
// it run, with several processes, on machines without a GPU. It is as strict as a GPU's driver: a stream
// holds few commands, and a thread that submits to a full one blocks all threads that call the device. It
// knows no CUDA, group or operation. The torch module and the tests make it.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "device/device.h"

namespace smddp::device {

class HostDevice final : public Device {
 public:
  ~HostDevice() override;

  Result<void*> allocate(size_t bytes) override;  // zeroed
  void free(void* address) override;
  // What devices without access to one another do: import_memory() fails, or its memory holds other bytes.
  enum class Peers { kReachable, kAbsent, kWrong };
  void set_peers(Peers peers) { peers_ = peers; }
  // True if one allocation contains [address, address + bytes).
  bool owns(const void* address, size_t bytes) const;

  std::string name() const override { return "host threads"; }
  int multiprocessors() const override { return 4; }
  std::array<uint8_t, 16> identity() const override { return {}; }
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
  Status reduce(Stream stream, const kernels::Reduction& reduction) override;
  Status write_flag(Stream stream, uint32_t* flag, uint32_t value) override;
  Status wait_flag(Stream stream, uint32_t* flag, uint32_t value) override;
  Status call(Stream stream, void (*function)(void*), void* argument) override;
  Result<std::vector<Allocation>> export_memory(const void* address, size_t bytes) override;
  bool still_allocated(const Allocation& allocation) override;
  Result<void*> import_memory(const Allocation& allocation, int pid) override;
  void release_memory(const Allocation& allocation, void* address) override;
  Result<void*> map_host(void* address, size_t bytes) override;
  void unmap_host(void* address) override;

 private:
  // Held through every call but synchronize(), also while a call waits for room in a stream.
  std::mutex context_;
  mutable std::mutex mutex_;
  std::map<uintptr_t, Allocation> allocations_;  // by base
  uint64_t next_id_ = 1;
  Peers peers_ = Peers::kReachable;
};

}  // namespace smddp::device
