// The memory of one operation: one block per rank (the rank's shard, or what is summed for the rank). A
// block is a run of extents, one per tensor, so a list of parameters is one operation and nothing is
// flattened. It knows addresses and lengths only. The layer above fills it; fragments read and write it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "common/small_vector.h"
#include "common/types.h"
#include "intranode/outbox.h"
#include "kernels/reduce.h"

namespace smddp {

using intranode::Extent;

class Blocks {
 public:
  // Blocks are filled in order: any number of add(), then end_block().
  void add(void* address, size_t bytes) {
    if (bytes > 0) extents_.push_back({static_cast<std::byte*>(address), bytes});
    total_ += bytes;
  }
  void end_block() {
    blocks_.push_back({extents_.size(), total_});
    largest_ = std::max(largest_, total_);
    total_ = 0;
  }

  size_t bytes(Rank block) const { return blocks_[static_cast<size_t>(block)].bytes; }
  // Bytes of `block` in [begin, begin + limit).
  size_t bytes(Rank block, size_t begin, size_t limit) const {
    size_t all = bytes(block);
    return all <= begin ? 0 : std::min(limit, all - begin);
  }
  size_t largest() const { return largest_; }

  // The extents that hold bytes [offset, offset + bytes) of `block`.
  std::vector<Extent> slice(Rank block, size_t offset, size_t bytes) const {
    std::vector<Extent> out;
    for_each(block, offset, bytes, [&](std::byte* address, size_t n) {
      out.push_back({address, n});
      return true;
    });
    return out;
  }
  // Bytes from `offset` on that lie in one extent; the address of the first in *address.
  size_t contiguous(Rank block, size_t offset, std::byte** address) const {
    size_t run = 0;
    for_each(block, offset, SIZE_MAX, [&](std::byte* a, size_t n) {
      *address = a;
      run = n;
      return false;
    });
    return run;
  }
  // Bytes of `block` from `offset` on that lie in one extent of at least `least` bytes, or up to the
  // next such extent.
  size_t stretch(Rank block, size_t offset, size_t least) const {
    size_t bytes = 0;
    for_each(block, offset, SIZE_MAX, [&](std::byte*, size_t n) {
      if (n < least || bytes == 0) bytes += n;
      return n < least;
    });
    return bytes;
  }
  // f(address, address in `other`, bytes, offset) for each stretch that lies end to end in `block` and in block
  // `other_block` of `other`, which is as large.
  template <class F>
  void for_each_stretch(Rank block, const Blocks& other, Rank other_block, F&& f) const {
    const size_t size = bytes(block);
    for (size_t offset = 0, run = 0; offset < size; offset += run) {
      std::byte *here = nullptr, *there = nullptr;
      run =
          std::min(contiguous(block, offset, &here), other.contiguous(other_block, offset, &there));
      f(here, there, run, offset);
    }
  }
  // `streaming`: past the caches, see kernels::copy().
  void write(Rank block, size_t offset, const std::byte* from, size_t bytes,
             bool streaming = false) const {
    for_each(block, offset, bytes, [&](std::byte* a, size_t n) {
      kernels::copy(a, from, n, streaming);
      from += n;
      return true;
    });
  }
  void read(Rank block, size_t offset, std::byte* to, size_t bytes, bool streaming = false) const {
    for_each(block, offset, bytes, [&](const std::byte* a, size_t n) {
      kernels::copy(to, a, n, streaming);
      to += n;
      return true;
    });
  }

 private:
  // f(address, bytes) for each extent of [offset, offset + bytes), until f returns false.
  template <class F>
  void for_each(Rank block, size_t offset, size_t bytes, F&& f) const {
    auto b = static_cast<size_t>(block);
    for (size_t i = b == 0 ? 0 : blocks_[b - 1].end; i < blocks_[b].end && bytes > 0; ++i) {
      if (offset >= extents_[i].bytes) {
        offset -= extents_[i].bytes;
        continue;
      }
      size_t n = std::min(extents_[i].bytes - offset, bytes);
      if (!f(extents_[i].address + offset, n)) return;
      bytes -= n;
      offset = 0;
    }
  }

  struct Block {
    size_t end;  // one past its extents
    size_t bytes;
  };
  SmallVector<Extent, 8> extents_;
  SmallVector<Block, 8> blocks_;
  size_t largest_ = 0;
  size_t total_ = 0;  // of the block being filled
};

}  // namespace smddp
