// AllGather. Shards cross between hosts along the rails, in the flows of the selected pattern. Each rank
// pushes to its host what enters the host through it: first its own shard, then what arrives from the
// network, piece by piece, while later pieces are still in flight. Each byte enters a host once.
//
// The group makes it by make_allgather().
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/fragment.h"
#include "collectives/own_shard.h"

namespace smddp {
namespace {

using intranode::Piece;

class AllGather final : public Fragment {
 public:
  AllGather(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq,
            size_t begin, size_t bytes, std::shared_ptr<const PartSums> sums)
      : Fragment(context, std::move(operation), seq, begin, bytes, intranode::Lane::kGathers,
                 sums != nullptr),
        sums_(std::move(sums)),
        own_(*operation_, context.members.rank(), begin, bytes) {}

  void start() override;
  bool progress(bool may_push) override;
  bool pushed() const override { return pushed_; }
  bool complete() const override;
  std::string waiting_for() const override;

 private:
  // What this rank pushes to its host: a shard, and where it comes from.
  struct Source {
    Rank shard;
    const ReceiveFlow* flow;  // nullptr: the own shard, here from the start
    size_t start;             // of the shard, in the flow's run
    size_t pushed;
  };
  // The next bytes of a source.
  struct NextPiece {
    Source* source = nullptr;  // nullptr: nothing can be pushed yet
    size_t bytes = 0;
    std::vector<Extent> extents;  // to be read by the peers; empty: the bytes go into the slot
  };

  // --- flows between hosts.

  void make_flows();
  // How much of this rank's shard is there to be passed on, from its start.
  size_t own_here() const { return sums_ == nullptr ? own_.bytes() : sums_->here; }
  ShardRun run_of(const pattern::Flow& flow) const;
  // Where a run lies end to end, or nullptr.
  std::byte* memory_of(const ShardRun& run) const;
  // How much of a flow's run is here, from its start. A shard that is passed on has come in one flow, not
  // always the same, or from a local peer.
  size_t sendable(SendFlow& flow) const;
  size_t arrived(Rank shard) const;  // by a flow

  // --- pieces inside the host.

  void add_source(Rank shard, const ReceiveFlow* flow, size_t start);
  // The rank of this host that pushes `shard`: its owner, or the rank that receives it from another host.
  Rank pusher(Rank shard) const;
  uint64_t expected_from(int i) const override;
  size_t available(const Source& source) const;
  bool push_one();
  NextPiece next_piece();
  // The memory behind the next `bytes` bytes of a source if the peers are to read it there, else nothing.
  std::vector<Extent> exposed(const Source& source, size_t bytes) const;
  bool take_in(int i, const Piece& head);
  bool fits(const Piece& head) const;

  // How much of another rank's shard is in the output, from its start.
  size_t here(Rank shard) const {
    return pusher(shard) == members_.rank() ? arrived(shard)
                                            : received_[static_cast<size_t>(shard)];
  }
  void read(Rank shard, size_t offset, std::byte* to, size_t bytes, bool streaming = false) const;

  const std::shared_ptr<const PartSums> sums_;  // of an AllReduce
  OwnShard own_;
  bool direct_ = false;  // peers read memory that is not shared, too
  bool streaming_ = false;
  bool pushed_ = false;
  // By shard, where it arrives; only of a pattern that passes shards on.
  struct Arrival {
    const ReceiveFlow* flow = nullptr;
    size_t start = 0, length = 0;
  };
  std::vector<Arrival> arrivals_;
  SmallVector<Source, 2> sources_;
  size_t first_source_ = 0;           // those before it are pushed
  size_t to_push_ = 0;                // bytes, of all sources
  SmallVector<size_t, 16> received_;  // bytes that local peers have pushed, by shard
  size_t missing_ = 0;                // bytes that they have yet to push
};

void AllGather::start() {
  Rank me = members_.rank();
  direct_ = read_directly(operation_->collective, limit_, shape_);
  streaming_ = streams();
  expect_pieces();
  received_.assign(static_cast<size_t>(members_.ranks()), 0);
  own_.start(streaming_);
  make_flows();
  add_source(me, nullptr, 0);
  for (const ReceiveFlow& flow : flows_.receives()) {
    for (size_t i = 0; i < flow.run.shards(); ++i) {
      add_source(flow.run.shard(i), &flow, flow.run.start(i));
    }
  }
  for (Rank shard = 0; shard < members_.ranks(); ++shard) {
    if (pusher(shard) != me) missing_ += part(operation_->output, shard);
  }
  pushed_ = local_.count() == 0;
  flows_.open(operation_->plan().pattern != Pattern::kLog);
}

bool AllGather::progress(bool may_push) {
  bool moved = flows_.allow_more();
  moved |= send([&](SendFlow& flow) { return sendable(flow); }, [&](auto... of) { read(of...); });
  auto push = [&] {
    while (may_push && !pushed_ && push_one()) moved = true;
  };
  push();
  for (int i = 0; i < local_.count(); ++i) {
    while (const Piece* head = inbox_head(i)) {
      moved = true;
      if (!take_in(i, *head)) return true;
      if (exposes()) push();
    }
  }
  // Last: the network and the local peers read the input, so none of them waits for this copy.
  return moved || own_.copy_some();
}

bool AllGather::complete() const {
  return pushed_ && missing_ == 0 && own_.copied() == own_.bytes() && heard_all() &&
         flows_.complete() && is_read();
}

std::string AllGather::waiting_for() const {
  std::string names;
  for (Rank shard = 0; shard < members_.ranks(); ++shard) {
    if (shard == members_.rank() || here(shard) >= part(operation_->output, shard)) continue;
    names += (names.empty() ? "" : ", ") + members_.describe(shard);
  }
  return names.empty() ? waiting_for_takers() : "no data from " + names;
}

uint64_t AllGather::expected_from(int i) const {
  uint64_t bytes = 0;
  for (Rank shard = 0; shard < members_.ranks(); ++shard) {
    if (pusher(shard) == local_.rank(i)) bytes += part(operation_->output, shard);
  }
  return bytes;
}

void AllGather::make_flows() {
  auto gather =
      pattern::gather_flows(members_.topology(), members_.rank(), operation_->plan().pattern);
  bool passes_on = operation_->plan().pattern == Pattern::kLog;
  if (passes_on) arrivals_.resize(static_cast<size_t>(members_.ranks()));
  for (const pattern::Flow& flow : gather.in) {
    ReceiveFlow* shards = flows_.add_receive(flow, run_of(flow));
    if (shards == nullptr) continue;
    shards->memory = memory_of(shards->run);
    if (passes_on) {
      for (size_t i = 0; i < shards->run.shards(); ++i)
        arrivals_[static_cast<size_t>(shards->run.shard(i))] = {shards, shards->run.start(i),
                                                                shards->run.length(i)};
    }
  }
  for (const pattern::Flow& flow : gather.out) {
    SendFlow* shards = flows_.add_send(flow, run_of(flow));
    if (shards != nullptr) shards->memory = memory_of(shards->run);
  }
}

ShardRun AllGather::run_of(const pattern::Flow& flow) const {
  ShardRun run;
  for (Rank shard : flow.shards) {
    size_t bytes = part(operation_->output, shard);
    if (bytes > 0) run.add(shard, bytes);
  }
  return run;
}

std::byte* AllGather::memory_of(const ShardRun& run) const {
  std::byte* at = nullptr;
  if (run.shards() != 1) return nullptr;
  Rank shard = run.shard(0);
  size_t length = shard == members_.rank() ? own_.blocks().contiguous(own_.block(), begin_, &at)
                                           : operation_->output.contiguous(shard, begin_, &at);
  return length >= run.bytes() ? at : nullptr;
}

// Shards become whole in any order, but never less so: a look goes on where the last one ended.
size_t AllGather::sendable(SendFlow& flow) const {
  for (size_t& i = flow.whole_shards; i < flow.run.shards(); ++i) {
    Rank shard = flow.run.shard(i);
    size_t bytes = shard == members_.rank() ? own_here() : here(shard);
    if (bytes < flow.run.length(i)) return flow.run.start(i) + bytes;
  }
  return flow.run.bytes();
}

size_t AllGather::arrived(Rank shard) const {
  if (!arrivals_.empty()) {
    const Arrival& arrival = arrivals_[static_cast<size_t>(shard)];
    if (arrival.flow == nullptr) return 0;
    return std::min(arrival.length, arrival.flow->arrived_from(arrival.start));
  }
  for (const ReceiveFlow& flow : flows_.receives()) {
    for (size_t i = 0; i < flow.run.shards(); ++i) {
      if (flow.run.shard(i) != shard) continue;
      return std::min(flow.run.length(i), flow.arrived_from(flow.run.start(i)));
    }
  }
  return 0;
}

void AllGather::read(Rank shard, size_t offset, std::byte* to, size_t bytes, bool streaming) const {
  if (shard == members_.rank()) {
    own_.read(offset, to, bytes, streaming);
  } else {
    operation_->output.read(shard, begin_ + offset, to, bytes, streaming);
  }
}

// --- pieces inside the host.

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
    put(slot, piece, next.extents, [&](bool streaming) {
      if (source->flow == nullptr) {
        own_.fill(slot, source->pushed, next.bytes, streaming);
      } else {
        read(source->shard, source->pushed, slot, next.bytes, streaming);
      }
    });
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
  if (bytes < intranode::kSlotBytes) return {};
  const Blocks& blocks = source.flow == nullptr ? own_.blocks() : operation_->output;
  Rank block = source.flow == nullptr ? own_.block() : source.shard;
  return readable(blocks, block, begin_ + source.pushed, bytes, direct_);
}

bool AllGather::take_in(int i, const Piece& head) {
  if (head.bytes > 0) {
    if (!fits(head)) return fail_piece(i);
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

}  // namespace

std::unique_ptr<Fragment> make_allgather(const FragmentContext& context,
                                         std::shared_ptr<Operation> operation, uint64_t seq,
                                         size_t begin, size_t bytes,
                                         std::shared_ptr<const PartSums> sums) {
  return std::make_unique<AllGather>(context, std::move(operation), seq, begin, bytes,
                                     std::move(sums));
}

}  // namespace smddp
