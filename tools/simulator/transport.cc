#include "simulator/transport.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace smddp::simulator {
namespace {

constexpr size_t kBatch = 16, kBatches = 4;

std::string name_of(size_t nics) {
  std::string name = "simulated on nic0";
  for (size_t nic = 1; nic < nics; ++nic) name += ", nic" + std::to_string(nic);
  return name;
}

}  // namespace

// A message or chunk on its way. It is an event three times: when its first byte reaches the receiver's NIC, when it
// has been received as a whole, and when its sender hears of it. A chunk's memory is read when it has been received,
// a message's when it leaves.
class SimulatedTransport::Transfer final : public Action {
 public:
  Transfer(VirtualNetwork& network, Shared& shared, Load load, bool ordered)
      : network_(network), shared_(shared), load_(std::move(load)), ordered_(ordered) {}

  void run() override {
    switch (stage_) {
      case Stage::kLeft:
        stage_ = Stage::kArrives;
        return arrive();
      case Stage::kArrives:
        stage_ = Stage::kReceived;
        return receive();
      case Stage::kReceived:
        return tell_sender();
    }
  }

 private:
  enum class Stage : uint8_t { kLeft, kArrives, kReceived };

  SimulatedTransport* end(uint64_t number) const {
    auto found = shared_.ends.find(number);
    return found != shared_.ends.end() ? static_cast<SimulatedTransport*>(found->second) : nullptr;
  }
  void go_on_at(uint64_t when) { network_.at(when, std::unique_ptr<Action>(this)); }
  void arrive() {
    SimulatedTransport* receiver = end(load_.to);
    uint64_t now = network_.now();
    go_on_at(receiver == nullptr ? now
                                 : network_.receive(network_.host_of(receiver->process_),
                                                    load_.sent.nic, load_.bytes));
  }
  void receive() {
    SimulatedTransport* receiver = end(load_.to);
    bool chunk = !load_.is_message();
    bool moves = network_.model().moves_writes && end(load_.from) != nullptr;
    if (receiver != nullptr && !chunk) {
      receiver->complete(load_.sent.nic, {std::move(load_.message), {}});
    } else if (receiver != nullptr && moves && shared_.opens(load_)) {
      std::memcpy(reinterpret_cast<void*>(load_.address), load_.data, load_.bytes);
    }
    // Where nothing orders messages behind it, a chunk's sender hears of it by a message back.
    double back = chunk && !ordered_ ? network_.model().latency_ns : 0;
    go_on_at(network_.now() + static_cast<uint64_t>(back));
  }
  void tell_sender() {
    std::unique_ptr<Transfer> self(this);
    if (SimulatedTransport* sender = end(load_.from))
      sender->complete(load_.sent.nic, {{}, load_.sent});
  }

  VirtualNetwork& network_;
  Shared& shared_;
  Load load_;
  const bool ordered_;
  Stage stage_ = Stage::kLeft;
};

SimulatedTransport::SimulatedTransport(VirtualNetwork& network, Shared& shared)
    : MemoryTransport(shared, static_cast<size_t>(network.model().nics),
                      name_of(static_cast<size_t>(network.model().nics))),
      network_(network),
      process_(network.current()),
      completed_(facts_.nics) {
  facts_.ordered = network.model().ordered && facts_.nics == 1;
}

void SimulatedTransport::start(Load load) {
  NetworkCounters& counters = network_.counters();
  ++(load.is_message() ? counters.messages : counters.writes);
  (load.is_message() ? counters.message_bytes : counters.write_bytes) += load.bytes;
  network_.charge(network_.model().message_ns);
  uint64_t first = network_.leave(load.sent.nic, load.bytes);
  network_.at(first,
              std::make_unique<Transfer>(network_, shared_, std::move(load), facts_.ordered));
}

void SimulatedTransport::complete(size_t nic, Completion completion) {
  std::deque<Completion>& of_nic = completed_[nic];
  of_nic.push_back(std::move(completion));
  if (!of_nic.back().message.empty() && of_nic.size() > kReceives)
    ++network_.counters().waiting_messages;
  network_.wake(process_, network_.now());
}

Result<int> SimulatedTransport::poll(transport::Sink& sink) {
  int handled = 0;
  for (std::deque<Completion>& of_nic : completed_) {
    for (size_t batch = 0; batch < kBatches && !of_nic.empty(); ++batch) {
      std::vector<Completion> reaped;
      for (; reaped.size() < kBatch && !of_nic.empty(); of_nic.pop_front()) {
        reaped.push_back(std::move(of_nic.front()));
        if (!reaped.back().message.empty()) network_.charge(network_.model().message_ns);
      }
      for (const Completion& completion : reaped) {
        if (completion.message.empty()) {
          finish(completion.sent);
        } else {
          deliver(sink, completion.message);
        }
      }
      handled += static_cast<int>(reaped.size());
      if (reaped.size() < kBatch) break;
    }
  }
  return handled + tell_losses(sink);
}

}  // namespace smddp::simulator
