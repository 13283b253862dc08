// Which network model a group uses: one that its ranks were given, one that all of them know from an earlier
// group, one that an earlier job on the same hosts has measured (cache.h), or one that the group measures
// while it is made (measurement.h). All ranks come to the same result. Must not know how ranks exchange
// what they tell. GroupBuilder calls it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "network/cache.h"
#include "network/model.h"
#include "topology/members.h"

namespace smddp {

// What a rank tells the others of the network that it knows.
struct NetworkClaim {
  // Of the model that the rank was given or, if none was, of that of its latest group between hosts; 0: none.
  uint64_t digest = 0;
  bool given = false;
  bool operator==(const NetworkClaim&) const = default;
};

class NetworkAgreement {
 public:
  // `group_name`: for people. `given`: instead of what SMDDP_DEBUG=curve says.
  NetworkAgreement(const std::string& group_name, const std::optional<NetworkModel>& given)
      : group_name_(group_name), given_model_(given) {}

  // What SMDDP_DEBUG=curve says. `known`: the model of this rank's latest group between hosts; "": none.
  Status read_settings(const std::string& known);
  // What the other ranks need to know.
  NetworkClaim claim() const;
  // `claims`: of all ranks. All find alike that two of them were given different models.
  Status agree(const std::vector<NetworkClaim>& claims, const Members& members);
  // Whether the ranks still have to find out what the network is. The same on all of them.
  bool unknown() const { return unknown_; }

  // What an earlier job has measured, as the first rank of a host that measures tells it; "": nothing.
  std::string recall(NetworkCache cache);
  // `recalled`: of what all have told, by agree_on_recalled(). "": it has to be measured.
  void take_recalled(const std::string& recalled);
  // `agreed`: of what all have measured, by agree_on_measurements(). `tells`: whether this rank warns the user.
  Status take_measured(const std::string& agreed, bool tells);

  const NetworkModel& model() const { return model_; }
  // Where model() is from, for people, if this group has found it out; "" if it was known or given before.
  const std::string& source() const { return source_; }

 private:
  const std::string& group_name_;
  const std::optional<NetworkModel>& given_model_;
  bool given_ = false;
  bool anew_ = false;  // SMDDP_DEBUG=curve=measure
  bool unknown_ = false;
  NetworkModel model_;
  std::string told_;  // the model whose digest claim() tells
  std::string source_;
  std::optional<NetworkCache> cache_;  // of a rank that measures
};

// What the first ranks of all hosts have told, by host: the numbers that all hosts that measure have, with the
// earliest of their times; "" if one of these has none, or others.
std::string agree_on_recalled(const std::vector<std::string>& recalled, const Topology& topology);

}  // namespace smddp
