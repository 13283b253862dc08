#include "gpu/pinned_pipeline.h"

#include <utility>

namespace smddp {
namespace {

// How many chunks a second exchange is behind the first. While one is summed, so many others are on the wire.
constexpr size_t kBehind = 2;
static_assert(kBehind < PinnedRing::kBuffers);

}  // namespace

Result<std::unique_ptr<PinnedPipeline>> PinnedPipeline::create(Process& process,
                                                               std::unique_ptr<Group> ranks,
                                                               device::Device& device,
                                                               uint64_t limit_ns, uint64_t grace_ns,
                                                               bool by_nic) {
  std::unique_ptr<PinnedPipeline> made(
      new PinnedPipeline(process, std::move(ranks), device, grace_ns, by_nic));
  made->set_limit(limit_ns);
  if (Status opened = made->open(); !opened) return opened;
  return made;
}

Status PinnedPipeline::open() {
  for (device::Stream* stream : {&out_, &in_}) {
    if (Status s = device_.create_stream().into(*stream); !s) return s;
  }
  if (Status s = device_.create_event().into(end_); !s) return s;
  carrier_.start();
  return {};
}

PinnedPipeline::~PinnedPipeline() {
  carrier_.stop();
  if (engine_.forked()) return;  // a forked child does not have the device
  for (device::Stream stream : {out_, in_}) device_.destroy_stream(stream);
  device_.destroy_event(end_);
}

Status PinnedPipeline::reserve(const DeviceExchange& exchange) {
  ChunkLayout slots = layout_of(exchange);
  size_t received =
      exchange.sums_on_device ? slots.slot_bytes() * static_cast<size_t>(ranks() - 1) : 0;
  return buffers_.reserve(slots.buffer_bytes(), stays(exchange), received);
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

Result<std::shared_ptr<const ExchangeOutcome>> PinnedPipeline::submit(
    const Around& around, const std::vector<DeviceExchange>& exchanges) {
  auto outcome = std::make_shared<ExchangeOutcome>();
  Status s = begin(around, exchanges);
  if (s) s = submit_all(around, exchanges, outcome);
  if (!s) {
    carrier_.outcome().fail(s);
    return s;
  }
  return std::shared_ptr<const ExchangeOutcome>(outcome);
}

Status PinnedPipeline::begin(const Around& around, const std::vector<DeviceExchange>& exchanges) {
  Status s;
  for (device::Stream stream : {out_, in_}) {
    for (device::Event event : around.after) {
      if (s) s = device_.wait(stream, event);
    }
  }
  for (const DeviceExchange& exchange : exchanges) {
    if (s) s = device_.copies(in_, exchange.copies);
  }
  return s;
}

Status PinnedPipeline::submit_all(const Around& around,
                                  const std::vector<DeviceExchange>& exchanges,
                                  const std::shared_ptr<ExchangeOutcome>& outcome) {
  const std::vector<size_t>& part_ends = exchanges.back().part_ends;
  std::vector<ChunkLayout> layouts;
  for (const DeviceExchange& exchange : exchanges) layouts.push_back(layout_of(exchange));
  size_t filled = 0, announced = 0;
  Status s;
  for (const auto& [which, begin] : turns_of(layouts, kBehind)) {
    const DeviceExchange& exchange = exchanges[which];
    const ChunkLayout& slots = layouts[which];
    const size_t slot = slots.slot_bytes();
    bool first = which == 0, last = which + 1 == exchanges.size();
    for (; s && first && filled <= part_ends.size() &&
           (filled == 0 || part_ends[filled - 1] < begin + slot);
         ++filled)
      s = around.fill(out_);
    if (!s) break;
    Cut cut{buffers_.ring(stays(exchange)), chunks_ % PinnedRing::kBuffers, chunks_ + 1, begin,
            slot};
    ++chunks_;
    std::shared_ptr<Chunk> next = chunk_of(exchange, slots, cut);
    next->outcome = outcome;
    carrier_.push(std::move(next));
    // What the first exchange has put there was put there by `main`.
    s = submit(around.main, first ? out_ : around.main, exchange, slots, cut);
    for (; s && last && announced < part_ends.size() && part_ends[announced] <= begin + slot;
         ++announced)
      s = announce(around);
  }
  // Exchanges without a byte have the parts that they have on other ranks.
  for (; s && filled <= part_ends.size(); ++filled) s = around.fill(out_);
  for (; s && announced <= part_ends.size(); ++announced) s = announce(around);
  return s;
}

ReceivedBlocks::Part PinnedPipeline::received_part(const DeviceExchange& exchange,
                                                   const Cut& cut) const {
  ReceivedBlocks::Part part;
  part.buffer = cut.buffer;
  part.bytes = exchange.in.bytes(0, cut.begin, cut.slot);
  part.others = static_cast<size_t>(ranks() - 1);
  part.distance = cut.slot;
  part.own_position = static_cast<size_t>(carrier_.rank());
  part.own = exchange.out.slice(carrier_.rank(), cut.begin, cut.slot);
  part.to = exchange.in.slice(0, cut.begin, cut.slot);
  return part;
}

// The chunk is known to the carrier.
Status PinnedPipeline::submit(device::Stream main, device::Stream out,
                              const DeviceExchange& exchange, const ChunkLayout& slots,
                              const Cut& cut) {
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
  const ReceivedBlocks& received = buffers_.received();
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

std::shared_ptr<Chunk> PinnedPipeline::chunk_of(const DeviceExchange& exchange,
                                                const ChunkLayout& slots, const Cut& cut) const {
  const auto& [ring, buffer, number, begin, slot] = cut;
  auto made = std::make_shared<Chunk>();
  made->ring = ring;
  made->buffer = buffer;
  made->flag_value = number;
  made->tuning = exchange.tuning;
  made->on_device = stays(exchange);
  // The logarithmic pattern sends several shards as one run, which needs a copy.
  if (made->on_device) made->tuning.algorithm = Algorithm::kDirect;
  static_cast<OperationTerms&>(*made) = exchange;
  if (exchange.sums_on_device) made->collective = Collective::kAllToAll;
  made->digest += begin;
  if (made->timeout_ns != 0) made->timeout_ns += grace_ns_;
  auto add = [&](Blocks& to, const Blocks& from, Rank block, size_t at, bool any) {
    to.add(cut.ring->buffer(cut.buffer) + at * cut.slot,
           any ? from.bytes(block, cut.begin, cut.slot) : 0);
    to.end_block();
  };
  for (Rank r = 0; r < ranks(); ++r) {
    bool any =
        !exchange.sums_on_device || r != carrier_.rank();  // the own block stays on the device
    if (slots.is_input(r)) add(made->input, exchange.out, slots.out_block(r), slots.before(r), any);
    if (slots.is_output(r)) add(made->output, exchange.in, slots.in_block(r), slots.after(r), any);
  }
  return made;
}

}  // namespace smddp
