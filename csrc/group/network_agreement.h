// Which network model a group uses: one that its ranks were given, one that all of them know from an earlier
// group, or one that the group measures while it is made (network_measurement.h). All ranks come to the same
// result. Must not know how ranks exchange what they tell. GroupBuilder calls it.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/exchange.h"
#include "group/group.h"
#include "peers/members.h"

namespace smddp {

// Of the text of a model, for RankInfo; that of no text is 0.
uint64_t network_digest(const std::string& model);

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
  // What this rank, the first of its host, tells when its host has joined; "" if it has measured nothing.
  std::string measure(Store& store, const Topology& topology, Rank rank);
  // `agreed`: of what all have told, by agree_on_measurements().
  Status take(const std::string& agreed, Rank rank);

  const NetworkModel& model() const { return model_; }

 private:
  Engine& engine_;
  const Group::Options& options_;
  bool given_ = false;
  bool measures_ = false;
  NetworkModel model_;
  std::string told_;  // the model whose digest describe() has told
};

}  // namespace smddp
