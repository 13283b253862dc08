// The c10d store of a group: behind the core's Store interface, and the part of it that belongs to one making of the
// group. Made first of all that a group needs.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "common/exceptions.h"
#include "joining/rendezvous.h"
#include "joining/store.h"
#include "torch/runtime.h"

namespace smddp {

class StoreAdapter final : public Store {
 public:
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout,
               std::vector<int> numbers)
      : store_(std::move(store)), timeout_(timeout), numbers_(std::move(numbers)) {}

  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    return guarded([&] { store_->set(key, value); });
  }

  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    if (Status waited = wait(keys, stop); !waited) return waited;
    std::vector<std::vector<uint8_t>> values;
    Status status = guarded([&] {
      if (store_->hasExtendedApi()) {
        values = store_->multiGet(keys);
      } else {
        for (const std::string& key : keys) values.push_back(store_->get(key));
      }
    });
    if (!status) return status;
    return values;
  }

  bool has(const std::string& key) override {
    bool found = false;
    (void)guarded([&] { found = store_->check({key}); });
    return found;
  }

  void remove(const std::string& key) override {
    (void)guarded([&] { (void)store_->deleteKey(key); });
  }

  // What `key` counts, with this call.
  int64_t count(const std::string& key) {
    int64_t counted = 0;
    (void)guarded([&] { counted = store_->add(key, 1); });
    return counted;
  }

  // Over a connection of its own: a request of one waits while another thread's of the same connection does.
  StoreAdapter apart() const { return StoreAdapter(store_->clone(), timeout_, numbers_); }

  int number_of(int rank) const override {
    return numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)];
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::ptrdiff_t kPart = 64;

  // By looks with pauses between them: a wait() of c10d that ends at a short deadline, to look for `stop`,
  // writes a warning each time. Looks for all keys at once, then for kPart at a time, as each look sends
  // its keys; as many ranks look as there are keys. Not measured: other parts.
  Status wait(const std::vector<std::string>& keys, const std::string& stop) {
    auto until = Clock::now() + timeout_;
    Pause pause(longest_pause_of(keys.size()));
    auto first = keys.begin(), last = keys.end();
    while (first != keys.end()) {
      bool found = false;
      Status looked = guarded([&] { found = store_->check({first, last}); });
      if (!looked) return looked;
      if (found) {
        first = last;
      } else {
        if (has(stop)) return {Code::kAborted, stop + " is in the store"};
        if (Clock::now() >= until) return {Code::kTimeout, "not all keys are in the store"};
        pause.sleep();
      }
      last = first + std::min(kPart, keys.end() - first);
    }
    return {};
  }

  template <class F>
  Status guarded(F&& call) {
    try {
      call();
      return {};
    } catch (
        const c10::DistStoreError& error) {  // this is how c10d reports that a deadline is over
      return {Code::kTimeout, error.what_without_backtrace()};
    } catch (const std::exception& error) {
      return {Code::kUnavailable, "the rendezvous store failed: " + text_of(error)};
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  const std::vector<int> numbers_;
};

class GroupStore {
 public:
  // Waits for all ranks of the group; throws if one does not come in time. `numbers`: theirs in the whole job;
  // empty: the group is the whole job.
  GroupStore(c10::intrusive_ptr<c10d::Store> store, int rank, int ranks,
             std::chrono::milliseconds timeout, std::vector<int> numbers)
      : adapter_(std::move(store), timeout, std::move(numbers)),
        whole_(adapter_, "smddp/"),
        rendezvous_(whole_, rank, ranks, timeout),
        name_(meet(rendezvous_)),
        part_(whole_, name_ + "/") {}

  Store& part() { return part_; }
  // To part(), for another thread.
  class Connection {
   public:
    explicit Connection(const GroupStore& of)
        : adapter_(of.adapter_.apart()), part_(adapter_, "smddp/" + of.name_ + "/") {}
    Store& part() { return part_; }

   private:
    StoreAdapter adapter_;
    PrefixStore part_;
  };
  // Once the group is made.
  void forget_rendezvous() { rendezvous_.forget(); }
  // Once on each rank, which reads the store no more. True on the last one.
  bool leave(int ranks) {
    const std::string left = "smddp/" + name_ + "/left";
    if (adapter_.count(left) < ranks) return false;
    adapter_.remove(left);
    return true;
  }
  // The name of the rendezvous that made the group, the same on all its ranks.
  const std::string& rendezvous() const { return name_; }

 private:
  static std::string meet(Rendezvous& rendezvous) {
    auto name = rendezvous.meet();
    if (!name) throw_status(name.status());
    return name.value();
  }

  StoreAdapter adapter_;
  PrefixStore whole_;
  Rendezvous rendezvous_;
  const std::string name_;
  PrefixStore part_;
};

}  // namespace smddp
