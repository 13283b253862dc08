#include "collectives/own_shard.h"

namespace smddp {
namespace {

// Between two looks at the network: some 50 us of copying. 1 MiB took up to 1.08 of its time between two ranks over the
// loopback, 64 KiB as long (2026-11-29-constants, AMD EPYC).
constexpr size_t kCopyStep = 256 << 10;

}  // namespace

bool OwnShard::copy_some() {
  if (copied_ == bytes()) return false;
  copy_until(std::min(bytes(), copied_ + kCopyStep));
  return true;
}

void OwnShard::copy_until(size_t end) {
  while (copied_ < end) {
    std::byte *from = nullptr, *to = nullptr;
    size_t n = std::min(blocks().contiguous(block(), begin_ + copied_, &from),
                        operation_.output.contiguous(rank_, begin_ + copied_, &to));
    if (from == to) {
      copied_ = std::min(bytes(), copied_ + n);
      continue;
    }
    n = std::min(n, end - copied_);
    kernels::copy(to, from, n, streaming_);
    copied_ += n;
  }
}

void OwnShard::fill(std::byte* slot, size_t offset, size_t bytes, bool streaming) {
  std::byte *from = nullptr, *to = nullptr;
  size_t at = begin_ + offset;
  bool one_slot = this->bytes() <= intranode::kSlotBytes;
  if (one_slot || streaming_ || copied_ != offset ||
      operation_.input.contiguous(0, at, &from) < bytes ||
      operation_.output.contiguous(rank_, at, &to) < bytes || from == to) {
    return read(offset, slot, bytes, streaming);
  }
  kernels::copy_twice(slot, to, from, bytes, streaming);
  copied_ += bytes;
}

}  // namespace smddp
