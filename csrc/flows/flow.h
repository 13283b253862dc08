// The two ends of a flow: the bytes that one rank sends another over the fabric in one fragment. Must not
// know when a flow may send, or which collective it belongs to. FragmentFlows makes and drives flows.
//
// The eager prefix of a flow goes out at once, as messages, as far as the sender's credit reaches: the
// receiver keeps what comes before it has started the fragment. A flow of at most kEagerBytes is all
// eager prefix; that of a larger flow keeps the link busy until the receiver's READY is here. Of the bytes
// behind the prefix the sender may send as many as the READYs have allowed so far: so a receiver bounds
// what is under way to it from all sides, and no switch has to drop it. A READY may carry a grant: then
// those bytes go as chunks straight into the receiver's memory; without a grant they go as messages.
// Flows do not depend on the order of arrival. The receiver learns from the sender's messages which written
// chunks are there: nothing else that comes from the network can make it believe that.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "common/types.h"
#include "flows/coding_choice.h"
#include "transport/transport.h"

namespace smddp {

// Flows up to this size wait for no READY. Up to 256 KiB, 1 MiB took 1.05 times as long (2026-11-21, AMD EPYC).
inline constexpr size_t kEagerBytes = 64 << 10;
// The payload of two messages that go out at once: 1 MiB on 4 x 1 0.97 of the link's rate for 0.95 (2026-11-21, AMD EPYC).
inline constexpr size_t kEagerPrefixBytes = 2 * transport::kEagerPayload;

// Which bytes of a run have arrived, in whatever order.
class Coverage {
 public:
  explicit Coverage(size_t bytes) : bytes_(bytes) {}
  // False, and nothing changed, if a byte lies outside or was there already.
  bool add(uint64_t offset, uint64_t bytes);
  size_t prefix() const { return prefix_; }  // bytes from the start without a gap
  size_t total() const { return total_; }
  bool complete() const { return prefix_ == bytes_; }

 private:
  size_t bytes_;
  size_t prefix_ = 0;
  size_t total_ = 0;
  std::vector<std::pair<size_t, size_t>> ahead_;  // [first, end), sorted, apart from each other
};

// Which of the writes of a send flow are in the target's memory, where writes complete in any order: the
// writes are counted in batches, and what was sent before the oldest batch that is not complete has arrived. A batch
// is a single write as long as few are under way.
class WriteBatches {
 public:
  WriteBatches() = default;
  WriteBatches(const WriteBatches&) = delete;
  WriteBatches& operator=(const WriteBatches&) = delete;

  // The counter that the next write increments when it starts and decrements when it completes.
  uint32_t* pending() { return &pending_[newest_]; }
  uint32_t count() const { return std::accumulate(pending_.begin(), pending_.end(), 0u); }
  bool idle() const { return count() == 0; }
  // Of the flow's first `sent` bytes, whose writes have started, how many are complete at least. The next write
  // begins a batch, if one is free.
  size_t completed(size_t sent) {
    while (oldest_ != newest_ && pending_[oldest_] == 0) oldest_ = after(oldest_);
    if (pending_[newest_] > 0 && after(newest_) != oldest_) newest_ = after(newest_);
    if (pending_[newest_] == 0) from_[newest_] = sent;
    return from_[oldest_];
  }

 private:
  static constexpr size_t kBatches = 16;  // simulated, with eight as well: docs/dev/design-notes.md
  static size_t after(size_t batch) { return (batch + 1) % kBatches; }

  std::array<uint32_t, kBatches> pending_{};
  std::array<size_t, kBatches> from_{};  // bytes sent before the first write of a batch
  size_t oldest_ = 0, newest_ = 0;       // in the ring
};

// Bytes that may be under way to a rank of a group from all sides: those that its senders were allowed to
// send and that have not arrived. A port of a switch can keep as many, so it never drops any.
class ReceiveBudget {
 public:
  ReceiveBudget() = default;
  explicit ReceiveBudget(size_t bytes) : bytes_(bytes) {}
  size_t bytes() const { return bytes_; }
  size_t left() const { return under_way_ < bytes_ ? bytes_ - under_way_ : 0; }
  void open(size_t bytes) { under_way_ += bytes; }
  void close(size_t bytes) { under_way_ -= std::min(bytes, under_way_); }

 private:
  size_t bytes_ = 0;
  size_t under_way_ = 0;
};

// The shards of a flow, end to end.
class ShardRun {
 public:
  void add(Rank shard, size_t bytes) {
    shards_.push_back(shard);
    starts_.push_back(bytes_);
    bytes_ += bytes;
  }
  // Of a run without shards: one byte that belongs to none, so that the flow still says that there are none.
  void pad() { bytes_ = 1; }
  size_t bytes() const { return bytes_; }
  size_t shard_bytes() const { return shards_.empty() ? 0 : bytes_; }
  size_t shards() const { return shards_.size(); }
  Rank shard(size_t i) const { return shards_[i]; }
  size_t start(size_t i) const { return starts_[i]; }
  size_t length(size_t i) const { return end(i) - starts_[i]; }

  // f(shard, offset into it, bytes, offset into the run) for each shard that [offset, offset +
  // bytes) touches.
  template <class F>
  void for_each(size_t offset, size_t bytes, F&& f) const {
    for (size_t i = 0; i < shards_.size(); ++i) {
      size_t from = std::max(offset, starts_[i]), to = std::min(offset + bytes, end(i));
      if (from < to) f(shards_[i], from - starts_[i], to - from, from - offset);
    }
  }

 private:
  size_t end(size_t i) const { return i + 1 < starts_.size() ? starts_[i + 1] : bytes_; }
  std::vector<Rank> shards_;
  std::vector<size_t> starts_;
  size_t bytes_ = 0;
};

// The receiver's end.
class ReceiveFlow {
 public:
  ReceiveFlow(Rank from, int at, ShardRun shards, size_t eager_prefix_bytes)
      : source(from),
        step(at),
        run(std::move(shards)),
        eager_prefix(eager_prefix_bytes),
        coverage(run.bytes()),
        allowed(eager_prefix_bytes),
        counted(eager_prefix_bytes) {}
  ReceiveFlow(const ReceiveFlow&) = delete;
  ReceiveFlow& operator=(const ReceiveFlow&) = delete;
  // Chunks of the region.
  uint64_t chunks() const { return (grant.bytes + grant.chunk_bytes - 1) / grant.chunk_bytes; }
  // Where a chunk begins in the run; the run's end for the one behind the last.
  size_t begin_of(uint64_t chunk) const {
    return std::min<size_t>(run.bytes(), eager_prefix + chunk * grant.chunk_bytes);
  }
  // `count` chunks from `first` on are in memory, and its owner sees them. False: one of them came before.
  bool on_chunks(uint64_t first, uint64_t count) {
    return coverage.add(begin_of(first), begin_of(first + count) - begin_of(first));
  }
  bool eager() const { return eager_prefix == run.bytes(); }
  bool complete() const { return coverage.complete(); }
  // Bytes of the run that are here from `start` on, without a gap.
  size_t arrived_from(size_t start) const {
    return coverage.prefix() <= start ? 0 : coverage.prefix() - start;
  }

  const Rank source;
  const int step;
  const ShardRun run;
  const size_t eager_prefix;  // bytes at the start of the run that wait for no READY
  Coverage coverage;
  std::byte* memory = nullptr;  // where the run lies end to end, if it does: may be granted
  wire::Grant grant{};
  bool granted = false;   // a region is open, for the bytes behind the eager prefix
  uint32_t region = 0;    // its number
  uint64_t written = 0;   // its chunks that are in memory, as the sender has said
  uint64_t withheld = 0;  // the one that counts once the memory's owner sees all of them
  size_t saved = 0;       // bytes that did not travel, as chunks were coded
  size_t allowed;         // bytes of the run that the sender may send
  // Bytes of the eager prefix, and behind it those that the receive budget counts as arrived.
  size_t counted;
  // When bytes behind the prefix were seen first, and how many bytes had travelled then; 0: not yet.
  uint64_t first_ns = 0;
  size_t first_bytes = 0;
};

// The sender's end.
struct SendFlow {
  Rank target;
  int step;
  ShardRun run;
  size_t eager_prefix;
  const std::byte* memory = nullptr;  // where the run lies end to end, if it does
  bool cleared = false;  // the target has started the fragment, or keeps the eager prefix
  size_t allowed = 0;    // bytes of the run that the target takes by now
  bool granted = false;
  wire::Grant grant{};
  size_t sent = 0;
  size_t whole_shards = 0;       // from the first on: that are known to be whole on this rank
  WriteBatches chunks;           // that the transport still works on
  size_t told = 0;               // bytes of the run of which the target knows that they are there
  std::vector<uint32_t> untold;  // of each chunk behind those: how many bytes are coded, or 0
  CodingState coding;

  bool eager() const { return eager_prefix == run.bytes(); }
  // What goes out next is written, which the target does not notice.
  bool in_chunks() const { return granted && sent >= eager_prefix; }
  bool told_all() const { return told == run.bytes(); }
  bool complete() const { return told_all() && chunks.idle(); }
};

inline Rank other_end(const ReceiveFlow& receive) { return receive.source; }
inline Rank other_end(const SendFlow& send) { return send.target; }

// Flows of a fragment, in the order in which they start, at most one for each rank at their other end. They stay at
// their addresses. Inside a host there are none, and an empty list takes no memory.
template <class Flow>
class FlowList {
 public:
  using iterator = typename std::deque<Flow>::iterator;
  using const_iterator = typename std::deque<Flow>::const_iterator;

  template <class... Args>
  Flow& emplace_back(Args&&... args) {
    if (!all_) all_ = std::make_unique<All>();
    return all_->flows.emplace_back(std::forward<Args>(args)...);
  }
  size_t size() const { return all_ ? all_->flows.size() : 0; }
  bool empty() const { return size() == 0; }
  Flow& operator[](size_t i) { return all_->flows[i]; }
  const Flow& operator[](size_t i) const { return all_->flows[i]; }
  const Flow& back() const { return all_->flows.back(); }
  iterator begin() { return all_ ? all_->flows.begin() : iterator(); }
  iterator end() { return all_ ? all_->flows.end() : iterator(); }
  const_iterator begin() const { return all_ ? all_->flows.cbegin() : const_iterator(); }
  const_iterator end() const { return all_ ? all_->flows.cend() : const_iterator(); }

  // Once all flows are there, before find().
  void index() {
    if (!all_) return;
    all_->by_rank.reserve(size());
    for (Flow& flow : *this) all_->by_rank.emplace_back(other_end(flow), &flow);
    std::sort(all_->by_rank.begin(), all_->by_rank.end());
  }
  // The flow from or to `rank`; nullptr: there is none.
  Flow* find(Rank rank) const {
    if (!all_) return nullptr;
    const auto& entries = all_->by_rank;
    auto at = std::lower_bound(entries.begin(), entries.end(), rank,
                               [](const auto& entry, Rank r) { return entry.first < r; });
    return at != entries.end() && at->first == rank ? at->second : nullptr;
  }

 private:
  struct All {
    std::deque<Flow> flows;
    std::vector<std::pair<Rank, Flow*>> by_rank;  // sorted
  };
  std::unique_ptr<All> all_;
};

}  // namespace smddp
