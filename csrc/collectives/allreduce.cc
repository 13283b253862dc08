// AllReduce between hosts of what fits one slot, in one exchange. Inside a host each rank pushes its whole vector. The
// first rank sums all vectors of its host in rank order, exchanges the sum with the first ranks of the other hosts, adds
// all in host order, and pushes the result to its host. Sums of half types of several ranks travel in fp32. So the
// results are the same on all ranks, and the same as those of the two fragments that larger operations take, if partial
// sums travel in fp32 there. The group makes it by make_allreduce(), if the plan says so.
#include <cstring>

#include "collectives/fragment.h"
#include "kernels/reduce.h"

namespace smddp {
namespace {

using intranode::Piece;

// Of sums that are rounded at once: they stay in the first cache.
constexpr size_t kSumBytes = 4096;

class AllReduce final : public Fragment {
 public:
  using Fragment::Fragment;

  void start() override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override { return done_ && pushed_ && flows_.complete(); }
  // False while only what comes from other hosts is missing: any rank there may be late.
  bool can_blame() const override { return local_.count() == 0 || !host_heard_; }

 private:
  // --- between the first ranks of all hosts.

  void make_flows();
  void place(const ReceiveFlow& flow, size_t offset, const std::byte* payload,
             size_t bytes) override {
    if (flow.memory != nullptr) std::memcpy(flow.memory + offset, payload, bytes);
  }
  bool sum_hosts();
  // Of the elements from byte `at` of the vector on.
  void sum_hosts(std::byte* to, size_t bytes, size_t at);

  // --- inside the host.

  // The next piece: all of `vector`, or no bytes. False: no slot is free.
  bool push(const Blocks& vector, size_t bytes, bool last);
  bool push_own();
  // Whether local peer i's piece is one of so many bytes in a slot. Fails the group if it is not.
  bool holds(const Piece& piece, int i, size_t bytes);
  bool hear_host();
  void sum_host();
  bool take_result();

  // f(input, output, bytes, offset into the vector) for each stretch that lies end to end in both.
  template <class F>
  void for_each_stretch(F&& f) const;
  size_t count_in(size_t bytes) const { return bytes / operation_->element_size; }
  void reduce(std::byte* to, size_t count, Dtype type, int divisor) const {
    kernels::reduce(to, sources_.data(), sources_.size(), count, type, operation_->reduce_op,
                    divisor);
  }

  size_t bytes_ = 0;
  Dtype sum_type_{};         // of a host's sum
  size_t sum_bytes_ = 0;     // for each byte of the vector
  bool leads_ = false;       // the first rank of its host
  bool own_pushed_ = false;  // a rank that leads begins with an empty piece
  bool pushed_ = false;
  bool host_heard_ = false;       // the vectors of all ranks of this host have been taken
  bool done_ = false;             // the result is in the output
  Staging host_sum_;              // of a rank that leads
  std::vector<Staging> staging_;  // of the flows from other hosts
  SmallVector<const std::byte*, 8> theirs_;      // by local peer
  SmallVector<const std::byte*, 8> host_sums_;   // by host
  mutable SmallVector<const void*, 8> sources_;  // by local rank, then by host
};

void AllReduce::start() {
  expect_pieces();
  for (Rank block = 0; block < members_.ranks(); ++block) bytes_ += operation_->input.bytes(block);
  theirs_.assign(heard_.size(), nullptr);
  sum_type_ = whole_sum_type(operation_->dtype, shape_);
  sum_bytes_ = sum_type_ == operation_->dtype ? 1 : size_of(sum_type_) / operation_->element_size;
  leads_ = members_.topology().local_index(members_.rank()) == 0;
  own_pushed_ = pushed_ = local_.count() == 0;
  if (leads_) make_flows();
}

bool AllReduce::progress(bool may_push) {
  bool moved = may_push && !own_pushed_ && push_own();
  if (!host_heard_ && hear_host()) moved = true;
  if (!leads_) return (host_heard_ && !done_ && take_result()) || moved;
  if (flows_.allow_more()) moved = true;
  auto available = [&](const SendFlow& flow) { return host_heard_ ? flow.run.bytes() : 0; };
  if (send(available, [](auto&&...) {})) moved = true;
  if (host_heard_ && !done_ && sum_hosts()) moved = true;
  if (!may_push || !done_ || !own_pushed_ || pushed_) return moved;
  pushed_ = push(operation_->output, bytes_, true);
  return pushed_ || moved;
}

// As if the host's sum were its first rank's shard of an AllGather.
void AllReduce::make_flows() {
  const Topology& topology = members_.topology();
  host_sum_ = staging_pool_.take(bytes_ * sum_bytes_);
  host_sums_.assign(static_cast<size_t>(topology.nodes()), nullptr);
  host_sums_[static_cast<size_t>(topology.node_of(members_.rank()))] = host_sum_.get();
  auto run_from = [&](Rank rank) {
    ShardRun run;
    if (bytes_ > 0) run.add(rank, bytes_ * sum_bytes_);
    return run;
  };
  pattern::Flows flows = pattern::leader_flows(topology, members_.rank());
  for (const pattern::Flow& flow : flows.in) {
    ReceiveFlow* receive = flows_.add_receive(flow, run_from(flow.peer));
    if (receive == nullptr || bytes_ == 0) continue;
    staging_.push_back(staging_pool_.take(bytes_ * sum_bytes_));
    receive->memory = staging_.back().get();
    host_sums_[static_cast<size_t>(topology.node_of(flow.peer))] = receive->memory;
  }
  for (const pattern::Flow& flow : flows.out) {
    SendFlow* send = flows_.add_send(flow, run_from(members_.rank()));
    if (send != nullptr && bytes_ > 0) send->memory = host_sum_.get();
  }
  flows_.open(true);
}

bool AllReduce::push(const Blocks& vector, size_t bytes, bool last) {
  std::byte* slot = next_slot();
  if (slot == nullptr) return false;
  if (bytes > 0) {
    local_.outbox().fill(bytes, [&](bool streaming) {
      for (Rank block = 0; block < members_.ranks(); ++block) {
        vector.read(block, 0, slot, vector.bytes(block), streaming);
        slot += vector.bytes(block);
      }
    });
  }
  Piece piece;
  piece.bytes = bytes;
  piece.last = last ? 1 : 0;
  publish(piece);
  return true;
}

bool AllReduce::push_own() {
  own_pushed_ = leads_ ? push(operation_->input, 0, false) : push(operation_->input, bytes_, true);
  pushed_ = own_pushed_ && !leads_;
  return own_pushed_;
}

template <class F>
void AllReduce::for_each_stretch(F&& f) const {
  size_t at = 0;
  for (Rank block = 0; block < members_.ranks(); ++block) {
    operation_->input.for_each_stretch(block, operation_->output, block,
                                       [&](std::byte* own, std::byte* to, size_t bytes,
                                           size_t offset) { f(own, to, bytes, at + offset); });
    at += operation_->input.bytes(block);
  }
}

bool AllReduce::holds(const Piece& piece, int i, size_t bytes) {
  return (piece.bytes == bytes && piece.extents == 0) || fail_piece(i);
}

// False until the first pieces of all local peers are here. Only the rank that leads sums them, and its own is empty.
bool AllReduce::hear_host() {
  for (int i = 0; i < local_.count(); ++i) {
    const Piece* head = inbox_head(i);
    if (head == nullptr) return false;
    bool leader = members_.topology().local_index(local_.rank(i)) == 0;
    if (!holds(*head, i, leader ? 0 : bytes_)) return true;
    theirs_[static_cast<size_t>(i)] = head_bytes(i);
  }
  // Before that a rank of this host may be what the others wait for.
  if (!own_pushed_) return false;
  if (leads_) sum_host();
  for (int i = 0; i < local_.count(); ++i) {
    if (leads_) count(*head(i), bytes_, false);
    take(i, *head(i));
  }
  return host_heard_ = true;
}

void AllReduce::sum_host() {
  auto own_position = static_cast<size_t>(members_.topology().local_index(members_.rank()));
  sources_.assign(heard_.size() + 1, nullptr);
  for_each_stretch([&](const std::byte* own, std::byte*, size_t bytes, size_t at) {
    for (size_t k = 0; k < sources_.size(); ++k) {
      sources_[k] = k == own_position ? own : theirs_[k < own_position ? k : k - 1] + at;
    }
    const size_t count = count_in(bytes);
    std::byte* sum = host_sum_.get() + at * sum_bytes_;
    if (sum_type_ == operation_->dtype) return reduce(sum, count, sum_type_, 1);
    kernels::load(sum, sources_[0], count, operation_->dtype);
    for (size_t k = 1; k < sources_.size(); ++k)
      kernels::accumulate(sum, sources_[k], count, operation_->dtype, operation_->reduce_op);
  });
}

// False until the result is here.
bool AllReduce::take_result() {
  for (int i = 0; i < local_.count(); ++i) {
    if (members_.topology().local_index(local_.rank(i)) != 0) continue;
    const Piece* head = inbox_head(i);
    if (head == nullptr) return false;
    if (!holds(*head, i, bytes_)) return true;
    const std::byte* result = head_bytes(i);
    for_each_stretch([&](const std::byte*, std::byte* to, size_t bytes, size_t at) {
      std::memcpy(to, result + at, bytes);
    });
    count(*head, bytes_, false);
    take(i, *head);
  }
  return done_ = true;
}

// False until the sums of all hosts are here.
bool AllReduce::sum_hosts() {
  for (const ReceiveFlow& flow : flows_.receives()) {
    if (!flow.complete()) return false;
  }
  sources_.assign(host_sums_.size(), nullptr);
  for_each_stretch([&](const std::byte*, std::byte* to, size_t bytes, size_t at) {
    if (sum_type_ == operation_->dtype) return sum_hosts(to, bytes, at);
    alignas(64) std::byte sum[kSumBytes];
    const size_t step = sizeof sum / sum_bytes_;
    for (size_t done = 0; done < bytes; done += step) {
      const size_t n = std::min(step, bytes - done);
      sum_hosts(sum, n, at + done);
      kernels::store(to + done, sum, count_in(n), operation_->dtype);
    }
  });
  return done_ = true;
}

void AllReduce::sum_hosts(std::byte* to, size_t bytes, size_t at) {
  for (size_t k = 0; k < sources_.size(); ++k) sources_[k] = host_sums_[k] + at * sum_bytes_;
  reduce(to, count_in(bytes), sum_type_, operation_->divisor_among(members_.ranks()));
}

}  // namespace

std::unique_ptr<Fragment> make_allreduce(const FragmentContext& context,
                                         std::shared_ptr<Operation> operation, uint64_t seq) {
  return std::make_unique<AllReduce>(context, std::move(operation), seq, 0, SIZE_MAX,
                                     intranode::Lane::kSums);
}

}  // namespace smddp
