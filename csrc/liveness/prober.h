// The side of a process that asks: one connection at a time per process and group that it waits for. From
// the answers, refusals and silences it concludes what became of them. Called by the thread of Liveness;
// ask() and meet() by any thread.
#pragma once

#include <poll.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "common/file_descriptor.h"
#include "liveness/contact.h"
#include "liveness/sockets.h"

namespace smddp::liveness {

class Prober {
 public:
  // Equal contacts give the same process. Asks it once, so that later a refusal means that it has ended.
  // `*fresh`: there is something new to do for the thread.
  Process meet(const Contact& contact, bool* fresh);
  // What is known by now. Goes on asking for some seconds after the latest call. `anew`: asks again now.
  Verdict ask(Process process, const JobKey& group, uint64_t now, bool anew, bool* fresh);
  // As of Liveness.
  Reach reach(Process process);
  void give_up_reaching(Process process);
  std::string text(Process process);

  // Begins the connections that are due. Appends the descriptors to poll; serve() takes those entries,
  // in the same order.
  void watch(std::vector<pollfd>& fds, uint64_t now);
  void serve(const pollfd* fds, uint64_t now);
  uint64_t next_ns() const { return next_ns_; }

 private:
  // What is asked of one process about one group, again and again.
  struct Probe {
    Process process = 0;
    JobKey group{};
    uint64_t wanted_until_ns = 0;  // 0: until the process has answered once
    uint64_t met_ns = 0;
    FileDescriptor socket;
    bool connected = false;
    bool is_polled = false;
    uint64_t began_ns = 0;    // the attempt under way
    uint64_t next_ns = 0;     // the next attempt
    uint64_t counted_ns = 0;  // up to here time without an answer has been counted
    Question question;
    size_t asked = 0;
    Answer answer;
    size_t answered = 0;
    std::string reason;
    size_t explained = 0;
    Verdict verdict;
  };
  struct Target {
    Contact contact;
    bool has_answered = false;
    bool refuses = false;  // as of Verdict
    bool given_up = false;
  };

  Probe& probe_of(Process process, const JobKey& group, bool* fresh);
  bool wanted(const Probe& probe, uint64_t now) const;
  void close(Probe& probe, uint64_t next_ns);
  void begin(Probe& probe, uint64_t now);
  void advance(Probe& probe, uint64_t now);
  Moved converse(Probe& probe, int* error);
  void on_answer(Probe& probe, uint64_t now);
  void on_failure(Probe& probe, int error, uint64_t now);
  void count_silence(Probe& probe, uint64_t now);

  std::mutex mutex_;
  std::deque<Target> targets_;
  std::deque<Probe> probes_;
  size_t open_ = 0;
  uint64_t next_ns_ = UINT64_MAX;
};

}  // namespace smddp::liveness
