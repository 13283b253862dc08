// How a group comes to be: one exchange of infos, then the node's segments and the rails. Only where
// a rank could not know that there are several hosts, so that its info says nothing of its fabric,
// do such ranks publish that in a second exchange.
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "bootstrap/prefix_store.h"
#include "collectives/group.h"
#include "common/clock.h"
#include "common/env.h"
#include "patterns/pattern.h"

namespace smddp {
namespace {

// How long a rank that waits for its node sleeps between looks for ranks that ended.
constexpr uint64_t kLookNs = 100'000'000;

using Fabric = FabricAddress::State;

// The launchers' own words: torchrun's, and DeepSpeed's for the second.
bool launched_on_several_hosts() {
  auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtol(text, nullptr, 10) : 0;
  };
  long local = std::max(number("LOCAL_WORLD_SIZE"), number("LOCAL_SIZE"));
  return local > 0 && number("WORLD_SIZE") > local;
}

// A rank that can't open its fabric says so in place of an address, so that the others do not wait.
FabricAddress open_fabric(Engine& engine) {
  auto endpoint = engine.fabric();
  if (!endpoint) return {Fabric::kUnavailable, {}, endpoint.status().message()};
  return {Fabric::kOpen, endpoint.value()->address(), {}};
}

}  // namespace

Result<std::unique_ptr<Group>> Group::create(Engine& engine, Store& store, int rank, int ranks,
                                             Options options) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Status(Code::kInvalid,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " is no rank");
  }
  Result<Algorithm> algorithm = parse_algorithm(env::get("ALGORITHM"));
  if (!algorithm) return algorithm.status();
  Result<NetworkModel> curve = parse_network_model(env::get("FABRIC_CURVE"));
  if (!curve) return curve.status();
  std::unique_ptr<Group> group(new Group(engine, rank, std::move(options)));
  RankInfo mine;
  const std::string& given = group->options_.host;
  mine.host = given.empty() ? host_identity() : given;
  mine.host_name = !given.empty()                ? given
                   : env::get("HOST_ID").empty() ? host_name()
                                                 : env::get("HOST_ID");
  if (getrandom(mine.key.data(), mine.key.size(), 0) != static_cast<ssize_t>(mine.key.size())) {
    return Status(Code::kUnavailable, "could not draw a random group key");
  }
  mine.token = engine.presence().token();
  mine.pid = getpid();
  mine.presence_fd = engine.presence().presence_fd();
  mine.doorbell_fd = engine.presence().doorbell_fd();
  if (ranks > 1) {
    // Sized for the case that all ranks share this host; untouched pages cost nothing.
    auto outbox = intranode::Outbox::create(mine.key, ranks - 1);
    if (!outbox) return outbox.status();
    group->outbox_ = std::move(outbox.value());
    mine.outbox_fd = group->outbox_->fd();
    if (engine.open_fabric() != nullptr || group->options_.several_hosts ||
        launched_on_several_hosts()) {
      mine.fabric = open_fabric(engine);
    }
  }
  std::vector<RankInfo> infos;
  if (ranks == 1) {
    infos.push_back(std::move(mine));
  } else {
    if (Status out = publish(store, "card", rank, encode(mine)); !out) return out;
    std::vector<int> everyone(static_cast<size_t>(ranks));
    std::iota(everyone.begin(), everyone.end(), 0);
    auto blobs = collect(store, "card", everyone);
    if (!blobs) return blobs.status();
    for (const auto& blob : blobs.value()) {
      auto info = decode(blob);
      if (!info) return info.status();
      infos.push_back(std::move(info.value()));
    }
  }
  std::vector<std::string> hosts;
  for (const RankInfo& info : infos) {
    hosts.push_back(info.host);
    group->host_names_.push_back(info.host_name);
  }
  group->key_ = infos[0].key;
  group->topology_ = Topology(hosts);
  group->shape_ = {ranks, group->topology_.nodes(), false, pattern::equal_nodes(group->topology_),
                   curve.value()};
  group->algorithm_ = algorithm.value();
  group->receive_budget_ = ReceiveBudget(receive_budget_bytes(group->shape_));
  group->remote_peers_.resize(static_cast<size_t>(ranks));
  // What all ranks conclude alike comes first: nobody then looks for a neighbour that gave up.
  if (Status known = group->learn_fabric(store, infos); !known) return known;
  Status joined = group->join_node(infos);
  if (joined.ok()) joined = group->join_rails(infos);
  if (joined.ok()) joined = group->await_node();
  if (!joined) {
    if (group->outbox_) group->outbox_->abort(joined.message(), 0);
    return joined;
  }
  engine.attach(group->key_, group.get());
  return group;
}

Result<std::unique_ptr<Group>> Group::subgroup(Store& store, const std::string& label,
                                               const std::vector<Rank>& ranks) {
  Options options = options_;
  options.several_hosts = topology_.nodes() > 1;
  options.called.clear();
  int mine = -1;
  for (Rank r : ranks) {
    if (r == rank_) mine = static_cast<int>(options.called.size());
    options.called.push_back(options_.called.empty() ? r : options_.called[static_cast<size_t>(r)]);
  }
  PrefixStore prefixed(store, label + "/");
  return create(engine_, prefixed, mine, static_cast<int>(ranks.size()), std::move(options));
}

// Every rank's fabric address into its info, or why there can be no group.
Status Group::learn_fabric(Store& store, std::vector<RankInfo>& infos) {
  if (topology_.nodes() == 1) return {};
  // The same list on every rank: it follows from the infos alone.
  std::vector<int> unopened;
  for (Rank r = 0; r < ranks(); ++r) {
    if (infos[static_cast<size_t>(r)].fabric.state == Fabric::kUnopened) unopened.push_back(r);
  }
  if (!unopened.empty()) {
    if (infos[static_cast<size_t>(rank_)].fabric.state == Fabric::kUnopened) {
      Status out = publish(store, "fabric", rank_, encode(open_fabric(engine_)));
      if (!out) return out;
    }
    auto blobs = collect(store, "fabric", unopened);
    if (!blobs) return blobs.status();
    for (size_t i = 0; i < unopened.size(); ++i) {
      auto fabric = decode_fabric(blobs.value()[i]);
      if (!fabric) return fabric.status();
      infos[static_cast<size_t>(unopened[i])].fabric = std::move(fabric.value());
    }
  }
  for (Rank r = 0; r < ranks(); ++r) {
    const FabricAddress& fabric = infos[static_cast<size_t>(r)].fabric;
    if (fabric.state == Fabric::kOpen) continue;
    return {Code::kUnavailable, "group '" + options_.name + "' spans " +
                                    std::to_string(topology_.nodes()) + " hosts and " +
                                    describe(r) + " has no fabric: " + fabric.reason};
  }
  return {};
}

Status Group::join_node(const std::vector<RankInfo>& infos) {
  const std::vector<Rank>& node = topology_.node(topology_.node_of(rank_));
  for (Rank peer : node) {
    if (peer != rank_) local_peers_.push_back(peer);
  }
  popped_since_wake_.assign(local_peers_.size(), false);
  engine_.expect_local_ranks(static_cast<int>(node.size()));
  if (local_peers_.empty()) {
    outbox_.reset();
    return {};
  }
  auto readers = static_cast<int>(local_peers_.size());
  outbox_->expect(readers);
  std::string wanted = env::get("SINGLE_COPY");
  bool allow = options_.single_copy.value_or(wanted == "1" ||
                                             (wanted != "0" && intranode::single_copy_pays()));
  for (Rank peer : local_peers_) {
    const RankInfo& info = infos[static_cast<size_t>(peer)];
    // Among the readers of a peer's outbox, in order of local index, the peer itself is left out.
    int reader = topology_.local_index(rank_) - (peer < rank_ ? 1 : 0);
    auto inbox = intranode::Inbox::open(info.pid, info.outbox_fd, info.key, reader, readers, allow);
    if (!inbox) return {inbox.status().code(), describe(peer) + ": " + inbox.status().message()};
    inboxes_.push_back(std::move(inbox.value()));
    auto neighbor = engine_.neighbor(info);
    if (!neighbor)
      return {neighbor.status().code(), describe(peer) + ": " + neighbor.status().message()};
    neighbors_.push_back(std::move(neighbor.value()));
  }
  return {};
}

// Until every rank of the node has attached to every outbox of it: from then on nobody opens a
// descriptor of this group, each rank's own is closed, and all know whether to read directly.
Status Group::await_node() {
  uint64_t until = now_ns() + options_.timeout_ns;
  while (!node_attached()) {
    for (size_t i = 0; i < inboxes_.size(); ++i) {
      const char* reason = inboxes_[i]->aborted();
      Engine::Lock lock = engine_.lock();  // other groups have the same neighbour
      if (reason == nullptr && !neighbors_[i]->look_for_death()) continue;
      // Whoever got past this point, and then ended, did so after the last rank had attached.
      if (node_attached()) return {};
      std::string who = describe(local_peers_[i]);
      if (reason != nullptr) return {Code::kAborted, who + " could not join: " + reason};
      return {Code::kPeerLost, who + " (process " + std::to_string(inboxes_[i]->pid()) +
                                   ") ended while group '" + options_.name + "' was made"};
    }
    if (now_ns() >= until) {
      return {Code::kTimeout,
              "not every rank of this host joined group '" + options_.name + "' in time"};
    }
    outbox_->wait_attached(kLookNs);
    for (const auto& inbox : inboxes_) inbox->wait_attached(local_peers(), kLookNs);
  }
  return {};
}

Status Group::join_rails(const std::vector<RankInfo>& infos) {
  if (topology_.nodes() == 1) return {};
  endpoint_ = engine_.open_fabric();
  auto flows = pattern::gather_flows(topology_, rank_, pattern::Pattern::kDirect);
  for (const auto* side : {&flows.out, &flows.in}) {
    for (const pattern::Flow& flow : *side) {
      if (std::find(remote_ranks_.begin(), remote_ranks_.end(), flow.peer) == remote_ranks_.end())
        remote_ranks_.push_back(flow.peer);
    }
  }
  peer_of_.resize(static_cast<size_t>(ranks()));
  Engine::Lock lock = engine_.lock();
  for (Rank r : remote_ranks_) {
    auto peer = endpoint_->add_peer(infos[static_cast<size_t>(r)].fabric.address);
    if (!peer) return {peer.status().code(), describe(r) + ": " + peer.status().message()};
    peer_of_[static_cast<size_t>(r)] = peer.value();
  }
  return {};
}

}  // namespace smddp
