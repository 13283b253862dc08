#include "gpu_collectives/pinned_pipeline.h"

#include <sys/mman.h>

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

// The memory of the chunks in flight: a page of the flags that streams set, pinned and mapped on the device,
// then the buffers (or they lie on the device). The flags that the host sets lie where the device wants them.
class PinnedPipeline::Ring {
 public:
  static Result<std::shared_ptr<Ring>> create(device::Device& device, size_t buffer_bytes,
                                              bool on_device) {
    auto ring = std::make_shared<Ring>(device, buffer_bytes, on_device);
    // Shared memory, so that a fork() does not replace the pinned pages by copies.
    void* at =
        mmap(nullptr, ring->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      return Status(Code::kUnavailable,
                    "no memory for " + std::to_string(ring->bytes()) + " bytes of pinned buffers");
    }
    ring->host_ = static_cast<std::byte*>(at);
    auto mapped = device.map_host(at, ring->bytes());
    if (!mapped) return mapped.status();
    ring->device_address_ = static_cast<std::byte*>(mapped.value());
    if (on_device) {
      auto buffers = device.allocate(ring->all_buffers());
      if (!buffers) return buffers.status();
      ring->on_device_ = static_cast<std::byte*>(buffers.value());
    }
    auto arrived = device.create_flags();
    if (!arrived) return arrived.status();
    ring->arrived_ = std::move(arrived.value());
    for (device::Event& event : ring->copied_in_) {
      auto made = device.create_event();
      if (!made) return made.status();
      event = made.value();
    }
    return ring;
  }
  Ring(device::Device& device, size_t buffer_bytes, bool on_device)
      : device_(device), buffer_bytes_(buffer_bytes), pinned_(!on_device) {}
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    for (device::Event event : copied_in_) {
      if (event != nullptr) device_.destroy_event(event);
    }
    if (on_device_ != nullptr) device_.free(on_device_);
    if (device_address_ != nullptr) device_.unmap_host(host_);
    if (host_ != nullptr) munmap(host_, bytes());
  }

  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t all_buffers() const { return kBuffers * buffer_bytes_; }
  // The address for collectives of the CPU, and the address for streams.
  std::byte* buffer(size_t i) const {
    return (pinned_ ? host_ + kPage : on_device_) + i * buffer_bytes_;
  }
  std::byte* buffer_on_device(size_t i) const {
    return (pinned_ ? device_address_ + kPage : on_device_) + i * buffer_bytes_;
  }
  device::Event copied_in(size_t i) const { return copied_in_[i]; }

  uint32_t* filled_on_device(size_t i) const { return &flags(device_address_)[i].filled; }
  uint32_t* arrived_on_device(size_t i) const { return arrived_->on_device(i); }
  uint32_t filled(size_t i) const {
    return std::atomic_ref(flags(host_)[i].filled).load(std::memory_order_acquire);
  }
  // Ordered after everything that the collective wrote into the buffer.
  void set_arrived(size_t i, uint32_t number) const { arrived_->set(i, number); }

 private:
  struct Flags {
    alignas(64) uint32_t filled;
  };
  static_assert(sizeof(Flags) * kBuffers <= kPage);
  static Flags* flags(std::byte* at) { return reinterpret_cast<Flags*>(at); }
  size_t bytes() const { return kPage + (pinned_ ? all_buffers() : 0); }

  device::Device& device_;
  const size_t buffer_bytes_;
  const bool pinned_;
  std::byte *host_ = nullptr, *device_address_ = nullptr, *on_device_ = nullptr;
  std::unique_ptr<device::HostFlags> arrived_;
  device::Event copied_in_[kBuffers] = {};
};

// The CPU's collective on one chunk.
class PinnedPipeline::Chunk final : public Operation {
 public:
  std::shared_ptr<Ring> ring;
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
  for (device::Event* event : {&begin_, &end_}) {
    auto made = device_.create_event();
    if (!made) return made.status();
    *event = made.value();
  }
  thread_ = std::thread([this] { run(); });
  return {};
}

PinnedPipeline::~PinnedPipeline() {
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
  {
    Engine::Lock lock = engine_.lock();
    for (const auto& ring : rings_[true]) engine_.network().take_back(ring->buffer(0));
  }
  for (const auto& left : queue_) left->give_up({Code::kAborted, "the group was destroyed"});
  for (device::Stream stream : {out_, in_}) {
    if (stream != nullptr) device_.destroy_stream(stream);
  }
  for (device::Event event : {begin_, end_}) {
    if (event != nullptr) device_.destroy_event(event);
  }
}

// Bytes of each rank's block that one chunk carries; equal on all ranks.
size_t PinnedPipeline::slot_bytes(const Exchange& exchange) const {
  size_t most = std::max(kLeastSlot, kChunkBytes / static_cast<size_t>(ranks()) / kGrain * kGrain);
  size_t largest = std::max(exchange.out.largest(), exchange.in.largest());
  return std::min(most, align_up(largest, kGrain));
}

Status PinnedPipeline::reserve(const Exchange& exchange) {
  size_t wanted =
      std::bit_ceil(std::max(kLeastRing, slot_bytes(exchange) * static_cast<size_t>(ranks())));
  bool on_device = stays(exchange);
  auto& rings = rings_[on_device];
  {
    std::lock_guard lock(mutex_);
    if (!rings.empty() && rings.back()->buffer_bytes() >= wanted) return {};
  }
  auto made = Ring::create(device_, wanted, on_device);
  if (!made) return made.status();
  const std::shared_ptr<Ring>& ring = made.value();
  if (on_device) {
    Engine::Lock lock = engine_.lock();
    Status lent = engine_.network().lend(ring->buffer(0), ring->all_buffers(), owner_of(device_));
    if (!lent) return lent;
  }
  std::lock_guard lock(mutex_);
  rings.push_back(ring);
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
    device::Stream main, const Exchange& exchange, const std::function<Status()>& arrived) {
  auto outcome = std::make_shared<Outcome>();
  size_t largest = std::max(exchange.out.largest(), exchange.in.largest());
  for (const Exchange::Copy& c : exchange.copies) {
    if (c.to.address == c.from.address || c.to.bytes == 0) continue;
    Status copied = device_.copy(main, c.to.address, c.from.address, c.to.bytes);
    if (!copied) return copied;
  }
  if (largest == 0) {
    Status after = arrived();
    if (!after) return after;
    return std::shared_ptr<const Outcome>(outcome);
  }
  std::shared_ptr<Ring> ring = newest_ring(exchange);
  size_t slot = slot_bytes(exchange);
  Rank me = rank();
  bool gathers = exchange.collective == Collective::kAllGather;
  bool scatters = exchange.collective == Collective::kReduceScatter;
  const std::vector<size_t>& part_ends = exchange.part_ends;
  Status s = device_.record(begin_, main);
  for (device::Stream stream : {out_, in_}) {
    if (s) s = device_.wait(stream, begin_);
  }
  size_t announced = 0;
  for (size_t begin = 0; begin < largest && s; begin += slot) {
    size_t buffer = chunks_ % kBuffers;
    std::shared_ptr<Chunk> next = chunk(exchange, ring, buffer, begin, slot);
    next->outcome = outcome;
    next->chunk_number = ++chunks_;
    enqueue(next);
    std::byte* pinned = ring->buffer_on_device(buffer);
    s = device_.wait(out_, ring->copied_in(buffer));
    for (Rank r = 0; r < ranks() && s; ++r) {
      std::byte* at = pinned + static_cast<size_t>(r) * slot;
      if (!gathers) s = copy(out_, exchange.out, r, begin, slot, at, true);
      if (gathers && r == me) s = copy(out_, exchange.out, 0, begin, slot, at, true);
    }
    if (s) s = device_.write_flag(out_, ring->filled_on_device(buffer), next->chunk_number);
    if (s) s = device_.wait_flag(in_, ring->arrived_on_device(buffer), next->chunk_number);
    for (Rank r = 0; r < ranks() && s; ++r) {
      std::byte* at = pinned + static_cast<size_t>(r) * slot;
      if (scatters && r == me) s = copy(in_, exchange.in, 0, begin, slot, at, false);
      if (!scatters && !(gathers && r == me)) s = copy(in_, exchange.in, r, begin, slot, at, false);
    }
    if (s) s = device_.record(ring->copied_in(buffer), in_);
    bool last = begin + slot >= largest;
    for (; s && announced < part_ends.size() && (last || begin + slot >= part_ends[announced]);
         ++announced)
      s = announce(main, arrived);
    if (s && last) s = announce(main, arrived);
  }
  if (!s) {
    outcome_->fail(s);
    return s;
  }
  return std::shared_ptr<const Outcome>(outcome);
}

Status PinnedPipeline::announce(device::Stream main, const std::function<Status()>& arrived) {
  Status s = device_.record(end_, in_);
  if (s) s = device_.wait(main, end_);
  return s ? arrived() : s;
}

std::shared_ptr<PinnedPipeline::Ring> PinnedPipeline::newest_ring(const Exchange& exchange) {
  std::lock_guard lock(mutex_);
  return rings_[stays(exchange)].back();
}

void PinnedPipeline::enqueue(const std::shared_ptr<Chunk>& chunk) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(chunk);
  }
  changed_.notify_all();
}

// The slots lie one after the other, one per rank, so the collective works in place.
std::shared_ptr<PinnedPipeline::Chunk> PinnedPipeline::chunk(const Exchange& exchange,
                                                             const std::shared_ptr<Ring>& ring,
                                                             size_t buffer, size_t begin,
                                                             size_t slot) const {
  auto made = std::make_shared<Chunk>();
  made->ring = ring;
  made->pipelines = outcome_;
  made->buffer = buffer;
  made->tuning = exchange.tuning;
  made->on_device = stays(exchange);
  // The logarithmic pattern sends several shards as one run, which needs a copy.
  if (made->on_device) made->tuning.algorithm = Algorithm::kDirect;
  made->collective = exchange.collective;
  made->dtype = exchange.dtype;
  made->reduce_op = exchange.reduce_op;
  made->divisor = exchange.divisor;
  made->element_size = exchange.element_size;
  made->tensors = exchange.tensors;
  made->digest = exchange.digest + begin;
  made->timeout_ns = exchange.timeout_ns == 0 ? 0 : exchange.timeout_ns + grace_ns_;
  auto add = [&](Blocks& to, const Blocks& from, Rank block, Rank at) {
    size_t all = from.bytes(block);
    to.add(ring->buffer(buffer) + static_cast<size_t>(at) * slot,
           std::min(slot, std::max(all, begin) - begin));
    to.end_block();
  };
  Rank me = rank();
  if (exchange.collective == Collective::kAllGather) {
    add(made->input, exchange.out, 0, me);
  } else {
    for (Rank r = 0; r < ranks(); ++r) add(made->input, exchange.out, r, r);
  }
  if (exchange.collective == Collective::kReduceScatter) {
    add(made->output, exchange.in, 0, me);
  } else {
    for (Rank r = 0; r < ranks(); ++r) add(made->output, exchange.in, r, r);
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

bool PinnedPipeline::awaits_copy_out() {
  std::lock_guard lock(mutex_);
  return !queue_.empty() && !queue_.front()->filled();
}

void PinnedPipeline::abort(const std::string& reason) {
  outcome_->fail({Code::kAborted, reason});
  ranks_->abort(reason, true);
  if (!engine_.ended()) return;
  // The group no longer ends its collectives: run() releases the streams of the rest.
  std::lock_guard lock(mutex_);
  for (const auto& rings : rings_) {
    for (const auto& ring : rings) {
      for (size_t i = 0; i < kBuffers; ++i) ring->set_arrived(i, ring->filled(i));
    }
  }
}

}  // namespace smddp
