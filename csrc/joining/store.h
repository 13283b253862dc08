// The key-value store through which ranks find each other, and what ranks that make a group read and write there
// together. It knows nothing of c10d: csrc/torch adapts a c10d::Store to it, tests use one in memory. Called where
// a group is made.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/status.h"

namespace smddp {

class Store {
 public:
  virtual ~Store() = default;
  // Another thread may call it at the same time as any function.
  virtual Status set(const std::string& key, const std::vector<uint8_t>& value) = 0;
  // The values, once every key is set. kAborted within a second once key `stop` is set; kTimeout if the
  // keys take too long.
  virtual Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                        const std::string& stop) = 0;
  virtual bool has(const std::string& key) = 0;
  // For a key that no rank reads any more. A store that can't remove it keeps it.
  virtual void remove(const std::string& key) = 0;
  // What sentences for the user call a rank of the group that the store is of: its number in the whole job.
  virtual int number_of(int rank) const { return rank; }
};

// A store whose keys all begin with a prefix: a part of `store`, which must outlive it, for one group: of the
// ranks of the store's group, or of `ranks` of them, in this order.
class PrefixStore : public Store {
 public:
  PrefixStore(Store& store, std::string prefix, std::vector<int> ranks = {})
      : store_(store), prefix_(std::move(prefix)), ranks_(std::move(ranks)) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    return store_.set(prefix_ + key, value);
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    std::vector<std::string> prefixed;
    for (const std::string& key : keys) prefixed.push_back(prefix_ + key);
    return store_.get(prefixed, prefix_ + stop);
  }
  bool has(const std::string& key) override { return store_.has(prefix_ + key); }
  void remove(const std::string& key) override { store_.remove(prefix_ + key); }
  int number_of(int rank) const override {
    return store_.number_of(ranks_.empty() ? rank : ranks_[static_cast<size_t>(rank)]);
  }

 private:
  Store& store_;
  const std::string prefix_;
  const std::vector<int> ranks_;
};

// The pauses between looks at a store: each twice as long as the one before, so that what comes soon is
// seen soon and many ranks that wait for long leave the store and the cores alone. For waits at start-up.
class Pause {
 public:
  explicit Pause(std::chrono::milliseconds longest) : longest_(longest) {}
  void sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, longest_);
  }

 private:
  const std::chrono::milliseconds longest_;
  std::chrono::milliseconds next_{1};
};
// A part of a store whose waits end with an error once look() gives one. `longest`: its pause between looks.
class WatchedStore : public PrefixStore {
 public:
  WatchedStore(Store& store, std::string prefix, std::vector<int> ranks,
               std::chrono::milliseconds longest, std::function<Status()> look)
      : PrefixStore(store, std::move(prefix), std::move(ranks)),
        longest_(longest),
        look_(std::move(look)) {}
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    auto there = [&] { return std::ranges::all_of(keys, [&](auto& key) { return has(key); }); };
    for (Pause pause(longest_); !there(); pause.sleep()) {
      if (has(stop)) return Status(Code::kAborted, stop + " is in the store");
      // A rank sets its keys before look() tells that it is done.
      if (Status fine = look_(); !fine && !there()) return fine;
    }
    return PrefixStore::get(keys, stop);
  }

 private:
  const std::chrono::milliseconds longest_;
  const std::function<Status()> look_;
};

// While so many ranks wait for one another: the more, the more look at one store. Not measured.
inline std::chrono::milliseconds longest_pause_of(size_t ranks) {
  return std::max(std::chrono::milliseconds(50), std::chrono::milliseconds(ranks / 4));
}

// Where a rank publishes its value of a topic.
std::string key_of(const std::string& topic, int rank);
// The values that the ranks `from` have published under `topic`, in order, with one multi-get. If a rank has
// published that it can't join, that is the error. On a timeout the error names the ranks that did not publish.
Result<std::vector<std::vector<uint8_t>>> collect(Store& store, const std::string& topic,
                                                  const std::vector<int>& from);
// Those of `from` that have not published.
std::vector<int> missing(Store& store, const std::string& topic, const std::vector<int>& from);
// Those that this rank waits for in vain: rank 0, which has answered its arrival (Rendezvous), waits for the others that
// are missing itself.
std::vector<int> overdue(Store& store, const std::string& topic, const std::vector<int>& from);
// The error of a rank that has waited for `ranks` of the store's group: kTimeout.
Status did_not_join(const Store& store, const std::vector<int>& ranks);
// Tells all ranks of the group that it can't be made, in a sentence that names the rank. The first such
// sentence counts: it is the cause of the others.
void publish_failure(Store& store, const Status& why) noexcept;
// Ok if no rank has.
Status published_failure(Store& store);

}  // namespace smddp
