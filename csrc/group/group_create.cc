// How a group is made: its ranks exchange what they are, then join the segments of their host, then get
// to know their remote peers. A rank that could not know that there are several hosts says nothing of
// its fabric in the first exchange; only such ranks publish it in a second one. At the end a rank of each host
// says in the store that its host has joined, and every rank waits for all hosts.
//
// A rank that fails publishes why, so that the others fail at once, with the same sentence. It does so before
// it gives up what its neighbours open: theirs is then not the cause.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <utility>

#include "bootstrap/job_secret.h"
#include "bootstrap/prefix_store.h"
#include "common/clock.h"
#include "common/env.h"
#include "common/exceptions.h"
#include "common/random.h"
#include "group/group.h"
#include "patterns/pattern.h"

namespace smddp {

struct GroupParts {
  JobKey key;
  Members members;
  Shape shape;
  Algorithm algorithm;
  LocalPeers local;
  RemotePeers remote;
  LivenessOfRanks liveness;
};

namespace {

// How long a rank that waits for the others of its host sleeps between looks for ranks that ended.
constexpr uint64_t kAttachLookNs = 100'000'000;

using Fabric = FabricAddress::State;

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

class Making {
 public:
  explicit Making(Engine& engine) : engine_(engine) { engine_.count_making(1); }
  ~Making() { engine_.count_making(-1); }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

 private:
  Engine& engine_;
};

class GroupBuilder {
 public:
  GroupBuilder(Engine& engine, Store& store, Rank rank, int ranks, const Group::Options& options)
      : engine_(engine), store_(store), rank_(rank), ranks_(ranks), options_(options) {}

  // Both may throw. After build() this rank has joined its host.
  Result<GroupParts> build();
  // Waits until all hosts of `topology`, the group's, have joined.
  Status await_hosts(const Topology& topology);
  // The error of the group, of which `why` is this rank's; tells it to the other ranks.
  Status fail(const Status& why) noexcept;

 private:
  Status describe_itself(RankInfo* mine);
  Status describe_secret(RankInfo* mine);
  Status exchange_infos();
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
  bool alike_ = false;  // all ranks have found the error
  std::unique_ptr<intranode::Outbox> outbox_;
  std::vector<RankInfo> infos_;         // by rank
  std::optional<siphash::Key> secret_;  // the job's
  std::optional<Members> members_;
  LocalPeers local_;
  std::optional<RemotePeers> remote_;
  LivenessOfRanks liveness_;
};

Result<GroupParts> GroupBuilder::build() {
  Result<Algorithm> algorithm = parse_algorithm(env::get("ALGORITHM"));
  if (!algorithm) return algorithm.status();
  Result<NetworkModel> network = parse_network_model(env::get("FABRIC_CURVE"));
  if (!network) return network.status();
  if (Status known = exchange_infos(); !known) return known;
  Status known = agree_on_secret();
  if (known) known = agree_on_routes();
  if (!known) {
    alike_ = true;
    return known;
  }
  // First of all the errors that all ranks find alike: then no rank waits for a rank that gave up.
  if (Status known = exchange_fabrics(); !known) return known;
  Shape shape{ranks_, topology().nodes(), false, pattern::equal_nodes(topology()), network.value()};
  remote_.emplace(infos_[0].key, message_key(*secret_, infos_[0].key), rank_, ranks_,
                  topology().nodes() > 1 ? engine_.open_fabric() : nullptr,
                  receive_budget_bytes(shape));
  // The host last: a rank that has attached to the last segment has nothing left that may fail.
  Status joined = join_remote_peers();
  if (joined.ok()) joined = join_host();
  if (joined.ok()) joined = await_host();
  if (!joined) return joined;
  shape.single_copy = local_.may_read_memory();
  return GroupParts{infos_[0].key,       std::move(*members_), shape,
                    algorithm.value(),   std::move(local_),    std::move(*remote_),
                    std::move(liveness_)};
}

Status GroupBuilder::fail(const Status& why) noexcept {
  if (alike_) return copy_of(why);
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
  if (!fill_random(mine->key.data(), mine->key.size()))
    return {Code::kUnavailable, "could not draw a random group key"};
  if (Status secret = describe_secret(mine); !secret) return secret;
  mine->token = engine_.presence().token();
  mine->pid = getpid();
  for (char c : options_.routes)
    mine->routes = extend_digest(mine->routes, static_cast<unsigned char>(c));
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
    if (Status out = publish(store_, "rank_info", rank_, encode(mine)); !out) return out;
    std::vector<int> all(static_cast<size_t>(ranks_));
    std::iota(all.begin(), all.end(), 0);
    auto blobs = collect(store_, "rank_info", all);
    if (!blobs) return blobs.status();
    for (const auto& blob : blobs.value()) {
      auto decoded = decode(blob);
      if (!decoded) return decoded.status();
      infos_.push_back(std::move(decoded.value()));
    }
  }
  std::vector<std::string> hosts, host_names;
  for (const RankInfo& i : infos_) {
    hosts.push_back(i.host);
    host_names.push_back(i.host_name);
  }
  members_.emplace(rank_, Topology(hosts), options_.name, std::move(host_names), options_.called);
  return {};
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
      Status out = publish(store_, "fabric", rank_, encode(open_fabric(engine_)));
      if (!out) return out;
    }
    auto blobs = collect(store_, "fabric", unopened);
    if (!blobs) return blobs.status();
    for (size_t i = 0; i < unopened.size(); ++i) {
      auto fabric = decode_fabric(blobs.value()[i]);
      if (!fabric) return fabric.status();
      info(unopened[i]).fabric = std::move(fabric.value());
    }
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
  if (topology.local_index(rank_) == 0) {
    if (Status out = publish(store_, "joined", rank_, {1}); !out) return out;
  }
  return collect(store_, "joined", first_of_hosts).status();
}

Status GroupBuilder::join_remote_peers() {
  if (topology().nodes() == 1) return {};
  std::vector<Rank> peers;  // in the order of the flows
  auto flows = pattern::gather_flows(topology(), rank_, pattern::Pattern::kDirect);
  for (const auto* side : {&flows.out, &flows.in}) {
    for (const pattern::Flow& flow : *side) {
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

}  // namespace

Status Group::tell_failure(Store& store, int rank, const Options& options,
                           const Status& why) noexcept {
  try {
    if (Status cause = published_failure(store); !cause) return cause;
    int called = options.called.empty() ? rank : options.called[static_cast<size_t>(rank)];
    std::string host = options.host.empty() ? host_name() : options.host;
    Status cause{why.code(), "rank " + std::to_string(called) + " (" + host +
                                 ") could not join group '" + options.name + "': " + why.message()};
    publish_failure(store, cause);
    return cause;
  } catch (...) {
    return copy_of(why);
  }
}

Result<std::unique_ptr<Group>> Group::create(Engine& engine, Store& store, int rank, int ranks,
                                             Options options) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Status(Code::kInvalid,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " is no rank");
  }
  Making making(engine);
  GroupBuilder builder(engine, store, rank, ranks, options);
  std::unique_ptr<Group> group;
  Status made;
  try {
    auto parts = builder.build();
    made = parts.status();
    if (made) {
      group.reset(new Group(engine, options, std::move(parts.value())));
      engine.attach(group->key_, group.get());
      made = builder.await_hosts(group->topology());
    }
  } catch (...) {
    made = status_of_exception();
  }
  if (made) return group;
  made = builder.fail(made);
  if (group) group->abort(made.message(), true);
  return made;
}

Group::Group(Engine& engine, Options options, GroupParts parts)
    : engine_(engine),
      options_(std::move(options)),
      key_(parts.key),
      members_(std::move(parts.members)),
      shape_(parts.shape),
      local_(std::move(parts.local)),
      remote_(std::move(parts.remote)),
      tallies_(members_.ranks()),
      remote_watch_(key_, members_, remote_, fragments_, std::move(parts.liveness),
                    options_.silence_ns),
      local_watch_(members_, local_, fragments_, options_.silence_ns),
      failures_(members_, local_, remote_, fragments_, health_, remote_watch_, local_watch_,
                options_.timeout_ns),
      ending_(remote_, fragments_),
      recorder_(options_.name + options_.part),
      context_{members_, shape_, local_, remote_, turns_, tallies_, health_, engine_.staging()},
      maker_(context_, parts.algorithm, fragments_) {}

Result<std::unique_ptr<Group>> Group::subgroup(Store& store, const std::string& label,
                                               const std::vector<Rank>& ranks) {
  Options options = options_;
  {
    Engine::Lock lock = engine_.lock();
    options.timeout_ns = failures_.timeout_ns();
  }
  options.several_hosts = topology().nodes() > 1;
  options.part += "/" + label;
  options.called.clear();
  int mine = -1;
  for (Rank r : ranks) {
    if (r == rank()) mine = static_cast<int>(options.called.size());
    options.called.push_back(members_.called(r));
  }
  PrefixStore prefixed(store, label + "/");
  return create(engine_, prefixed, mine, static_cast<int>(ranks.size()), std::move(options));
}

}  // namespace smddp
