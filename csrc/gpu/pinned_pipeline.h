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
// An operation's chunks follow those of the operation before, which may still be on their way or be copied in:
// its streams wait for the events that the caller gives, and not for the stream `main`, which waits for the ends of
// the operations one after the other.
//
// All copies of an operation are submitted by one call, and nothing after that calls the device: streams and
// host signal each other by flags that both see. A stream takes about a thousand commands, and a thread that
// submits to a full one blocks until the stream goes on. So a chunk is known to this class's thread before its
// commands are submitted, and no lock is held while they are: the chunks that fill the stream are carried, and
// the thread that submits goes on. A stream sets a chunk's flag `filled` once the chunk is copied
// out; this class's thread sees the flag and starts the chunk's collective; the thread that ends the
// collective sets the flag `arrived`, for which the stream that copies in waits. A flag holds the number of
// its chunk. If two chunks use the same buffer, the second is copied out after the first has been copied in
// (an event orders them), so no flag is overwritten while a stream or thread waits for it.
//
// Used by DeviceGroup.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/condition_variable.h"
#include "device/device.h"
#include "gpu/exchange_outcome.h"
#include "gpu/pinned_ring.h"
#include "gpu/received_blocks.h"
#include "group/group.h"

namespace smddp {

// The device as the fabric must know it to register its memory.
fabric::MemoryOwner owner_of(const device::Device& device);

class PinnedPipeline {
 public:
  // One collective on memory of the device. AllGather: `out` is one block, `in` has one block per rank, and
  // this rank's own block of `in` is not written. ReduceScatter: the other way round. AllReduce: both have
  // one block per rank, of sizes that differ by a few elements at most. Sizes are equal on all ranks.
  struct Exchange {
    Collective collective = Collective::kAllGather;
    Dtype dtype = Dtype::kBytes;
    ReduceOp reduce_op = ReduceOp::kNone;
    int divisor = 0;  // see Operation
    size_t element_size = 1;
    uint32_t tensors = 1;
    uint64_t digest = 0;  // must be equal on all ranks; else all raise
    // Of the signature. An exchange that is a part of a collective says so here.
    uint8_t options = 0;
    // A ReduceScatter whose sums the device does, by a kernel of at most `thread_blocks`. `in` has the extents'
    // sizes of this rank's block of `out`.
    bool sums_on_device = false;
    int thread_blocks = 1;
    uint64_t timeout_ns = 0;
    Tuning tuning;
    Blocks out, in;
    // Where the parts of a block end that are filled and announced one by one, but for the last part, which ends
    // with the block. Increasing.
    std::vector<size_t> part_ends;
    // Copies inside the device that come before all chunks that are copied in.
    struct Copy {
      Extent to, from;
    };
    std::vector<Copy> copies;

    kernels::Reduction reduction() const;  // without sources
  };
  using Outcome = ExchangeOutcome;
  // A call of all ranks of the group `ranks`, which the pipeline owns. `grace_ns` is added to all limits, so
  // that ranks that know the cause of a delay report it first. `by_nic`: equal on all ranks; if true, each
  // rank is alone on its host, and Network::reaches() its device.
  static Result<std::unique_ptr<PinnedPipeline>> create(Engine& engine,
                                                        std::unique_ptr<Group> ranks,
                                                        device::Device& device, uint64_t limit_ns,
                                                        uint64_t grace_ns, bool by_nic);
  ~PinnedPipeline();

  // Told why the pipeline broke, before any stream goes on because of that.
  void set_told(Outcome::Told told) { outcome_->tell(std::move(told)); }

  int ranks() const { return ranks_->ranks(); }
  int rank() const { return ranks_->rank(); }

  // Makes room for such an exchange. May wait for the device, while submit() does not.
  Status reserve(const Exchange& exchange);
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
  Result<std::shared_ptr<const Outcome>> submit(const Around& around,
                                                const std::vector<Exchange>& exchanges);

  // Not ok: why the pipeline is broken. Streams are released all the same.
  Status status() const { return outcome_->get(); }
  // Fails all exchanges under way and to come, here and on the other ranks.
  void abort(const std::string& reason);
  void set_limit(uint64_t limit_ns) { ranks_->set_timeout(limit_ns + grace_ns_); }
  // True while a collective of the CPU has a chunk: it has a deadline of its own and names the rank that it
  // waits for.
  bool between_ranks() const { return outcome_->under_way > 0; }
  // True if the next chunk has not been copied out, and is of the operation `of`, if given.
  bool awaits_copy_out(const Outcome* of);

 private:
  class Chunk;
  class Slots;
  // One chunk: bytes [begin, begin + slot) of each block, in a buffer of the ring.
  struct Cut {
    std::shared_ptr<PinnedRing> ring;
    size_t buffer;
    uint32_t number;
    size_t begin, slot;
  };
  // A chunk that is to be submitted: of which exchange.
  struct Turn {
    size_t exchange, begin, slot;
  };

  PinnedPipeline(Engine& engine, std::unique_ptr<Group> ranks, device::Device& device,
                 uint64_t grace_ns, bool by_nic)
      : engine_(engine),
        device_(device),
        ranks_(std::move(ranks)),
        grace_ns_(grace_ns),
        by_nic_(by_nic) {}
  Status open();
  // Whether the chunks of the exchange stay on the device.
  bool stays(const Exchange& exchange) const {
    return by_nic_ && exchange.collective == Collective::kAllGather && exchange.options == 0;
  }
  size_t slot_bytes(const Exchange& exchange) const;
  Status copy(device::Stream stream, const Blocks& blocks, Rank block, size_t begin, size_t bytes,
              std::byte* pinned, bool out);
  Status reserve_received(size_t bytes);
  Status begin(const Around& around, const std::vector<Exchange>& exchanges);
  Status submit_all(const Around& around, const std::vector<Exchange>& exchanges,
                    const std::shared_ptr<Outcome>& outcome);
  std::vector<Turn> turns(const std::vector<Exchange>& exchanges) const;
  Status submit(device::Stream main, device::Stream out, const Exchange& exchange, const Cut& cut);
  std::shared_ptr<Chunk> chunk(const Exchange& exchange, const Cut& cut) const;
  ReceivedBlocks::Part received_part(const Exchange& exchange, const Cut& cut) const;
  // `main` waits for what has been copied in up to now; then arrived().
  Status announce(const Around& around);
  std::shared_ptr<PinnedRing> newest_ring(const Exchange& exchange);
  const ReceivedBlocks& newest_received();
  void run();

  Engine& engine_;
  device::Device& device_;
  std::unique_ptr<Group> ranks_;
  const uint64_t grace_ns_;
  const bool by_nic_;
  // Of all exchanges. Outlives the pipeline if the engine still ends its collectives.
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  device::Stream out_ = nullptr, in_ = nullptr;
  device::Event end_ = nullptr;

  std::mutex mutex_;  // not held while the device is called
  std::condition_variable changed_;
  // In host memory [0] and on the device [1]. The last ring is in use; each is twice as large as the one
  // before.
  std::vector<std::shared_ptr<PinnedRing>> rings_[2];
  std::vector<std::unique_ptr<ReceivedBlocks>> received_;  // as the rings
  uint32_t chunks_ = 0;                                    // used by the thread that submits
  std::deque<std::shared_ptr<Chunk>> queue_;  // being submitted to the device, not yet to `ranks_`
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace smddp
