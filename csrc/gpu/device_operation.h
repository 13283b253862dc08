// One collective on device memory, from the call until the device is done with it. Filled by
// device_plan.h, carried out by DeviceGroup, extended by the torch module.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "common/exceptions.h"
#include "gpu/offer_exchange.h"
#include "gpu/pinned_pipeline.h"
#include "intranode/copy_engine.h"

namespace smddp {

class DeviceGroup;
class DeviceLinks;

class DeviceOperation {
 public:
  DeviceOperation() = default;
  virtual ~DeviceOperation();
  DeviceOperation(const DeviceOperation&) = delete;
  DeviceOperation& operator=(const DeviceOperation&) = delete;

  Signature what;               // of the collective itself
  std::vector<Extent> offered;  // what the peers of this host read; equal sizes on all ranks
  intranode::CopyEngine::Plan plan;
  // What goes through pinned memory, after the plan's sums and before its moves: among the ranks of this
  // rank's rail, or among all ranks (`among_all`). One exchange after the other.
  std::vector<DeviceExchange> exchanges;
  bool among_all = false;
  uint64_t limit_ns = 0;  // deadline of the whole, counted from the call; 0: the group's
  SentBytes sent;         // to other hosts; valid once it is closed

  uint64_t number() const { return offers_.number(); }  // among the operations of the host's ranks
  // A caller waits for it since then.
  void note_wait(uint64_t from_ns) {
    offers_.waited_from_ns.store(from_ns, std::memory_order_relaxed);
  }

 protected:
  // Called once all of the operation is submitted to the group's stream. Must return quickly: other
  // operations wait.
  virtual void on_submitted() {}
  // Called once the operation is closed, done by the device or failed: at most some milliseconds after
  // the device is done.
  virtual void on_closed(const Status&) {}
  // The event that a stream waits for; valid from on_submitted() on.
  device::Event end_event() const { return end_; }
  // A stream waits for that event, and its work behind that takes what has come for a result.
  void count_on() { awaited_ = true; }

 private:
  friend class DeviceGroup;
  friend class OfferExchange;
  // It comes after what the stream `callers` holds now.
  Status begin(device::Device& device, device::Stream callers);
  // Submits all of it to `main`, and its exchanges to `pipeline`. Blocks while a stream is full. `before`: the
  // group's latest operation that the device may not be done with; nullptr: there is none.
  Status launch(device::Device& device, device::Stream main, DeviceLinks& links,
                PinnedPipeline* pipeline, const DeviceOperation* before);
  // Calls on_closed(). If that throws, the operations behind this one still end.
  void close() noexcept {
    (void)without_exceptions([this] { return on_closed(outcome_), Status(); });
  }

  OfferExchange offers_{*this};
  std::shared_ptr<DeviceGroup> group_;
  device::Event ready_ = nullptr, end_ = nullptr;
  bool captured_ =
      false;  // into a graph: the thread that records the graph submits it, to its own stream
  device::Stream callers_ = nullptr;
  std::atomic<bool> exchanged_{false};
  bool submitter_waits_ = false;  // a thread waits for the exchange, and then submits
  uint64_t turn_ = 0;             // among all operations of the device
  uint32_t number_on_device_ =
      0;                    // the group's streams set it once they are done with the operation
  bool submitted_ = false;  // to the device, or failed
  bool began_ = false;      // the device has it; written once, before submitted_
  bool in_part_ = false;    // the device has some of it, and the rest failed
  bool succeeded_ = false;  // closed without an error
  std::atomic<bool> awaited_{false};
  Status outcome_;
  std::shared_ptr<const ExchangeOutcome> exchange_outcome_;
  uint64_t started_ns_ = 0;
};

}  // namespace smddp
