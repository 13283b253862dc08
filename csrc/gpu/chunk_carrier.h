// Carries the chunks of a pipeline: a stream sets a chunk's flag `filled` once the chunk is copied out; a thread of
// this class sees that and starts the chunk's collective; the thread that ends the collective sets the flag `arrived`,
// for which the stream that copies in waits. A flag holds the number of its chunk. Nothing here calls the device.
// Used by PinnedPipeline.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "common/condition_variable.h"
#include "gpu/device_exchange.h"
#include "gpu/pinned_ring.h"
#include "group/group.h"

namespace smddp {

// The CPU's collective on one chunk.
class Chunk final : public Operation {
 public:
  std::shared_ptr<PinnedRing> ring;
  size_t buffer = 0;        // of the ring
  uint32_t flag_value = 0;  // the chunk's number
  Tuning tuning;
  std::shared_ptr<ExchangeOutcome> outcome;  // of its exchanges

 private:
  friend class ChunkCarrier;
  bool filled() const { return ring->filled(buffer) == flag_value; }
  // The stream that copies in waits until the pipeline's buffers are released.
  void give_up(const Status& why);
  void on_complete() override;
  std::shared_ptr<ExchangeOutcome> all_;  // of all chunks of the carrier
};

class ChunkCarrier {
 public:
  ChunkCarrier(Engine& engine, std::unique_ptr<Group> ranks)
      : engine_(engine), ranks_(std::move(ranks)) {}
  ~ChunkCarrier() { stop(); }
  void start();
  // Ends the collectives under way and gives up the chunks that are left. Not in a forked child, which has no thread.
  void stop();

  int ranks() const { return ranks_->ranks(); }
  int rank() const { return ranks_->rank(); }
  void set_limit(uint64_t limit_ns) { ranks_->set_timeout(limit_ns); }

  // The next chunk, which is being submitted to the device.
  void push(std::shared_ptr<Chunk> chunk);
  // True if the next chunk has not been copied out, and is of the operation `of`, if given.
  bool awaits_copy_out(const ExchangeOutcome* of);
  // True while a collective of the CPU has a chunk: it has a deadline of its own and names the rank that it
  // waits for.
  bool between_ranks() const { return outcome_->under_way > 0; }
  // The first failure of any chunk. After it, chunks are given up.
  ExchangeOutcome& outcome() const { return *outcome_; }
  void abort(const std::string& reason);

 private:
  void run();

  Engine& engine_;
  std::unique_ptr<Group> ranks_;
  // Outlives the carrier if the engine still ends its collectives.
  const std::shared_ptr<ExchangeOutcome> outcome_ = std::make_shared<ExchangeOutcome>();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Chunk>> queue_;  // not yet given to `ranks_`
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace smddp
