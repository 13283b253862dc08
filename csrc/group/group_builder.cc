#include "group/group_builder.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#include "joining/job_secret.h"
#include "common/clock.h"
#include "common/env.h"
#include "common/random.h"
#include "group/network_measurement.h"
#include "topology/pattern.h"

namespace smddp {
namespace {

// How long a rank that waits for the others of its host sleeps between looks for ranks that ended.
constexpr uint64_t kAttachLookNs = 100'000'000;

using Fabric = FabricAddress::State;
using Found = InfoExchange::Found;

// Of the keys of this process's groups.
std::atomic<uint32_t> latest_serial{0};

// The environment variables of the launchers: torchrun's, and DeepSpeed's for the second.
bool launched_on_several_hosts() {
  auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtol(text, nullptr, 10) : 0;
  };
  long local = std::max(number("LOCAL_WORLD_SIZE"), number("LOCAL_SIZE"));
  return local > 0 && number("WORLD_SIZE") > local;
}

// A rank that can't open its fabric publishes why in place of an address, so that the others do not
// wait.
FabricAddress open_fabric(Engine& engine) {
  auto endpoint = engine.fabric();
  if (!endpoint) return {Fabric::kUnavailable, {}, endpoint.status().message(), {}};
  Engine::Lock lock = engine.lock();
  liveness::Liveness* liveness = engine.network().liveness();
  return {Fabric::kOpen,
          endpoint.value()->address(),
          {},
          liveness != nullptr ? liveness->contact() : std::vector<uint8_t>()};
}

}  // namespace

Result<GroupParts> GroupBuilder::build() {
  if (Status known = parse_settings(); !known) return known;
  if (Status known = exchange_infos(); !known) return known;
  if (Status known = agree(); !known) return known;
  // First of all the errors that all ranks find alike: then no rank waits for a rank that gave up.
  if (Status known = exchange_fabrics(); !known) return known;
  // The host last: a rank that has attached to the last segment has nothing left that may fail.
  Status joined = join_remote_peers();
  if (joined.ok()) joined = join_host();
  if (!joined) return joined;
  return finish();
}

Status GroupBuilder::join(std::vector<RankInfo> infos) {
  infos_ = std::move(infos);
  learn_infos();
  Status joined = parse_settings();
  if (joined) joined = agree();
  if (joined) joined = join_remote_peers();
  return joined ? join_host() : joined;
}

Result<GroupParts> GroupBuilder::finish() {
  if (Status joined = await_host(); !joined) return joined;
  shape_.single_copy = local_.may_read_memory();
  return GroupParts{key_,
                    std::move(*members_),
                    shape_,
                    algorithm_,
                    std::move(local_),
                    std::move(*remote_),
                    std::move(liveness_)};
}

Status GroupBuilder::parse_settings() {
  Result<Algorithm> algorithm = parse_algorithm(env::get("ALGORITHM"));
  if (!algorithm) return algorithm.status();
  algorithm_ = algorithm.value();
  return network_.read_settings();
}

Status GroupBuilder::agree() {
  Status known = agree_on_secret();
  if (known) known = agree_on_routes();
  if (known) known = network_.agree(infos_, *members_);
  alike_ = !known;
  return known;
}

Status GroupBuilder::fail(const Status& why) noexcept {
  if (alike_) {
    // A rank that has not read yet what this one hands on can't find the error by itself any more.
    if (exchange_.hands_on()) publish_failure(store_, why);
    return copy_of(why);
  }
  Status cause = Group::tell_failure(store_, rank_, options_, why);
  local_.abort(cause.message(), 0);
  if (outbox_) outbox_->abort(cause.message(), 0);
  return cause;
}

// Makes this rank's outbox, too.
Status GroupBuilder::describe_itself(RankInfo* mine) {
  const std::string& given = options_.host;
  mine->host = given.empty() ? host_identity() : given;
  mine->host_name = !given.empty()                ? given
                    : env::get("HOST_ID").empty() ? host_name()
                                                  : env::get("HOST_ID");
  mine->token = engine_.presence().token();
  if (rank_ > 0) {
    mine->serial = ++latest_serial;
    mine->key = own_key(mine->token, mine->serial);
  } else if (!fill_random(mine->key.data(), mine->key.size())) {
    return {Code::kUnavailable, "could not draw a random group key"};
  }
  if (Status secret = describe_secret(mine); !secret) return secret;
  mine->pid = getpid();
  mine->routes = digest_of_text(options_.routes);
  network_.describe(mine);
  mine->presence_fd = engine_.presence().presence_fd();
  mine->doorbell_fd = engine_.presence().doorbell_fd();
  if (ranks_ == 1) return {};
  // Sized for the case that all ranks share this host; untouched pages cost nothing.
  auto outbox = intranode::Outbox::create(mine->key, ranks_ - 1);
  if (!outbox) return outbox.status();
  outbox_ = std::move(outbox.value());
  mine->outbox_fd = outbox_->fd();
  if (engine_.open_fabric() != nullptr || options_.several_hosts || launched_on_several_hosts())
    mine->fabric = open_fabric(engine_);
  return {};
}

Status GroupBuilder::describe_secret(RankInfo* mine) {
  auto configured = configured_secret();
  if (!configured) return configured.status();
  secret_ = configured.value();
  mine->has_secret = secret_.has_value();
  if (mine->has_secret) {
    mine->proof = proof_of_secret(*secret_, mine->key);
    return {};
  }
  if (rank_ > 0) return {};
  auto drawn = random_secret();
  if (!drawn) return drawn.status();
  mine->drawn = drawn.value();
  return {};
}

// All ranks find alike that two of them differ.
Status GroupBuilder::agree_on_secret() {
  for (Rank r = 0; r < ranks_; ++r) {
    if (info(r).has_secret == info(0).has_secret) continue;
    const char* has = info(r).has_secret ? " has a job secret and " : " has no job secret and ";
    return {Code::kInvalid,
            members_->describe(r) + has + members_->describe(0) +
                (info(0).has_secret ? " has one" : " has none") +
                ": give SMDDP_JOB_SECRET_FILE or SMDDP_JOB_SECRET to all ranks, or to none"};
  }
  if (!info(0).has_secret) secret_ = info(0).drawn;
  for (Rank r = 0; r < ranks_ && info(0).has_secret; ++r) {
    if (info(r).proof == proof_of_secret(*secret_, info(r).key)) continue;
    return {Code::kInvalid,
            members_->describe(r) + " has another job secret than " + members_->describe(rank_) +
                ": give all ranks the same SMDDP_JOB_SECRET_FILE or SMDDP_JOB_SECRET"};
  }
  return {};
}

// All ranks find alike that two of them differ.
Status GroupBuilder::agree_on_routes() const {
  for (size_t r = 1; r < infos_.size(); ++r) {
    if (infos_[r].routes == infos_[0].routes) continue;
    return {Code::kInvalid, members_->describe(static_cast<Rank>(r)) +
                                " has other \"routes\" than " + members_->describe(0) +
                                ": give all ranks the same smddp.routes"};
  }
  return {};
}

Status GroupBuilder::exchange_infos() {
  RankInfo mine;
  if (Status made = describe_itself(&mine); !made) return made;
  if (ranks_ == 1) {
    infos_.push_back(std::move(mine));
  } else {
    if (Status out = exchange_.publish(mine); !out) return out;
    auto infos = exchange_.infos();
    if (!infos) return infos.status();
    infos_ = std::move(infos.value());
  }
  learn_infos();
  return {};
}

void GroupBuilder::conclude() {
  exchange_.forget();
  if (!options_.whole_job || ranks_ == 1) return;
  try {
    engine_.known_processes().remember(
        {std::make_shared<ProcessDirectory>(key_, infos_), rank_, info(rank_)});
  } catch (...) {  // without memory this rank tells later groups all
  }
}

void GroupBuilder::learn_infos() {
  std::vector<std::string> hosts, host_names;
  for (const RankInfo& i : infos_) {
    hosts.push_back(i.host);
    host_names.push_back(i.host_name);
  }
  key_ = infos_[0].key;
  members_.emplace(rank_, Topology(hosts), options_.name, std::move(host_names), options_.called);
}

// Every rank's fabric address into its info, or why there can be no group.
Status GroupBuilder::exchange_fabrics() {
  if (topology().nodes() == 1) return {};
  // The same list on every rank: it follows from the infos alone.
  std::vector<int> unopened;
  for (Rank r = 0; r < ranks_; ++r) {
    if (info(r).fabric.state == Fabric::kUnopened) unopened.push_back(r);
  }
  if (!unopened.empty()) {
    if (info(rank_).fabric.state == Fabric::kUnopened) {
      if (Status out = exchange_.publish(open_fabric(engine_)); !out) return out;
    }
    auto fabrics = exchange_.fabrics(unopened);
    if (!fabrics) return fabrics.status();
    for (size_t i = 0; i < unopened.size(); ++i)
      info(unopened[i]).fabric = std::move(fabrics.value()[i]);
  }
  for (Rank r = 0; r < ranks_; ++r) {
    const FabricAddress& fabric = info(r).fabric;
    if (fabric.state == Fabric::kOpen) continue;
    alike_ = true;
    return {Code::kUnavailable, "group '" + options_.name + "' spans " +
                                    std::to_string(topology().nodes()) + " hosts and " +
                                    members_->describe(r) + " has no fabric: " + fabric.reason};
  }
  return {};
}

Status GroupBuilder::join_host() {
  const std::vector<Rank>& here = topology().node(topology().node_of(rank_));
  engine_.expect_local_ranks(static_cast<int>(here.size()));
  auto readers = static_cast<int>(here.size()) - 1;
  if (readers == 0) return {};
  outbox_->expect(readers);
  local_ = LocalPeers(std::move(outbox_));
  std::string wanted = env::get("SINGLE_COPY");
  bool allow = options_.single_copy.value_or(wanted == "1" ||
                                             (wanted != "0" && intranode::single_copy_pays()));
  auto failed = [&](Rank peer, const Status& why) {
    return Status(why.code(), members_->describe(peer) + ": " + why.message());
  };
  std::vector<std::shared_ptr<intranode::Neighbor>> neighbors;
  for (Rank peer : here) {
    if (peer == rank_) continue;
    auto neighbor = engine_.neighbor(info(peer));
    if (!neighbor) return failed(peer, neighbor.status());
    neighbors.push_back(std::move(neighbor.value()));
  }
  for (Rank peer : here) {
    if (peer == rank_) continue;
    // Among the readers of a peer's outbox, in order of local index, the peer itself is left out.
    int reader = topology().local_index(rank_) - (peer < rank_ ? 1 : 0);
    auto inbox = intranode::Inbox::open(info(peer).pid, info(peer).outbox_fd, info(peer).key,
                                        reader, readers, allow);
    if (!inbox) return failed(peer, inbox.status());
    auto neighbor = std::move(neighbors[static_cast<size_t>(local_.count())]);
    local_.add(peer, std::move(inbox.value()), std::move(neighbor));
  }
  return {};
}

// Until every rank of the host has attached to every outbox of it. From then on no rank opens a
// descriptor of this group, each rank's own is closed, and all know whether to read directly.
Status GroupBuilder::await_host() {
  uint64_t until = now_ns() + options_.timeout_ns;
  while (!local_.all_attached()) {
    for (int i = 0; i < local_.count(); ++i) {
      const char* reason = local_.inbox(i).aborted();
      Engine::Lock lock = engine_.lock();  // other groups have the same neighbour
      if (reason == nullptr && !local_.neighbor(i).look_for_death()) continue;
      // A rank that got past this point, and then ended, did so after the last rank had attached.
      if (local_.all_attached()) return {};
      std::string peer = members_->describe(local_.rank(i));
      if (reason != nullptr) return {Code::kAborted, reason};
      return {Code::kPeerLost, peer + " (process " + std::to_string(local_.inbox(i).pid()) +
                                   ") ended while group '" + options_.name + "' was made"};
    }
    if (now_ns() >= until) {
      return {Code::kTimeout,
              "not every rank of this host joined group '" + options_.name + "' in time"};
    }
    local_.outbox().wait_attached(kAttachLookNs);
    for (int i = 0; i < local_.count(); ++i) {
      local_.inbox(i).wait_attached(local_.count(), kAttachLookNs);
    }
  }
  return {};
}

Status GroupBuilder::await_hosts(const Topology& topology) {
  if (topology.nodes() == 1) return {};
  std::vector<int> first_of_hosts;
  for (int n = 0; n < topology.nodes(); ++n) first_of_hosts.push_back(topology.node(n)[0]);
  const bool first = topology.local_index(rank_) == 0;
  if (first) {
    Status out =
        exchange_.publish_found(Found::kOnJoining, network_.recall(infos_, topology, rank_));
    if (!out) return out;
  }
  auto same = [&](const auto& told) { return agree_on_recalled(told, topology); };
  auto recalled = exchange_.await_found(Found::kOnJoining, first_of_hosts, infos_, same);
  if (!recalled) return recalled.status();
  network_.take_recalled(recalled.value());
  if (!network_.unknown()) return {};
  if (first) {
    Status out =
        exchange_.publish_found(Found::kMeasured, network_.measure(store_, topology, rank_));
    if (!out) return out;
  }
  auto agreed =
      exchange_.await_found(Found::kMeasured, first_of_hosts, infos_, agree_on_measurements);
  return agreed ? network_.take(agreed.value(), rank_) : agreed.status();
}

Status GroupBuilder::join_remote_peers() {
  shape_ = {ranks_, topology().nodes(), false, pattern::equal_nodes(topology()), network_.model()};
  remote_.emplace(key_, message_key(*secret_, key_), rank_, ranks_,
                  topology().nodes() > 1 ? engine_.open_fabric() : nullptr,
                  receive_budget_bytes(shape_), shape_.equal_nodes ? shape_.nodes : 0);
  if (topology().nodes() == 1) return {};
  std::vector<Rank> peers;  // in the order of the flows
  auto flows = pattern::gather_flows(topology(), rank_, pattern::Pattern::kDirect);
  for (const auto* side : {&flows.out, &flows.in}) {
    for (const pattern::Flow& flow : *side) {
      if (std::find(peers.begin(), peers.end(), flow.peer) == peers.end())
        peers.push_back(flow.peer);
    }
  }
  if (pattern::pairs_ranks(topology())) {
    for (const pattern::Flow& flow : pattern::pair_flows(topology(), rank_).out) {
      if (std::find(peers.begin(), peers.end(), flow.peer) == peers.end())
        peers.push_back(flow.peer);
    }
  }
  Engine::Lock lock = engine_.lock();
  liveness_.service = engine_.network().liveness();
  for (Rank r : peers) {
    meet(r);
    auto peer = remote_->endpoint().add_peer(info(r).fabric.address);
    if (!peer)
      return {peer.status().code(), members_->describe(r) + ": " + peer.status().message()};
    remote_->add(r, peer.value());
  }
  return {};
}

void GroupBuilder::meet(Rank rank) {
  const std::vector<uint8_t>& contact = info(rank).fabric.liveness;
  bool asks = liveness_.service != nullptr && !contact.empty();
  Result<liveness::Process> process = liveness::Process{0};
  if (asks) process = liveness_.service->meet(contact);
  liveness_.known.push_back(asks && process.ok());
  liveness_.processes.push_back(process.ok() ? process.value() : liveness::Process{0});
}

}  // namespace smddp
