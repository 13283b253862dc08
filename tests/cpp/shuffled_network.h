// A transport between threads of one process that uses every freedom that the interface gives: messages and chunks
// arrive in any order and late, sends complete before and long after they arrive, messages come twice, chunks too
// until their sends complete, and no room is left now and then. Seeded: SMDDP_TEST_SHUFFLED=seed has the engines of
// a whole test program use it (network_of_tests()).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "simulator/memory_transport.h"

namespace smddp {

class ShuffledTransport;

// What is under way between the transports. All calls under the mutex.
class ShuffledNetwork : public MemoryTransport::Shared {
 public:
  struct Flight : MemoryTransport::Load {
    bool told = false;      // the sender has heard of it
    bool arrived = false;   // the sender is still to hear of it
    bool repeated = false;  // has come before
    unsigned rests = 0;     // times that its turn passes
  };

  static ShuffledNetwork& only() {
    static ShuffledNetwork network;
    return network;
  }
  bool one_in(unsigned n) { return !orderly && chance() % n == 0; }
  // Lets some of what is under way arrive or complete.
  void pump() {
    for (size_t turns = chance() % 8; !orderly && turns > 0 && !flights.empty(); --turns)
      advance(chance() % flights.size());
    for (size_t i = 0; orderly && i < flights.size();) {
      size_t before = flights.size();
      advance(i);
      if (flights.size() == before) ++i;  // its receiver takes nothing now
    }
  }

  bool loses_writes = false;  // of each transport, all are missing
  bool orderly = false;       // instead: at once, once, and in the order of sending
  std::mt19937 chance{std::getenv("SMDDP_TEST_SHUFFLED") != nullptr
                          ? static_cast<unsigned>(std::atoi(std::getenv("SMDDP_TEST_SHUFFLED")))
                          : 1u};
  std::deque<Flight> flights;

 private:
  void advance(size_t index);
  void land(Flight& flight);
  static void copy(const Flight& chunk) {
    std::memcpy(reinterpret_cast<void*>(chunk.address), chunk.data, chunk.bytes);
  }
  void tell_sender(const Flight& flight);
  ShuffledTransport* end(uint64_t number);
};

class ShuffledTransport final : public MemoryTransport {
 public:
  static Result<std::unique_ptr<transport::Transport>> open() {
    return std::unique_ptr<transport::Transport>(std::make_unique<ShuffledTransport>());
  }
  ShuffledTransport() : MemoryTransport(ShuffledNetwork::only(), 1, "the tests' network") {}
  // Messages that were sent still arrive; chunks lie in memory of this process's, and don't.
  ~ShuffledTransport() override {
    std::lock_guard lock(network_.mutex);
    network_.ends.erase(number_);
    std::erase_if(network_.flights, [&](const ShuffledNetwork::Flight& flight) {
      return flight.from == number_ && !flight.is_message();
    });
  }

  transport::MessageBuffer* acquire(Peer to, bool control) override {
    return is_busy() ? nullptr : MemoryTransport::acquire(to, control);
  }
  bool write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data, size_t bytes,
             uint32_t* pending) override {
    return !is_busy() && MemoryTransport::write(to, grant, index, data, bytes, pending);
  }
  using MemoryTransport::write;
  size_t arrived(uint32_t) const override { return network_.loses_writes ? 0 : SIZE_MAX; }

  Result<int> poll(transport::Sink& sink) override {
    std::deque<Completion> completed;
    {
      std::lock_guard lock(network_.mutex);
      if (fails) return Status(Code::kInternal, "the tests' network fails");
      polled_ = true;
      network_.pump();
      completed.swap(completed_);
    }
    for (const Completion& completion : completed) {
      if (completion.message.empty()) {
        finish(completion.sent);
      } else {
        deliver(sink, completion.message);
      }
    }
    return static_cast<int>(completed.size()) + tell_losses(sink);
  }

  bool fails = false;  // from now on; under the engine's lock

 private:
  friend class ShuffledNetwork;
  // A message that has arrived, or what the sender of something gets back.
  struct Completion {
    std::vector<std::byte> message;
    Sent sent;
  };

  bool is_busy() {
    std::lock_guard lock(network_.mutex);
    return network_.one_in(5);
  }
  void start(Load load) override {
    std::lock_guard lock(network_.mutex);
    // Some rest so long that much of what follows overtakes them.
    unsigned rests = network_.one_in(8) ? static_cast<unsigned>(network_.chance() % 32) : 0;
    network_.flights.push_back({std::move(load), false, false, false, rests});
  }
  // From its first poll() on, and so many between two of them.
  bool takes_messages() const {
    if (!polled_) return false;
    auto waiting = std::count_if(completed_.begin(), completed_.end(),
                                 [](const Completion& one) { return !one.message.empty(); });
    return static_cast<size_t>(waiting) < kReceives;
  }

  ShuffledNetwork& network_ = ShuffledNetwork::only();
  std::deque<Completion> completed_;  // under the network's mutex, like the next
  bool polled_ = false;
};

inline ShuffledTransport* ShuffledNetwork::end(uint64_t number) {
  auto found = ends.find(number);
  return found != ends.end() ? static_cast<ShuffledTransport*>(found->second) : nullptr;
}

inline void ShuffledNetwork::tell_sender(const Flight& flight) {
  if (ShuffledTransport* sender = end(flight.from)) sender->completed_.push_back({{}, flight.sent});
}

inline void ShuffledNetwork::land(Flight& flight) {
  ShuffledTransport* to = end(flight.to);
  flight.arrived = true;
  if (to == nullptr || (!flight.is_message() && !opens(flight))) {
    flight.sent.failed = true;  // its transport, or the region, is closed
  } else if (flight.is_message()) {
    flight.arrived = to->takes_messages();
    if (flight.arrived) to->completed_.push_back({flight.message, {}});
  } else {
    copy(flight);
  }
}

inline void ShuffledNetwork::advance(size_t index) {
  Flight& flight = flights[index];
  if (flight.rests > 0) {
    --flight.rests;
    return;
  }
  if (flight.is_message() && !flight.told && !flight.arrived && one_in(4)) {  // before it arrives
    flight.told = true;
    return tell_sender(flight);
  }
  if (!flight.arrived) {
    land(flight);
    if (!flight.arrived) return;
    bool once = flight.is_message() && !flight.repeated && !flight.sent.failed;
    if (!flight.told && one_in(4))  // its sender hears of it much later
      flight.rests = 1 + static_cast<unsigned>(chance() % 16);
    unsigned rests = flight.rests;
    if (once && one_in(4)) {
      Flight again = flight;
      again.told = again.repeated = true;
      again.arrived = false;
      again.rests = static_cast<unsigned>(chance() % 8);
      flights.push_back(std::move(again));
    }
    if (rests > 0) return;
  } else if (!flight.is_message() && end(flight.to) != nullptr && opens(flight)) {
    copy(flight);  // again
  }
  Flight closed = std::move(flights[index]);
  flights.erase(flights.begin() + static_cast<std::ptrdiff_t>(index));
  if (!closed.told) tell_sender(closed);
}

// The network of a test's engines: libfabric, unless the environment asks for this one.
inline transport::Open network_of_tests() {
  if (std::getenv("SMDDP_TEST_SHUFFLED") == nullptr) return nullptr;
  return ShuffledTransport::open;
}

}  // namespace smddp
