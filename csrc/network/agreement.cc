#include "network/agreement.h"

#include <algorithm>

#include "common/env.h"
#include "common/log.h"
#include "common/signature.h"
#include "network/measurement.h"

namespace smddp {

Status NetworkAgreement::read_settings(const std::string& known) {
  const std::string curve = env::debug("curve");
  anew_ = curve == "measure";
  given_ = given_model_.has_value() || (curve != "auto" && !anew_);
  model_ = given_model_.value_or(NetworkModel{});
  if (given_ && !given_model_ && curve != "default") {
    if (Status s = parse_network_model(curve).into(model_); !s) return s;
  }
  told_ = given_ ? text_of(model_) : known;
  return {};
}

NetworkClaim NetworkAgreement::claim() const { return {digest_of_text(told_), given_}; }

Status NetworkAgreement::agree(const std::vector<NetworkClaim>& claims, const Members& members) {
  if (members.topology().nodes() == 1) return {};
  const NetworkClaim& first = claims[0];
  bool all_know = first.digest != 0;
  for (size_t r = 1; r < claims.size(); ++r) {
    bool same = claims[r].digest == first.digest;
    if (claims[r].given != first.given || (first.given && !same))
      return {Code::kInvalid, members.describe(static_cast<Rank>(r)) +
                                  " has another curve in SMDDP_DEBUG than " + members.describe(0) +
                                  ": give all ranks the same"};
    all_know &= same;
  }
  unknown_ = !all_know;
  if (unknown_ || given_) return {};
  Result<NetworkModel> model = parse_network_model(told_);  // which all have told
  if (model) model_ = model.value();
  return model.status();
}

std::string NetworkAgreement::recall(NetworkCache cache) {
  cache_ = std::move(cache);
  auto found = anew_ ? std::nullopt : cache_->load();
  return found ? text_of(*found) : std::string();
}

void NetworkAgreement::take_recalled(const std::string& recalled) {
  auto found = parse_measured_network(recalled);
  auto model = found ? parse_network_model(found->model) : Result<NetworkModel>(NetworkModel{});
  if (!unknown_ || !found || !model) return;
  model_ = model.value();
  unknown_ = false;
  source_ = "measured on " + date_of(found->measured);
}

// If no measurement has succeeded, the network counts as known all the same, so that not every group tries
// again.
Status NetworkAgreement::take_measured(const std::string& agreed, bool tells) {
  unknown_ = false;
  source_ = agreed.empty() ? "assumed, as it could not be measured" : "measured now";
  if (agreed.empty()) {
    if (tells)
      log(LogLevel::kWarning, "the network of group '" + group_name_ +
                                  "' could not be measured; operations assume " + text_of(model_) +
                                  ", as with SMDDP_DEBUG=curve=default");
    return {};
  }
  if (Status s = parse_network_model(agreed).into(model_); !s) return s;
  if (cache_) cache_->store(text_of(model_));
  return {};
}

std::string agree_on_recalled(const std::vector<std::string>& recalled, const Topology& topology) {
  std::optional<MeasuredNetwork> all;
  for (int host = 0; host < topology.nodes(); ++host) {
    if (!measuring_pair(topology, topology.node(host)[0])) continue;
    auto found = parse_measured_network(recalled[static_cast<size_t>(host)]);
    if (!found || (all && all->model != found->model)) return {};
    found->measured = std::min(found->measured, all ? all->measured : found->measured);
    all = found;
  }
  return all ? text_of(*all) : std::string();
}

}  // namespace smddp
