#include "group/group_builder.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "common/clock.h"
#include "common/env.h"
#include "common/exceptions.h"
#include "common/log.h"
#include "group/measured_host.h"
#include "group/measured_network.h"
#include "liveness/contact.h"
#include "network/measurement.h"
#include "topology/pattern.h"

namespace smddp {
namespace {

// How long a rank that waits for the others of its host sleeps between looks for ranks that ended.
constexpr uint64_t kAttachLookNs = 100'000'000;

// An answer of another host takes milliseconds. Later the store is looked at as well.
constexpr uint64_t kAnswerNs = 500'000'000;
constexpr std::chrono::milliseconds kAnswerPause(50);
// For so long one is waited for that neither answers nor refuses: its host is busy, or a firewall drops.
constexpr uint64_t kReachNs = 10'000'000'000;

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
FabricAddress open_fabric(Process& process) {
  auto endpoint = process.fabric();
  if (!endpoint) return {Fabric::kUnavailable, {}, endpoint.status().message(), {}};
  Engine::Lock lock = process.engine().lock();
  liveness::Liveness* liveness = process.network().liveness();
  return {Fabric::kOpen,
          endpoint.value()->facts().address,
          {},
          liveness != nullptr ? liveness->contact() : std::vector<uint8_t>()};
}

OwnPlace place_of(Process& process) {
  Engine::Lock lock = process.engine().lock();
  return process.place();
}

// What this process has found out of its host: word_of_reads().
std::atomic<uint64_t> known_of_host{0};

// As long as a group is made, the engine keeps the endpoint that it is made with.
class CountedMaking {
 public:
  explicit CountedMaking(Engine& engine) : engine_(engine) { engine_.count_making(1); }
  ~CountedMaking() { engine_.count_making(-1); }
  CountedMaking(const CountedMaking&) = delete;
  CountedMaking& operator=(const CountedMaking&) = delete;

 private:
  Engine& engine_;
};

}  // namespace

GroupBuilder::GroupBuilder(Process& process, Store& store, Rank rank, int ranks,
                           GroupOptions options)
    : process_(process),
      store_(store),
      rank_(rank),
      ranks_(ranks),
      options_(std::move(options)),
      watch_(process, store, ranks, options_),
      joining_(
          store, rank, ranks, options_, [this](auto&&... of) { return watch_.look(of...); },
          place_of(process)),
      network_(options_.name, options_.network) {}

Result<std::unique_ptr<Group>> GroupBuilder::build() {
  CountedMaking counted(process_.engine());
  std::unique_ptr<Group> group;
  Status made = without_exceptions([&] { return build_steps(&group); });
  if (made) {
    conclude(*group);
    return group;
  }
  made = fail(made);
  if (group) group->abort(made.message(), true);
  return made;
}

Status GroupBuilder::build_steps(std::unique_ptr<Group>* group) {
  RankInfo mine;
  Status known = describe_itself(&mine);
  if (known) known = joining_.exchange(std::move(mine));
  if (known) known = agree();
  // First of all the errors that all ranks find alike: then no rank waits for a rank that gave up.
  if (known) known = joining_.exchange_fabrics([&] { return open_fabric(process_); });
  if (known) known = join_peers();
  if (!known) return known;
  if (Status s = finish().into(*group); !s) return s;
  if (Status joined = await_hosts(); !joined) return joined;
  (*group)->use(network_.model());
  return asks_host_ ? ask_host(**group) : Status();
}

Status GroupBuilder::join(std::vector<RankInfo>& infos) {
  joining_.learn(std::move(infos));
  Status joined = agree();
  if (joined) joined = join_peers();
  infos = joining_.take_infos();
  return joined;
}

Result<std::unique_ptr<Group>> GroupBuilder::finish() {
  if (Status joined = await_host(); !joined) return joined;
  decide_reads();
  std::unique_ptr<Group> group(
      new Group(process_, options_,
                GroupParts{joining_.key(), members(), shape_, algorithm_, std::move(local_),
                           std::move(*remote_), std::move(liveness_)}));
  process_.engine().attach(joining_.key(), group.get());
  return group;
}

Status GroupBuilder::describe_itself(RankInfo* mine) {
  if (Status s = parse_algorithm(env::debug("algorithm")).into(algorithm_); !s) return s;
  Engine::Lock lock = process_.engine().lock();
  const Network::Known& last = process_.network().known();
  Status known = network_.read_settings(last.doubted ? "" : last.model);
  lock.unlock();
  if (known) known = joining_.describe(process_.presence().token(), mine);
  if (!known) return known;
  mine->network = network_.claim();
  mine->presence_fd = process_.presence().presence_fd();
  mine->wake_fd = process_.presence().wake_fd();
  if (ranks_ == 1) return {};
  // Sized for the case that all ranks share this host; untouched pages cost nothing.
  knows_ = known_of_host;
  if (Status s = intranode::Outbox::create(mine->key, ranks_ - 1, knows_).into(outbox_); !s)
    return s;
  mine->outbox_fd = outbox_->fd();
  if (process_.open_fabric() != nullptr || options_.several_hosts || launched_on_several_hosts())
    mine->fabric = open_fabric(process_);
  return {};
}

Status GroupBuilder::agree() {
  if (Status known = joining_.agree(); !known) return known;
  std::vector<NetworkClaim> claims;
  for (const RankInfo& info : joining_.infos()) claims.push_back(info.network);
  return joining_.found_alike(network_.agree(claims, members()));
}

// The host last: a rank that has attached to the last segment has nothing left that may fail.
Status GroupBuilder::join_peers() {
  Status joined = join_remote_peers();
  if (joined) joined = reach_hosts();
  return joined ? join_host() : joined;
}

Status GroupBuilder::join_host() {
  const std::vector<Rank>& here = topology().node(topology().node_of(rank_));
  process_.engine().expect_local_ranks(static_cast<int>(here.size()));
  auto readers = static_cast<int>(here.size()) - 1;
  if (readers == 0) return {};
  outbox_->expect(readers);
  local_ = LocalPeers(std::move(outbox_));
  bool allow = options_.single_copy.value_or(env::debug("single_copy") != "0");
  auto failed = [&](Rank peer, const Status& why) {
    Status seen = watch_.look(peer, info(peer), info(rank_).host);
    if (seen.code() == Code::kPeerLost) return seen;
    return Status(why.code(), members().describe(peer) + ": " + why.message());
  };
  std::vector<std::shared_ptr<intranode::Neighbor>> neighbors;
  for (Rank peer : here) {
    if (peer == rank_) continue;
    auto neighbor = process_.neighbor(info(peer));
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
      Engine::Lock lock = process_.engine().lock();  // other groups have the same neighbour
      if (reason == nullptr && !local_.neighbor(i).look_for_death()) continue;
      // A rank that got past this point, and then ended, did so after the last rank had attached.
      if (local_.all_attached()) return {};
      std::string peer = members().describe(local_.rank(i));
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

// Every rank of the host sees the same words and verdicts.
void GroupBuilder::decide_reads() {
  if (topology().nodes() > 1 || ranks_ == 1 || !local_.may_read_memory()) return;
  bool wanted = options_.single_copy.value_or(env::debug("single_copy") == "1");
  bool same = true;
  for (int i = 0; i < local_.count(); ++i) same &= local_.inbox(i).owner_knows() == knows_;
  shape_.reads_up_to = wanted ? SIZE_MAX : same ? reads_of(knows_) : 0;
  asks_host_ = !wanted && (knows_ == 0 || !same);
}

// What it carries out for that are no operations of the group.
Status GroupBuilder::ask_host(Group& group) {
  group.ask(true);
  auto found =
      measure_host(process_.engine(), group, [&](size_t up_to) { group.use_reads(up_to); });
  group.ask(false);
  if (!found) return found.status();
  group.use_reads(found.value());
  known_of_host = word_of_reads(found.value());
  return {};
}

Status GroupBuilder::join_remote_peers() {
  shape_ = {ranks_, topology().nodes(), {}, pattern::equal_nodes(topology()), network_.model()};
  remote_.emplace(joining_.key(), joining_.key_of_messages(), rank_, ranks_,
                  topology().nodes() > 1 ? process_.open_fabric() : nullptr,
                  receive_budget_bytes(shape_), shape_.equal_nodes ? shape_.nodes : 0);
  if (topology().nodes() == 1) return {};
  const std::vector<Rank> peers = remote_peers();
  Engine::Lock lock = process_.engine().lock();
  liveness_.service = process_.network().liveness();
  for (Rank r : peers) {
    if (Status met = meet(r); !met) return met;
    auto peer = remote_->transport().add_peer(info(r).fabric.address);
    if (!peer)
      return {peer.status().code(), members().describe(r) + ": " + peer.status().message()};
    remote_->add(r, peer.value());
  }
  return {};
}

// In the order of the flows.
std::vector<Rank> GroupBuilder::remote_peers() const {
  std::vector<Rank> peers;
  auto add = [&](const std::vector<pattern::Flow>& flows) {
    for (const pattern::Flow& flow : flows) {
      if (std::find(peers.begin(), peers.end(), flow.peer) == peers.end())
        peers.push_back(flow.peer);
    }
  };
  pattern::Flows flows = pattern::gather_flows(topology(), rank_, pattern::Pattern::kDirect);
  add(flows.out);
  add(flows.in);
  if (pattern::pairs_ranks(topology())) add(pattern::pair_flows(topology(), rank_).out);
  return peers;
}

// An address that two machines have is of use on its own machine alone: docker0's, or the loopback's.
Status GroupBuilder::meet(Rank rank) {
  const Blob& contact = info(rank).fabric.liveness;
  std::optional<liveness::Process>& known = liveness_.processes.emplace_back();
  if (liveness_.service == nullptr || contact.empty()) return {};
  auto theirs = liveness::unpack(contact), ours = liveness::unpack(liveness_.service->contact());
  std::string there = boot_id_of(info(rank).host), here = boot_id_of(info(rank_).host);
  if (theirs && ours && theirs.value().ip == ours.value().ip && there != here && !there.empty() &&
      !here.empty()) {
    return {Code::kInvalid,
            members().describe(rank) + " and " + members().describe(rank_) +
                " run on two machines and say that they are reached at the same address, " +
                ours.value().text() +
                ": set SMDDP_FABRIC_INTERFACE to the interface that connects the machines"};
  }
  if (auto process = liveness_.service->meet(contact)) known = process.value();
  return {};
}

// That a process refuses connections tells its end only if it was reached before: so none may end unseen before that.
// Now the first rank of each other host still counts, as it can't have the group without this rank. It sees its host's
// other ranks itself. One that counts and refuses is behind a firewall, as are others then.
Status GroupBuilder::reach_hosts() {
  using liveness::Reach;
  const std::vector<Rank>& peers = remote_->ranks();
  std::vector<size_t> unreached;
  for (size_t i = 0; i < peers.size(); ++i) {
    if (topology().local_index(peers[i]) == 0 && liveness_.processes[i]) unreached.push_back(i);
  }
  auto is = [&](Reach reach) {
    return [this, reach](size_t i) {
      return liveness_.service->reach(*liveness_.processes[i]) == reach;
    };
  };
  const uint64_t began = now_ns();
  for (Pause pause(kAnswerPause);; pause.sleep()) {
    std::erase_if(unreached, is(Reach::kSettled));
    if (unreached.empty()) return {};
    const uint64_t waited = now_ns() - began;
    if (waited < kAnswerNs) continue;
    if (Status failure = published_failure(store_); !failure) return failure;
    auto refuses = std::find_if(unreached.begin(), unreached.end(), is(Reach::kRefuses));
    const Rank peer = peers[refuses != unreached.end() ? *refuses : unreached[0]];
    if (Status alive = watch_.look(peer, info(peer), info(rank_).host); !alive) return alive;
    if (watch_.counts(peer) && (refuses != unreached.end() || waited >= kReachNs))
      give_up_reaching(unreached);
    if (waited >= options_.timeout_ns) return did_not_join(store_, {peer});
  }
}

void GroupBuilder::give_up_reaching(const std::vector<size_t>& peers) {
  std::string ports;
  for (size_t i : peers) {
    const liveness::Process process = *liveness_.processes[i];
    liveness_.service->give_up_reaching(process);
    ports += (ports.empty() ? "" : ", ") + members().describe(remote_->ranks()[i]) + " at " +
             liveness_.service->text(process);
  }
  log(LogLevel::kWarning,
      members().describe(rank_) + " can't reach " + ports +
          ": if they end, that is noticed at the deadline only. Let TCP pass between the hosts");
}

Status GroupBuilder::await_hosts() {
  if (topology().nodes() == 1) return {};
  auto recall = [&]() -> std::string {
    const transport::Transport* transport = process_.open_fabric();
    if (!network_.unknown() || !measuring_pair(topology(), rank_) || transport == nullptr)
      return {};
    std::vector<std::string> hosts;
    for (const RankInfo& info : joining_.infos()) hosts.push_back(info.host);
    return network_.recall(cache_of(hosts, transport->facts()));
  };
  auto recalled = joining_.agree_among_hosts(InfoExchange::kJoined, recall, [&](const auto& told) {
    return agree_on_recalled(told, topology());
  });
  if (!recalled) return recalled.status();
  network_.take_recalled(recalled.value());
  if (!network_.unknown()) return {};
  auto measured = joining_.agree_among_hosts(
      InfoExchange::kMeasured,
      [&] { return measure_network(process_, store_, topology(), rank_, options_); },
      agree_on_measurements);
  return measured ? network_.take_measured(measured.value(), rank_ == 0) : measured.status();
}

void GroupBuilder::conclude(Group& group) noexcept {
  try {
    Engine::Lock lock = process_.engine().lock();
    if (options_.whole_job) process_.set_on_one_host(topology().nodes() == 1);
    group.last_keys_ = joining_.take_last_keys();
    process_.forget_cause();  // of a measurement that failed
    if (!network_.source().empty())
      process_.network().remember({text_of(network_.model()), network_.source()});
    lock.unlock();
    auto place = joining_.conclude();
    lock.lock();
    if (place) process_.place() = std::move(*place);
  } catch (...) {  // without memory later groups find out again what this one knows
  }
}

// The user may give up its other groups in consequence.
Status GroupBuilder::fail(const Status& why) noexcept {
  Status cause = joining_.fail(why);
  try {
    Engine::Lock lock = process_.engine().lock();
    process_.blame(cause.message());
  } catch (...) {  // without memory they are given up without a cause
  }
  local_.abort(cause.message(), 0);
  if (outbox_) outbox_->abort(cause.message(), 0);
  return cause;
}

}  // namespace smddp
