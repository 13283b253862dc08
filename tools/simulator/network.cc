#include "simulator/network.h"

#include <algorithm>
#include <cmath>

namespace smddp::simulator {

VirtualNetwork::VirtualNetwork(const Model& model, int hosts, int processes_per_host)
    : model_(model),
      hosts_(hosts),
      processes_per_host_(processes_per_host),
      links_(static_cast<size_t>(hosts * model.nics)),
      processes_(static_cast<size_t>(hosts * processes_per_host)) {}

VirtualNetwork::~VirtualNetwork() {
  for (; !events_.empty(); events_.pop()) delete events_.top().action;
}

void VirtualNetwork::enter(ProcessNumber process) {
  current_ = process;
  State& state = processes_[process];
  state.clock_ns = std::max(state.clock_ns, static_cast<double>(now_));
  now_ = static_cast<uint64_t>(state.clock_ns);
}

void VirtualNetwork::charge(double ns) {
  State& state = processes_[current_];
  state.clock_ns += ns;
  now_ = static_cast<uint64_t>(state.clock_ns);
}

void VirtualNetwork::pass_to(uint64_t ns) {
  if (events_.empty() || events_.top().when >= ns) now_ = std::max(now_, ns);
}

bool VirtualNetwork::next(ProcessNumber* process) {
  while (!events_.empty()) {
    Queued event = events_.top();
    events_.pop();
    ++counters_.events;
    now_ = event.when;
    if (event.action != nullptr) {
      event.action->run();
      continue;
    }
    State& state = processes_[event.process];
    if (state.runs_at != event.when) continue;  // it was woken earlier
    state.runs_at = UINT64_MAX;
    *process = event.process;
    return true;
  }
  return false;
}

void VirtualNetwork::wake(ProcessNumber process, uint64_t at) {
  State& state = processes_[process];
  at = std::max(at, static_cast<uint64_t>(state.clock_ns));
  if (at >= state.runs_at) return;
  state.runs_at = at;
  events_.push({at, order_++, nullptr, process});
}

void VirtualNetwork::at(uint64_t when, std::unique_ptr<Action> action) {
  events_.push({when, order_++, action.release(), 0});
}

uint64_t VirtualNetwork::leave(size_t nic, size_t bytes) {
  Link& from = link(host_of(current_), nic);
  double size = static_cast<double>(bytes) + model_.header_bytes;
  double start = std::max(from.out_free_ns, static_cast<double>(now_));
  from.out_free_ns = start + size / model_.bytes_per_ns;
  from.out_bytes += size;
  return static_cast<uint64_t>(std::llround(start + model_.latency_ns));
}

uint64_t VirtualNetwork::receive(int host, size_t nic, size_t bytes) {
  Link& to = link(host, nic);
  double size = static_cast<double>(bytes) + model_.header_bytes;
  double start = std::max(to.in_free_ns, static_cast<double>(now_));
  to.in_free_ns = start + size / model_.bytes_per_ns;
  to.in_bytes += size;
  return static_cast<uint64_t>(std::llround(to.in_free_ns));
}

}  // namespace smddp::simulator
