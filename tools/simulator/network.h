// A network of hosts in virtual time: the NICs and links, the processes at its ends, and the queue of what
// happens next. It knows bytes and times: transport.h makes it a transport for each simulated process. The
// Cluster creates it and asks it which process runs next.
//
// One thread. Equal calls give equal times: events at the same time happen in the order of their creation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <queue>
#include <vector>

namespace smddp::simulator {

// Nanoseconds and bytes. A message of b bytes between two idle processes takes
// message_ns + latency_ns + b / bytes_per_ns + message_ns, as in LogGP (Alexandrov et al., SPAA 1995).
struct Model {
  double latency_ns = 20'000;  // from the sending NIC to the receiving NIC
  double bytes_per_ns = 1.25;  // of a NIC, in each direction
  double message_ns = 4'000;   // of a processor, for each operation started and message taken
  double header_bytes = 0;     // that each operation adds on the link
  int nics = 1;                // of a host
  bool ordered = false;        // messages arrive after the writes before them
  bool moves_writes = true;    // false: writes take their time, but move no bytes
};

using ProcessNumber = uint32_t;  // dense from 0

struct NetworkCounters {
  uint64_t messages = 0, message_bytes = 0;
  uint64_t writes = 0, write_bytes = 0;
  uint64_t waiting_messages = 0;  // that found no receive buffer at first
  uint64_t events = 0;

  // What has been added since `before`.
  NetworkCounters& operator-=(const NetworkCounters& before) {
    messages -= before.messages;
    message_bytes -= before.message_bytes;
    writes -= before.writes;
    write_bytes -= before.write_bytes;
    waiting_messages -= before.waiting_messages;
    events -= before.events;
    return *this;
  }
};

// What one event does when its time has come. run() owns the action: it queues it again, or passes it on.
class Action {
 public:
  virtual ~Action() = default;
  virtual void run() = 0;
};

class VirtualNetwork {
 public:
  VirtualNetwork(const Model& model, int hosts, int processes_per_host);
  ~VirtualNetwork();
  VirtualNetwork(const VirtualNetwork&) = delete;
  VirtualNetwork& operator=(const VirtualNetwork&) = delete;

  const Model& model() const { return model_; }
  NetworkCounters& counters() { return counters_; }
  int hosts() const { return hosts_; }
  int host_of(ProcessNumber process) const {
    return static_cast<int>(process) / processes_per_host_;
  }

  // --- time

  // Of the process that runs, or of the event that happens. common/clock.h reads it.
  const uint64_t* clock() const { return &now_; }
  uint64_t now() const { return now_; }
  // The process whose calls follow. Its time is at least `now`, the time of the latest event.
  void enter(ProcessNumber process);
  ProcessNumber current() const { return current_; }
  // The running process computes for so long.
  void charge(double ns);
  // Time passes without an event, up to `ns`: only if none is queued before.
  void pass_to(uint64_t ns);

  // --- what happens next

  // Lets things happen until a process has to run: true, and the process. False: nothing is queued.
  bool next(ProcessNumber* process);
  // The process has to run at `at`, or as soon as it has computed what it computes.
  void wake(ProcessNumber process, uint64_t at);
  void at(uint64_t when, std::unique_ptr<Action> action);

  // --- the links

  // A transfer of `bytes` bytes leaves NIC `nic` of the running process's host now, or after those before
  // it. The time when its first byte reaches the receiver's NIC.
  uint64_t leave(size_t nic, size_t bytes);
  // Its first byte reaches NIC `nic` of `host` now. The time when it has been received as a whole.
  uint64_t receive(int host, size_t nic, size_t bytes);
  // Bytes that NIC `nic` of `host` has sent so far, with headers.
  double sent(int host, size_t nic) const { return link(host, nic).out_bytes; }
  double received(int host, size_t nic) const { return link(host, nic).in_bytes; }

 private:
  struct Link {
    double out_free_ns = 0, in_free_ns = 0;
    double out_bytes = 0, in_bytes = 0;
  };
  struct State {
    double clock_ns = 0;
    uint64_t runs_at = UINT64_MAX;  // of its event in the queue
  };
  struct Queued {
    uint64_t when, order;
    Action* action;  // nullptr: a process runs
    ProcessNumber process;
    bool operator>(const Queued& other) const {
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  Link& link(int host, size_t nic) { return links_[static_cast<size_t>(host * model_.nics) + nic]; }
  const Link& link(int host, size_t nic) const {
    return links_[static_cast<size_t>(host * model_.nics) + nic];
  }

  const Model model_;
  const int hosts_;
  const int processes_per_host_;
  NetworkCounters counters_;
  std::vector<Link> links_;
  std::vector<State> processes_;
  std::priority_queue<Queued, std::vector<Queued>, std::greater<>> events_;
  uint64_t order_ = 0;
  uint64_t now_ = 1;
  ProcessNumber current_ = 0;
};

}  // namespace smddp::simulator
