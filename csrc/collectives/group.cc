#include "collectives/group.h"

#include <algorithm>
#include <utility>

#include "common/clock.h"

namespace smddp {
namespace {

// Rounds in flight per group: enough to overlap one's sums with another's transfer, few enough that
// what a fast rank can have announced stays small.
constexpr size_t kFragmentsInFlight = 8;
// Of a list's shards, those that get rounds of their own: copied twice, they would cost more than a
// round's messages do.
constexpr size_t kOwnFragment = 128 << 10;
constexpr uint64_t kGraceNs = 1'000'000'000;
// Long after anything could still be under way from a peer that did its part and ended.
constexpr uint64_t kReminderNs = 5'000'000'000;

}  // namespace

Group::~Group() {
  if (engine_.ended()) return;
  abort("the group was destroyed while operations were in flight");
  engine_.detach(key_);
}

Status Group::status() {
  Engine::Lock lock = engine_.lock();
  return health_;
}

std::string Group::describe(Rank rank) const {
  bool known = rank >= 0 && static_cast<size_t>(rank) < options_.called.size();
  Rank called = known ? options_.called[static_cast<size_t>(rank)] : rank;
  std::string text = "rank " + std::to_string(called);
  if (rank >= 0 && rank < ranks()) text += " (" + host_names_[static_cast<size_t>(rank)] + ")";
  return text;
}

void Group::submit(const std::shared_ptr<Operation>& operation, const Tuning& tuning,
                   bool background) {
  Engine::Lock lock = engine_.lock();
  operation->number_ = ++operations_;
  if (engine_.ended()) {
    engine_.finish(operation, {Code::kAborted, "the process is ending, or was forked"});
  } else if (!health_) {
    engine_.finish(operation, health_);
  } else {
    enqueue(operation, tuning);
  }
  progress();
  engine_.release(std::move(lock), background ? nullptr : operation.get());
}

void Group::enqueue(const std::shared_ptr<Operation>& operation, const Tuning& tuning) {
  Operation& op = *operation;
  moved_lately_ = true;
  bool sums =
      op.collective == Collective::kReduceScatter || op.collective == Collective::kAllReduce;
  const Blocks& blocks = sums ? op.input : op.output;
  Tuning settled = tuning;
  if (settled.algorithm == Algorithm::kAuto) settled.algorithm = algorithm_;
  Plan plan = select({op.collective, blocks.largest(), op.element_size}, shape_, settled);
  size_t total = 0;
  for (Rank r = 0; r < ranks(); ++r) total += blocks.bytes(r);
  op.plan_ = plan;
  op.signature_ = {
      op.collective,
      op.dtype,
      op.reduce_op,
      static_cast<uint8_t>((sums && tuning.reduce_precision_fp32 ? kPartialsInFp32 : 0) |
                           (plan.pattern == Pattern::kLog ? kLogPattern : 0) |
                           (plan.pattern == Pattern::kJoint ? kJointPattern : 0)),
      op.tensors,
      total,
      plan.fragment_bytes,
      op.digest};
  if (plan.whole) {
    queued_.push_back(make_allreduce(*this, operation, next_seq_++));
    op.fragments = op.fragments_left_ = 1;
    op.largest_fragment = total;
    return;
  }
  bool gathers = op.collective != Collective::kReduceScatter;
  uint64_t gather_after = 0;
  size_t gather_begin = 0;
  auto gather = [&](size_t begin, size_t bytes, uint64_t after) {
    queued_.push_back(make_allgather(*this, operation, next_seq_++, begin, bytes));
    queued_.back()->after = after;
  };
  // Between hosts, what lies end to end goes straight from memory to memory, if the round holds nothing
  // else: large tensors of a list get rounds of their own.
  bool apart = !sums && op.tensors > 1 && shape_.nodes > 1 &&
               total == blocks.largest() * static_cast<size_t>(ranks());
  size_t step = plan.fragment_bytes;
  for (size_t begin = 0; begin == 0 || begin < blocks.largest(); begin += step) {
    if (apart && begin < blocks.largest())
      step = std::min(plan.fragment_bytes, blocks.stretch(0, begin, kOwnFragment));
    if (sums) {
      uint64_t seq = next_seq_++;
      queued_.push_back(make_reduce_scatter(*this, operation, seq, begin, plan.fragment_bytes));
      // A part is gathered behind the next part's sums, so that the rails never idle between.
      if (gather_after != 0) gather(gather_begin, step, gather_after);
      if (gathers) gather_after = seq + 1;
      gather_begin = begin;
    } else {
      gather(begin, step, 0);
    }
    ++op.fragments;
    size_t bytes = 0;
    for (Rank r = 0; r < ranks(); ++r) {
      bytes += std::min(step, std::max(blocks.bytes(r), begin) - begin);
    }
    op.largest_fragment = std::max<uint64_t>(op.largest_fragment, bytes);
  }
  if (gather_after != 0) gather(gather_begin, step, gather_after);
  op.fragments_left_ = op.collective == Collective::kAllReduce ? 2 * op.fragments : op.fragments;
}

// The ranks of a node must decide alike, so each looks at every verdict, not only at its own.
bool Group::node_attached() {
  if (attached_) return true;
  bool single_copy = true;
  if (outbox_) {
    if (!outbox_->all_attached()) return false;
    single_copy = !outbox_->any_denied();
    for (const auto& inbox : inboxes_) {
      if (!inbox->all_attached(local_peers())) return false;
      single_copy = single_copy && !inbox->any_denied();
    }
  }
  shape_.single_copy = single_copy;
  return attached_ = true;
}

bool Group::start_fragments() {
  bool moved = false;
  while (!queued_.empty() && active_.size() < kFragmentsInFlight) {
    Fragment& next = *queued_.front();
    if (next.after != 0 && active(next.after - 1) != nullptr) break;
    active_.push_back(std::move(queued_.front()));
    queued_.pop_front();
    next.start();
    if (next.operation().path.empty()) {
      Operation& op = next.operation();
      bool direct = read_directly(op.signature_.fragment_bytes, shape_);
      op.path = ranks() == 1 ? "copy" : local_peers() == 0 ? "" : direct ? "single-copy" : "shm";
      if (shape_.nodes > 1) op.path += (op.path.empty() ? "" : " + ") + std::string("fabric");
      if (op.plan_.pattern == Pattern::kLog) op.path += " (log)";
      if (op.plan_.pattern == Pattern::kJoint) op.path += " (joint)";
    }
    for (const Early& early : early_) {
      if (early.header.seq != next.seq() || !health_) continue;
      if (early.header.type == wire::Type::kData)
        remote_peers_[early.header.source].kept_bytes -= early.payload.size();
      dispatch(next, early.header, early.payload.data());
    }
    std::erase_if(early_, [&](const Early& early) { return early.header.seq <= next.seq(); });
    moved = true;
  }
  return moved;
}

bool Group::finish_fragments() {
  bool moved = false;
  for (auto fragment = active_.begin(); fragment != active_.end();) {
    if (!(*fragment)->complete()) {
      ++fragment;
      continue;
    }
    (*fragment)->close_flows();
    std::shared_ptr<Operation> op = (*fragment)->take_operation();
    fragment = active_.erase(fragment);
    if (--op->fragments_left_ == 0) engine_.finish(std::move(op), Status());
    moved = true;
  }
  return moved;
}

bool Group::busy() const {
  return !active_.empty() || !queued_.empty() || !unsent_ready_.empty() || !unsent_abort_.empty();
}

bool Group::progress() {
  bool moved = false;
  if (health_) moved |= flush_ready();
  if (health_) check_aborts();
  if (health_) moved |= start_fragments();
  bool may_push = true;
  for (auto& fragment : active_) {
    if (!health_) break;
    moved |= fragment->progress(may_push);
    may_push = may_push && fragment->pushed();
  }
  if (health_) moved |= finish_fragments();
  if (!health_) {
    std::set<std::shared_ptr<Operation>> over;
    for (auto* fragments : {&active_, &queued_}) {
      for (auto& fragment : *fragments) {
        over.insert(fragment->operation_ptr());
        if (fragment->abandon())
          engine_.keep_until_fabric_closes(std::shared_ptr<Fragment>(std::move(fragment)));
      }
      fragments->clear();
    }
    for (const auto& op : over) engine_.finish(op, health_);
    unsent_ready_.clear();
    flush_aborts();
    moved |= !over.empty();
  }
  for (size_t i = 0; i < neighbors_.size(); ++i) {
    if (pushed_since_wake_ || popped_since_wake_[i]) neighbors_[i]->wake();
    popped_since_wake_[i] = false;
  }
  pushed_since_wake_ = false;
  moved_ = moved;
  moved_lately_ = moved_lately_ || moved;
  return moved;
}

uint64_t Group::oldest_unfinished() const {
  return !active_.empty()   ? active_.front()->seq()
         : !queued_.empty() ? queued_.front()->seq()
                            : next_seq_;
}

// A peer that gave up a later round has pushed all that the oldest one here needs of it: that one may
// still finish.
void Group::check_aborts() {
  for (int i = 0; i < local_peers(); ++i) {
    const char* reason = inbox(i).aborted();
    if (reason == nullptr || inbox(i).aborted_from() > oldest_unfinished()) continue;
    return fail({Code::kAborted, std::string(reason)});
  }
  if (heard_abort_.from <= oldest_unfinished()) fail({Code::kAborted, heard_abort_.reason});
}

// At the first watch after a call, at most some microseconds later: what is over before needs no look at
// the clock.
void Group::set_deadlines(uint64_t now) {
  const Operation* last = nullptr;
  for (auto* fragments : {&queued_, &active_}) {
    for (auto fragment = fragments->rbegin(); fragment != fragments->rend(); ++fragment) {
      Operation& op = (*fragment)->operation();
      if (&op == std::exchange(last, &op)) continue;
      if (op.deadline_ns_ != 0) return;
      op.deadline_ns_ = now + (op.timeout_ns != 0 ? op.timeout_ns : options_.timeout_ns);
    }
  }
}

bool Group::watch(uint64_t now) {
  if (health_) set_deadlines(now);
  if (std::exchange(moved_lately_, false)) moved_ns_ = now;
  if (health_ && !moved_) {
    check_neighbors();
    check_deadline(now);
  }
  return !health_;
}

// A rank that can't tell which of several ranks holds it up gives the one that can a moment to say so:
// all deadlines expire together, and the first verdict is everybody's.
uint64_t Group::expires_ns(const Fragment& fragment) const {
  uint64_t set = fragment.operation().deadline_ns_;
  return set == 0 ? UINT64_MAX : set + (fragment.can_blame() ? 0 : kGraceNs);
}

uint64_t Group::deadline_ns() const {
  return active_.empty() ? UINT64_MAX : expires_ns(*active_.front());
}

void Group::check_deadline(uint64_t now) {
  if (now < deadline_ns()) {
    if (!remote_ranks_.empty() && now - moved_ns_ > kReminderNs) remind();
    return;
  }
  const Fragment& oldest = *active_.front();
  const Operation& op = oldest.operation();
  uint64_t limit = op.timeout_ns != 0 ? op.timeout_ns : options_.timeout_ns;
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(limit) * 1e-9);
  fail({Code::kTimeout, smddp::describe(op.signature_) + " #" + std::to_string(op.number_) +
                            " of group '" + options_.name + "' did not finish within " + seconds +
                            " s on " + describe(rank_) + ": " + oldest.waiting_for()});
}

// Whoever only receives learns nothing of a connection that broke. A READY said twice changes nothing
// at a live peer; to a dead one it fails, and on_peer_lost() hears of it.
void Group::remind() {
  moved_ns_ = now_ns();
  for (auto& fragment : active_) fragment->remind();
}

// Only a neighbour that a round still needs is missed: one that has done its part may have ended.
void Group::check_neighbors() {
  for (int i = 0; i < local_peers(); ++i) {
    if (!neighbors_[static_cast<size_t>(i)]->dead()) continue;
    for (auto& fragment : active_) {
      if (fragment->heard(i) && outbox_->read_by(i) >= outbox_->published()) continue;
      return lose(i, *fragment);
    }
  }
}

void Group::lose(int i, const Fragment& fragment) {
  const Operation& op = fragment.operation();
  fail({Code::kPeerLost, describe(local_peer(i)) + " (process " + std::to_string(inbox(i).pid()) +
                             ") ended during " + smddp::describe(op.signature_) + " #" +
                             std::to_string(op.number_) + " of group '" + options_.name + "'"});
}

void Group::fail_read(int i, const Fragment& fragment, const Status& why) {
  if (why.code() == Code::kPeerLost) return lose(i, fragment);
  fail({why.code(), describe(local_peer(i)) + ": " + why.message()});
}

bool Group::rails_are_free(const Fragment& fragment) const {
  for (const auto& earlier : active_) {
    if (earlier.get() == &fragment) return true;
    if (earlier->holds_rails()) return false;
  }
  return true;
}

bool Group::rails_soon_free(const Fragment& fragment) const {
  int held = 0;
  for (const auto& earlier : active_) {
    if (earlier.get() == &fragment) return true;
    if (!earlier->holds_rails()) continue;
    if (++held > 1 || !earlier->in_last_steps()) return false;
  }
  return true;
}

Fragment* Group::active(uint64_t seq) {
  for (auto& fragment : active_) {
    if (fragment->seq() == seq) return fragment.get();
  }
  return nullptr;
}

void Group::fail(Status why) {
  if (!health_) return;
  health_ = std::move(why);
  gave_up_from_ = oldest_unfinished();
  if (outbox_) {
    outbox_->abort(health_.message(), gave_up_from_);
    pushed_since_wake_ = true;
  }
  unsent_abort_ = remote_ranks_;
}

void Group::leave() {
  if (!health_ || !busy()) return;
  fail({Code::kAborted, describe(rank_) + " ended with operations in flight"});
  progress();
}

void Group::abort(const std::string& reason, bool idle_too) {
  Engine::Lock lock = engine_.lock();
  if (health_ && (idle_too || busy()) && !engine_.ended()) {
    fail({Code::kAborted, reason});
    progress();
  }
  engine_.kick(std::move(lock));
}

}  // namespace smddp
