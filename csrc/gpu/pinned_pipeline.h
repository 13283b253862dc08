// Collectives of the CPU on device memory, through pinned host memory, in chunks. A chunk is copied out of
// the device, goes through a collective of the CPU, and is copied back in, while the next chunk is copied out
// and the previous one is copied in. It carries transfers between hosts, and sums that use no multiprocessor.
// If NICs read and write the device's memory, the chunks of an AllGather stay on the device, and nothing is
// copied to the host.
//
// The device may do the sums of a ReduceScatter: then the collective of the CPU is an all-to-all of the blocks,
// and once a chunk's blocks have been copied in to memory of the device, a kernel on the stream `main` sums them
// with the own block, while the next chunk's are copied in.
//
// An operation's chunks come after the events that the caller gives, and not after all that the stream `main` holds.
//
// All copies of an operation are submitted by one call, and nothing after that calls the device: streams and
// host signal each other by flags that both see (chunk_carrier.h). A stream takes about a thousand commands, and a
// thread that submits to a full one blocks until the stream goes on. So a chunk is known to the carrier before its
// commands are submitted, and no lock is held while they are: the chunks that fill the stream are carried, and
// the thread that submits goes on. If two chunks use the same buffer, the second is copied out after the first has
// been copied in (an event orders them), so no flag is overwritten while a stream or thread waits for it.
//
// Used by DeviceGroup.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "gpu/chunk_buffers.h"
#include "gpu/chunk_carrier.h"
#include "gpu/device_exchange.h"

namespace smddp {

class PinnedPipeline {
 public:
  // A call of all ranks of the group `ranks`, which the pipeline owns. `grace_ns` is added to all limits, so
  // that ranks that know the cause of a delay report it first. `by_nic`: equal on all ranks; if true, each
  // rank is alone on its host, and Network::reaches() its device.
  static Result<std::unique_ptr<PinnedPipeline>> create(Process& process,
                                                        std::unique_ptr<Group> ranks,
                                                        device::Device& device, uint64_t limit_ns,
                                                        uint64_t grace_ns, bool by_nic);
  ~PinnedPipeline();

  // Told why the pipeline broke, before any stream goes on because of that.
  void set_told(ExchangeOutcome::Told told) { carrier_.outcome().tell(std::move(told)); }

  int ranks() const { return carrier_.ranks(); }

  // Makes room for such an exchange. May wait for the device, while submit() does not.
  Status reserve(const DeviceExchange& exchange);
  // What surrounds an operation's exchanges.
  struct Around {
    device::Stream main;               // waits for the exchanges; sums are made there
    std::vector<device::Event> after;  // before these nothing is copied
    // Submits to the stream what makes the next part of the first exchange's `out`.
    std::function<Status(device::Stream)> fill;
    // `main` holds the next part of the last exchange's `in`. What this submits to `main` does not hold up chunks.
    std::function<Status()> arrived;
  };
  // Submits the exchanges to the device. All ranks submit their exchanges in the same order. A second one copies
  // out what the first, whose sums the device does, has put into the same bytes of a block; its chunks follow a few
  // behind those of the first. Blocks while a stream is full. Called by one thread at a time. Calls `fill` and
  // `arrived` for each part, in their order.
  Result<std::shared_ptr<const ExchangeOutcome>> submit(
      const Around& around, const std::vector<DeviceExchange>& exchanges);

  // Not ok: why the pipeline is broken.
  Status status() const { return carrier_.outcome().get(); }
  // Fails all exchanges under way and to come, here and on the other ranks.
  void abort(const std::string& reason) { carrier_.abort(reason); }
  // Of a broken pipeline: ends the waits of its streams for chunks that were copied out. The caller repeats the call
  // until the streams are empty.
  void release() { buffers_.release(); }
  void set_limit(uint64_t limit_ns) { carrier_.set_limit(limit_ns + grace_ns_); }
  // As the carrier's.
  bool between_ranks() const { return carrier_.between_ranks(); }
  bool awaits_copy_out(const ExchangeOutcome* of) { return carrier_.awaits_copy_out(of); }

 private:
  // One chunk: bytes [begin, begin + slot) of each block, in a buffer of the ring.
  struct Cut {
    std::shared_ptr<PinnedRing> ring;
    size_t buffer;
    uint32_t number;
    size_t begin, slot;
  };

  PinnedPipeline(Process& process, std::unique_ptr<Group> ranks, device::Device& device,
                 uint64_t grace_ns, bool by_nic)
      : engine_(process.engine()),
        device_(device),
        grace_ns_(grace_ns),
        by_nic_(by_nic),
        buffers_(process, device),
        carrier_(engine_, std::move(ranks)) {}
  Status open();
  // Whether the chunks of the exchange stay on the device.
  bool stays(const DeviceExchange& exchange) const {
    return by_nic_ && exchange.collective == Collective::kAllGather && exchange.options == 0;
  }
  ChunkLayout layout_of(const DeviceExchange& exchange) const {
    return {exchange, carrier_.rank(), ranks()};
  }
  Status copy(device::Stream stream, const Blocks& blocks, Rank block, size_t begin, size_t bytes,
              std::byte* pinned, bool out);
  Status begin(const Around& around, const std::vector<DeviceExchange>& exchanges);
  Status submit_all(const Around& around, const std::vector<DeviceExchange>& exchanges,
                    const std::shared_ptr<ExchangeOutcome>& outcome);
  Status submit(device::Stream main, device::Stream out, const DeviceExchange& exchange,
                const ChunkLayout& slots, const Cut& cut);
  std::shared_ptr<Chunk> chunk_of(const DeviceExchange& exchange, const ChunkLayout& slots,
                                  const Cut& cut) const;
  ReceivedBlocks::Part received_part(const DeviceExchange& exchange, const Cut& cut) const;
  // `main` waits for what has been copied in up to now; then arrived().
  Status announce(const Around& around);

  Engine& engine_;
  device::Device& device_;
  const uint64_t grace_ns_;
  const bool by_nic_;
  device::Stream out_ = nullptr, in_ = nullptr;
  device::Event end_ = nullptr;
  uint32_t chunks_ = 0;  // used by the thread that submits
  ChunkBuffers buffers_;
  ChunkCarrier carrier_;  // stopped before the buffers go
};

}  // namespace smddp
