#include "flows/fragment_flows.h"

#include <utility>

#include "coding/piece.h"
#include "common/clock.h"
#include "transport/transport.h"

namespace smddp {
namespace {

// Offsets stay multiples of it, so that every element type lies whole in a message.
constexpr size_t kGrain = 64;
// Fewer written bytes are not worth a message while more are sent. Not measured.
constexpr size_t kLeastTold = transport::kMaxPayload;
// Nor more than so many coded ones, which the target decodes while others are under way. Not measured.
constexpr size_t kMostCoded = 256 << 10;

constexpr size_t payload_of(size_t message) {
  return (message - sizeof(wire::Header)) / kGrain * kGrain;
}
static_assert(payload_of(transport::kEagerMessage) == transport::kEagerPayload);
// A chunk is coded as one piece.
static_assert(coding::kPieceBytes == transport::kMaxPayload);
// A buffer has space for a coded message.
static_assert(coding::most_coded(transport::kEagerPayload) <=
              transport::kEagerMessage - sizeof(wire::Header));

// If the whole operation has no bytes, a flow says so: its target hears that this rank has called it, and
// with which signature.
bool carries_any(ShardRun& run, const FlowTerms& terms) {
  if (run.bytes() > 0) return true;
  if (terms.signature.bytes > 0) return false;
  run = {};
  run.pad();
  return true;
}

// The first flow from `from` on that is not complete.
template <class Flow>
size_t first_open(const FlowList<Flow>& flows, size_t from) {
  while (from < flows.size() && flows[from].complete()) ++from;
  return from;
}

uint32_t chunk_index(const SendFlow& send) {
  return static_cast<uint32_t>((send.sent - send.eager_prefix) / send.grant.chunk_bytes);
}

}  // namespace

// The READYs of an operation's later fragments leave while earlier ones are under way: large flows of
// those need no eager prefix.
size_t FragmentFlows::eager_prefix_of(const ShardRun& run) const {
  if (terms_.on_device) return 0;
  return run.bytes() <= kEagerBytes ? run.bytes() : terms_.first ? kEagerPrefixBytes : 0;
}

ReceiveFlow* FragmentFlows::add_receive(const pattern::Flow& flow, ShardRun run) {
  if (!carries_any(run, terms_)) return nullptr;
  size_t prefix = eager_prefix_of(run);
  return &receives_.emplace_back(flow.peer, flow.step, std::move(run), prefix);
}

SendFlow* FragmentFlows::add_send(const pattern::Flow& flow, ShardRun run) {
  if (!carries_any(run, terms_)) return nullptr;
  SendFlow& send = sends_.emplace_back();
  send.target = flow.peer;
  send.step = flow.step;
  send.eager_prefix = eager_prefix_of(run);
  send.run = std::move(run);
  return &send;
}

void FragmentFlows::open(bool sends_at_once) {
  turns_.enter(this);
  receives_.index();
  sends_.index();
  bool ordered = members_.topology().nodes() > 2 && terms_.pattern != pattern::Pattern::kLog;
  steps_.begin(receives_, ordered, terms_.limits.reach);
  open_sends_.reserve(sends_.size());
  for (SendFlow& send : sends_) {
    open_sends_.push_back(&send);
    if (send.eager()) clear_early(send);
  }
  for (ReceiveFlow& receive : receives_) {
    if (sends_at_once && needs_no_ready(receive)) continue;
    grant(receive);
    receive.allowed = allowance(receive);
    send_ready(receive);
  }
}

// A sender that has credit for a whole flow needs no READY in the oldest fragment, and its later
// fragments follow, if this rank's own data tells it that the fragment has started. Where flows keep
// step, that data waits for its turn, maybe for data of the very rank that it would tell: that rank must
// then know this group already, which gives it the credit.
bool FragmentFlows::needs_no_ready(const ReceiveFlow& receive) const {
  if (!receive.eager() || receive.run.bytes() > remote_.credit()) return false;
  if (is_message(terms_.signature.collective))
    return !remote_.count_message(receive.source, receive.run.bytes());
  if (steps_.kept() && !remote_.has_greeted(receive.source)) return false;
  const SendFlow* back = sends_.find(receive.source);
  return back != nullptr && back->eager() && back->cleared;
}

bool FragmentFlows::clear_early(SendFlow& send) {
  if (!send.cleared && send.eager_prefix > 0) {
    send.cleared = remote_.may_send_early(send.target, terms_.seq, send.eager_prefix);
    if (send.cleared) send.allowed = send.eager_prefix;
  }
  return send.cleared;
}

void FragmentFlows::grant(ReceiveFlow& receive) {
  if (receive.eager() || receive.memory == nullptr) return;
  transport::Transport& transport = remote_.transport();
  size_t chunk = std::min(terms_.chunk_bytes, payload_of(transport.facts().max_message));
  receive.grant.chunk_bytes = static_cast<uint32_t>(chunk);
  receive.grant.bytes = receive.run.bytes() - receive.eager_prefix;
  receive.granted =
      wire::check(receive.grant, receive.grant.bytes) &&
      transport.open_region(remote_.peer(receive.source), receive.memory + receive.eager_prefix,
                            receive.grant.bytes, &receive.region, &receive.grant);
}

void FragmentFlows::count_arrived() {
  if (terms_.on_device) see_written();
  steps_.look(receives_);
  received_ = first_open(receives_, received_);
  sent_ = first_open(sends_, sent_);
}

// Bytes behind the eager prefix have come: reads the clock at the first of them and at the last.
void FragmentFlows::time(ReceiveFlow& receive) const {
  if (terms_.tallies == nullptr) return;
  if (receive.first_ns == 0) {
    receive.first_ns = now_ns();
    receive.first_bytes = receive.coverage.total() - receive.saved;
  } else if (receive.complete()) {
    terms_.tallies->count_flow(
        receive.source, receive.run.bytes() - receive.saved - receive.first_bytes, receive.first_ns,
        now_ns(), terms_.waited_from_ns.load(std::memory_order_relaxed),
        !pairwise(terms_.signature.collective));
  }
}

// Of a device's memory: the last chunk counts once the device sees all of them.
void FragmentFlows::see_written() {
  for (size_t i = received_; i < receives_.size(); ++i) {
    ReceiveFlow& receive = receives_[i];
    bool last = receive.granted && receive.written == receive.chunks();
    if (last && !receive.complete() && remote_.transport().visible(receive.region))
      receive.on_chunks(receive.withheld, 1);
  }
}

bool FragmentFlows::allow_more() {
  bool moved = false;
  count_arrived();
  for (size_t i = counted_; i < receives_.size() && receives_[i].step <= steps_.near(); ++i) {
    ReceiveFlow& receive = receives_[i];
    if (!receive.eager()) {
      size_t arrived = std::max(receive.eager_prefix, receive.coverage.total());
      if (arrived > receive.counted) time(receive);
      remote_.receive_budget().close(arrived - receive.counted);
      receive.counted = arrived;
      if (receive.allowed < receive.run.bytes()) {
        size_t before = std::exchange(receive.allowed, allowance(receive));
        if (receive.allowed > before) {
          send_ready(receive);
          moved = true;
        }
      }
    }
    if (i == counted_ && receive.counted == receive.run.bytes()) ++counted_;
  }
  return moved;
}

// The bytes of a flow that its sender may send by now; takes what is new from the receive budget. Each
// sender that has its turn, or will have it soon, gets a part of the budget. In the turn of this
// fragment, a sender with nothing under way gets a chunk in any case, so that something always moves.
// Less than a quarter of a part is not worth a message, except there: the later fragments that fill
// the budget may wait for this very one.
size_t FragmentFlows::allowance(const ReceiveFlow& receive) {
  size_t before = receive.allowed, bytes = receive.run.bytes();
  if (receive.eager()) return before;
  size_t here = std::max(receive.eager_prefix, receive.coverage.total());
  ReceiveBudget& budget = remote_.receive_budget();
  size_t chunk = receive.granted ? receive.grant.chunk_bytes : terms_.chunk_bytes;
  size_t turns = steps_.kept() ? std::min<size_t>(kStepsAhead, receives_.size()) : receives_.size();
  size_t part = std::max(chunk, budget.bytes() / turns);
  // Of the fragments that keep step, one has the turn, and the first steps of the next are prepared.
  bool now = steps_.kept() ? turns_.free_for(this) : turns_.is_oldest(this);
  bool near = !steps_.kept() || steps_.complete(receives_) ||
              (receive.step <= steps_.near() && (now || turns_.soon_free_for(this)));
  if (!near) return before;
  size_t wanted = std::min(here + part, before + budget.left()) - receive.eager_prefix;
  wanted = receive.eager_prefix + wanted / chunk * chunk;
  bool idle = before == here && now;
  if (idle) wanted = std::max(wanted, before + chunk);
  wanted = std::min(wanted, bytes);
  size_t worth = idle ? chunk : std::max(chunk, part / 4);
  bool worth_a_message = (wanted == bytes && wanted > before) || wanted >= before + worth;
  if (!worth_a_message) return before;
  budget.open(wanted - before);
  return wanted;
}

void FragmentFlows::send_ready(const ReceiveFlow& receive) {
  remote_.send_ready(receive.source, terms_.seq, terms_.signature_of(receive.run), receive.allowed,
                     receive.granted ? &receive.grant : nullptr);
}

// A second READY changes nothing at a live peer. To a dead one it fails, which tells this rank that the
// connection broke: a rank that only receives would not notice.
void FragmentFlows::remind() {
  for (const ReceiveFlow& receive : receives_) {
    if (receive.complete()) continue;
    send_ready(receive);
    remote_.send_question(wire::Type::kAsk, receive.source, terms_.seq,
                          terms_.signature_of(receive.run));
  }
}

bool FragmentFlows::has_sent_all(Rank target) const {
  const SendFlow* send = sends_.find(target);
  return send == nullptr || send->complete();
}

Status FragmentFlows::on_ready(Rank source, uint64_t allowed, const wire::Grant* grant) {
  SendFlow* found = sends_.find(source);
  if (found == nullptr) return {};
  SendFlow& send = *found;
  if (terms_.on_device && grant == nullptr) {
    return {Code::kUnavailable,
            members_.describe(source) + " could not have its NIC write into its GPU's memory"};
  }
  bool fits = allowed <= send.run.bytes();
  if (grant != nullptr && !send.granted && send.sent <= send.eager_prefix) {
    fits = fits && wire::check(*grant, send.run.bytes() - send.eager_prefix) &&
           grant->chunk_bytes <= payload_of(remote_.transport().facts().max_message);
    send.granted = true;
    send.grant = *grant;
  }
  if (!fits) {
    return {Code::kMismatch,
            members_.describe(source) + " is ready for another flow than this rank's"};
  }
  send.cleared = true;
  send.allowed = std::max<size_t>(send.allowed, allowed);
  return {};
}

// Words may overtake one another where writes do. Each leaves once the bytes of its chunks come no more
// (Facts::ordered), so that these can be decoded in place.
Status FragmentFlows::on_written(Rank source, uint64_t first, std::span<const std::byte> lengths) {
  ReceiveFlow* receive = receives_.find(source);
  uint64_t count = lengths.size() / sizeof(uint32_t);
  if (receive == nullptr || !receive->granted || count == 0 || first > receive->chunks() ||
      count > receive->chunks() - first)
    return {Code::kMismatch, members_.describe(source) + " wrote more than it was allowed to"};
  if (first + count > remote_.transport().arrived(receive->region)) {
    return {Code::kPeerLost,
            members_.describe(source) +
                " is lost: the connection to it broke, and what was under way is lost"};
  }
  receive->written += count;
  bool withholds = terms_.on_device && receive->written == receive->chunks();
  if (withholds) receive->withheld = first + --count;
  if (!receive->on_chunks(first, count))
    return {Code::kMismatch, members_.describe(source) + " wrote the same bytes twice"};
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t coded;
    std::memcpy(&coded, lengths.data() + i * sizeof coded, sizeof coded);
    if (coded == 0) continue;
    size_t begin = receive->begin_of(first + i), end = receive->begin_of(first + i + 1);
    std::byte* at = receive->memory + begin;
    if (Status s = decode(*receive, at, end - begin, at, coded); !s) return s;
  }
  return {};
}

Status FragmentFlows::decode(ReceiveFlow& receive, std::byte* to, size_t bytes,
                             const std::byte* from, size_t coded) {
  if (terms_.on_device || !terms_.coding.choice.decode(to, bytes, from, coded))
    return {Code::kMismatch, members_.describe(receive.source) + " sent damaged code"};
  receive.saved += bytes - coded;
  return {};
}

ReceiveFlow* FragmentFlows::on_data(Rank source, uint64_t offset, uint64_t bytes) {
  ReceiveFlow* receive = receives_.find(source);
  return receive != nullptr && receive->coverage.add(offset, bytes) ? receive : nullptr;
}

bool FragmentFlows::has_turn(const SendFlow& send) const {
  return !steps_.kept() || (send.step <= steps_.open() && turns_.free_for(this));
}

// Flows that keep step start one after another: of the send flows those before `sent_` are complete, and those of
// later steps have no chunks with the NICs.
bool FragmentFlows::window_full(const SendFlow& send) const {
  if (!steps_.kept() || terms_.limits.window == SIZE_MAX || !send.in_chunks()) return false;
  size_t chunks = 1;
  for (size_t i = sent_; i < sends_.size() && sends_[i].step <= send.step; ++i)
    chunks += sends_[i].chunks.count();
  return chunks * send.grant.chunk_bytes > terms_.limits.window;
}

// No message is longer than what goes without a rendezvous: the question in a rendezvous queues behind the data
// that this rank sends to its partner, and the partner's data waits for it meanwhile.
size_t FragmentFlows::message_bytes(const SendFlow& send) const {
  if (send.in_chunks()) return send.grant.chunk_bytes;
  size_t longest =
      payload_of(std::min(remote_.transport().facts().max_message, transport::kEagerMessage));
  return send.sent < send.eager_prefix ? std::min(send.eager_prefix - send.sent, longest) : longest;
}

bool FragmentFlows::write(SendFlow& send, size_t bytes) {
  bool started = remote_.transport().write(remote_.peer(send.target), send.grant, chunk_index(send),
                                           send.memory + send.sent, bytes, send.chunks.pending());
  if (started) count(send, bytes, bytes);
  return started;
}

void FragmentFlows::count(SendFlow& send, size_t bytes, size_t sent) {
  if (send.in_chunks()) send.untold.push_back(sent < bytes ? static_cast<uint32_t>(sent) : 0);
  terms_.sent.sent += sent;
  terms_.sent.raw += bytes;
}

transport::MessageBuffer* FragmentFlows::acquire(const SendFlow& send, std::byte** to) {
  transport::MessageBuffer* buffer = remote_.transport().acquire(remote_.peer(send.target), false);
  if (buffer != nullptr) *to = buffer->data + (send.in_chunks() ? 0 : sizeof(wire::Header));
  return buffer;
}

void FragmentFlows::post(SendFlow& send, transport::MessageBuffer* buffer, std::byte* to,
                         const std::byte* from, size_t bytes, bool coded) {
  static thread_local std::byte raw[coding::kPieceBytes];
  size_t sent = bytes;
  if (coded) {
    if (from == to) from = static_cast<std::byte*>(std::memcpy(raw, to, bytes));
    sent = terms_.coding.choice.encode(send.coding, to, from, bytes, terms_.coding.dtype);
  } else if (from != to) {
    std::memcpy(to, from, bytes);
  }
  if (send.in_chunks()) {
    transport::Transport& transport = remote_.transport();
    // A message that follows a write over the same connection tells as much as the write's completion.
    transport.write(buffer, send.grant, chunk_index(send), sent,
                    transport.facts().ordered ? nullptr : send.chunks.pending());
  } else {
    remote_.send_data(send.target, buffer, terms_.seq, terms_.signature_of(send.run), send.sent,
                      bytes, sent);
  }
  count(send, bytes, sent);
}

bool FragmentFlows::progress_matters(const SendFlow& send) const {
  const Topology& topology = members_.topology();
  return steps_.kept() || topology.ranks() > topology.nodes() || send.allowed < send.run.bytes() ||
         terms_.signature.collective != Collective::kAllGather;
}

// A flow that goes on tells each quarter of what the target allows, and each eighth of what is left, so that
// the target passes bytes on and allows more while further ones are under way. A flow that waits tells all:
// what it waits for may depend on these bytes. Not measured: other parts than these.
void FragmentFlows::tell_written(SendFlow& send, bool waits) {
  size_t written =
      remote_.transport().facts().ordered ? send.sent : send.chunks.completed(send.sent);
  if (written <= send.told) return;
  size_t worth = std::max(
      kLeastTold, std::min((send.allowed - send.told) / 4, (send.run.bytes() - send.told) / 8));
  if (send.coding.codes) worth = std::min(worth, kMostCoded);
  bool matters = send.coding.codes || progress_matters(send);
  if (!waits && (!matters || written - send.told < worth)) return;
  const size_t chunk = send.grant.chunk_bytes;
  const size_t count = (written - send.told + chunk - 1) / chunk;
  if (!remote_.send_written(send.target, terms_.seq, terms_.signature_of(send.run),
                            (send.told - send.eager_prefix) / chunk,
                            std::span(send.untold).first(count)))
    return;
  send.told = written;
  send.untold.erase(send.untold.begin(), send.untold.begin() + static_cast<ptrdiff_t>(count));
}

bool FragmentFlows::complete() const {
  return first_open(receives_, received_) == receives_.size() &&
         first_open(sends_, sent_) == sends_.size();
}

void FragmentFlows::close() {
  turns_.leave(this);
  for (ReceiveFlow& receive : receives_) {
    if (std::exchange(receive.granted, false))
      remote_.transport().close_region(receive.region, false);
  }
}

bool FragmentFlows::may_write(const ReceiveFlow& receive) const {
  return receive.granted && !remote_.writes_closed(receive.source) &&
         receive.written < receive.chunks();
}

bool FragmentFlows::closed(bool but_for_silent) const {
  auto counts = [&](Rank rank) { return !but_for_silent || !remote_.is_silent(rank); };
  for (const ReceiveFlow& receive : receives_) {
    if (may_write(receive) && counts(receive.source)) return false;
  }
  for (const SendFlow& send : sends_) {
    if (!send.chunks.idle() && counts(send.target)) return false;
  }
  return true;
}

bool FragmentFlows::may_overtake(Rank peer) const {
  if (remote_.transport().facts().ordered) return false;
  for (const SendFlow& send : sends_) {
    if (send.target == peer && !send.chunks.idle()) return true;
  }
  return false;
}

bool FragmentFlows::give_up() {
  bool entangled = !closed(false);
  for (ReceiveFlow& receive : receives_) {
    if (!receive.granted) continue;
    remote_.transport().close_region(receive.region, may_write(receive));
    receive.granted = false;
  }
  return entangled;
}

bool RailTurns::free_for(const FragmentFlows* flows) const {
  for (const FragmentFlows* earlier : in_flight_) {
    if (earlier == flows) return true;
    if (earlier->hold_rails()) return false;
  }
  return true;
}

bool RailTurns::soon_free_for(const FragmentFlows* flows) const {
  int held = 0;
  for (const FragmentFlows* earlier : in_flight_) {
    if (earlier == flows) return true;
    if (!earlier->hold_rails()) continue;
    if (++held > 1 || !earlier->in_last_steps()) return false;
  }
  return true;
}

}  // namespace smddp
