// Which network model a group uses: one that its ranks were given, one that all of them know from an earlier
// group, one that an earlier job on the same hosts has measured (network_cache.h), or one that the group measures
// while it is made (network_measurement.h). All ranks come to the same result. Must not know how ranks exchange
// what they tell. GroupBuilder calls it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "joining/exchange.h"
#include "group/group.h"
#include "group/network_cache.h"
#include "flows/members.h"

namespace smddp {

class NetworkAgreement {
 public:
  NetworkAgreement(Engine& engine, const Group::Options& options)
      : engine_(engine), options_(options) {}

  // What SMDDP_FABRIC_CURVE, or the group's options, say.
  Status read_settings();
  // What the other ranks need to know.
  void describe(RankInfo* mine);
  // All ranks find alike that two of them were given different models.
  Status agree(const std::vector<RankInfo>& infos, const Members& members);
  // Whether the ranks still have to find out what the network is. The same on all of them.
  bool unknown() const { return unknown_; }

  // What this rank, the first of its host, tells when its host has joined: what an earlier job has measured; "" if
  // it has nothing, or does not measure.
  std::string recall(const std::vector<RankInfo>& infos, const Topology& topology, Rank rank);
  // `recalled`: of what all have told, by agree_on_recalled(). "": it has to be measured.
  void take_recalled(const std::string& recalled);
  // If it is still unknown(): what the first rank of a host tells next; "" if it has measured nothing.
  std::string measure(Store& store, const Topology& topology, Rank rank);
  // `agreed`: of what all have told, by agree_on_measurements().
  Status take(const std::string& agreed, Rank rank);

  const NetworkModel& model() const { return model_; }

 private:
  // `source`: where model() is from, for people.
  void remember(const std::string& source);

  Engine& engine_;
  const Group::Options& options_;
  bool given_ = false;
  bool anew_ = false;  // SMDDP_FABRIC_CURVE=measure
  bool unknown_ = false;
  NetworkModel model_;
  std::string told_;                   // the model whose digest describe() has told
  std::optional<NetworkCache> cache_;  // of a rank that measures
};

// What the first ranks of all hosts have told, by host: the numbers that all hosts that measure have, with the
// earliest of their times; "" if one of these has none, or others.
std::string agree_on_recalled(const std::vector<std::string>& recalled, const Topology& topology);

// For people: the model that an earlier job has measured, and when; "" if none has. `hosts`: the identity of each
// rank's host. Opens the endpoint.
Result<std::string> stored_network(Engine& engine, const std::vector<std::string>& hosts);

}  // namespace smddp
