// The flows between hosts of one fragment: when each may send, how much each sender is allowed, what has
// arrived. Must not know which collective they carry: the fragment makes the flows, says what may go
// out, and puts messages where they belong. Under the engine's lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <vector>

#include "flows/coding_choice.h"
#include "flows/flow.h"
#include "flows/peer_tallies.h"
#include "flows/rail_turns.h"
#include "flows/remote_peers.h"
#include "flows/step_order.h"
#include "topology/members.h"
#include "topology/pattern.h"

namespace smddp {

// What the network bounds, in bytes; by collectives/selector.h.
struct FlowLimits {
  size_t reach = 0;  // reach_bytes()
  // send_window_bytes(): how much of a fragment's flows is with the NICs at once, where a chunk's completion says
  // that it has arrived. What this rank has to say of earlier chunks would queue behind more.
  size_t window = SIZE_MAX;
};

// What both ends of a fragment's flows have in common.
struct FlowTerms {
  Signature signature;  // of the operation
  uint64_t seq;         // of the fragment
  pattern::Pattern pattern;
  size_t chunk_bytes;
  bool first;      // the fragment covers the start of the operation's blocks
  bool on_device;  // no processor touches the memory: the flows have to be chunks
  FlowLimits limits;
  // How fast bytes come is counted there, if it says something of their sender and its link, as that does not wait
  // for others' bytes meanwhile; else nullptr.
  PeerTallies* tallies;
  const std::atomic<uint64_t>& waited_from_ns;  // the operation's
  FlowCoding coding;
  SentBytes& sent;  // the operation's

  // As every message of a flow carries it.
  Signature signature_of(const ShardRun& run) const {
    return between_two(signature, run.shard_bytes());
  }
};

class FragmentFlows {
 public:
  FragmentFlows(const Members& members, RemotePeers& remote, RailTurns& turns,
                const FlowTerms& terms)
      : members_(members), remote_(remote), turns_(turns), terms_(terms) {}
  FragmentFlows(const FragmentFlows&) = delete;
  FragmentFlows& operator=(const FragmentFlows&) = delete;

  // Before open(), in the order in which they start. nullptr if the flow carries nothing.
  ReceiveFlow* add_receive(const pattern::Flow& flow, ShardRun run);
  SendFlow* add_send(const pattern::Flow& flow, ShardRun run);
  // Lets the peers send. `sends_at_once`: what goes out waits for no other host, so that it tells the
  // target what a READY would tell.
  void open(bool sends_at_once);

  FlowList<ReceiveFlow>& receives() { return receives_; }
  const FlowList<ReceiveFlow>& receives() const { return receives_; }
  // The flow from `source`, or nullptr. After open().
  const ReceiveFlow* receive_from(Rank source) const { return receives_.find(source); }
  const FlowList<SendFlow>& sends() const { return sends_; }

  // Allows the senders to send more, as far as the group's receive budget reaches. True if it did.
  bool allow_more();
  // f(send) for each flow that may have something to send now, or to tell its target, in their order.
  template <class F>
  void for_each_open_send(F&& f);
  // Sends one message or chunk of the bytes before `available` of the run; false if none may go now.
  // fill(offset, to, bytes) writes bytes of the run that do not lie in memory end to end.
  template <class Fill>
  bool send_one(SendFlow& send, size_t available, Fill&& fill);
  bool complete() const;
  // f(rank, bytes of its flow, bytes of them that have come, amount) for each rank whose data is still to come,
  // and with (rank, 0, 0, amount) for each that is still to get data. As long as nothing moves between that
  // rank and this one, `amount` stays the same.
  template <class F>
  void for_each_awaited(F&& f) const;

  // `source` has started the fragment, and takes `allowed` bytes of the flow to it, with `grant` where
  // its memory is open for them (else nullptr).
  Status on_ready(Rank source, uint64_t allowed, const wire::Grant* grant);
  // The flow that bytes [offset, offset + bytes) from `source` belong to, which counts them as arrived.
  // nullptr: they are not part of this fragment, or came before.
  ReceiveFlow* on_data(Rank source, uint64_t offset, uint64_t bytes);
  // CodingChoice::decode() of a piece of `receive`. An error names its sender.
  Status decode(ReceiveFlow& receive, std::byte* to, size_t bytes, const std::byte* from,
                size_t coded);
  // `source` says that chunks of its flow, from `first` on, are in this rank's memory: one for each length in
  // `lengths`, as in wire::kMostTold. Decodes those that are coded.
  Status on_written(Rank source, uint64_t first, std::span<const std::byte> lengths);
  // Repeats the READYs to the senders whose data is still to come, and asks them whether it has left.
  void remind();
  // Whether nothing of this fragment is left to send to `target`.
  bool has_sent_all(Rank target) const;

  // At the end of a fragment that is complete: the peers may no longer write into its memory.
  void close();
  // After a failure: first stop(); then, once closed() but for peers that do not answer, or if that takes too
  // long, give_up().
  void stop() { turns_.leave(this); }
  // Whether no peer writes into memory of the operation any more, and the fabric reads none of it. `but_for_silent`:
  // peers that do not answer do not count.
  bool closed(bool but_for_silent) const;
  // Whether bytes for `peer` are under way that a message to it may overtake.
  bool may_overtake(Rank peer) const;
  // Closes the regions. True if it was not closed(false): then the memory of the operation has to be kept.
  bool give_up();

  // True if later fragments that keep step have to wait until enough of this one's data is here.
  bool hold_rails() const { return steps_.kept() && !steps_.complete(receives_); }
  bool in_last_steps() const { return steps_.in_last_steps(receives_); }

 private:
  size_t eager_prefix_of(const ShardRun& run) const;
  bool clear_early(SendFlow& send);
  bool needs_no_ready(const ReceiveFlow& receive) const;
  void grant(ReceiveFlow& receive);
  void count_arrived();
  void time(ReceiveFlow& receive) const;
  void see_written();
  size_t allowance(const ReceiveFlow& receive);
  bool has_turn(const SendFlow& send) const;
  // Whether what `send` sends next is a chunk that has to wait.
  bool window_full(const SendFlow& send) const;
  size_t message_bytes(const SendFlow& send) const;
  // Whether the next piece of a flow, the `bytes` bytes at `from`, is to be coded.
  bool codes(SendFlow& send, const std::byte* from, size_t bytes) {
    return terms_.coding.choice.codes(send.coding, terms_.coding, from, bytes, send.sent);
  }
  // Writes the next chunk from where it lies. False: there is no room for it now.
  bool write(SendFlow& send, size_t bytes);
  // A buffer for the next piece of a flow, which begins at `*to` in it, or nullptr for now.
  transport::MessageBuffer* acquire(const SendFlow& send, std::byte** to);
  // Sends the next piece by way of the buffer, the `bytes` bytes at `from`, which may be `to`.
  void post(SendFlow& send, transport::MessageBuffer* buffer, std::byte* to, const std::byte* from,
            size_t bytes, bool coded);
  // The next `bytes` bytes have left, in `sent` bytes.
  void count(SendFlow& send, size_t bytes, size_t sent);
  // Tells the target which chunks are in its memory, if that is worth a message. `waits`: the flow can't go
  // on for now.
  void tell_written(SendFlow& send, bool waits);
  // Whether the target does something with a part of the flow: it passes it on, sums it, starts a step with
  // it, or allows more.
  bool progress_matters(const SendFlow& send) const;
  void send_ready(const ReceiveFlow& receive);
  bool may_write(const ReceiveFlow& receive) const;  // its sender, still

  const Members& members_;
  RemotePeers& remote_;
  RailTurns& turns_;
  const FlowTerms terms_;
  StepOrder steps_;
  FlowList<ReceiveFlow> receives_;
  FlowList<SendFlow> sends_;
  // Those that have bytes to send, or to tell their targets of, in their order: a pass looks at no others, so that its
  // work does not grow with the peers that have all.
  std::vector<SendFlow*> open_sends_;
  // What is complete stays so. From the first flow on: receive flows that allow_more() needs no more, receive flows
  // and send flows that are complete.
  size_t counted_ = 0, received_ = 0, sent_ = 0;
};

template <class F>
void FragmentFlows::for_each_open_send(F&& f) {
  const int last = steps_.open();
  size_t kept = 0, i = 0;
  for (; i < open_sends_.size() && open_sends_[i]->step <= last; ++i) {
    SendFlow& send = *open_sends_[i];
    f(send);
    if (!send.told_all()) open_sends_[kept++] = &send;
  }
  auto at = open_sends_.begin();
  open_sends_.erase(at + static_cast<ptrdiff_t>(kept), at + static_cast<ptrdiff_t>(i));
}

template <class F>
void FragmentFlows::for_each_awaited(F&& f) const {
  for (const ReceiveFlow& receive : receives_) {
    uint64_t come = receive.coverage.total();
    if (!receive.complete()) f(receive.source, receive.run.bytes(), come, come);
  }
  for (const SendFlow& send : sends_) {
    if (!send.complete()) f(send.target, 0, 0, send.sent + send.allowed - send.chunks.count());
  }
}

template <class Fill>
bool FragmentFlows::send_one(SendFlow& send, size_t available, Fill&& fill) {
  auto may_send = [&](size_t* bytes) {
    if (send.sent == send.run.bytes() || !has_turn(send) || !clear_early(send)) return false;
    *bytes = std::min(message_bytes(send), send.allowed - send.sent);
    return *bytes > 0 && available >= send.sent + *bytes && send.untold.size() < wire::kMostTold;
  };
  size_t bytes = 0;
  bool goes_on = may_send(&bytes), writes = send.in_chunks();
  if (send.told < send.sent) tell_written(send, !goes_on);
  if (!goes_on || window_full(send)) return false;
  const std::byte* from = send.memory != nullptr ? send.memory + send.sent : nullptr;
  bool coded = from != nullptr && codes(send, from, bytes);
  if (from != nullptr && send.in_chunks() && !coded) {
    if (!write(send, bytes)) return false;
  } else {
    std::byte* to = nullptr;
    transport::MessageBuffer* buffer = acquire(send, &to);
    if (buffer == nullptr) return false;
    if (from == nullptr) {
      *to = std::byte{0};  // of a run without shards
      fill(send.sent, to, bytes);
      coded = codes(send, to, bytes);
      from = to;
    }
    post(send, buffer, to, from, bytes, coded);
  }
  send.sent += bytes;
  if (!writes) send.told = send.sent;  // the target notices what is not written
  return true;
}

}  // namespace smddp
