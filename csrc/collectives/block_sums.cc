#include "collectives/block_sums.h"

#include <algorithm>
#include <cstring>

namespace smddp {

void BlockSums::start(bool streaming) {
  streaming_ = streaming;
  dtype_ = operation_.dtype;
  sum_type_ = kernels::accumulator_of(dtype_);
  element_ = operation_.element_size;
  wire_type_ = (operation_.signature().options & kPartialsInFp32) != 0 ? sum_type_ : dtype_;
  wire_element_ = size_of(wire_type_);
  index_of_.assign(static_cast<size_t>(topology_.ranks()), -1);
}

void BlockSums::add(Rank block) {
  index_of_[static_cast<size_t>(block)] = static_cast<int>(sums_.size());
  BlockSum& sum = sums_.emplace_back();
  sum.block = block;
  sum.bytes = operation_.input.bytes(block, begin_, limit_);
}

void BlockSums::receive(ReceiveFlow& flow) {
  staging_.push_back(pool_.take(flow.run.bytes()));
  flow.memory = staging_.back().get();
  for (size_t i = 0; i < flow.run.shards(); ++i) {
    of(flow.run.shard(i))
        .partials.push_back({&flow, flow.run.start(i), topology_.node_of(flow.source)});
  }
}

void BlockSums::prepare_host_sums() {
  for (BlockSum& sum : sums_) {
    std::sort(sum.partials.begin(), sum.partials.end(),
              [](const auto& a, const auto& b) { return a.host < b.host; });
    while (sum.own_position < sum.partials.size() && sum.partials[sum.own_position].host < host_) {
      ++sum.own_position;
    }
    if (!alone_ && !sum.partials.empty() && sum.bytes > 0)
      sum.host_sum = pool_.take(to_sum(sum.bytes));
    // The input of a rank alone on its host is the host's sum.
    if (alone_) sum.summed = sum.bytes;
    if (!sum.partials.empty()) with_partials_.push_back(&sum);
  }
}

void BlockSums::send(SendFlow& flow) {
  if (sent_from_input(flow)) return;
  staging_.push_back(pool_.take(flow.run.bytes()));
  flow.memory = staging_.back().get();
  for (size_t i = 0; i < flow.run.shards(); ++i) {
    of(flow.run.shard(i)).out = staging_.back().get() + flow.run.start(i);
  }
}

bool BlockSums::sent_from_input(SendFlow& flow) const {
  if (!alone_ || wire_type_ != dtype_ || flow.run.shards() != 1) return false;
  Rank block = flow.run.shard(0);
  if (!of(block).partials.empty()) return false;
  std::byte* at = nullptr;
  if (operation_.input.contiguous(block, begin_, &at) >= flow.run.bytes()) flow.memory = at;
  return true;
}

void BlockSums::finish_unsummed() {
  if (!alone_) return;
  for (const BlockSum& sum : sums_) {
    bool here = sum.out != nullptr || sum.block == rank_;
    if (!sum.partials.empty() || !here) continue;
    for (size_t done = 0; done < sum.bytes;) {
      std::byte* from = nullptr;
      size_t n = std::min({sum.bytes - done, kElements * element_,
                           operation_.input.contiguous(sum.block, begin_ + done, &from)});
      size_t count = n / element_;
      deliver(sum, done, accumulate(1, count, [&](size_t) { return Source{from, dtype_}; }), count);
      done += n;
    }
  }
}

std::byte* BlockSums::accumulator() {
  alignas(64) static thread_local std::byte memory[kElements * 8];
  return memory;
}

void BlockSums::put_host_sum(BlockSum& sum, size_t at, std::byte* accumulator, size_t count) {
  if (sum.partials.empty()) return deliver(sum, at, accumulator, count);
  std::memcpy(sum.host_sum.get() + to_sum(at), accumulator, count * size_of(sum_type_));
}

size_t BlockSums::result_run(const BlockSum& sum, size_t at, std::byte** to) const {
  if (sum.block != rank_) {
    *to = sum.out + at;
    return wire_type_ == dtype_ ? sum.bytes - at : 0;
  }
  return operation_.output.contiguous(output_block(), begin_ + at, to);
}

void BlockSums::reduce(const BlockSum& sum, std::byte* to, size_t bytes,
                       const Sources& sources) const {
  bool whole = sum.block == rank_;
  kernels::reduce(to, sources.data(), sources.size(), bytes / element_, dtype_,
                  operation_.reduce_op, whole ? operation_.divisor_among(topology_.ranks()) : 1,
                  streaming_);
}

bool BlockSums::combine() {
  bool moved = false;
  for (BlockSum* sum : with_partials_) moved |= combine(*sum);
  return moved;
}

// A pass looks at all partials only if more has come of the one that had least.
bool BlockSums::combine(BlockSum& sum) {
  auto here = [&](size_t i) {
    const BlockSum::Partial& partial = sum.partials[i];
    return from_wire(partial.flow->arrived_from(partial.start));
  };
  if (sum.summed == sum.combined || here(sum.least) <= sum.combined) return false;
  size_t covered = SIZE_MAX;
  for (size_t i = 0; i < sum.partials.size(); ++i) {
    if (size_t bytes = here(i); bytes < covered) {
      covered = bytes;
      sum.least = i;
    }
  }
  covered = std::min(covered, sum.summed);
  bool moved = sum.combined < covered;
  while (sum.combined < covered) {
    if (size_t n = combine_in_one_pass(sum, covered - sum.combined)) {
      sum.combined += n;
      continue;
    }
    size_t n = std::min(covered - sum.combined, kElements * element_);
    Source own{nullptr, alone_ ? dtype_ : sum_type_};
    if (alone_) {
      std::byte* at = nullptr;
      n = std::min(n, operation_.input.contiguous(sum.block, begin_ + sum.combined, &at));
      own.address = at;
    } else {
      own.address = sum.host_sum.get() + to_sum(sum.combined);
    }
    size_t count = n / element_;
    std::byte* total = accumulate(sum.partials.size() + 1, count, [&](size_t k) -> Source {
      if (k == sum.own_position) return own;
      const BlockSum::Partial& partial = sum.partial_at(k);
      return {partial.flow->memory + partial.start + to_wire(sum.combined), wire_type_};
    });
    deliver(sum, sum.combined, total, count);
    sum.combined += n;
  }
  return moved;
}

size_t BlockSums::combine_in_one_pass(const BlockSum& sum, size_t limit) {
  if (wire_type_ != dtype_ || (!alone_ && sum_type_ != dtype_)) return 0;
  std::byte *own = nullptr, *to = nullptr;
  size_t n = std::min(limit, result_run(sum, sum.combined, &to));
  if (alone_) {
    n = std::min(n, operation_.input.contiguous(sum.block, begin_ + sum.combined, &own));
  } else {
    own = sum.host_sum.get() + sum.combined;
  }
  sources_.clear();
  for (size_t k = 0; k <= sum.partials.size(); ++k) {
    if (k == sum.own_position) {
      sources_.push_back(own);
      continue;
    }
    const BlockSum::Partial& partial = sum.partial_at(k);
    sources_.push_back(partial.flow->memory + partial.start + sum.combined);
  }
  if (n > 0) reduce(sum, to, n, sources_);
  return n;
}

void BlockSums::deliver(const BlockSum& sum, size_t at, std::byte* accumulator,
                        size_t count) const {
  if (sum.block != rank_) {
    kernels::store(sum.out + to_wire(at), accumulator, count, wire_type_);
    return;
  }
  if (operation_.reduce_op == ReduceOp::kAvg) {
    kernels::divide(accumulator, count, sum_type_, operation_.divisor_among(topology_.ranks()));
  }
  size_t width = size_of(sum_type_);
  for (size_t done = 0; done < count;) {
    std::byte* to = nullptr;
    size_t n =
        operation_.output.contiguous(output_block(), begin_ + at + done * element_, &to) / element_;
    n = std::min(n, count - done);
    kernels::store(to, accumulator + done * width, n, dtype_);
    done += n;
  }
}

size_t BlockSums::sendable(const SendFlow& flow) const {
  for (size_t i = 0; i < flow.run.shards(); ++i) {
    size_t here = to_wire(of(flow.run.shard(i)).here());
    if (here < flow.run.length(i)) return flow.run.start(i) + here;
  }
  return flow.run.bytes();
}

}  // namespace smddp
