// How a group comes to be: one exchange of cards, the node's segments, then, where there are
// several nodes, one exchange of fabric addresses.
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "collectives/communicator.h"
#include "common/env.h"
#include "schedule/pattern.h"

namespace smddp {
namespace {

// A rank that can't open its fabric says so in place of an address, so that the others do not wait.
constexpr uint8_t kAddress = 1;
constexpr uint8_t kReason = 0;

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::create(Engine& engine, Store& store, int rank,
                                                           int ranks, Options options) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Status(Code::kInvalid,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " is no rank");
  }
  std::unique_ptr<Communicator> group(new Communicator(engine, rank, std::move(options)));
  Card mine;
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
  }
  std::vector<int> everyone(static_cast<size_t>(ranks));
  std::iota(everyone.begin(), everyone.end(), 0);
  auto blobs = ranks > 1 ? exchange(store, "card", rank, encode(mine), everyone)
                         : Result<std::vector<std::vector<uint8_t>>>({encode(mine)});
  if (!blobs) return blobs.status();
  std::vector<Card> cards;
  std::vector<std::string> hosts;
  for (const auto& blob : blobs.value()) {
    auto card = decode(blob);
    if (!card) return card.status();
    hosts.push_back(card.value().host);
    group->host_names_.push_back(card.value().host_name);
    cards.push_back(std::move(card.value()));
  }
  group->key_ = cards[0].key;
  group->topology_ = Topology(hosts);
  group->shape_ = {ranks, group->topology_.nodes(), false,
                   pattern::equal_nodes(group->topology_), {}};
  group->rails_.resize(static_cast<size_t>(ranks));
  if (Status joined = group->join_node(cards); !joined) return joined;
  if (Status joined = group->join_rails(store); !joined) return joined;
  engine.attach(group->key_, group.get());
  return group;
}

Status Communicator::join_node(const std::vector<Card>& cards) {
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
  outbox_->expect(static_cast<int>(local_peers_.size()));
  bool allow = options_.single_copy && env::get("SINGLE_COPY") != "0";
  for (Rank peer : local_peers_) {
    const Card& card = cards[static_cast<size_t>(peer)];
    // Among the readers of a peer's outbox, in order of local index, the peer itself is left out.
    int reader = topology_.local_index(rank_) - (peer < rank_ ? 1 : 0);
    auto inbox = intranode::Inbox::open(card.pid, card.outbox_fd, card.key, reader, allow);
    if (!inbox) return {inbox.status().code(), describe(peer) + ": " + inbox.status().message()};
    inboxes_.push_back(std::move(inbox.value()));
    auto neighbor = engine_.neighbor(card);
    if (!neighbor)
      return {neighbor.status().code(), describe(peer) + ": " + neighbor.status().message()};
    neighbors_.push_back(std::move(neighbor.value()));
  }
  for (auto& neighbor : neighbors_) neighbor->wake();  // it may wait for this rank's verdict
  return {};
}

Status Communicator::join_rails(Store& store) {
  if (topology_.nodes() == 1) return {};
  auto endpoint = engine_.fabric();
  std::vector<uint8_t> blob;
  if (endpoint.ok()) {
    endpoint_ = endpoint.value();
    blob = endpoint_->address();
    blob.insert(blob.begin(), kAddress);
  } else {
    const std::string reason = endpoint.status().message();
    blob.assign(reason.begin(), reason.end());
    blob.insert(blob.begin(), kReason);
  }
  std::vector<int> everyone(static_cast<size_t>(ranks()));
  std::iota(everyone.begin(), everyone.end(), 0);
  auto blobs = exchange(store, "fabric", rank_, blob, everyone);
  if (!blobs) return blobs.status();
  for (Rank r = 0; r < ranks(); ++r) {
    const auto& theirs = blobs.value()[static_cast<size_t>(r)];
    if (!theirs.empty() && theirs[0] == kAddress) continue;
    return {Code::kUnavailable,
            "group '" + options_.name + "' spans " + std::to_string(topology_.nodes()) +
                " hosts and " + describe(r) + " has no fabric: " +
                std::string(theirs.begin() + (theirs.empty() ? 0 : 1), theirs.end())};
  }
  auto flows = pattern::gather_flows(topology_, rank_, pattern::Pattern::kDirect);
  for (const auto* side : {&flows.out, &flows.in}) {
    for (const pattern::Flow& flow : *side) {
      if (std::find(rail_.begin(), rail_.end(), flow.peer) == rail_.end())
        rail_.push_back(flow.peer);
    }
  }
  peer_of_.resize(static_cast<size_t>(ranks()));
  for (Rank r : rail_) {
    const auto& theirs = blobs.value()[static_cast<size_t>(r)];
    Engine::Lock lock = engine_.lock();
    auto peer = endpoint_->add_peer({theirs.begin() + 1, theirs.end()});
    if (!peer) return {peer.status().code(), describe(r) + ": " + peer.status().message()};
    peer_of_[static_cast<size_t>(r)] = peer.value();
  }
  return {};
}

}  // namespace smddp
