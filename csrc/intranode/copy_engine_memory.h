// Device memory that the ranks of a host read from each other. MemoryOffer describes the extents that a rank
// lets its peers read; Imports maps the peers' memory into this process. The file knows no operation and
// no stream. DeviceGroup and DeviceOperation make and exchange offers, CopyEngine reads through them, and
// the torch module has one Imports per device.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/signature.h"
#include "common/status.h"
#include "device/device.h"
#include "intranode/outbox.h"

namespace smddp::intranode {

// The peers' allocations that are mapped in this process. They stay mapped from one operation to the
// next, as mapping takes far longer than a copy. If the owner freed an allocation and made another one at
// the same address, the id differs, and the new mapping replaces the old one. No stream of this process
// still reads the old one then, as the owner's operations end only when their readers are done. One per
// device and process.
class Imports {
 public:
  explicit Imports(device::Device& device);
  ~Imports();
  Imports(const Imports&) = delete;
  Imports& operator=(const Imports&) = delete;

  // The address in this process at which `allocation` of process `pid` begins.
  Result<std::byte*> find(int pid, const device::Allocation& allocation);

  struct Statistics {
    uint64_t hits = 0, misses = 0;
    uint64_t replaced = 0;  // mappings ended because the owner had freed the memory
    uint64_t mapped = 0;    // bytes mapped now
  };
  Statistics statistics() const;

 private:
  struct Entry {
    device::Allocation allocation;
    void* address;
  };
  // By owner and the address in the owner.
  using Entries = std::map<std::pair<int, uint64_t>, Entry>;
  // Ends a mapping; returns the next one.
  Entries::iterator unmap(Entries::iterator at);
  // Ends the mapping of an allocation that its owner is about to free. No stream of this process reads it: the
  // owner's operations end only when their readers are done. Does nothing without one.
  void forget(int pid, const device::RecalledMemory& memory);

  device::Device& device_;
  mutable std::mutex mutex_;
  Entries entries_;
  Statistics statistics_;
  // Calls forget() when an owner is about to free memory.
  std::unique_ptr<device::RecallClient> recalls_;
};

// The extents that a rank lets its peers read in one operation, in a form that can be sent to them.
class MemoryOffer {
 public:
  // The most bytes that an encoded offer of extents of these sizes can take. All ranks that know the
  // sizes compute the same number.
  static size_t encoded_bytes(const std::vector<size_t>& sizes);

  // The offer of this rank. If memory can't be offered, the offer holds the reason: see refusal().
  static MemoryOffer make(device::Device& device, const Signature& signature,
                          const std::vector<Extent>& extents);
  // The offer of a rank that has nothing to offer.
  static MemoryOffer refuse(const std::string& reason);
  void encode(std::byte* to, size_t room) const;
  static Result<MemoryOffer> decode(const std::byte* from, size_t room);
  // The offers of `ranks`, one after the other in `room` bytes each. The memory of rank `own` needs no mapping.
  static Result<std::vector<MemoryOffer>> decode_all(const std::byte* from, size_t room, int ranks,
                                                     int own);
  // Writes into an encoded offer when its rank made the call that it belongs to.
  static void note_call(std::byte* encoded, uint64_t ns);
  // The latest call of encoded offers that lie as for decode_all().
  static uint64_t last_call(const std::byte* from, size_t room, int ranks);

  const Signature& signature() const { return signature_; }
  const std::string& refusal() const { return refusal_; }  // empty: all extents are offered
  size_t extents() const { return extents_.size(); }
  uint64_t bytes(size_t extent) const { return extents_[extent].bytes; }

  // Calls f(address in this process, bytes) for the pieces of [offset, offset + bytes) of an extent.
  template <class F>
  Status pieces(Imports& imports, size_t extent, size_t offset, size_t bytes, F&& f) const {
    while (bytes > 0) {
      auto piece = locate(imports, extent, offset, bytes);
      if (!piece) return piece.status();
      f(piece.value().address, piece.value().bytes);
      offset += piece.value().bytes;
      bytes -= piece.value().bytes;
    }
    return {};
  }
  // The first of these pieces.
  Result<Extent> locate(Imports& imports, size_t extent, size_t offset, size_t bytes) const;

 private:
  struct Place {
    uint64_t address, bytes;
  };
  struct Header {
    uint64_t called_ns;
    Signature signature;
    int32_t pid;
    uint32_t extents, allocations, refusal;
  };
  Signature signature_;
  int32_t pid_ = 0;
  bool own_ = false;
  std::string refusal_;
  std::vector<Place> extents_;
  std::vector<device::Allocation> allocations_;
};

}  // namespace smddp::intranode
