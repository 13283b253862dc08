// A group of ranks: who they are, how they are reached, and the queue of what they do together.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/store.h"
#include "collectives/fragment.h"
#include "collectives/operation.h"
#include "collectives/selector.h"
#include "progress/engine.h"
#include "topology/topology.h"

namespace smddp {

class Group : private Progressable {
 public:
  struct Options {
    std::string name;
    uint64_t timeout_ns = 600'000'000'000ull;
    std::string host;  // identity of this rank's host; empty: host_identity()
    // Whether to read peers' memory with process_vm_readv; unset: SMDDP_SINGLE_COPY, or what costs less
    // on this host.
    std::optional<bool> single_copy;
    // The job is known to span hosts: the fabric is opened before the first group knows its ranks,
    // which saves it a round over the store. Where WORLD_SIZE says so, it is known without this.
    bool several_hosts = false;
    // What the ranks are called in sentences for the user; empty: by their number here.
    std::vector<Rank> called;
  };

  // Blocks until every rank of the group has joined, or the store's timeout is over.
  static Result<std::unique_ptr<Group>> create(Engine& engine, Store& store, int rank, int ranks,
                                               Options options);
  // A group of some of its ranks, in the order given, of which this rank must be one. A call of those
  // ranks; `store` is one that the group's ranks share, `label` tells their groups apart.
  Result<std::unique_ptr<Group>> subgroup(Store& store, const std::string& label,
                                          const std::vector<Rank>& ranks);
  ~Group() override;

  // Starts `operation`, after all earlier ones of this group. `background`: nobody is going to wait
  // for it at once. Its end, good or bad, is the operation's status.
  void submit(const std::shared_ptr<Operation>& operation, const Tuning& tuning, bool background);
  // Fails everything in flight, here and on the other ranks, and everything to come. Without anything
  // in flight it does nothing, unless `idle_too`.
  void abort(const std::string& reason, bool idle_too = false);

  int rank() const { return rank_; }
  int ranks() const { return topology_.ranks(); }
  const Topology& topology() const { return topology_; }
  const std::string& name() const { return options_.name; }
  Status status();  // ok until the group is broken
  void set_timeout(uint64_t timeout_ns) { options_.timeout_ns = timeout_ns; }

  // --- for the rounds, under the engine's lock
  // -----------------------------------------------------

  const Shape& shape() const { return shape_; }
  int local_peers() const { return static_cast<int>(inboxes_.size()); }
  Rank local_peer(int i) const { return local_peers_[static_cast<size_t>(i)]; }
  intranode::Outbox& outbox() { return *outbox_; }
  intranode::Inbox& inbox(int i) { return *inboxes_[static_cast<size_t>(i)]; }
  // The head of peer i's outbox if it belongs to `round`. Fails the group when the two ranks
  // disagree about what that round is.
  const intranode::Piece* head(int i, const Fragment& fragment);
  void push(const Fragment& fragment, intranode::Piece piece);
  void pop(int i);
  // Bytes of that head, from `offset` on, that can be read where they lie, and where: in its slot, or
  // in memory that the peer shares. 0: they have to be fetched with a single-copy read.
  size_t reach(int i, size_t offset, const std::byte** at);
  // True where every local peer can read these extents in place.
  bool shares(const std::vector<Extent>& extents) const;

  fabric::Endpoint& endpoint() { return *endpoint_; }
  fabric::Peer peer(Rank rank) const { return peer_of_[static_cast<size_t>(rank)]; }
  StagingPool& staging() { return engine_.staging(); }
  // Tells `to` that this rank has started `round` and takes `allowed` bytes of its flow, with `grant`
  // where its memory is open for it.
  void send_ready(const Fragment& fragment, Rank to, uint64_t allowed, const wire::Grant* grant);
  ReceiveBudget& receive_budget() { return receive_budget_; }
  // True where no earlier round that keeps step still has data to come.
  bool rails_are_free(const Fragment& fragment) const;
  // True where those are in their last steps.
  bool rails_soon_free(const Fragment& fragment) const;
  bool is_oldest(const Fragment& fragment) const { return active_.front().get() == &fragment; }
  // True where `to` has started round `seq`, or has room for `bytes` bytes of a round that it may not
  // have started: those are then taken off its room until it is heard to have started the round.
  bool may_send_early(Rank to, uint64_t seq, size_t bytes);
  size_t credit() const;  // that room, when nothing fills it
  // True where `to` knows, or will know, that this rank has made the group.
  bool has_greeted(Rank to) const { return remote_peers_[static_cast<size_t>(to)].greeted; }
  // Sends what lies behind the header's room in `buffer` as bytes [offset, offset + bytes) of the
  // flow of `round` to the peer that the buffer was acquired for.
  void send_data(const Fragment& fragment, fabric::SendBuffer* buffer, uint64_t offset,
                 size_t bytes);

  std::string describe(Rank rank) const;  // "rank 3 (host b)"
  void fail(Status why);
  // Fails the group because local peer i ended while `round` needed it.
  void lose(int i, const Fragment& fragment);
  // The same for any failed look at local peer i's memory.
  void fail_read(int i, const Fragment& fragment, const Status& why);

 private:
  Group(Engine& engine, int rank, Options options)
      : engine_(engine), rank_(rank), options_(std::move(options)) {}
  Status learn_fabric(Store& store, std::vector<RankInfo>& infos);
  Status join_node(const std::vector<RankInfo>& infos);
  // False until every rank of the node has judged whether it may read the others' memory.
  bool node_attached();
  Status join_rails(const std::vector<RankInfo>& infos);
  Status await_node();

  bool busy() const override;
  bool progress() override;
  bool watch(uint64_t now_ns) override;
  uint64_t deadline_ns() const override;
  void on_message(const wire::Header& header, const std::byte* payload) override;
  void on_peer_lost(fabric::Peer peer, const Status& why) override;
  void leave() override;

  void enqueue(const std::shared_ptr<Operation>& operation, const Tuning& tuning);
  bool start_fragments();
  bool finish_fragments();
  uint64_t oldest_unfinished() const;  // the sequence number of that round
  void check_aborts();
  void check_neighbors();
  void set_deadlines(uint64_t now);
  void check_deadline(uint64_t now);
  void remind();
  Fragment* active(uint64_t seq);
  void dispatch(Fragment& fragment, const wire::Header& header, const std::byte* payload);
  void keep_early(const wire::Header& header, const std::byte* payload);
  bool flush_ready();
  uint64_t expires_ns(const Fragment& fragment) const;
  void flush_aborts();
  wire::Header header(wire::Type type, uint64_t seq, const Signature& signature) const;
  void post(fabric::SendBuffer* buffer, const wire::Header& header);

  Engine& engine_;
  const int rank_;
  Options options_;
  JobKey key_{};
  Topology topology_;
  Shape shape_;
  Algorithm algorithm_ = Algorithm::kAuto;  // where an operation's tuning leaves it open
  bool attached_ = false;
  std::vector<std::string> host_names_;

  // The node: peers in the order of their local index, this rank left out.
  std::vector<Rank> local_peers_;
  std::vector<std::shared_ptr<intranode::Neighbor>> neighbors_;
  std::unique_ptr<intranode::Outbox> outbox_;
  std::vector<std::unique_ptr<intranode::Inbox>> inboxes_;
  bool pushed_since_wake_ = false;
  std::vector<bool> popped_since_wake_;

  // The rails.
  fabric::Endpoint* endpoint_ = nullptr;
  std::vector<Rank> remote_ranks_;     // ranks this one exchanges messages with
  std::vector<fabric::Peer> peer_of_;  // by rank; valid for those in remote_ranks_

  ReceiveBudget receive_budget_;

  // What a rail peer is known to have started, and what went to it before that was known.
  struct RemotePeer {
    uint64_t heard = 0;  // one past the latest round that a message of it belonged to
    std::deque<std::pair<uint64_t, size_t>> ahead;  // (round, bytes)
    size_t ahead_bytes = 0;
    std::set<uint64_t> refused;  // rounds that found no room: others wait behind them
    bool greeted = false;        // a READY has gone to it
    size_t kept_bytes = 0;       // of its early data, here
  };
  std::vector<RemotePeer> remote_peers_;  // by rank

  // Messages of rounds not yet started here.
  struct Early {
    wire::Header header;
    std::vector<std::byte> payload;
  };
  std::vector<Early> early_;
  // READY messages that found no send buffer.
  struct Ready {
    Rank rank;
    wire::Header header;
    wire::Grant grant;
  };
  std::deque<Ready> unsent_ready_;
  std::vector<Rank> unsent_abort_;

  std::deque<std::unique_ptr<Fragment>> queued_, active_;
  uint64_t next_seq_ = 0;  // of the next round enqueued
  uint64_t operations_ = 0;
  bool moved_ = false;         // when progress() last looked
  bool moved_lately_ = false;  // since watch() last looked
  uint64_t moved_ns_ = 0;      // when that last found so, or peers were last reminded
  Status health_;              // not ok: the group is broken, and why
  uint64_t gave_up_from_ = 0;  // then: the first round that it did not finish
  // Of the remote ranks that gave the group up, whose first such round is the earliest.
  struct {
    uint64_t from = UINT64_MAX;
    std::string reason;
  } heard_abort_;
};

}  // namespace smddp
