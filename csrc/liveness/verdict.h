// What a process knows of another one that it waits for. Made by Prober, read by the groups.
#pragma once

#include <cstdint>
#include <string>

namespace smddp::liveness {

using Process = uint32_t;  // index of a process that was met, dense from 0

struct Verdict {
  bool ended = false;        // its port refuses connections, and it has answered before
  bool refuses = false;      // its port refused the latest connection; a firewall may do so, too
  uint64_t answered_ns = 0;  // its latest answer; 0: none
  uint64_t silent_ns = 0;    // time since then in which it was asked in vain
  uint64_t left_from = UINT64_MAX;  // the fragment from which on it has left the group
  std::string reason;               // why it has
};

}  // namespace smddp::liveness
