// A group's fragments in the order of their sequence numbers: those in flight, and behind them those
// that wait. Must not know how a fragment moves bytes. The Group fills and drains it; its FailureDetector
// reads it. Under the engine's lock.
#pragma once

#include <deque>
#include <memory>
#include <utility>

#include "collectives/fragment.h"

namespace smddp {

// The most at once. Enough to overlap one fragment's sums with another's transfer; few enough that what a fast
// rank can have announced stays small. 2 and 16 take as long at 1 Gbit/s and over the loopback (2026-11-29-constants).
inline constexpr int kFragmentsInFlight = 8;

class FragmentQueue {
 public:
  // The sequence number of the next fragment to be added.
  uint64_t next_seq() const { return next_seq_; }
  void add(std::unique_ptr<Fragment> fragment) {
    waiting_.push_back(std::move(fragment));
    ++next_seq_;
  }
  // An operation of a fragment's place that has needed none.
  void skip() { ++next_seq_; }
  // Moves the first waiting fragment to those in flight; nullptr if it may not start yet.
  Fragment* advance();
  // Takes the fragments in flight that are complete, in order, and calls f(operation) for each.
  // True if there was one.
  template <class F>
  bool take_complete(F&& f);
  // Takes all fragments and calls f(fragment) for each, a std::unique_ptr.
  template <class F>
  void take_all(F&& f);
  // Calls f(fragment) for each.
  template <class F>
  void for_each(F&& f) const;
  // Whether test(fragment) is false for all of them.
  template <class F>
  bool none_of(F&& test) const;

  bool empty() const { return in_flight_.empty() && waiting_.empty(); }
  const std::deque<std::unique_ptr<Fragment>>& in_flight() const { return in_flight_; }
  const std::deque<std::unique_ptr<Fragment>>& waiting() const { return waiting_; }
  // The fragment in flight with this sequence number, or nullptr.
  Fragment* find(uint64_t seq) const;
  // `source` has sent a message of its fragment `header.seq`, and none before of `from` and later ones.
  void on_start(Rank source, uint64_t from, const wire::Header& header) const;
  // Whether nothing of fragment `seq` is left to send to `target`. A fragment that has not started owes all.
  bool has_sent_all(Rank target, uint64_t seq) const;
  // The sequence numbers of the first fragment that has not started, and that is not complete.
  uint64_t first_unstarted() const {
    return waiting_.empty() ? next_seq_ : waiting_.front()->seq();
  }
  uint64_t first_incomplete() const {
    return in_flight_.empty() ? first_unstarted() : in_flight_.front()->seq();
  }

 private:
  std::deque<std::unique_ptr<Fragment>> in_flight_, waiting_;
  uint64_t next_seq_ = 0;
};

template <class F>
bool FragmentQueue::take_complete(F&& f) {
  bool any = false;
  for (auto fragment = in_flight_.begin(); fragment != in_flight_.end();) {
    if (!(*fragment)->complete()) {
      ++fragment;
      continue;
    }
    std::shared_ptr<Operation> operation = (*fragment)->close();
    if (fragment == in_flight_.begin()) {
      in_flight_.pop_front();  // 250 instructions less than erase()
      fragment = in_flight_.begin();
    } else {
      fragment = in_flight_.erase(fragment);
    }
    f(std::move(operation));
    any = true;
  }
  return any;
}

template <class F>
void FragmentQueue::take_all(F&& f) {
  for (auto* fragments : {&in_flight_, &waiting_}) {
    for (auto& fragment : *fragments) f(std::move(fragment));
    fragments->clear();
  }
}

template <class F>
void FragmentQueue::for_each(F&& f) const {
  for (auto* fragments : {&in_flight_, &waiting_}) {
    for (const auto& fragment : *fragments) f(*fragment);
  }
}

template <class F>
bool FragmentQueue::none_of(F&& test) const {
  bool found = false;
  for_each([&](const Fragment& fragment) { found = found || test(fragment); });
  return !found;
}

}  // namespace smddp
