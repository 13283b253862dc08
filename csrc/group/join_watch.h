// Whether a rank that this one waits for while a group is made has ended or is silent. A rank of this host is seen
// through its pidfd; the first rank of another host by the count that it keeps in the store (joining/heartbeat.h)
// and, once that stands still, by asking its process over TCP (csrc/liveness). Must not know what is waited for.
// InfoExchange calls it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "joining/group_options.h"
#include "joining/rank_info.h"
#include "joining/store.h"
#include "progress/process.h"

namespace smddp {

class JoinWatch {
 public:
  // All must outlive it.
  JoinWatch(Process& process, Store& store, int ranks, const GroupOptions& options)
      : process_(process), store_(store), ranks_(ranks), options_(options) {}

  // An error if the rank, which is `info`, has ended or is silent. `host`: that of this rank.
  Status look(Rank rank, const RankInfo& info, const std::string& host);
  // Whether looks have seen the first rank of another host count for some seconds.
  bool counts(Rank rank) const;

 private:
  // What this rank has seen of one of another host.
  struct Count {
    std::vector<uint8_t> value;
    uint64_t looked_ns = 0;
    uint64_t silent_ns = 0;  // of which this rank has looked for it
    int changes = 0;
  };
  Status look_at_neighbor(Rank rank, const RankInfo& info);
  Status look_at_count(Rank rank, const RankInfo& info);
  // "192.0.2.2:4711" if a process that has not counted for `silent_ns` has ended, as its port refuses connections,
  // else "".
  std::string port_of_ended(const RankInfo& info, uint64_t silent_ns);
  std::string describe(Rank rank, const RankInfo& info) const;

  Process& process_;
  Store& store_;
  const int ranks_;
  const GroupOptions& options_;
  std::map<Rank, std::shared_ptr<intranode::Neighbor>> neighbors_;
  std::map<Rank, Count> counts_;
};

}  // namespace smddp
