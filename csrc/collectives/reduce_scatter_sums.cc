// The arithmetic of a ReduceScatter: a node's contributions in rank order, partial sums in node order.
#include <algorithm>
#include <utility>

#include "collectives/reduce_scatter.h"

namespace smddp {
namespace {

using intranode::Piece;

constexpr size_t kBlockElements = 16 << 10;  // accumulator and one source stay in L2

}  // namespace

bool ReduceScatter::align_heads() {
  bool aligned = true, dropped = false;
  for (int i = 0; i < group_.local_peers(); ++i) {
    const Piece* head = group_.head(i, *this);
    while (head != nullptr &&
           (head->bytes == 0 || head->shard >= static_cast<uint32_t>(group_.ranks()) ||
            reducer(static_cast<Rank>(head->shard)) != group_.rank())) {
      take(i, *head);
      dropped = true;
      head = group_.head(i, *this);
    }
    if (head == nullptr) {
      aligned = false;
    } else if (head->shard != static_cast<uint32_t>(wanted_.block) ||
               head->offset != wanted_.offset || head->bytes != wanted_.bytes) {
      group_.fail({Code::kInternal,
                   group_.describe(group_.local_peer(i)) + " pushed a piece out of order"});
      return false;
    }
  }
  return wanted_.bytes == 0 ? dropped : aligned;
}

bool ReduceScatter::sum_one() {
  if (wanted_.bytes == 0) return align_heads();
  if (!align_heads() || !sum_node()) return false;
  for (int i = 0; i < group_.local_peers(); ++i) take(i, *group_.inbox(i).head());
  share(wanted_.block).summed += wanted_.bytes;
  wanted_ = next(wanted_, true);
  return true;
}

size_t ReduceScatter::result_run(const Share& s, size_t at, std::byte** to) const {
  if (s.block != group_.rank()) {
    *to = s.out + at;
    return wire_type_ == dtype_ ? s.bytes - at : 0;
  }
  bool all_reduce = operation_->collective == Collective::kAllReduce;
  return operation_->output.contiguous(all_reduce ? group_.rank() : 0, begin_ + at, to);
}

void ReduceScatter::fuse(const Share& s, std::byte* to, size_t bytes) {
  bool whole = s.block == group_.rank();
  kernels::reduce(to, sources_.data(), sources_.size(), bytes / element_, dtype_,
                  operation_->reduce_op, whole ? operation_->divisor_among(group_.ranks()) : 1,
                  streaming_);
}

size_t ReduceScatter::fuse_node(size_t at, size_t limit) {
  const Share& target = share(wanted_.block);
  std::byte *own = nullptr, *to = nullptr;
  if (!target.partials.empty()) return 0;
  size_t n = std::min({limit, result_run(target, at, &to),
                       operation_->input.contiguous(wanted_.block, begin_ + at, &own)});
  sources_.clear();
  for (int i = 0; i < group_.local_peers(); ++i) {
    if (group_.local_peer(i) > group_.rank() && own != nullptr)
      sources_.push_back(std::exchange(own, nullptr));
    const std::byte* theirs = nullptr;
    n = std::min(n, group_.reach(i, at - group_.inbox(i).head()->offset, &theirs));
    sources_.push_back(theirs);
  }
  if (own != nullptr) sources_.push_back(own);
  if (n == 0) return 0;
  fuse(target, to, n);
  for (int i = 0; i < group_.local_peers(); ++i) count(*group_.inbox(i).head(), n, false);
  return n;
}

bool ReduceScatter::sum_node() {
  Share& target = share(wanted_.block);
  for (size_t done = 0; done < wanted_.bytes;) {
    std::byte* own = nullptr;
    size_t at = wanted_.offset + done;
    if (size_t n = fuse_node(at, wanted_.bytes - done)) {
      done += n;
      continue;
    }
    size_t n = std::min({wanted_.bytes - done, kBlockElements * element_,
                         operation_->input.contiguous(wanted_.block, begin_ + at, &own)});
    size_t count = n / element_;
    alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
    bool first = true;
    auto add = [&](const std::byte* source) {
      if (first) {
        kernels::load(accumulator, source, count, dtype_);
      } else {
        kernels::accumulate(accumulator, source, count, dtype_, operation_->reduce_op);
      }
      first = false;
    };
    for (int i = 0; i < group_.local_peers(); ++i) {
      if (group_.local_peer(i) > group_.rank() && own != nullptr) add(std::exchange(own, nullptr));
      const std::byte* theirs = peer_bytes(i, at, n);
      if (theirs == nullptr) return false;
      add(theirs);
    }
    if (own != nullptr) add(own);
    if (target.partials.empty()) {
      deliver(target, at, accumulator, count);
    } else {
      size_t width = size_of(sum_type_);
      std::memcpy(target.node_sum.data() + at / element_ * width, accumulator, count * width);
    }
    done += n;
  }
  return true;
}

const std::byte* ReduceScatter::peer_bytes(int i, size_t offset, size_t bytes) {
  intranode::Inbox& inbox = group_.inbox(i);
  const Piece& head = *inbox.head();
  size_t into = offset - head.offset;
  const std::byte* at = nullptr;
  bool here = group_.reach(i, into, &at) >= bytes;
  count(head, bytes, !here);
  if (here) return at;
  alignas(64) static thread_local std::byte scratch[kBlockElements * 8];
  Extent to{scratch, bytes};
  Status read =
      intranode::single_copy_read(inbox.pid(), inbox.extents(), head.extents, into, bytes, &to, 1);
  if (read.ok()) return scratch;
  group_.fail_read(i, *this, read);
  return nullptr;
}

size_t ReduceScatter::fuse_partials(const Share& s, size_t limit) {
  if (wire_type_ != dtype_ || (!alone_ && sum_type_ != dtype_)) return 0;
  std::byte *own = nullptr, *to = nullptr;
  size_t n = std::min(limit, result_run(s, s.combined, &to));
  if (alone_) {
    n = std::min(n, operation_->input.contiguous(s.block, begin_ + s.combined, &own));
  } else {
    own = s.node_sum.data() + s.combined;
  }
  sources_.clear();
  for (const auto& partial : s.partials) {
    if (partial.node > node_ && own != nullptr) sources_.push_back(std::exchange(own, nullptr));
    sources_.push_back(partial.receive->memory + partial.start + s.combined);
  }
  if (own != nullptr) sources_.push_back(own);
  if (n > 0) fuse(s, to, n);
  return n;
}

bool ReduceScatter::combine(Share& s) {
  if (s.partials.empty()) return false;
  size_t covered = s.summed;
  for (const auto& partial : s.partials) {
    covered = std::min(covered, from_wire(partial.receive->arrived_from(partial.start)));
  }
  bool moved = s.combined < covered;
  while (s.combined < covered) {
    if (size_t n = fuse_partials(s, covered - s.combined)) {
      s.combined += n;
      continue;
    }
    size_t n = std::min(covered - s.combined, kBlockElements * element_);
    std::byte* own = nullptr;
    if (alone_) {
      n = std::min(n, operation_->input.contiguous(s.block, begin_ + s.combined, &own));
    } else {
      own = s.node_sum.data() + s.combined / element_ * size_of(sum_type_);
    }
    size_t count = n / element_;
    alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
    bool first = true;
    auto add = [&](const std::byte* source, Dtype type) {
      if (first) {
        kernels::load(accumulator, source, count, type);
      } else {
        kernels::accumulate(accumulator, source, count, type, operation_->reduce_op);
      }
      first = false;
    };
    for (const auto& partial : s.partials) {
      if (partial.node > node_ && own != nullptr)
        add(std::exchange(own, nullptr), alone_ ? dtype_ : sum_type_);
      add(partial.receive->memory + partial.start + to_wire(s.combined), wire_type_);
    }
    if (own != nullptr) add(own, alone_ ? dtype_ : sum_type_);
    deliver(s, s.combined, accumulator, count);
    s.combined += n;
  }
  return moved;
}

void ReduceScatter::pass_on(Share& s) {
  for (size_t done = 0; done < s.bytes;) {
    std::byte* from = nullptr;
    size_t n = std::min({s.bytes - done, kBlockElements * element_,
                         operation_->input.contiguous(s.block, begin_ + done, &from)});
    alignas(64) static thread_local std::byte accumulator[kBlockElements * 8];
    kernels::load(accumulator, from, n / element_, dtype_);
    deliver(s, done, accumulator, n / element_);
    done += n;
  }
}

void ReduceScatter::deliver(Share& s, size_t offset, std::byte* accumulator, size_t count) {
  if (s.block != group_.rank()) {
    kernels::store(s.out + to_wire(offset), accumulator, count, wire_type_);
    return;
  }
  if (operation_->reduce_op == ReduceOp::kAvg) {
    kernels::divide(accumulator, count, sum_type_, operation_->divisor_among(group_.ranks()));
  }
  bool all_reduce = operation_->collective == Collective::kAllReduce;
  Rank block = all_reduce ? group_.rank() : 0;
  size_t width = size_of(sum_type_);
  for (size_t done = 0; done < count;) {
    std::byte* to = nullptr;
    size_t n =
        operation_->output.contiguous(block, begin_ + offset + done * element_, &to) / element_;
    n = std::min(n, count - done);
    kernels::store(to, accumulator + done * width, n, dtype_);
    done += n;
  }
}

}  // namespace smddp
