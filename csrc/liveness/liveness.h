// Whether the processes of other hosts that this one waits for still live. Each process listens at a TCP
// port, beside the network that carries the data, and publishes it (Contact). One that waits in vain
// connects, asks, and is answered: by a thread that needs neither the engine's lock nor the
// interpreter's. A refusal means that the process has ended, no answer is silence. So death is heard
// alike over every provider of libfabric, nothing is sent while data flows, and no connection is kept.
//
// Knows no ranks, no operations and no libfabric. The engine owns it; the groups ask.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/file_descriptor.h"
#include "common/forks.h"
#include "common/signature.h"
#include "common/status.h"
#include "liveness/contact.h"

namespace smddp::liveness {

class Prober;
class Responder;

class Liveness {
 public:
  // `ip`: the address of this host that the others reach; "": of its first interface.
  static Result<std::unique_ptr<Liveness>> open(const std::string& ip);
  ~Liveness();
  // The process ends: from now on it answers and asks no more. The other functions may still be called.
  void close();

  // What this process publishes.
  std::vector<uint8_t> contact() const;
  // A process that has published `contact`. Asks it at once whether it can be reached: what was never
  // reached is never called dead or silent.
  Result<Process> meet(const std::vector<uint8_t>& contact);
  Reach reach(Process process) const;
  void give_up_reaching(Process process);
  // What is known by now of a process that takes part in `group`. Never blocks. Goes on asking it for
  // some seconds: call it again while it matters. `anew`: what is known may be out of date; the next call tells.
  Verdict ask(Process process, const JobKey& group, bool anew = false);
  std::string text(Process process) const;  // "192.0.2.2:4711"
  // Answers to `group` from now on: this process takes no part in it from fragment `from` on, and can tell its rank
  // `lost` nothing but this way.
  void left(const JobKey& group, uint64_t from, const std::string& reason, int64_t lost = kNobody);

 private:
  Liveness() = default;
  void run();
  void turn(std::vector<pollfd>& fds);
  void wake();

  std::unique_ptr<Responder> responder_;
  std::unique_ptr<Prober> prober_;
  FileDescriptor wake_up_;
  std::atomic<bool> stop_{false};
  const uint32_t forks_ = fork_count();
  std::thread thread_;
};

// nullptr, and a warning, if this host has no port for it: then deaths are noticed by the deadlines.
std::unique_ptr<Liveness> open_if_possible(const std::string& ip);

}  // namespace smddp::liveness
