// How a group is made on one rank: the steps between which it joins the others (joining/joining.h) that need the
// engine. It joins the segments of its host, then gets to know its remote peers. At the end a rank of each host
// says in the store that its host has joined, and every rank waits for all hosts, which agree on a network model
// meanwhile.
//
// A rank that fails publishes why, so that the others fail at once, with the same sentence. It does so before
// it gives up what its neighbours open: theirs is then not the cause.
//
// Knows no operation. Group::create() calls it, and the simulator, whose ranks share one thread: describe_itself()
// for every rank, then join() for every rank with all that was told, then finish() for every rank. None of
// these waits for another rank, or asks the store.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "group/group.h"
#include "group/join_watch.h"
#include "joining/joining.h"
#include "network/agreement.h"

namespace smddp {

// What a group is made of.
struct GroupParts {
  JobKey key;
  Members members;
  Shape shape;
  Algorithm algorithm;
  LocalPeers local;
  RemotePeers remote;
  LivenessOfRanks liveness;
};

class GroupBuilder {
 public:
  // `process` and `store` must outlive it.
  GroupBuilder(Process& process, Store& store, Rank rank, int ranks, GroupOptions options);
  GroupBuilder(const GroupBuilder&) = delete;
  GroupBuilder& operator=(const GroupBuilder&) = delete;

  // Blocks until every rank of the group has joined. Does not throw.
  Result<std::unique_ptr<Group>> build();

  // What this rank is; makes its outbox, too.
  Status describe_itself(RankInfo* mine);
  // `infos`: of all ranks. They are lent for the call, so that the ranks of a simulation share them.
  Status join(std::vector<RankInfo>& infos);
  // Waits for the ranks of this host.
  Result<std::unique_ptr<Group>> finish();

 private:
  Status build_steps(std::unique_ptr<Group>* group);
  Status agree();
  Status join_peers();
  Status join_host();
  Status await_host();
  Status join_remote_peers();
  std::vector<Rank> remote_peers() const;
  Status meet(Rank rank);
  Status reach_hosts();
  void give_up_reaching(const std::vector<size_t>& peers);
  Status await_hosts();
  void decide_reads();
  Status ask_host(Group& group);
  void conclude(Group& group) noexcept;
  Status fail(const Status& why) noexcept;

  const RankInfo& info(Rank rank) const { return joining_.info(rank); }
  const Members& members() const { return joining_.members(); }
  const Topology& topology() const { return joining_.topology(); }

  Process& process_;
  Store& store_;
  const Rank rank_;
  const int ranks_;
  const GroupOptions options_;
  JoinWatch watch_;
  Joining joining_;
  NetworkAgreement network_;
  Algorithm algorithm_ = Algorithm::kAuto;
  Shape shape_;
  uint64_t knows_ = 0;  // this rank, of its host: word_of_reads()
  bool asks_host_ = false;
  std::unique_ptr<intranode::Outbox> outbox_;
  LocalPeers local_;
  std::optional<RemotePeers> remote_;
  LivenessOfRanks liveness_;
};

}  // namespace smddp
