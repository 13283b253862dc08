// One pass over the node's outboxes and the rails: an operation is cut into rounds, each covers
// bytes [begin, begin + part) of every rank's block. A round is a state machine that progress()
// pushes on; it never blocks. allgather.cc, reduce_scatter.cc and allreduce.cc each hold one kind,
// whole; what they share, the flows between nodes, is here and in round.cc.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "collectives/flow.h"
#include "collectives/operation.h"
#include "common/small_vector.h"
#include "fabric/wire.h"

namespace smddp {

// READYs leave this many steps before their flows: they queue behind a step's data on the way.
inline constexpr int kStepsAhead = 2;

class Fragment {
 public:
  Fragment(Group& group, std::shared_ptr<Operation> operation, uint64_t seq, size_t begin,
           size_t bytes)
      : group_(group), operation_(std::move(operation)), seq_(seq), begin_(begin), limit_(bytes) {}
  Fragment(const Fragment&) = delete;
  Fragment& operator=(const Fragment&) = delete;
  virtual ~Fragment() = default;

  // Once, before any other call.
  virtual void start() = 0;
  // Pushes to the node while `may_push` (rounds push in order), takes in, sends out. True if
  // anything moved.
  virtual bool progress(bool may_push) = 0;
  virtual bool pushed() const = 0;  // nothing more will go into the outbox
  virtual bool complete()
      const = 0;  // and all results are in place, and nobody still reads this rank's memory
  // Whom it waits for, as a sentence's end: "no data from rank 3 (host b)".
  virtual std::string waiting_for() const = 0;
  // False where those it names may themselves be held up by a rank that this one can't see.
  virtual bool can_blame() const { return true; }

  // Tells again the remote ranks whose data is still to come that this round has started.
  void remind();
  // Messages whose key, seq and signature the group has checked. An error ends the group.
  Status on_ready(Rank source, uint64_t allowed, const wire::Grant* grant);
  Status on_data(const wire::Header& header, const std::byte* payload);
  // Once complete: the peers may no longer write here.
  void close_flows();
  // After a failure: true where the fabric may still touch memory of the operation, which then has
  // to be kept. Closes the regions.
  bool abandon();

  // Later rounds that keep step, too, have to wait until enough of this one's data is here.
  bool holds_rails() const { return keeps_step_ && arrived_ < receive_flows_.size(); }
  bool in_last_steps() const {
    return arrived_ == receive_flows_.size() ||
           receive_flows_[arrived_].step + kStepsAhead > receive_flows_.back().step;
  }

  Operation& operation() const { return *operation_; }
  const std::shared_ptr<Operation>& operation_ptr() const { return operation_; }
  // The end of the round: nothing may be called after it.
  std::shared_ptr<Operation> take_operation() { return std::move(operation_); }
  uint64_t seq() const { return seq_; }
  bool heard(int local_peer) const { return heard_[static_cast<size_t>(local_peer)]; }
  uint64_t after = 0;  // starts only when round `after` - 1 is complete; 0: at once

 protected:
  // Bytes of `block` of `blocks` that fall into this round.
  size_t part(const Blocks& blocks, Rank block) const {
    return blocks.bytes(block, begin_, limit_);
  }

  // Whether results are to be written past the caches.
  bool streams() const;
  // Whether neighbours read this rank's memory for this round: what it pushes then costs it nothing, and
  // one that has run out of it can do nothing but wait, so pushes come before every piece taken in.
  bool exposes() const { return exposed_until_ != 0; }
  // Where `bytes` bytes of a block at `at` lie, if the neighbours are to read them there; empty: the bytes
  // go into slots. `direct`: the neighbours read memory that is not shared, too.
  std::vector<Extent> readable(const Blocks& blocks, Rank block, size_t at, size_t bytes,
                               bool direct) const;
  bool heard_all() const { return std::find(heard_.begin(), heard_.end(), false) == heard_.end(); }
  // Counts bytes of a local peer's piece that this rank has read, `fetched` with a single-copy read.
  void count(const intranode::Piece& piece, size_t bytes, bool fetched) {
    Taken& taken = operation_->taken;
    (piece.extents == 0 ? taken.slots : fetched ? taken.single_copy : taken.in_place) += bytes;
  }
  // Pops local peer i's head, noting whether it was that peer's last piece of this round.
  void take(int i, const intranode::Piece& head);

  // --- flows; start() makes them, then opens them.
  // READYs of an operation's later rounds leave while earlier ones are under way: those need no head.
  size_t eager_prefix_of(const ShardRun& run) const {
    if (operation_->on_device) return 0;
    return run.bytes() <= kEagerBytes ? run.bytes() : begin_ == 0 ? kEagerPrefixBytes : 0;
  }
  // Null where the flow carries nothing.
  ReceiveFlow* add_receive_flow(const pattern::Flow& flow, ShardRun run);
  SendFlow* add_send_flow(const pattern::Flow& flow, ShardRun run);
  // `sends_at_once`: what goes out waits for no other node, so that it says what READY would say.
  void open_flows(bool sends_at_once);
  // Lets the senders send more, as far as the group's window reaches. True if it did.
  bool widen();
  // Puts a message's bytes where they belong; `offset` is into the receive's run.
  virtual void place(const ReceiveFlow& receive, size_t offset, const std::byte* payload,
                     size_t bytes) = 0;
  // Sends one message or chunk of what lies before `available` of the run. fill(offset, to, bytes)
  // writes bytes of the run where they do not lie in memory end to end.
  template <class Fill>
  bool send_one(SendFlow& send, size_t available, Fill&& fill);
  bool flows_done() const;

  Group& group_;
  std::shared_ptr<Operation> operation_;
  const uint64_t seq_;
  const size_t begin_;
  const size_t limit_;
  SmallVector<bool, 16> heard_;  // by local peer: its last piece has been taken
  uint64_t exposed_until_ = 0;   // the outbox must be read up to here before memory may change
  FlowList<ReceiveFlow> receive_flows_;
  FlowList<SendFlow> send_flows_;

 private:
  bool clear_early(SendFlow& send);
  void count_arrived();
  bool has_turn(const SendFlow& send) const;
  // A place for the next part of a flow that does not go straight from memory, or nullptr for now.
  fabric::SendBuffer* acquire(const SendFlow& send, std::byte** to);
  void post(const SendFlow& send, fabric::SendBuffer* buffer, size_t bytes);
  bool send_memory(SendFlow& send, size_t bytes);
  size_t step_of(const SendFlow& send) const;
  void grant(ReceiveFlow& receive);
  bool widen(ReceiveFlow& receive, bool first);
  void say_ready(const ReceiveFlow& receive);

  bool keeps_step_ = false;
  size_t arrived_ =
      0;  // receive_flows, from the first on, of whose run enough is here for the next step
};

template <class Fill>
bool Fragment::send_one(SendFlow& send, size_t available, Fill&& fill) {
  if (send.sent == send.run.bytes() || !has_turn(send) || !clear_early(send)) return false;
  size_t bytes = std::min(step_of(send), send.allowed - send.sent);
  if (bytes == 0 || available < send.sent + bytes) return false;
  if (send.in_chunks() && send.memory != nullptr) {
    if (!send_memory(send, bytes)) return false;
  } else {
    std::byte* to = nullptr;
    fabric::SendBuffer* buffer = acquire(send, &to);
    if (buffer == nullptr) return false;
    if (send.memory != nullptr) {
      std::memcpy(to, send.memory + send.sent, bytes);
    } else {
      fill(send.sent, to, bytes);
    }
    post(send, buffer, bytes);
  }
  send.sent += bytes;
  return true;
}

std::unique_ptr<Fragment> make_allgather(Group& group, std::shared_ptr<Operation> operation,
                                         uint64_t seq, size_t begin, size_t bytes);
std::unique_ptr<Fragment> make_reduce_scatter(Group& group, std::shared_ptr<Operation> operation,
                                              uint64_t seq, size_t begin, size_t bytes);
// The whole of an AllReduce whose plan says so.
std::unique_ptr<Fragment> make_allreduce(Group& group, std::shared_ptr<Operation> operation,
                                         uint64_t seq);

}  // namespace smddp
