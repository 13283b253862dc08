// Collectives of the CPU on device memory, through pinned host memory, in chunks: one chunk is copied
// out, goes through a collective of the CPU's, and is copied in, while the next is on its way out and
// the one before on its way in. It carries what goes between hosts, and sums that take no
// multiprocessor. Where NICs read and write the device's memory, the chunks of an AllGather stay on the
// device, and nothing is copied to the host.
//
// All copies of an operation are submitted at once, and nothing that follows calls the device: streams
// and host meet in flags that both see. A stream sets a chunk's `filled` once it is copied out; the
// thread here sees that and starts the chunk's collective; whichever thread ends that sets `arrived`,
// for which the stream that copies in waits. Flags hold the number of their chunk. Of two chunks that
// use one buffer in turn, the second is copied out after the first has been copied in (an event), so
// no flag is overwritten that somebody still waits for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/group.h"
#include "device/device.h"

namespace smddp {

// As the network is told of it.
fabric::MemoryOwner owner_of(const device::Device& device);

class PinnedPipeline {
 public:
  // One collective, its memory on the device. AllGather: `out` is one block, `in` one per rank, of
  // which the own one is left alone. ReduceScatter: the other way round. AllReduce: one per rank in
  // both, equal but for a few elements. Sizes are equal on all ranks.
  struct Exchange {
    Collective collective = Collective::kAllGather;
    Dtype dtype = Dtype::kBytes;
    ReduceOp reduce_op = ReduceOp::kNone;
    int divisor = 0;  // see Operation
    size_t element_size = 1;
    uint32_t tensors = 1;
    uint64_t digest = 0;  // equal on all ranks, or they raise
    uint64_t timeout_ns = 0;
    Tuning tuning;
    Blocks out, in;
    // Before anything else, inside the device.
    struct Copy {
      Extent to, from;
    };
    std::vector<Copy> copies;
  };
  // How an exchange goes: its first failure, known before any stream goes on.
  class Outcome {
   public:
    Status get() const {
      std::lock_guard lock(mutex_);
      return status_;
    }
    void fail(const Status& why) {
      std::lock_guard lock(mutex_);
      if (status_) status_ = why;
    }

    std::atomic<int> under_way{0};  // collectives of the CPU

   private:
    mutable std::mutex mutex_;
    Status status_;
  };

  // A call of all ranks of `ranks`, which it owns.
  // `grace_ns` is added to all limits: for ranks that know better than these whom all wait for, to say so.
  // `by_nic`: equal on all ranks; each of them is alone on its host, and Engine::reaches() its device.
  static Result<std::unique_ptr<PinnedPipeline>> create(Engine& engine,
                                                        std::unique_ptr<Group> ranks,
                                                        device::Device& device, uint64_t limit_ns,
                                                        uint64_t grace_ns, bool by_nic);
  ~PinnedPipeline();

  int ranks() const { return ranks_->ranks(); }
  int rank() const { return ranks_->rank(); }

  // Makes room for such an exchange. May wait for the device; submit() does not.
  Status reserve(const Exchange& exchange);
  // Submits all of it after what `main` holds; `main` goes on after it. In the same order on all ranks.
  Result<std::shared_ptr<const Outcome>> submit(device::Stream main, const Exchange& exchange);

  // Why it is broken. Streams are let go of all the same.
  Status status() const { return outcome_->get(); }
  // Fails what is under way and to come, here and on the other ranks.
  void abort(const std::string& reason);
  void set_limit(uint64_t limit_ns) { ranks_->set_timeout(limit_ns + grace_ns_); }
  // True while the CPU's ranks have a chunk: they know a limit of their own, and whom they wait for.
  bool between_ranks() const { return outcome_->under_way > 0; }
  // True where the next chunk is yet to be copied out.
  bool awaits_copy_out();

 private:
  static constexpr size_t kBuffers = 4;
  class Ring;
  class Chunk;

  PinnedPipeline(Engine& engine, std::unique_ptr<Group> ranks, device::Device& device,
                 uint64_t grace_ns, bool by_nic)
      : engine_(engine),
        device_(device),
        ranks_(std::move(ranks)),
        grace_ns_(grace_ns),
        by_nic_(by_nic) {}
  Status open();
  // Whether its chunks stay on the device.
  bool stays(const Exchange& exchange) const {
    return by_nic_ && exchange.collective == Collective::kAllGather;
  }
  size_t slot_bytes(const Exchange& exchange) const;
  Status copy(device::Stream stream, const Blocks& blocks, Rank block, size_t begin, size_t bytes,
              std::byte* pinned, bool out);
  std::shared_ptr<Chunk> chunk(const Exchange& exchange, const std::shared_ptr<Ring>& ring,
                               size_t buffer, size_t begin, size_t slot) const;
  void run();

  Engine& engine_;
  device::Device& device_;
  std::unique_ptr<Group> ranks_;
  const uint64_t grace_ns_;
  const bool by_nic_;
  // Of all exchanges. Outlives the pipeline where the engine still ends its collectives.
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  device::Stream out_ = nullptr, in_ = nullptr;
  device::Event begin_ = nullptr, end_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  // In host memory and on the device: the last one is used; each is twice the one before.
  std::vector<std::shared_ptr<Ring>> rings_[2];
  uint32_t chunks_ = 0;                       // submitted to the device
  std::deque<std::shared_ptr<Chunk>> queue_;  // of those, not yet submitted to `ranks_`
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace smddp
