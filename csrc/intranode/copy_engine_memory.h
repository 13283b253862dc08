// Device memory that ranks of a host read from one another: what a rank says of its own, and what the
// others make of it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/signature.h"
#include "common/status.h"
#include "device/device.h"
#include "intranode/outbox.h"

namespace smddp::intranode {

// Peers' allocations as they are mapped here, kept from one operation to the next: mapping takes far
// longer than a copy. What the owner freed and allocated anew at the same address is told by its id,
// and replaces what was mapped; nothing here reads it any more, as the owner's operations end only
// when their readers are done. One per device and process.
class Imports {
 public:
  explicit Imports(device::Device& device) : device_(device) {}
  ~Imports();
  Imports(const Imports&) = delete;
  Imports& operator=(const Imports&) = delete;

  // Where `allocation` of process `pid` begins here.
  Result<std::byte*> find(int pid, const device::Allocation& allocation);

  struct Statistics {
    uint64_t hits = 0, misses = 0;
    uint64_t replaced = 0;  // had been freed by the owner
    uint64_t mapped = 0;    // bytes
  };
  Statistics statistics() const;

 private:
  struct Entry {
    device::Allocation allocation;
    void* address;
  };
  device::Device& device_;
  mutable std::mutex mutex_;
  std::map<std::pair<int, uint64_t>, Entry> entries_;  // by owner and the address there
  Statistics statistics_;
};

// The extents that a rank lets others read in one operation, as they travel to them.
class Offer {
 public:
  // Bytes of an encoded offer of extents of these sizes, at most: equal on all ranks that know the
  // sizes.
  static size_t room(const std::vector<size_t>& sizes);

  // This rank's; why it can't be made is part of it.
  static Offer make(device::Device& device, const Signature& signature,
                    const std::vector<Extent>& extents);
  void encode(std::byte* to, size_t room) const;
  static Result<Offer> decode(const std::byte* from, size_t room);

  // It is this rank's own: nothing has to be mapped.
  void claim() { own_ = true; }

  const Signature& signature() const { return signature_; }
  const std::string& refusal() const { return refusal_; }  // empty: all is offered
  size_t extents() const { return extents_.size(); }
  uint64_t bytes(size_t extent) const { return extents_[extent].bytes; }

  // Calls f(address here, bytes) for the pieces of [offset, offset + bytes) of an extent.
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
  // The first of those pieces.
  Result<Extent> locate(Imports& imports, size_t extent, size_t offset, size_t bytes) const;

 private:
  struct Place {
    uint64_t address, bytes;
  };
  struct Header {
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
