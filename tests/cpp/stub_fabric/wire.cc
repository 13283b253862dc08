// Operations in flight: their arrival and their completions.
#include <algorithm>
#include <cstring>

#include "stub_fabric/objects.h"

namespace stub {
namespace {

void complete(Cq* cq, void* context, uint64_t flags, size_t bytes, uint64_t data, int error) {
  Completion done = {};
  done.entry.op_context = context;
  done.entry.flags = flags;
  done.entry.len = bytes;
  done.entry.data = data;
  done.entry.err = error;
  done.entry.prov_errno = error;
  done.error = error != 0;
  cq->ready.push_back(done);
}

bool knows(const Ep& target, uint64_t name) {
  return std::find(target.av->names.begin(), target.av->names.end(), name) !=
         target.av->names.end();
}

// The registration at `target` that the flight's key opens for `access`, or nullptr.
Registered* opened(const Flight& flight, const Ep& target, uint64_t access) {
  auto found = world().registrations.find(flight.key);
  if (found == world().registrations.end()) return nullptr;
  const Registered& mr = *found->second;
  bool opens = mr.domain == target.domain && (mr.access & access) != 0 &&
               flight.address >= mr.base && flight.address + flight.bytes <= mr.base + mr.bytes;
  return opens ? found->second : nullptr;
}

int read(const Flight& flight, const Ep& target) {
  Registered* mr = opened(flight, target, FI_REMOTE_READ);
  if (mr == nullptr) return FI_EKEYREJECTED;
  for (const auto& [at, bytes] : mr->late) {
    std::memcpy(reinterpret_cast<void*>(at), bytes.data(), bytes.size());
  }
  mr->late.clear();
  std::memcpy(const_cast<void*>(flight.data), reinterpret_cast<void*>(flight.address),
              flight.bytes);
  return 0;
}

// 0, an error for the sender, or -1: not yet.
int arrive(const Flight& flight, Ep& target) {
  if (flight.kind == Flight::kRead) return read(flight, target);
  if (flight.kind == Flight::kWrite) {
    Registered* mr = opened(flight, target, FI_REMOTE_WRITE);
    if (mr == nullptr) return FI_EKEYREJECTED;
    if (!knows(target, flight.from_name)) {
      violation("a write by an endpoint that the target's address vector lacks");
      return FI_EHOSTUNREACH;
    }
    if (mr->gpu) {
      auto data = static_cast<const std::byte*>(flight.data);
      mr->late.emplace_back(flight.address, std::vector<std::byte>(data, data + flight.bytes));
    } else {
      std::memcpy(reinterpret_cast<void*>(flight.address), flight.data, flight.bytes);
    }
    return 0;
  }
  if (target.receives.empty()) return -1;
  PostedReceive receive = target.receives.front();
  target.receives.pop_front();
  size_t bytes = std::min(flight.bytes, receive.bytes);
  std::memcpy(receive.data, flight.data, bytes);
  complete(target.cq, receive.context, FI_MSG | FI_RECV, bytes, 0,
           flight.bytes > receive.bytes ? FI_ETRUNC : 0);
  return 0;
}

// Completes the write before it arrives. Its memory is the sender's again.
void acknowledge(Flight& flight) {
  auto data = static_cast<const std::byte*>(flight.data);
  flight.copy.assign(data, data + flight.bytes);
  flight.data = flight.copy.data();
  flight.acknowledged = true;
  complete(flight.from->cq, flight.context, FI_RMA | FI_WRITE, 0, 0, 0);
}

uint64_t flags_of(const Flight& flight) {
  switch (flight.kind) {
    case Flight::kWrite:
      return FI_RMA | FI_WRITE;
    case Flight::kRead:
      return FI_RMA | FI_READ;
    case Flight::kSend:
      break;
  }
  return FI_MSG | FI_SEND;
}

// As arrive(), of a flight that may be lost on the way.
int land(const Flight& flight) {
  if (state().fail_operations > 0) {
    --state().fail_operations;
    return state().error;
  }
  auto target = world().endpoints.find(flight.to);
  return target != world().endpoints.end() ? arrive(flight, *target->second) : FI_ECONNRESET;
}

void advance(size_t index) {
  std::deque<Flight>& flights = world().flights;
  Flight& flight = flights[index];
  bool early = flight.kind == Flight::kWrite && !flight.delivered && !flight.acknowledged;
  if (early) return acknowledge(flight);
  int error = land(flight);
  if (error < 0) return;
  state().overtaken += flight.sequence < world().last_arrived;
  world().last_arrived = std::max(world().last_arrived, flight.sequence);
  Flight done = std::move(flight);
  flights.erase(flights.begin() + static_cast<ptrdiff_t>(index));
  if (!done.acknowledged) complete(done.from->cq, done.context, flags_of(done), 0, 0, error);
}

void write_from_outside() {
  for (auto& [name, ep] : world().endpoints) {
    if (state().foreign_writes == 0) return;
    void* context = nullptr;
    if (state().settings.consumes_receives) {
      if (ep->receives.empty()) continue;
      context = ep->receives.front().context;
      ep->receives.pop_front();
    }
    complete(ep->cq, context, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, 8, 0, 0);
    --state().foreign_writes;
  }
}

}  // namespace

void pump() {
  write_from_outside();
  std::deque<Flight>& flights = world().flights;
  for (size_t turns = chance()() % 8; turns > 0 && !flights.empty(); --turns)
    advance(chance()() % flights.size());
}

bool cancel(Ep& ep, void* context) {
  auto receive = std::find_if(ep.receives.begin(), ep.receives.end(),
                              [&](const PostedReceive& r) { return r.context == context; });
  if (receive == ep.receives.end()) return false;
  ep.receives.erase(receive);
  complete(ep.cq, context, FI_RECV, 0, 0, FI_ECANCELED);
  return true;
}

void check_descriptor(const Ep& ep, const void* data, size_t bytes, void* descriptor,
                      uint64_t access) {
  uintptr_t base = reinterpret_cast<uintptr_t>(data);
  for (auto& [key, mr] : world().registrations) {
    if (mr != descriptor) continue;
    if (mr->domain != ep.domain) violation("a descriptor of another domain");
    if (base < mr->base || base + bytes > mr->base + mr->bytes) {
      violation("a descriptor of other memory");
    }
    if ((mr->access & access) != access) violation("a descriptor without the access");
    return;
  }
  violation("memory without a descriptor");
}

bool busy() {
  bool is = chance()() % state().settings.busy_one_in == 0;
  state().busy += is;
  return is;
}

}  // namespace stub
