// The ranks of other hosts that this rank exchanges messages with, as one group sees them: what each
// is known to have started, the credit for data that it may get before, messages that came before their
// fragment was started here, and messages that wait for a send buffer. Signs what leaves, and takes only
// what is authentic. Must not know operations or what the data is for. The group's fragments and its FailureDetector call it, under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/types.h"
#include "flows/flow.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace smddp {

class RemotePeers {
 public:
  // `key` names the group, `message_key` signs its messages. `rank`: this one. `transport`: nullptr if the
  // group stays inside a host. `budget_bytes`: of data that may be under way to this rank. `senders`: the
  // most ranks that may send to one rank in an operation along the rails, the same on all ranks; 0: as many as
  // there are ranks.
  RemotePeers(const JobKey& key, const siphash::Key& message_key, Rank rank, int ranks,
              transport::Transport* transport, size_t budget_bytes, int senders = 0);
  void add(Rank rank, transport::Peer peer);

  transport::Transport& transport() { return *transport_; }
  // Of a rank that was added.
  transport::Peer peer(Rank rank) const { return of(rank).address; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  ReceiveBudget& receive_budget() { return receive_budget_; }

  // --- messages that arrive

  // Whether a rank of this group has sent this message, to this rank, and it has not come before. Called
  // once for each message, before anything is done with it.
  bool accept(const wire::Header& header, const std::byte* payload);
  // `source` has started fragment `seq`: a message of it belongs to that fragment. Returns the first fragment
  // that it was not known to have started.
  uint64_t has_started(Rank source, uint64_t seq);
  bool is_known_to_have_started(Rank source, uint64_t seq) const { return of(source).heard > seq; }
  // Keeps a message of a fragment that this rank has not started. False if `source` sends more than
  // its credit, or anything but data that is longer than a grant.
  bool keep_early(const wire::Header& header, const std::byte* payload);
  // Calls f(header, payload) for each message kept for fragment `seq`; drops those of earlier fragments.
  template <class F>
  void take_early(uint64_t seq, F&& f);

  // `source` has said that it writes no more into this rank's memory.
  void heard_closed(Rank source) { of(source).writes_closed = true; }
  // The connection to `peer` is lost: nothing more comes from there.
  void on_peer_lost(transport::Peer peer);
  // The transport is closed: no peer is told anything more.
  void on_network_closed();
  // Whether one of the two has happened.
  bool writes_closed(Rank source) const { return of(source).writes_closed; }
  // `source` asks by `header` whether all its messages have arrived: answers if they have. It reads no more of this
  // rank's.
  void heard_leaving(const wire::Header& header);
  void heard_taken(Rank source) { of(source).taken = true; }
  // `peer` does not answer, or can't. The end of a broken group does not wait for it.
  void expect_nothing(Rank peer) { of(peer).silent = true; }
  bool is_silent(Rank peer) const { return of(peer).silent; }
  // When the last message of it came, by recent_ns(); 0: none has.
  uint64_t last_message_ns(Rank peer) const { return of(peer).last_message_ns; }
  bool has_sent(Rank peer) const { return of(peer).sent > 0; }
  // As the transport's; "" without one.
  const std::string& rails_text() const { return rails_text_; }

  // --- messages that leave

  // Bytes of data that each remote rank keeps for this one in fragments that it has not started. The
  // same everywhere, so that both sides know it.
  size_t credit() const;
  // True if `to` has started fragment `seq`, or has credit left for `bytes` bytes of it. The credit is
  // taken until `to` is known to have started the fragment.
  bool may_send_early(Rank to, uint64_t seq, size_t bytes);
  // Counts a message of `bytes` bytes, at most the credit, that this rank receives from `source`. True: `source` has to
  // be sent a READY for it; else its credit is enough.
  bool count_message(Rank source, size_t bytes);
  // True if a READY has gone to `to`: it knows, or will know, that this rank has made the group.
  bool has_greeted(Rank to) const { return of(to).greeted; }
  // Tells `to` that this rank has started fragment `seq` and takes `allowed` bytes of its flow; `grant`,
  // if not nullptr, opens this rank's memory for it.
  void send_ready(Rank to, uint64_t seq, const Signature& signature, uint64_t allowed,
                  const wire::Grant* grant);
  // Sends the `bytes` bytes behind the place of the header in `buffer`, which was acquired for `to`, as bytes [offset,
  // offset + raw_bytes) of the flow of fragment `seq`: coded, if that is more.
  void send_data(Rank to, transport::MessageBuffer* buffer, uint64_t seq,
                 const Signature& signature, uint64_t offset, size_t raw_bytes, size_t bytes);
  // Tells `to` that chunks of the flow to it, from `first` on, are in its memory once this message is taken.
  // `coded`: how many bytes of each are coded, or 0; of at most wire::kMostTold. False: no buffer is free now.
  bool send_written(Rank to, uint64_t seq, const Signature& signature, uint64_t first,
                    std::span<const uint32_t> coded) {
    return send(wire::Type::kWritten, to, seq, signature, first, coded);
  }
  // Asks `to` for kSentAll, or sends it. If no buffer is free now nothing is sent: the question is repeated.
  void send_question(wire::Type type, Rank to, uint64_t seq, const Signature& signature) {
    send(type, to, seq, signature, 0);
  }
  // Tells `to`, once, that this rank writes no more into its memory. False: no buffer is free now.
  bool tell_closed(Rank to);
  // Puts into line for all of them that this rank gives up the group from fragment `from` on. Needs no memory.
  void send_aborts(uint64_t from, const std::string& reason);
  // This rank is about to leave the group: asks each peer whether all its messages have arrived, and again after a
  // moment. True: they have, at each peer that is left and reads them. A transport reports a message as sent once
  // it is with the kernel, which drops it if this process closes the connection before the peer has read it.
  bool all_taken(uint64_t now_ns);
  // True while READYs or aborts wait for a send buffer.
  bool has_unsent() const { return !unsent_ready_.empty() || !unsent_aborts_.empty(); }
  bool flush_ready();  // true if one left
  // Drops the READYs that wait.
  void flush_aborts();
  // The transport has failed: what waits for it is dropped.
  void drop_unsent() {
    unsent_ready_.clear();
    unsent_aborts_.clear();
  }

 private:
  struct RemotePeer {
    transport::Peer address = 0;
    uint64_t heard = 0;  // one past the latest fragment that a message of it belonged to
    std::deque<std::pair<uint64_t, size_t>> ahead;  // early data sent to it: (fragment, bytes)
    size_t ahead_bytes = 0;
    std::set<uint64_t> refused;  // fragments that found no credit: later ones wait behind them
    bool greeted = false;
    size_t untold = 0;  // of its messages, since the last READY to it
    bool writes_closed = false, told_closed = false, silent = false;
    bool taken = false;       // all messages to it have arrived, or it reads none any more
    size_t kept_bytes = 0;    // of its early data, here
    uint64_t sent = 0;        // messages: the counter of the next one
    Coverage seen{SIZE_MAX};  // counters of its messages that were accepted
    uint64_t last_message_ns = 0;
    uint64_t full_at = 0;  // the last flush that found no buffer for it
  };
  struct Early {
    wire::Header header;
    std::vector<std::byte> payload;
  };
  struct Ready {
    Rank to;
    wire::Header header;
    wire::Grant grant;
  };

  static constexpr uint32_t kNone = UINT32_MAX;
  // Of a rank that was added.
  RemotePeer& of(Rank rank) { return peers_[position_[static_cast<size_t>(rank)]]; }
  const RemotePeer& of(Rank rank) const { return peers_[position_[static_cast<size_t>(rank)]]; }

  wire::Header header(wire::Type type, Rank to, uint64_t seq, const Signature& signature) const;
  // False: no buffer is free now.
  bool send(wire::Type type, Rank to, uint64_t seq, const Signature& signature, uint64_t offset,
            std::span<const uint32_t> payload = {});
  // Signs and sends a message to header.target, whose payload stands behind the place of the header.
  void post(transport::MessageBuffer* buffer, wire::Header header);

  JobKey key_;
  siphash::Key message_key_;
  Rank rank_;
  transport::Transport* transport_;
  const std::string rails_text_;
  std::vector<Rank> ranks_;
  std::vector<RemotePeer> peers_;   // of ranks_, in their order
  std::vector<uint32_t> position_;  // by rank, in peers_; kNone
  size_t senders_;
  ReceiveBudget receive_budget_;
  std::multimap<uint64_t, Early> early_;  // by fragment, in the order in which they came
  std::deque<Ready> unsent_ready_;
  uint64_t flushes_ = 0;  // of READYs
  std::vector<Rank> unsent_aborts_;
  uint64_t ask_leaving_ns_ = 0;  // when all_taken() asks next
  uint64_t abort_from_ = 0;
  std::string abort_reason_;
};

template <class F>
void RemotePeers::take_early(uint64_t seq, F&& f) {
  while (!early_.empty() && early_.begin()->first <= seq) {
    auto node = early_.extract(early_.begin());
    const auto& [h, payload] = node.mapped();
    if (h.type == wire::Type::kData) of(static_cast<Rank>(h.source)).kept_bytes -= payload.size();
    if (h.seq == seq) f(h, payload.data());
  }
}

}  // namespace smddp
