#include "progress/process.h"

#include <string_view>

#include "common/exceptions.h"

namespace smddp {

Result<std::unique_ptr<Process>> Process::create(transport::Open open) try {
  auto presence = intranode::Presence::create();
  if (!presence) return presence.status();
  std::unique_ptr<Process> process(new Process(std::move(presence.value()), std::move(open)));
  if (Status started = process->engine_.start(); !started) return started;
  return process;
} catch (...) {
  return status_of_exception();
}

Result<std::shared_ptr<intranode::Neighbor>> Process::neighbor(const RankInfo& info) {
  Engine::Lock lock = engine_.lock();
  return neighbors_.open(info.pid, info.token, info.presence_fd, info.wake_fd);
}

Result<transport::Transport*> Process::fabric() {
  Engine::Lock lock = engine_.lock();
  auto transport = network_.open();
  if (transport) engine_.expect_network();
  return transport;
}

transport::Transport* Process::open_fabric() {
  Engine::Lock lock = engine_.lock();
  return network_.transport();
}

void Process::blame(const std::string& why) {
  constexpr std::string_view kAfter = ", after a failure: ";
  if (!cause_.empty()) return;
  size_t known = why.find(kAfter);  // another rank hands on its cause
  cause_ = known != why.npos ? why.substr(known) : std::string(kAfter) + why;
}

uint64_t Process::refused() {
  Engine::Lock lock = engine_.lock();
  return engine_.foreign_messages() + network_.foreign_writes();
}

}  // namespace smddp
