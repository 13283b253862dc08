#include "group/network_agreement.h"

#include "common/env.h"
#include "common/log.h"
#include "group/network_measurement.h"

namespace smddp {

uint64_t network_digest(const std::string& model) {
  uint64_t digest = 0;
  for (char c : model) digest = extend_digest(digest, static_cast<unsigned char>(c));
  return digest;
}

Status NetworkAgreement::read_settings() {
  const std::string curve = env::get("FABRIC_CURVE");
  given_ = options_.network.has_value() || curve != "auto";
  model_ = options_.network.value_or(NetworkModel{});
  if (options_.network || curve == "auto" || curve == "default") return {};
  Result<NetworkModel> model = parse_network_model(curve);
  if (model) model_ = model.value();
  return model.status();
}

void NetworkAgreement::describe(RankInfo* mine) {
  mine->network_given = given_;
  if (given_) {
    told_ = text_of(model_);
  } else {
    Engine::Lock lock = engine_.lock();
    told_ = engine_.network().model();
  }
  mine->network = network_digest(told_);
}

Status NetworkAgreement::agree(const std::vector<RankInfo>& infos, const Members& members) {
  if (members.topology().nodes() == 1) return {};
  const RankInfo& first = infos[0];
  bool all_know = first.network != 0;
  for (size_t r = 1; r < infos.size(); ++r) {
    bool same = infos[r].network == first.network;
    if (infos[r].network_given != first.network_given || (first.network_given && !same))
      return {Code::kInvalid, members.describe(static_cast<Rank>(r)) +
                                  " has another SMDDP_FABRIC_CURVE than " + members.describe(0) +
                                  ": give all ranks the same"};
    all_know &= same;
  }
  measures_ = !all_know;
  if (measures_ || given_) return {};
  Result<NetworkModel> model = parse_network_model(told_);  // which all have told
  if (model) model_ = model.value();
  return model.status();
}

std::string NetworkAgreement::measure(Store& store, const Topology& topology, Rank rank) {
  return measures_ ? measure_network(engine_, store, topology, rank, options_) : std::string();
}

// If no measurement has succeeded, the network counts as known all the same, so that not every group tries
// again.
Status NetworkAgreement::take(const std::string& agreed, Rank rank) {
  if (!measures_) return {};
  if (!agreed.empty()) {
    Result<NetworkModel> model = parse_network_model(agreed);
    if (!model) return model.status();
    model_ = model.value();
  } else if (rank == 0) {
    log(LogLevel::kWarning, "the network of group '" + options_.name +
                                "' could not be measured; operations assume " + text_of(model_) +
                                ", as with SMDDP_FABRIC_CURVE=default");
  }
  Engine::Lock lock = engine_.lock();
  engine_.network().remember(text_of(model_));
  return {};
}

}  // namespace smddp
