#include "gpu/pinned_pipeline.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/align.h"
#include "common/clock.h"

namespace smddp {
namespace {

// Bytes of a chunk, with the parts of all ranks. With three chunks, one copy out, one copy in and the start
// of a collective are hidden behind the transfer.
constexpr size_t kChunkBytes = 4 << 20;
// The least bytes of one rank in a chunk, as with many ranks the parts would be smaller: a message costs
// more than these bytes.
constexpr size_t kLeastSlot = 64 << 10;
constexpr size_t kLeastRing = 64 << 10;
// How many chunks a second exchange is behind the first. While one is summed, so many others are on the wire.
constexpr size_t kBehind = 2;
static_assert(kBehind < PinnedRing::kBuffers);
// Slots begin at cache lines and hold whole elements.
constexpr size_t kGrain = 256;
// How long the thread sleeps between two reads of a flag that a stream sets; the longer it waits, the longer
// it sleeps.
constexpr uint64_t kShortestNapNs = 20'000, kLongestNapNs = 500'000;

}  // namespace

fabric::MemoryOwner owner_of(const device::Device& device) {
  int ordinal = device.cuda_ordinal();
  if (ordinal < 0) return {};
  return {fabric::MemoryOwner::Kind::kCuda, ordinal};
}

// The CPU's collective on one chunk.
class PinnedPipeline::Chunk final : public Operation {
 public:
  std::shared_ptr<PinnedRing> ring;
  std::shared_ptr<Outcome> outcome, pipelines;
  Tuning tuning;
  size_t buffer = 0;
  uint32_t chunk_number = 0;

  bool filled() const { return ring->filled(buffer) == chunk_number; }
  void give_up(const Status& why) {
    outcome->fail(why);
    pipelines->fail(why);
    ring->set_arrived(buffer, chunk_number);
  }

 private:
  void on_done() override {
    Operation::on_done();
    pipelines->under_way.fetch_sub(1);
    if (!status()) {
      give_up(status());
    } else {
      ring->set_arrived(buffer, chunk_number);
    }
    ring.reset();  // the engine may keep the operation for longer than there is a device
  }
};

Result<std::unique_ptr<PinnedPipeline>> PinnedPipeline::create(Engine& engine,
                                                               std::unique_ptr<Group> ranks,
                                                               device::Device& device,
                                                               uint64_t limit_ns, uint64_t grace_ns,
                                                               bool by_nic) {
  std::unique_ptr<PinnedPipeline> made(
      new PinnedPipeline(engine, std::move(ranks), device, grace_ns, by_nic));
  made->set_limit(limit_ns);
  if (Status opened = made->open(); !opened) return opened;
  return made;
}

Status PinnedPipeline::open() {
  for (device::Stream* stream : {&out_, &in_}) {
    auto made = device_.create_stream();
    if (!made) return made.status();
    *stream = made.value();
  }
  auto event = device_.create_event();
  if (!event) return event.status();
  end_ = event.value();
  thread_ = std::thread([this] { run(); });
  return {};
}

PinnedPipeline::~PinnedPipeline() {
  outcome_->tell({});      // the engine may keep the outcome for longer than there is whom it tells
  if (engine_.forked()) {  // a forked child has neither the thread nor the device
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  ranks_.reset();
  engine_.kick(engine_.lock());  // chunks that a shut-down engine left finished free their rings
  {
    Engine::Lock lock = engine_.lock();
    for (const auto& ring : rings_[true]) engine_.network().take_back(ring->buffer(0));
  }
  for (const auto& left : queue_) left->give_up({Code::kAborted, "the group was destroyed"});
  for (device::Stream stream : {out_, in_}) {
    if (stream != nullptr) device_.destroy_stream(stream);
  }
  if (end_ != nullptr) device_.destroy_event(end_);
}

// Bytes of each rank's block that one chunk carries; equal on all ranks.
size_t PinnedPipeline::slot_bytes(const Exchange& exchange) const {
  size_t most = std::max(kLeastSlot, kChunkBytes / static_cast<size_t>(ranks()) / kGrain * kGrain);
  size_t largest = std::max(exchange.out.largest(), exchange.in.largest());
  return std::min(most, align_up(largest, kGrain));
}

// Which slot of a buffer holds a rank's block before the chunk's collective, and which after it. Collectives of
// the CPU work in place. What another rank sends cannot overwrite what goes to it, so blocks that the device
// sums have slots of their own: first those that the other ranks get, then what they send.
class PinnedPipeline::Slots {
 public:
  Slots(const Exchange& exchange, Rank me, int ranks)
      : sums_(exchange.sums_on_device),
        gathers_(exchange.collective == Collective::kAllGather),
        scatters_(exchange.collective == Collective::kReduceScatter),
        me_(me),
        ranks_(ranks) {}

  size_t count() const { return static_cast<size_t>(sums_ ? 2 * (ranks_ - 1) : ranks_); }
  size_t before(Rank r) const { return static_cast<size_t>(sums_ && r > me_ ? r - 1 : r); }
  size_t after(Rank r) const { return before(r) + static_cast<size_t>(sums_ ? ranks_ - 1 : 0); }
  // Whether the rank's block is copied out of the device, and in from the buffer to its place.
  bool goes_out(Rank r) const { return gathers_ ? r == me_ : !sums_ || r != me_; }
  bool comes_in(Rank r) const { return !sums_ && (gathers_ ? r != me_ : !scatters_ || r == me_); }
  // The block of the exchange that goes into the rank's slot, and that comes out of it.
  Rank out_block(Rank r) const { return gathers_ ? 0 : r; }
  Rank in_block(Rank r) const { return scatters_ ? 0 : r; }
  // Whether the chunk's collective has a block of this rank as input, and as output; it may have no bytes.
  bool is_input(Rank r) const { return !gathers_ || r == me_; }
  bool is_output(Rank r) const { return sums_ || !scatters_ || r == me_; }

 private:
  const bool sums_, gathers_, scatters_;
  const Rank me_;
  const int ranks_;
};

Status PinnedPipeline::reserve(const Exchange& exchange) {
  Slots slots(exchange, rank(), ranks());
  size_t slot = slot_bytes(exchange);
  size_t wanted = std::bit_ceil(std::max(kLeastRing, slot * slots.count()));
  if (exchange.sums_on_device) {
    if (Status room = reserve_received(slot * static_cast<size_t>(ranks() - 1)); !room) return room;
  }
  bool on_device = stays(exchange);
  auto& rings = rings_[on_device];
  {
    std::lock_guard lock(mutex_);
    if (!rings.empty() && rings.back()->buffer_bytes() >= wanted) return {};
  }
  auto made = PinnedRing::create(device_, wanted, on_device);
  if (!made) return made.status();
  const std::shared_ptr<PinnedRing>& ring = made.value();
  if (on_device) {
    Engine::Lock lock = engine_.lock();
    Status lent = engine_.network().lend(ring->buffer(0), ring->all_buffers(), owner_of(device_));
    if (!lent) return lent;
  }
  std::lock_guard lock(mutex_);
  rings.push_back(ring);
  return {};
}

Status PinnedPipeline::reserve_received(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (!received_.empty() && received_.back()->bytes() >= bytes) return {};
  }
  auto made = ReceivedBlocks::create(device_, std::bit_ceil(std::max(kLeastRing, bytes)));
  if (!made) return made.status();
  std::lock_guard lock(mutex_);
  received_.push_back(std::move(made.value()));
  return {};
}

Status PinnedPipeline::copy(device::Stream stream, const Blocks& blocks, Rank block, size_t begin,
                            size_t bytes, std::byte* pinned, bool out) {
  for (const Extent& e : blocks.slice(block, begin, bytes)) {
    Status s = out ? device_.copy(stream, pinned, e.address, e.bytes)
                   : device_.copy(stream, e.address, pinned, e.bytes);
    if (!s) return s;
    pinned += e.bytes;
  }
  return {};
}

Result<std::shared_ptr<const PinnedPipeline::Outcome>> PinnedPipeline::submit(
    const Around& around, const std::vector<Exchange>& exchanges) {
  auto outcome = std::make_shared<Outcome>();
  Status s = begin(around, exchanges);
  if (s) s = submit_all(around, exchanges, outcome);
  if (!s) {
    outcome_->fail(s);
    return s;
  }
  return std::shared_ptr<const Outcome>(outcome);
}

Status PinnedPipeline::begin(const Around& around, const std::vector<Exchange>& exchanges) {
  Status s;
  for (device::Stream stream : {out_, in_}) {
    for (device::Event event : around.after) {
      if (s) s = device_.wait(stream, event);
    }
  }
  for (const Exchange& exchange : exchanges) {
    for (const Exchange::Copy& c : exchange.copies) {
      bool moves = c.to.address != c.from.address && c.to.bytes > 0;
      if (s && moves) s = device_.copy(in_, c.to.address, c.from.address, c.to.bytes);
    }
  }
  return s;
}

// In the order in which all ranks submit the chunks.
std::vector<PinnedPipeline::Turn> PinnedPipeline::turns(
    const std::vector<Exchange>& exchanges) const {
  std::vector<Turn> turns;
  bool more = true;
  for (size_t step = 0; more; ++step) {
    more = false;
    for (size_t i = 0; i < exchanges.size(); ++i) {
      size_t largest = std::max(exchanges[i].out.largest(), exchanges[i].in.largest());
      size_t slot = slot_bytes(exchanges[i]), before = i * kBehind;
      if (step * slot >= largest + before * slot) continue;
      more = true;
      if (step >= before) turns.push_back({i, (step - before) * slot, slot});
    }
  }
  return turns;
}

Status PinnedPipeline::submit_all(const Around& around, const std::vector<Exchange>& exchanges,
                                  const std::shared_ptr<Outcome>& outcome) {
  const std::vector<size_t>& part_ends = exchanges.back().part_ends;
  size_t filled = 0, announced = 0;
  Status s;
  for (const auto& [which, begin, slot] : turns(exchanges)) {
    const Exchange& exchange = exchanges[which];
    bool first = which == 0, last = which + 1 == exchanges.size();
    for (; s && first && filled <= part_ends.size() &&
           (filled == 0 || part_ends[filled - 1] < begin + slot);
         ++filled)
      s = around.fill(out_);
    if (!s) break;
    Cut cut{newest_ring(exchange), chunks_ % PinnedRing::kBuffers, chunks_ + 1, begin, slot};
    ++chunks_;
    std::shared_ptr<Chunk> next = chunk(exchange, cut);
    next->outcome = outcome;
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(next));
    }
    changed_.notify_all();
    // What the first exchange has put there was put there by `main`.
    s = submit(around.main, first ? out_ : around.main, exchange, cut);
    for (; s && last && announced < part_ends.size() && part_ends[announced] <= begin + slot;
         ++announced)
      s = announce(around);
  }
  // Exchanges without a byte have the parts that they have on other ranks.
  for (; s && filled <= part_ends.size(); ++filled) s = around.fill(out_);
  for (; s && announced <= part_ends.size(); ++announced) s = announce(around);
  return s;
}

ReceivedBlocks::Part PinnedPipeline::received_part(const Exchange& exchange, const Cut& cut) const {
  ReceivedBlocks::Part part;
  part.buffer = cut.buffer;
  part.bytes = exchange.in.bytes(0, cut.begin, cut.slot);
  part.others = static_cast<size_t>(ranks() - 1);
  part.distance = cut.slot;
  part.own_position = static_cast<size_t>(rank());
  part.own = exchange.out.slice(rank(), cut.begin, cut.slot);
  part.to = exchange.in.slice(0, cut.begin, cut.slot);
  return part;
}

// The chunk is known to run().
Status PinnedPipeline::submit(device::Stream main, device::Stream out, const Exchange& exchange,
                              const Cut& cut) {
  Slots slots(exchange, rank(), ranks());
  const auto& [ring, buffer, number, begin, slot] = cut;
  std::byte* pinned = ring->buffer_on_device(buffer);
  Status s = device_.wait(out, ring->copied_in(buffer));
  for (Rank r = 0; r < ranks() && s; ++r) {
    if (slots.goes_out(r))
      s = copy(out, exchange.out, slots.out_block(r), begin, slot, pinned + slots.before(r) * slot,
               true);
  }
  if (s) s = device_.write_flag(out, ring->filled_on_device(buffer), number);
  if (s) s = device_.wait_flag(in_, ring->arrived_on_device(buffer), number);
  for (Rank r = 0; r < ranks() && s; ++r) {
    if (slots.comes_in(r))
      s = copy(in_, exchange.in, slots.in_block(r), begin, slot, pinned + slots.after(r) * slot,
               false);
  }
  if (!exchange.sums_on_device) return s ? device_.record(ring->copied_in(buffer), in_) : s;
  ReceivedBlocks::Part part = received_part(exchange, cut);
  const ReceivedBlocks& received = newest_received();
  if (s) s = received.copy_in(in_, part, pinned + part.others * slot);
  if (s) s = device_.record(ring->copied_in(buffer), in_);
  if (s) s = device_.wait(main, ring->copied_in(buffer));
  return s ? received.sum(main, part, exchange.reduction()) : s;
}

Status PinnedPipeline::announce(const Around& around) {
  Status s = device_.record(end_, in_);
  if (s) s = device_.wait(around.main, end_);
  return s ? around.arrived() : s;
}

kernels::Reduction PinnedPipeline::Exchange::reduction() const {
  kernels::Reduction how;
  how.dtype = dtype;
  how.op = reduce_op;
  how.divisor = reduce_op == ReduceOp::kAvg ? divisor : 1;
  how.blocks = thread_blocks;
  return how;
}

std::shared_ptr<PinnedRing> PinnedPipeline::newest_ring(const Exchange& exchange) {
  std::lock_guard lock(mutex_);
  return rings_[stays(exchange)].back();
}

const ReceivedBlocks& PinnedPipeline::newest_received() {
  std::lock_guard lock(mutex_);
  return *received_.back();
}

std::shared_ptr<PinnedPipeline::Chunk> PinnedPipeline::chunk(const Exchange& exchange,
                                                             const Cut& cut) const {
  const auto& [ring, buffer, number, begin, slot] = cut;
  auto made = std::make_shared<Chunk>();
  made->ring = ring;
  made->pipelines = outcome_;
  made->buffer = buffer;
  made->chunk_number = number;
  made->tuning = exchange.tuning;
  made->on_device = stays(exchange);
  // The logarithmic pattern sends several shards as one run, which needs a copy.
  if (made->on_device) made->tuning.algorithm = Algorithm::kDirect;
  made->collective = exchange.sums_on_device ? Collective::kAllToAll : exchange.collective;
  made->dtype = exchange.dtype;
  made->reduce_op = exchange.reduce_op;
  made->divisor = exchange.divisor;
  made->element_size = exchange.element_size;
  made->tensors = exchange.tensors;
  made->digest = exchange.digest + begin;
  made->options = exchange.options;
  made->timeout_ns = exchange.timeout_ns == 0 ? 0 : exchange.timeout_ns + grace_ns_;
  Slots slots(exchange, rank(), ranks());
  auto add = [&](Blocks& to, const Blocks& from, Rank block, size_t at, bool any) {
    to.add(cut.ring->buffer(cut.buffer) + at * cut.slot,
           any ? from.bytes(block, cut.begin, cut.slot) : 0);
    to.end_block();
  };
  for (Rank r = 0; r < ranks(); ++r) {
    bool any = !exchange.sums_on_device || r != rank();  // the own block stays on the device
    if (slots.is_input(r)) add(made->input, exchange.out, slots.out_block(r), slots.before(r), any);
    if (slots.is_output(r)) add(made->output, exchange.in, slots.in_block(r), slots.after(r), any);
  }
  return made;
}

// Starts the collectives of the chunks in order, each once its chunk is in host memory. If the pipeline is
// broken, streams are still released in that order.
void PinnedPipeline::run() {
  std::unique_lock lock(mutex_);
  uint64_t since = 0;  // when this chunk became the next
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    if (!queue_.front()->filled()) {
      uint64_t now = now_ns();
      if (since == 0) since = now;
      uint64_t nap = std::clamp((now - since) / 16, kShortestNapNs, kLongestNapNs);
      changed_.wait_for(lock, std::chrono::nanoseconds(nap), [this] { return stop_; });
      continue;
    }
    since = 0;
    std::shared_ptr<Chunk> next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Status broken = status();
    if (broken) {
      outcome_->under_way.fetch_add(1);
      ranks_->submit(next, next->tuning, true);
    } else {
      next->give_up(broken);
    }
    next.reset();
    lock.lock();
  }
}

bool PinnedPipeline::awaits_copy_out(const Outcome* of) {
  std::lock_guard lock(mutex_);
  if (queue_.empty() || queue_.front()->filled()) return false;
  return of == nullptr || queue_.front()->outcome.get() == of;
}

void PinnedPipeline::abort(const std::string& reason) {
  outcome_->fail({Code::kAborted, reason});
  ranks_->abort(reason, true);
  if (!engine_.ended()) return;
  // The group no longer ends its collectives: run() releases the streams of the rest.
  std::lock_guard lock(mutex_);
  for (const auto& rings : rings_) {
    for (const auto& ring : rings) {
      for (size_t i = 0; i < PinnedRing::kBuffers; ++i) ring->set_arrived(i, ring->filled(i));
    }
  }
}

}  // namespace smddp
