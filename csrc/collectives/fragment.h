// A fragment: the part of one operation that is scheduled as a unit, bytes [begin, begin + limit) of
// every rank's block. It exchanges pieces with the ranks of this host, through their outboxes, and
// flows with ranks of other hosts. A fragment is a state machine that progress() advances; it never
// blocks. allgather.cc, reduce_scatter.cc, allreduce.cc and all_to_all.cc each hold one kind; this class
// holds what they share. A fragment must not know the group's queue or its other fragments. The Group calls it,
// under the engine's lock.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "common/small_vector.h"
#include "common/staging.h"
#include "flows/fragment_flows.h"
#include "flows/health.h"
#include "flows/local_peers.h"
#include "flows/rail_turns.h"
#include "flows/remote_peers.h"
#include "topology/members.h"

namespace smddp {

// What the fragments of a group work with. All of it lives longer than they do, except for those that
// are kept until the fabric closes, which are never called again.
struct FragmentContext {
  const Members& members;
  const Shape& shape;
  LocalPeers& local;
  RemotePeers& remote;
  RailTurns& turns;
  PeerTallies& tallies;
  CodingChoice& coding;
  Health& health;
  StagingPool& staging;
};

// How far the sums of this rank's block have come in one part of an AllReduce: bytes from the part's start that lie
// in the output. The part's ReduceScatter writes it, and its AllGather passes on what is there.
struct PartSums {
  size_t here = 0;
};

class Fragment {
 public:
  // `lane`: of its pieces inside the host, if the group has several hosts. In one host no fragment waits for long, and
  // the slots of one lane stay in the caches. `gathers_sums`: it passes on what an earlier fragment sums, and so waits
  // for other ranks from the start.
  Fragment(const FragmentContext& context, std::shared_ptr<Operation> operation, uint64_t seq,
           size_t begin, size_t limit, intranode::Lane lane, bool gathers_sums = false)
      : members_(context.members),
        shape_(context.shape),
        local_(context.local),
        remote_(context.remote),
        tallies_(context.tallies),
        health_(context.health),
        staging_pool_(context.staging),
        operation_(std::move(operation)),
        seq_(seq),
        begin_(begin),
        limit_(limit),
        lane_(context.shape.nodes > 1 ? lane : intranode::Lane::kSums),
        gathers_sums_(gathers_sums),
        flows_(context.members, context.remote, context.turns,
               {operation_->signature(), seq, operation_->plan().pattern,
                operation_->plan().chunk_bytes, begin == 0, operation_->on_device,
                limits_of(context, operation_->plan().chunk_bytes),
                gathers_sums ? nullptr : &context.tallies, operation_->waited_from_ns,
                coding_of(context), operation_->sent}) {}
  Fragment(const Fragment&) = delete;
  Fragment& operator=(const Fragment&) = delete;
  virtual ~Fragment() = default;

  // Once, before any other call.
  virtual void start() = 0;
  // Pushes to this host's ranks if `may_push` (fragments of a lane push in order), takes in, sends out. True if
  // anything moved.
  virtual bool progress(bool may_push) = 0;
  virtual bool pushed() const = 0;  // nothing more will go into the outbox
  intranode::Lane lane() const { return lane_; }
  // The same, all results are in place, and no other rank still reads this rank's memory.
  virtual bool complete() const = 0;
  // The ranks that it waits for, as the end of a sentence: "no data from rank 3 (host b)".
  virtual std::string waiting_for() const;
  // False if the ranks that waiting_for() names may themselves wait for a rank that this one can't see.
  virtual bool can_blame() const { return true; }

  // After start(): follows when the other ranks start the operation, if this is its first fragment. Gathers of
  // sums are not: they wait for other ranks.
  void follow_starts();
  // Notes the ranks of this host that have started it since the last look.
  void look_for_starts() {
    if (starts_.any_unseen()) look_at_inboxes();
  }
  // The first message that `source` sent of this fragment or of a later one is a `type`.
  void on_start(Rank source, wire::Type type);

  // A message for this fragment, whose key has been checked. An error ends the group.
  Status on_message(const wire::Header& header, const std::byte* payload);
  // Repeats the READYs to the remote ranks whose data is still to come.
  void remind() { flows_.remind(); }
  // Whether bytes of another rank have come.
  bool has_received() const { return has_received_; }
  // f(rank, bytes that are expected from it or 0 if that is not known, bytes that have come) for each rank
  // that still has to send something, or to take something.
  template <class F>
  void for_each_awaited(F&& f) const;
  // The flows to and from other hosts.
  const FragmentFlows& flows() const { return flows_; }
  // Closes a fragment that is complete. Only the destructor may be called after it.
  std::shared_ptr<Operation> close();
  // After a failure, in this order; as of FragmentFlows.
  void stop() { flows_.stop(); }
  bool closed() const { return flows_.closed(true); }
  bool may_overtake(Rank peer) const { return flows_.may_overtake(peer); }
  void close_flows() { entangled_ = flows_.give_up(); }
  // After it: whether the network may still touch memory of the operation, so that both have to be kept.
  bool entangled() const { return entangled_; }

  Operation& operation() const { return *operation_; }
  const std::shared_ptr<Operation>& operation_ptr() const { return operation_; }
  uint64_t seq() const { return seq_; }
  // True if local peer i will still push to it, or read what this rank pushed.
  bool needs(int i) const {
    return !heard(i) || local_.outbox().read_by(lane_, i) < local_.outbox().published(lane_);
  }
  // "all_gather(...) #3 of group 'g'"
  std::string describe() const;
  // The error that says that local peer i ended.
  Status lost(int i) const;

 protected:
  // Bytes of `block` of `blocks` that fall into this fragment.
  size_t part(const Blocks& blocks, Rank block) const {
    return blocks.bytes(block, begin_, limit_);
  }
  // Puts the bytes of a message where they belong, by default into the output; `offset` is into the flow's run.
  virtual void place(const ReceiveFlow& receive, size_t offset, const std::byte* payload,
                     size_t bytes);
  // Bytes that local peer i pushes in all; 0: not known.
  virtual uint64_t expected_from(int) const { return 0; }

  // Sends what may go out of the flows. Of a flow's run the first available(flow) bytes are here;
  // read(shard, offset into it, to, bytes) reads those that do not lie end to end.
  template <class Available, class Read>
  bool send(Available&& available, Read&& read);

  // Whether results are to be written past the caches.
  bool streams() const;
  // True if the local peers read this rank's memory for this fragment. What it pushes then costs it
  // nothing, and a peer with no piece left can only wait: so pushes come before every piece taken in.
  bool exposes() const { return exposed_until_ != 0; }
  // Where `bytes` bytes of a block at `at` lie, if the local peers are to read them there; empty: the
  // bytes go into slots. `direct`: the peers also read memory that is not shared.
  std::vector<Extent> readable(const Blocks& blocks, Rank block, size_t at, size_t bytes,
                               bool direct) const;

  // Whether every local peer has read all that exposes this rank's memory.
  bool is_read() const {
    return !exposes() || local_.outbox().read_by_all(lane_) >= exposed_until_;
  }
  // The slot for the next piece; nullptr: none is free.
  std::byte* next_slot() { return local_.outbox().next(lane_); }
  // Puts a piece into the next slot: the addresses of `extents`, whose memory has to stay as it is until the piece
  // is read, or, if there are none, the bytes, by fill(streaming).
  template <class Fill>
  void put(std::byte* slot, intranode::Piece& piece, const std::vector<Extent>& extents,
           Fill&& fill);
  // Local peer i's oldest piece of the lane, of whichever fragment; nullptr: there is none.
  const intranode::Piece* head(int i) const { return local_.inbox(i).head(lane_); }
  const std::byte* head_bytes(int i) const { return local_.inbox(i).bytes(lane_); }
  // LocalPeers::reach() of that piece.
  size_t reach(int i, size_t offset, const std::byte** at) {
    return local_.reach(lane_, i, offset, at);
  }

  // Before the first piece.
  void expect_pieces() {
    heard_.assign(static_cast<size_t>(local_.count()), false);
    taken_from_.assign(static_cast<size_t>(local_.count()), 0);
  }
  // Local peer i's only piece, of so many bytes, was taken in before the start.
  void note_taken(int i, size_t bytes) {
    heard_[static_cast<size_t>(i)] = has_received_ = true;
    taken_from_[static_cast<size_t>(i)] = bytes;
  }
  // Local peer i's oldest piece if it belongs to this fragment, else nullptr. Fails the group if the
  // two ranks disagree about what this fragment is.
  const intranode::Piece* inbox_head(int i);
  // Pops that piece, and notes whether it was the peer's last of this fragment. Fails the group if the peer
  // gave the fragment up while this rank read its memory: the peer may have changed it meanwhile.
  void take(int i, const intranode::Piece& piece);
  // Counts bytes of a local peer's piece that this rank has read, `fetched` with a single-copy read.
  void count(const intranode::Piece& piece, size_t bytes, bool fetched) {
    Taken& taken = operation_->taken;
    (piece.extents == 0 ? taken.slots : fetched ? taken.single_copy : taken.in_place) += bytes;
  }
  // Copies the piece at the head of inbox i to bytes [at, at + piece.bytes) of `block` of the output. False: the
  // group has failed.
  bool copy_piece(int i, const intranode::Piece& piece, Rank block, size_t at, bool streaming);
  // Publishes the outbox's next slot as `piece` of this fragment.
  void publish(intranode::Piece piece);
  // The parts of waiting_for(): the local peers and the senders of flows whose data is not here, and, once all data is
  // here, a rank that takes none.
  std::string late_peers() const;
  std::string late_senders() const;
  std::string waiting_for_takers() const;
  bool heard(int i) const { return heard_[static_cast<size_t>(i)]; }
  // Whether local peer i has pushed nothing more, though more has to come of it.
  bool is_late(int i) const {
    const intranode::Piece* next = head(i);
    return !heard(i) && (next == nullptr || next->seq != seq_);
  }
  bool heard_all() const { return std::find(heard_.begin(), heard_.end(), false) == heard_.end(); }

  void fail(Status why) { health_.fail(std::move(why)); }
  // Fails the group after local peer i pushed a piece that does not fit; false.
  bool fail_piece(int i);
  // Fails the group after a single-copy read from local peer i failed.
  void fail_read(int i, const Status& why);

  const Members& members_;
  const Shape& shape_;
  LocalPeers& local_;
  const RemotePeers& remote_;
  PeerTallies& tallies_;
  Health& health_;
  StagingPool& staging_pool_;
  std::shared_ptr<Operation> operation_;
  const uint64_t seq_;
  const size_t begin_;
  const size_t limit_;
  const intranode::Lane lane_;
  const bool gathers_sums_;
  FragmentFlows flows_;
  SmallVector<bool, 16> heard_;  // by local peer: its last piece has been taken
  uint64_t exposed_until_ = 0;   // the outbox must be read up to here before memory may change

 private:
  static FlowLimits limits_of(const FragmentContext& context, size_t chunk_bytes);
  FlowCoding coding_of(const FragmentContext& context) const;
  void look_at_inboxes();
  Rank peer() const;  // of a message
  bool peer_has_called() const;
  // Whether a rank, whose first message of the fragment is a `type`, sent it as soon as it had started.
  // `receive`: the flow from it, or nullptr.
  bool starts_by_itself(const ReceiveFlow* receive, wire::Type type) const;
  // Bytes of the block from another rank, or to it, if each pair of ranks has its own; else 0.
  uint64_t pair_bytes(Rank other, bool from_other) const;
  // The error that says that another rank's signature is not this one's; `other_sends`: of a block that the other
  // rank sends, not this one.
  Status disagreement(Rank other_rank, bool other_sends, const Signature& theirs,
                      const Signature& ours) const;

  Starts starts_;
  bool entangled_ = false;
  bool has_received_ = false;
  SmallVector<uint64_t, 16> taken_from_;  // bytes, by local peer
};

template <class F>
void Fragment::for_each_awaited(F&& f) const {
  for (int i = 0; i < local_.count() && !heard_.empty(); ++i) {
    if (needs(i)) f(local_.rank(i), expected_from(i), taken_from_[static_cast<size_t>(i)]);
  }
  flows_.for_each_awaited([&](Rank rank, uint64_t expected, uint64_t arrived, uint64_t) {
    f(rank, expected, arrived);
  });
}

template <class Available, class Read>
bool Fragment::send(Available&& available, Read&& read) {
  bool moved = false;
  flows_.for_each_open_send([&](SendFlow& flow) {
    auto fill = [&](size_t offset, std::byte* to, size_t bytes) {
      flow.run.for_each(offset, bytes, [&](Rank shard, size_t at, size_t n, size_t from) {
        read(shard, at, to + from, n);
      });
    };
    while (flows_.send_one(flow, available(flow), fill)) moved = true;
  });
  return moved;
}

template <class Fill>
void Fragment::put(std::byte* slot, intranode::Piece& piece, const std::vector<Extent>& extents,
                   Fill&& fill) {
  if (extents.empty()) return local_.outbox().fill(piece.bytes, fill);
  std::memcpy(slot, extents.data(), extents.size() * sizeof(Extent));
  piece.extents = static_cast<uint32_t>(extents.size());
  exposed_until_ = local_.outbox().published(lane_) + 1;
}

// `sums`: of the same part, if the fragment is one of an AllReduce.
std::unique_ptr<Fragment> make_allgather(const FragmentContext& context,
                                         std::shared_ptr<Operation> operation, uint64_t seq,
                                         size_t begin, size_t limit,
                                         std::shared_ptr<const PartSums> sums = nullptr);
std::unique_ptr<Fragment> make_reduce_scatter(const FragmentContext& context,
                                              std::shared_ptr<Operation> operation, uint64_t seq,
                                              size_t begin, size_t limit,
                                              std::shared_ptr<PartSums> sums = nullptr);
// An all-to-all, gather or scatter, in one fragment.
std::unique_ptr<Fragment> make_all_to_all(const FragmentContext& context,
                                          std::shared_ptr<Operation> operation, uint64_t seq);
// The whole of an AllReduce whose plan says so.
std::unique_ptr<Fragment> make_allreduce(const FragmentContext& context,
                                         std::shared_ptr<Operation> operation, uint64_t seq);

}  // namespace smddp
