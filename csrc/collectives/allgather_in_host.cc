// The pieces of an AllGather inside the host: what this rank pushes, and what it takes in from its local
// peers.
#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/allgather.h"

namespace smddp {

using intranode::Piece;

void AllGather::add_source(Rank shard, const ReceiveFlow* flow, size_t start) {
  size_t bytes = part(operation_->output, shard);
  if (local_.count() == 0 || bytes == 0) return;
  sources_.push_back({shard, flow, start, 0});
  to_push_ += bytes;
}

Rank AllGather::pusher(Rank shard) const {
  const Topology& topology = members_.topology();
  return pattern::entry(topology, topology.node_of(members_.rank()), shard,
                        operation_->plan().pattern);
}

size_t AllGather::available(const Source& source) const {
  size_t bytes = part(operation_->output, source.shard);
  if (source.flow == nullptr) return own_here();
  return std::min(bytes, source.flow->arrived_from(source.start));
}

bool AllGather::push_one() {
  std::byte* slot = next_slot();
  if (slot == nullptr) return false;
  NextPiece next = next_piece();
  Source* source = next.source;
  if (source == nullptr && to_push_ > 0) return false;  // more will arrive
  Piece piece;
  if (source != nullptr) {
    piece.shard = static_cast<uint32_t>(source->shard);
    piece.offset = source->pushed;
    piece.bytes = next.bytes;
    if (!next.extents.empty()) {
      std::memcpy(slot, next.extents.data(), next.extents.size() * sizeof(Extent));
      piece.extents = static_cast<uint32_t>(next.extents.size());
      expose();
    } else {
      local_.outbox().fill(next.bytes, [&](bool streaming) {
        if (source->flow == nullptr) {
          own_.fill(slot, source->pushed, next.bytes, streaming);
        } else {
          read(source->shard, source->pushed, slot, next.bytes, streaming);
        }
      });
    }
    source->pushed += next.bytes;
    to_push_ -= next.bytes;
  }
  piece.last = to_push_ == 0 ? 1 : 0;
  pushed_ = piece.last == 1;
  publish(piece);
  // Now, while the caches still hold these bytes.
  if (streaming_ && source != nullptr && source->flow == nullptr && piece.extents == 0)
    own_.copy_until(source->pushed);
  return true;
}

AllGather::NextPiece AllGather::next_piece() {
  for (size_t i = first_source_; i < sources_.size(); ++i) {
    Source& source = sources_[i];
    size_t bytes = part(operation_->output, source.shard) - source.pushed;
    if (bytes == 0) {
      if (i == first_source_) ++first_source_;
      continue;
    }
    if (available(source) == source.pushed) continue;
    std::vector<Extent> extents = exposed(source, std::min(bytes, kDirectPiece));
    bytes = std::min(bytes, extents.empty() ? intranode::kSlotBytes : kDirectPiece);
    if (available(source) >= source.pushed + bytes) return {&source, bytes, std::move(extents)};
  }
  return {};
}

std::vector<Extent> AllGather::exposed(const Source& source, size_t bytes) const {
  if (bytes <= intranode::kSlotBytes) return {};
  const Blocks& blocks = source.flow == nullptr ? own_.blocks() : operation_->output;
  Rank block = source.flow == nullptr ? own_.block() : source.shard;
  return readable(blocks, block, begin_ + source.pushed, bytes, direct_);
}

bool AllGather::take_in(int i, const Piece& head) {
  if (head.bytes > 0) {
    if (!fits(head)) {
      fail({Code::kInternal, members_.describe(local_.rank(i)) + " pushed a piece out of bounds"});
      return false;
    }
    auto shard = static_cast<Rank>(head.shard);
    if (!copy_piece(i, head, shard, begin_ + head.offset, streaming_)) return false;
    received_[head.shard] += head.bytes;
    missing_ -= head.bytes;
  }
  take(i, head);
  return true;
}

bool AllGather::fits(const Piece& head) const {
  if (head.shard >= received_.size() || head.bytes > missing_) return false;
  size_t size = part(operation_->output, static_cast<Rank>(head.shard));
  return head.offset <= size && head.bytes <= size - head.offset &&
         head.bytes <= size - received_[head.shard];
}

}  // namespace smddp
