// A c10d store behind the core's Store interface.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <string>

#include "bootstrap/store.h"

namespace smddp {

class StoreAdapter final : public Store {
 public:
  // A group that is made again over the same store must not read its predecessor's values. So each rank
  // counts how often it has joined, and the count is part of every key.
  StoreAdapter(c10::intrusive_ptr<c10d::Store> store, int rank, std::chrono::milliseconds timeout)
      : store_(std::move(store)), timeout_(timeout) {
    prefix_ =
        "smddp/" + std::to_string(store_->add("smddp/joined/" + std::to_string(rank), 1)) + "/";
  }

  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    return guarded([&] { store_->set(prefix_ + key, value); });
  }

  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    std::vector<std::string> names;
    for (const std::string& key : keys) names.push_back(prefix_ + key);
    if (Status waited = wait(names, stop); !waited) return waited;
    std::vector<std::vector<uint8_t>> values;
    Status status = guarded([&] {
      if (store_->hasExtendedApi()) {
        values = store_->multiGet(names);
      } else {
        for (const std::string& name : names) values.push_back(store_->get(name));
      }
    });
    if (!status) return status;
    return values;
  }

  bool has(const std::string& key) override {
    bool found = false;
    (void)guarded([&] { found = store_->check({prefix_ + key}); });
    return found;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kLook = std::chrono::milliseconds(500);  // how often `stop` is looked for
  static constexpr std::ptrdiff_t kPart = 64;

  // For all keys at once; after the first look, for kPart at a time: each wait sends its keys again.
  Status wait(const std::vector<std::string>& names, const std::string& stop) {
    auto until = Clock::now() + timeout_;
    auto first = names.begin(), last = names.end();
    while (first != names.end()) {
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      auto turn = std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(1), kLook);
      Status waited = guarded([&] { store_->wait({first, last}, turn); });
      if (waited) {
        first = last;
      } else if (waited.code() != Code::kTimeout || left <= turn) {
        return waited;
      } else if (has(stop)) {
        return {Code::kAborted, stop + " is in the store"};
      }
      last = first + std::min(kPart, names.end() - first);
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
      return {Code::kUnavailable, std::string("the rendezvous store failed: ") + error.what()};
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  std::string prefix_;
};

}  // namespace smddp
