// How a group is made: its ranks exchange what they are (info_exchange.h), then join the segments of their host, then get
// to know their remote peers. A rank that could not know that there are several hosts says nothing of
// its fabric in the first exchange; only such ranks publish it in a second one. At the end a rank of each host
// says in the store that its host has joined, and every rank waits for all hosts.
//
// A rank that fails publishes why, so that the others fail at once, with the same sentence. It does so before
// it gives up what its neighbours open: theirs is then not the cause.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "joining/store.h"
#include "group/group.h"
#include "group/info_exchange.h"
#include "group/making_watch.h"
#include "group/network_agreement.h"

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

// Makes the parts of one group for one rank. GroupBuilder knows no operation; Group::create() and GroupMaking
// call it.
class GroupBuilder {
 public:
  GroupBuilder(Engine& engine, Store& store, Rank rank, int ranks, const Group::Options& options)
      : engine_(engine),
        store_(store),
        rank_(rank),
        ranks_(ranks),
        options_(options),
        watch_(engine, store, ranks, options),
        exchange_(
            store, rank, ranks, {options.timeout_ns, options.few_ranks},
            [this](auto&&... of) { return watch_.look(of...); }, engine.known_processes().place()),
        network_(engine, options) {}

  // Both may throw. After build() this rank has joined its host.
  Result<GroupParts> build();
  // The steps of build(), for a simulation: no step waits for another rank. What this rank is goes to
  // `mine`; `infos` are those of all ranks.
  Status describe_itself(RankInfo* mine);
  Status join(std::vector<RankInfo> infos);
  Result<GroupParts> finish();
  std::vector<RankInfo> take_infos() { return std::move(infos_); }
  // Waits until all hosts of `topology`, the group's, have joined, and settles network().
  Status await_hosts(const Topology& topology);
  const NetworkAgreement& network() const { return network_; }
  // After await_hosts(). Removes from the store what no rank reads any more; keeps what all ranks of the job have told
  // of their processes for later groups.
  void conclude();
  // The error of the group, of which `why` is this rank's; tells it to the other ranks.
  Status fail(const Status& why) noexcept;

 private:
  Status parse_settings();
  Status describe_secret(RankInfo* mine);
  Status exchange_infos();
  void learn_infos();
  Status agree();
  Status agree_on_secret();
  Status agree_on_routes() const;
  Status exchange_fabrics();
  Status join_host();
  Status await_host();
  Status join_remote_peers();
  void meet(Rank rank);

  RankInfo& info(Rank rank) { return infos_[static_cast<size_t>(rank)]; }
  const Topology& topology() const { return members_->topology(); }

  Engine& engine_;
  Store& store_;
  const Rank rank_;
  const int ranks_;
  const Group::Options& options_;
  MakingWatch watch_;
  InfoExchange exchange_;
  bool alike_ = false;  // all ranks have found the error
  Algorithm algorithm_ = Algorithm::kAuto;
  NetworkAgreement network_;
  Shape shape_;
  std::unique_ptr<intranode::Outbox> outbox_;
  std::vector<RankInfo> infos_;         // by rank
  JobKey key_{};                        // the group's
  std::optional<siphash::Key> secret_;  // the job's
  std::optional<Members> members_;
  LocalPeers local_;
  std::optional<RemotePeers> remote_;
  LivenessOfRanks liveness_;
};

}  // namespace smddp
