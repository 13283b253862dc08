#include "group/failure_detector.h"

#include <algorithm>
#include <new>
#include <utility>

#include "common/clock.h"

namespace smddp {
namespace {

constexpr uint64_t kGraceNs = 1'000'000'000;
// A rank that only receives finds out by a reminder that its connection broke: ofi_rxm tells nothing.
constexpr uint64_t kReminderNs = 1'000'000'000;
constexpr uint64_t kStateLookNs = 500'000'000;
// A process that was stopped itself must not count that time.
constexpr uint64_t kLongestNs = 1'000'000'000;

// When a fragment's operation has to be complete. A rank that can't tell which of several ranks holds it up
// leaves a moment to the rank that can: all deadlines expire together, and the first verdict is the one
// that all ranks report.
uint64_t expires_ns(const Fragment& fragment) {
  uint64_t set = fragment.operation().deadline_ns;
  return set == 0 ? UINT64_MAX : set + (fragment.can_blame() ? 0 : kGraceNs);
}

}  // namespace

void FailureDetector::fail(Status why) noexcept {
  try {
    const char* told = why.code() == Code::kPeerLost && health_.ok() ? told_cause() : nullptr;
    if (told != nullptr) why = {Code::kAborted, told};
  } catch (const std::bad_alloc&) {  // then with what was found here
  }
  health_.fail(std::move(why));
  tell_peers();
}

void FailureDetector::tell_peers() noexcept {
  if (health_.ok() || std::exchange(told_, true)) return;
  uint64_t from = fragments_.first_incomplete();
  local_.abort(health_.status().message(), from);
  remote_.send_aborts(from, health_.status().message());
  try {
    remote_watch_.leave(from, health_.status().message());
  } catch (const std::bad_alloc&) {  // the peers are told by messages
  }
}

// Of the group's end, by a peer that gave up from a fragment on that is not due yet here. That a rank is lost then is a
// consequence, or comes later.
const char* FailureDetector::told_cause() const {
  if (heard_abort_from_ != UINT64_MAX) return heard_abort_reason_.c_str();
  for (int i = 0; i < local_.count(); ++i) {
    const intranode::Inbox& inbox = local_.inbox(i);
    const char* reason = inbox.aborted();
    if (reason != nullptr && !inbox.destroyed()) return reason;
  }
  return nullptr;
}

// A peer that gave up from a later fragment on has pushed all that the oldest one here needs of it: the
// oldest may still become complete.
void FailureDetector::check_aborts() {
  uint64_t oldest = fragments_.first_incomplete();
  for (int i = 0; i < local_.count(); ++i) {
    const intranode::Inbox& inbox = local_.inbox(i);
    const char* reason = inbox.aborted();
    if (reason == nullptr || inbox.aborted_from() > oldest) continue;
    if (inbox.destroyed() && fragments_.in_flight().empty()) continue;
    return fail({Code::kAborted, std::string(reason)});
  }
  if (heard_abort_from_ <= oldest) fail({Code::kAborted, heard_abort_reason_});
}

void FailureDetector::on_abort(const wire::Header& header, const std::byte* reason) {
  if (header.seq < heard_abort_from_) {
    heard_abort_from_ = header.seq;
    heard_abort_reason_.assign(reinterpret_cast<const char*>(reason),
                               std::min<size_t>(header.bytes, kReasonBytes));
  }
  check_aborts();
}

void FailureDetector::leave(const std::string& what) {
  uint64_t from = fragments_.first_incomplete();
  std::string reason = members_.describe(members_.rank()) + " has " + what;
  local_.abort(reason, from, intranode::GaveUp::kDestroyed);
  remote_watch_.leave(from, reason);
}

bool FailureDetector::watch(uint64_t now) {
  if (health_.ok()) set_deadlines(now);
  if (std::exchange(moved_lately_, false)) moved_ns_ = now;
  if (health_.ok() && !moved_) check_neighbors(now);
  if (health_.ok()) {
    bool one_gave_up = told_cause() != nullptr;
    if (Status fine = remote_watch_.look(now, one_gave_up); !fine) fail(std::move(fine));
  }
  if (health_.ok() && !moved_) check_deadline(now);
  return !health_.ok();
}

// At the first watch() after a call, at most some microseconds later: operations that are complete before
// that need no look at the clock.
void FailureDetector::set_deadlines(uint64_t now) {
  const Operation* last = nullptr;
  for (const auto* fragments : {&fragments_.waiting(), &fragments_.in_flight()}) {
    for (auto fragment = fragments->rbegin(); fragment != fragments->rend(); ++fragment) {
      Operation& op = (*fragment)->operation();
      if (&op == std::exchange(last, &op)) continue;
      if (op.deadline_ns != 0) return;
      op.deadline_ns = now + (op.timeout_ns != 0 ? op.timeout_ns : timeout_ns_);
    }
  }
}

// A dead local peer is an error only if a fragment still needs it: a rank that has done its part may
// have ended.
void FailureDetector::check_neighbors(uint64_t now) {
  for (int i = 0; i < local_.count(); ++i) {
    if (!local_.neighbor(i).dead()) continue;
    for (const auto& fragment : fragments_.in_flight()) {
      if (!fragment->needs(i)) continue;
      check_aborts();  // its last words
      return fail(fragment->lost(i));
    }
  }
  if (silence_ns_ != 0 && now >= looked_ns_ + kStateLookNs) check_stopped(now);
}

void FailureDetector::check_stopped(uint64_t now) {
  uint64_t passed = std::min(now - std::exchange(looked_ns_, now), kLongestNs);
  stopped_ns_.resize(static_cast<size_t>(local_.count()));
  for (int i = 0; i < local_.count(); ++i) {
    uint64_t& stopped = stopped_ns_[static_cast<size_t>(i)];
    const auto& in_flight = fragments_.in_flight();
    bool awaited = std::any_of(in_flight.begin(), in_flight.end(),
                               [=](const auto& fragment) { return fragment->needs(i); });
    if (!awaited || !local_.neighbor(i).is_stopped()) {
      stopped = 0;
    } else {
      stopped = stopped == 0 ? 1 : stopped + passed;
    }
    if (stopped < silence_ns_) continue;
    return fail({Code::kPeerLost, members_.describe(local_.rank(i)) + " is lost during " +
                                      in_flight.front()->describe() + ": it has not answered for " +
                                      seconds_text(stopped) + ". Its process " +
                                      std::to_string(local_.neighbor(i).pid()) +
                                      " was not seen to end: it is stopped (silence_seconds is " +
                                      seconds_text(silence_ns_) + ")"});
  }
}

uint64_t FailureDetector::deadline_ns() const {
  const auto& in_flight = fragments_.in_flight();
  return in_flight.empty() ? UINT64_MAX : expires_ns(*in_flight.front());
}

void FailureDetector::check_deadline(uint64_t now) {
  if (now < deadline_ns()) {
    if (!remote_.ranks().empty() && now - moved_ns_ > kReminderNs) remind();
    return;
  }
  const Fragment& oldest = *fragments_.in_flight().front();
  uint64_t own = oldest.operation().timeout_ns;
  fail({Code::kTimeout, oldest.describe() + " timed out after " +
                            seconds_text(own != 0 ? own : timeout_ns_) + " on " +
                            members_.describe(members_.rank()) + ": " + oldest.waiting_for()});
}

void FailureDetector::remind() {
  moved_ns_ = now_ns();
  for (const auto& fragment : fragments_.in_flight()) fragment->remind();
}

}  // namespace smddp
