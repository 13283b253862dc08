#include "group/group.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/log.h"
#include "common/processor.h"
#include "group/group_builder.h"
#include "group/measured_host.h"
#include "group/measured_network.h"
#include "joining/store.h"

namespace smddp {
namespace {

constexpr std::chrono::microseconds kLook(100);
// How long a rank that leaves waits until its peers have taken what it has sent, and, of a broken group, until they
// have heard why. A peer that answers no questions is not waited for.
constexpr uint64_t kLeaveNs = 5'000'000'000, kLeaveBrokenNs = 1'000'000'000;
// Then it asks their ports as well: the last word of a peer that leaves at the same time may be lost.
constexpr uint64_t kAskPortsNs = 100'000'000;

// In the order of the ranks. Asks no process anything.
std::vector<Connection> connections(LocalPeers& local, const RemotePeers& remote,
                                    const RemoteWatch& watch, uint64_t now) {
  using State = Connection::State;
  std::vector<Connection> all;
  for (int i = 0; i < local.count(); ++i) {
    const intranode::Neighbor& neighbor = local.neighbor(i);
    State state = neighbor.dead()         ? State::kEnded
                  : neighbor.is_stopped() ? State::kStopped
                                          : State::kConnected;
    all.push_back({local.rank(i), state, {}, 0, {}, "shared memory"});
  }
  for (Rank rank : remote.ranks()) all.push_back(watch.connection(rank, now));
  std::sort(all.begin(), all.end(),
            [](const Connection& a, const Connection& b) { return a.rank < b.rank; });
  return all;
}

}  // namespace

Result<std::unique_ptr<Group>> Group::create(Process& process, Store& store, int rank, int ranks,
                                             Options options) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return Status(Code::kInvalid,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " is no rank");
  }
  {
    Engine::Lock lock = process.engine().lock();
    process.forget_cause();
  }
  return GroupBuilder(process, store, rank, ranks, std::move(options)).build();
}

Group::Group(Process& process, Options options, GroupParts parts)
    : process_(process),
      engine_(process.engine()),
      options_(std::move(options)),
      key_(parts.key),
      members_(std::move(parts.members)),
      shape_(parts.shape),
      local_(std::move(parts.local)),
      remote_(std::move(parts.remote)),
      tallies_(members_.ranks()),
      remote_watch_(key_, members_, remote_, fragments_, std::move(parts.liveness),
                    options_.silence_ns),
      failures_(members_, local_, remote_, fragments_, health_, remote_watch_, options_.timeout_ns,
                options_.silence_ns),
      closing_(remote_, fragments_),
      recorder_(options_.name + options_.part),
      context_{members_, shape_,  local_,  remote_,           turns_,
               tallies_, coding_, health_, process_.staging()},
      maker_(context_, parts.algorithm, fragments_) {}

Result<std::unique_ptr<Group>> Group::subgroup(Store& store, const std::string& label,
                                               const std::vector<Rank>& ranks, bool recorded) {
  Options options = options_;
  options.recorded = recorded;
  {
    Engine::Lock lock = engine_.lock();
    options.timeout_ns = failures_.timeout_ns();
  }
  options.several_hosts = topology().nodes() > 1;
  options.part += "/" + label;
  const auto mine = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
  PrefixStore part(store, label + "/", ranks);
  return create(process_, part, static_cast<int>(mine), static_cast<int>(ranks.size()),
                std::move(options));
}

Group::~Group() {
  if (engine_.ended()) return;
  abort("the group was destroyed while operations were in flight");
  // The peers of a broken group still have to be told, and fragments refer to it.
  drive_until([this, until = now_ns() + 2 * Closing::kLongestNs] {
    return !closing_.busy() || now_ns() >= until;
  });
  {
    Engine::Lock lock = engine_.lock();
    guarded([&] {
      failures_.leave("destroyed group '" + name() + "'" + process_.cause());
      start_leaving();
    });
    if (!remote_.ranks().empty()) process_.network().wear();
  }
  drive_until([this] { return leaving_ns_ == 0; });
  engine_.detach(key_);
}

// `done` is called under the engine's lock.
template <class F>
void Group::drive_until(F&& done) {
  for (Engine::Lock lock = engine_.lock(); !done(); lock = engine_.lock()) {
    engine_.kick(std::move(lock));
    std::this_thread::sleep_for(kLook);
  }
}

Status Group::status() {
  Engine::Lock lock = engine_.lock();
  return health_.status();
}

Status Group::look(Rank rank) {
  Engine::Lock lock = engine_.lock();
  if (!health_.ok()) return copy_of(health_.status());
  for (int i = 0; i < local_.count(); ++i) {
    if (local_.rank(i) != rank) continue;
    if (const char* reason = local_.inbox(i).aborted()) return {Code::kAborted, reason};
    if (!local_.neighbor(i).look_for_death()) return {};
    return {Code::kPeerLost,
            describe(rank) + " (process " + std::to_string(local_.inbox(i).pid()) + ") ended"};
  }
  return remote_watch_.ask_now(rank, now_ns());
}

bool Group::is_ahead(Rank rank) {
  engine_.kick(engine_.lock());  // takes what the network has brought
  Engine::Lock lock = engine_.lock();
  for (int i = 0; i < local_.count(); ++i) {
    if (local_.rank(i) != rank) continue;
    const intranode::Piece* piece = local_.inbox(i).head(intranode::Lane::kSums);
    return piece != nullptr && piece->seq >= fragments_.next_seq();
  }
  return remote_.is_known_to_have_started(rank, fragments_.next_seq());
}

void Group::use(const NetworkModel& network) {
  Engine::Lock lock = engine_.lock();
  shape_.network = network;
  remote_.receive_budget() = ReceiveBudget(receive_budget_bytes(shape_));
}

void Group::use_reads(size_t up_to) {
  Engine::Lock lock = engine_.lock();
  shape_.reads_up_to = up_to;
}

void Group::ask(bool begin) {
  Engine::Lock lock = engine_.lock();
  asked_ = begin;
  operations_ = completed_ = 0;
  tallies_ = PeerTallies(ranks());
}

void Group::set_timeout(uint64_t timeout_ns) {
  Engine::Lock lock = engine_.lock();
  failures_.set_timeout(timeout_ns);
}

bool Group::made_by_all() {
  Engine::Lock lock = engine_.lock();
  return made_by_all_;
}

std::vector<std::string> Group::take_last_keys() {
  Engine::Lock lock = engine_.lock();
  return std::move(last_keys_);
}

void Group::submit(const std::shared_ptr<Operation>& operation, const Tuning& tuning,
                   bool background) {
  Engine::Lock lock = engine_.lock();
  operation->number_ = ++operations_;
  if (engine_.ended()) {
    engine_.complete(operation, {Code::kAborted, "the process is ending, or was forked"});
  } else {
    // Planned in any case, as the plan is what the recorder and errors tell of it.
    bool planned = guarded([&] { maker_.plan(*operation, tuning); });
    if (options_.recorded && !asked_) recorder_.begin(*operation);
    bool enqueued = planned && health_.ok() && guarded([&] {
                      failures_.on_enqueued();
                      if (!exchange_at_once(operation, background ? 1 : engine_.polls()))
                        maker_.enqueue(operation);
                    });
    if (!enqueued || !fragments_.empty()) guarded([&] { progress(); });
    recorder_.end_call();
    // If only some of its fragments could be made, they never start.
    if (!enqueued && !closing_.holds(operation, health_.verdict()))
      engine_.complete(operation, health_.verdict());
  }
  // Whether the caller of a message waits for it at once is not known; most do.
  engine_.release(std::move(lock), background ? nullptr : operation.get(),
                  is_message(operation->collective));
}

void Group::on_fabric_failed(const Status& why) {
  if (remote_.ranks().empty()) return;
  failures_.fail({Code::kUnavailable, "the network of " + describe(rank()) + " failed: " +
                                          why.message() + "; group '" + name() + "' can't go on"});
  remote_.drop_unsent();
}

// The other ranks carry out what this one can't: the whole group breaks.
void Group::fail(Status why) noexcept {
  if (!health_.ok()) return;
  try {
    std::string what = fragments_.in_flight().empty()
                           ? ""
                           : " during " + fragments_.in_flight().front()->describe();
    why = {why.code(), describe(rank()) + ": " + why.message() + what};
  } catch (...) {  // then without a name
  }
  failures_.fail(std::move(why));
}

template <class F>
bool Group::guarded(F&& f) noexcept {
  try {
    f();
    return true;
  } catch (...) {
    fail(status_of_exception());
    return false;
  }
}

bool Group::busy() const {
  return !fragments_.empty() || remote_.has_unsent() || failures_.has_suspects() ||
         closing_.busy() || leaving_ns_ != 0;
}

bool Group::watch(uint64_t now_ns) {
  bool broken = !health_.ok();
  return failures_.watch(now_ns) && (!broken || now_ns >= closing_.limit_ns());
}

bool Group::progress() {
  bool moved = false;
  if (health_.ok()) moved |= remote_.flush_ready();
  if (health_.ok()) failures_.check_aborts();
  if (health_.ok()) moved |= start_fragments();
  if (health_.ok()) moved |= progress_fragments();
  if (health_.ok()) moved |= close_fragments();
  if (!health_.ok()) moved |= give_up();
  if (leaving_ns_ != 0) take_leave();
  local_.wake();
  failures_.on_progress(moved);
  return moved;
}

bool Group::exchange_at_once(const std::shared_ptr<Operation>& operation, int looks) {
  if (!maker_.takes_slots(*operation) || !fragments_.empty()) return false;
  failures_.check_aborts();  // of peers whose pieces may be here
  if (!health_.ok()) return false;
  const uint64_t seq = fragments_.next_seq();
  SlotExchange exchange(context_, *operation);
  if (!exchange.push(seq)) return false;
  note_start(*operation);
  for (exchange.look(seq); !exchange.complete(); exchange.look(seq)) {
    if (--looks <= 0 || engine_.wanted()) {
      maker_.enqueue(operation, std::move(exchange));
      return true;
    }
    pause();
  }
  fragments_.skip();
  local_.wake();
  finish(operation);
  return true;
}

void Group::note_start(Operation& op) {
  if (!op.path.empty()) return;
  op.path = maker_.path_of(op);
  recorder_.start(op);
}

bool Group::start_fragments() {
  bool moved = false;
  while (Fragment* next = fragments_.advance()) {
    next->start();
    next->follow_starts();
    note_start(next->operation());
    remote_.take_early(next->seq(), [&](const wire::Header& header, const std::byte* payload) {
      if (!health_.ok()) return;
      if (Status taken = next->on_message(header, payload); !taken) failures_.fail(taken);
    });
    moved = true;
  }
  return moved;
}

bool Group::progress_fragments() {
  bool moved = false;
  std::array<bool, intranode::kLanes> lanes_free{true, true};
  for (const auto& fragment : fragments_.in_flight()) {
    if (!health_.ok()) break;
    fragment->look_for_starts();
    bool& may_push = lanes_free[static_cast<size_t>(fragment->lane())];
    moved |= fragment->progress(may_push);
    // What is complete at once needs no clock: its first byte is its last.
    const recorder::Mark& record = fragment->operation().record;
    if (fragment->has_received() && record.awaits_first_byte() && !fragment->complete())
      record.first_byte(now_ns());
    may_push = may_push && fragment->pushed();
  }
  return moved;
}

bool Group::close_fragments() {
  return fragments_.take_complete([&](std::shared_ptr<Operation> op) {
    if (--op->fragments_left_ == 0) finish(std::move(op));
  });
}

void Group::finish(std::shared_ptr<Operation> op) {
  ++completed_;
  if (shape_.nodes > 1) guarded([&] { check_network(); });
  made_by_all_ |= op->collective <= Collective::kBarrier;  // those that wait for every rank
  engine_.complete(std::move(op), Status());
}

// A model that was measured on a busy machine, or on a link that has changed since, is not believed for ever. This group
// keeps it, as all its ranks must have the same.
void Group::check_network() {
  using Verdict = ObservedRates::Verdict;
  Network& network = process_.network();
  double model = shape_.network.bytes_per_ns, fastest = tallies_.rates().fastest();
  if (fastest == 0 || network.known().doubted) return;
  Verdict verdict = tallies_.rates().judge(model, static_cast<double>(shape_.ranks) / shape_.nodes);
  bool other = verdict != Verdict::kNone && network.known().model == text_of(shape_.network);
  if (!other || !network.doubt()) return;
  std::vector<std::string> hosts;
  for (Rank r = 0; r < ranks(); ++r) hosts.push_back(members_.host(r));
  cache_of(hosts, network.transport()->facts()).forget();
  if (topology().local_index(rank()) != 0) return;
  char text[160];
  std::snprintf(text, sizeof text,
                "large transfers of group '%s' came at up to %.3g GB/s; its network was taken for "
                "%.3g GB/s per host (%s)",
                name().c_str(), fastest, model, network.known().source.c_str());
  log(LogLevel::kWarning, std::string(text) + ". The next group, or job, measures it again");
}

// Ends everything in flight, without memory, once the group is broken and no peer writes for it.
bool Group::give_up() {
  uint64_t now = now_ns();
  if (!broken_at_ && !closing_.busy()) guarded([&] { broken_at_ = oldest(now); });
  failures_.tell_peers();
  if (closing_.begin(now)) {
    guarded([&] { process_.broke(health_.status().message()); });
    if (!remote_.ranks().empty()) process_.network().wear();
  }
  remote_watch_.find_silent(now, leaving_ns_ != 0);
  remote_.flush_aborts();
  if (!closing_.progress(now)) return false;
  closing_.close_flows();
  fragments_.take_all([&](std::unique_ptr<Fragment> fragment) {
    engine_.complete(fragment->operation_ptr(), health_.verdict());
    if (fragment->entangled()) process_.network().keep(std::move(fragment));
  });
  engine_.complete(closing_.take_held());
  return true;
}

GroupState Group::state(bool with_connections) {
  Engine::Lock lock = engine_.lock();
  GroupState state{name() + options_.part, rank(), {}, {}, {}, operations_, completed_,
                   health_.status(),       {},     {}, {}, {}, {}};
  for (Rank r = 0; r < ranks(); ++r) {
    state.members.push_back(members_.number_of(r));
    state.hosts.push_back(members_.host(r));
  }
  if (shape_.nodes > 1) state.network = text_of(shape_.network);
  if (shape_.nodes == 1 && shape_.ranks > 1) state.inside_host = text_of_reads(shape_.reads_up_to);
  state.coding = coding_.last();
  state.tallies = tallies_.all();
  state.oldest = health_.ok() ? oldest(now_ns()) : broken_at_;
  if (with_connections) state.connections = connections(local_, remote_, remote_watch_, now_ns());
  return state;
}

std::optional<OldestOperation> Group::oldest(uint64_t now) const {
  if (fragments_.in_flight().empty()) return std::nullopt;
  const Fragment& fragment = *fragments_.in_flight().front();
  const Operation& op = fragment.operation();
  OldestOperation found{op.number(), op.collective, fragment.describe(), {}};
  fragment.for_each_awaited([&](Rank rank, uint64_t expected, uint64_t arrived) {
    for (AwaitedRank& known : found.awaited) {
      if (known.rank == rank) return;
    }
    uint64_t since = remote_watch_.quiet_since_ns(rank);
    if (since == 0) since = std::max(failures_.moved_ns(), op.called_ns);
    found.awaited.push_back({rank, expected, arrived, now - std::min(now, since)});
  });
  return found;
}

bool Group::on_message(const wire::Header& header, const std::byte* payload) {
  if (!remote_.accept(header, payload)) return false;
  if (header.type == wire::Type::kClosed) {
    remote_.heard_closed(static_cast<Rank>(header.source));
  } else if (header.type == wire::Type::kLeaving) {
    remote_.heard_leaving(header);
  } else if (header.type == wire::Type::kTaken) {
    remote_.heard_taken(static_cast<Rank>(header.source));
  } else if (health_.ok()) {
    take(header, payload);
  } else if (header.type == wire::Type::kWritten) {
    closing_.on_written(header, payload);
  }
  return true;
}

void Group::take(const wire::Header& header, const std::byte* payload) {
  if (header.type == wire::Type::kAbort) return failures_.on_abort(header, payload);
  auto source = static_cast<Rank>(header.source);
  uint64_t unheard = remote_.has_started(source, header.seq);
  if (unheard <= header.seq) fragments_.on_start(source, unheard, header);
  if (header.type == wire::Type::kAsk) {
    if (fragments_.has_sent_all(source, header.seq))
      remote_.send_question(wire::Type::kSentAll, source, header.seq, header.signature);
    return;
  }
  if (header.type == wire::Type::kSentAll) return remote_watch_.on_sent_all(source, header.seq);
  if (Fragment* fragment = fragments_.find(header.seq)) {
    if (Status taken = fragment->on_message(header, payload); !taken) failures_.fail(taken);
  } else if (header.seq >= fragments_.first_unstarted() && !remote_.keep_early(header, payload)) {
    failures_.fail({Code::kInternal, describe(source) + " is too far ahead"});
  }  // else it is kept, or that fragment is complete: the message had nothing to bring
}

void Group::leave() {
  if (health_.ok() && (busy() || process_.has_broken())) {
    failures_.fail({Code::kAborted, describe(rank()) + " ended" +
                                        (busy() ? " with operations in flight" : "") +
                                        process_.cause()});
  } else if (health_.ok()) {
    failures_.leave("ended its program, without a further operation of group '" + name() + "'" +
                    process_.cause());
  }
  start_leaving();
}

void Group::start_leaving() {
  leaving_ns_ = now_ns();
  progress();
}

void Group::take_leave() {
  bool whole = health_.ok() && !process_.has_broken();
  uint64_t now = now_ns(), until = leaving_ns_ + (whole ? kLeaveNs : kLeaveBrokenNs);
  if (now - leaving_ns_ >= kAskPortsNs) remote_watch_.find_silent(now, true);
  if (now >= until || !process_.network().works() ||
      (!remote_.has_unsent() && remote_.all_taken(now)))
    leaving_ns_ = 0;
}

void Group::abort(const std::string& reason, bool idle_too) {
  Engine::Lock lock = engine_.lock();
  if (health_.ok() && (idle_too || busy()) && !engine_.ended()) {
    failures_.fail({Code::kAborted, reason});
    guarded([&] { progress(); });
  }
  engine_.kick(std::move(lock));
}

}  // namespace smddp
