// Ranks as threads of one process, each with what a process has: real segments, real libfabric.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "group/group.h"
#include "results.h"
#include "shuffled_network.h"

namespace smddp {

// Sanitizers take memory, address space and descriptors of their own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Runs body(rank) on a thread for each of `ranks` ranks.
inline void on_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&body, r] { body(r); });
  for (std::thread& t : threads) t.join();
}

// Wakes a waiting rank once, when its last key is set, as a real store's server does. A condition that all
// ranks check after each key would wake all of them every time.
class MemoryStore : public Store {
 public:
  explicit MemoryStore(std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : timeout_(timeout) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_[key];
    entry.value = value;
    entry.set = true;
    for (Waiter* waiter : entry.waiters) {
      if (--waiter->missing == 0) waiter->changed.notify_one();
    }
    entry.waiters.clear();
    for (Waiter* waiter : entry.stopped) waiter->changed.notify_one();
    return {};
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    std::unique_lock lock(mutex_);
    Waiter waiter;
    for (const auto& key : keys) {
      Entry& entry = entries_[key];
      if (entry.set) continue;
      entry.waiters.push_back(&waiter);
      ++waiter.missing;
    }
    Entry& stops = entries_[stop];
    stops.stopped.push_back(&waiter);
    waiter.changed.wait_for(lock, timeout_, [&] { return waiter.missing == 0 || stops.set; });
    std::erase(stops.stopped, &waiter);
    if (waiter.missing > 0) {
      for (auto& [key, entry] : entries_) std::erase(entry.waiters, &waiter);
      return stops.set ? Status(Code::kAborted, stop) : Status(Code::kTimeout, "a key is missing");
    }
    std::vector<std::vector<uint8_t>> out;
    for (const auto& key : keys) out.push_back(entries_[key].value);
    return out;
  }
  bool has(const std::string& key) override {
    std::lock_guard lock(mutex_);
    auto entry = entries_.find(key);
    return entry != entries_.end() && entry->second.set;
  }
  void remove(const std::string& key) override {
    std::lock_guard lock(mutex_);
    entries_[key].set = false;
    entries_[key].value.clear();
  }
  size_t keys() {
    std::lock_guard lock(mutex_);
    size_t count = 0;
    for (const auto& [key, entry] : entries_) count += entry.set ? 1 : 0;
    return count;
  }

 private:
  struct Waiter {
    size_t missing = 0;
    std::condition_variable changed;
  };
  struct Entry {
    bool set = false;
    std::vector<uint8_t> value;
    std::vector<Waiter*> waiters, stopped;
  };
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::unordered_map<std::string, Entry> entries_;
};

// One rank's view of a store: its keys stand under `prefix`, and its requests are counted. Not so those that come
// again while a rank waits: heartbeats, and its own information, by which it looks whether the store answers.
class CountingStore : public Store {
 public:
  CountingStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (!is_heartbeat(key)) {
      ++sets;
      written[key] = value;
    }
    return store_.set(prefix_ + key, value);
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    const bool again = keys.size() == 1 && (is_heartbeat(keys[0]) || is_own_info(keys[0]));
    if (!again) ++gets;
    for (const auto& key : keys) values += again || written.contains(key) ? 0 : 1;
    std::vector<std::string> names;
    for (const auto& key : keys) names.push_back(prefix_ + key);
    return store_.get(names, prefix_ + stop);
  }
  bool has(const std::string& key) override {
    if (!is_heartbeat(key)) ++looks;
    return store_.has(prefix_ + key);
  }
  void remove(const std::string& key) override { store_.remove(prefix_ + key); }
  static bool is_heartbeat(const std::string& key) {
    return key.find("heartbeat/") != std::string::npos;
  }
  bool is_own_info(const std::string& key) const {
    return key.starts_with("rank_info/") && written.contains(key);
  }
  int sets = 0, gets = 0, looks = 0;
  int values = 0;                                       // asked for, but its own
  std::map<std::string, std::vector<uint8_t>> written;  // also those that were removed again

 private:
  Store& store_;
  std::string prefix_;
};

struct RankContext {
  int rank;
  int ranks;
  Process& process;
  Group& group;
  CountingStore& store;  // what the group was made over
  Engine& engine = process.engine();

  // Submits, waits, and returns the status.
  Status run(const std::shared_ptr<Operation>& op, const Tuning& tuning = {}) {
    group.submit(op, tuning, false);
    engine.wait(*op);
    return op->status();
  }
};

struct WorldOptions {
  bool single_copy = true;
  double timeout_seconds = 60;
  bool several_hosts = false;
  transport::Open network = network_of_tests();
  std::optional<NetworkModel> model = {};
};

// Runs `body` on one thread per entry of `hosts`; ranks with equal entries share a host.
inline void run_world(const std::vector<std::string>& hosts,
                      const std::function<void(RankContext&)>& body,
                      const WorldOptions& options = {}) {
  MemoryStore store;
  auto ranks = static_cast<int>(hosts.size());
  on_threads(ranks, [&](int r) {
    auto process = Process::create(options.network);
    ASSERT_TRUE(process.ok()) << process.status().message();
    Group::Options group_options{"test", static_cast<uint64_t>(options.timeout_seconds * 1e9),
                                 hosts[static_cast<size_t>(r)], options.single_copy,
                                 options.several_hosts};
    group_options.network = options.model;
    CountingStore view(store, "");
    auto group = Group::create(*process.value(), view, r, ranks, group_options);
    ASSERT_TRUE(group.ok()) << group.status().message();
    RankContext context{r, ranks, *process.value(), *group.value(), view};
    body(context);
    group.value().reset();
  });
}

// The same with a letter per rank.
inline void run_world(const std::string& layout, const std::function<void(RankContext&)>& body,
                      const WorldOptions& options = {}) {
  std::vector<std::string> hosts;
  for (char letter : layout) hosts.push_back(std::string("host-") + letter);
  run_world(hosts, body, options);
}

using Sizes = std::vector<size_t>;  // elements, by rank
inline Sizes equal_sizes(int ranks, size_t size) { return Sizes(static_cast<size_t>(ranks), size); }
inline Sizes size_of_one(int rank, int ranks, size_t size) {
  Sizes sizes(static_cast<size_t>(ranks), 0);
  sizes[static_cast<size_t>(rank)] = size;
  return sizes;
}

// Blocks end to end in `data`.
template <class Vector>
void fill_blocks(Blocks& blocks, const Vector& data, const Sizes& sizes) {
  using T = typename Vector::value_type;
  size_t at = 0;
  for (size_t size : sizes) {
    blocks.add(const_cast<T*>(data.data()) + at, size * sizeof(T));
    blocks.end_block();
    at += size;
  }
}

// One tensor per operation, laid out as torch's base forms do.
template <class Vector>
std::shared_ptr<Operation> operation_of(Collective collective, uint64_t digest, const Vector& in,
                                        const Sizes& in_sizes, const Vector& out,
                                        const Sizes& out_sizes, Dtype dtype = Dtype::kBytes,
                                        ReduceOp reduce = ReduceOp::kNone) {
  auto op = std::make_shared<Operation>();
  op->collective = collective;
  op->dtype = dtype;
  op->reduce_op = reduce;
  op->element_size = sizeof(typename Vector::value_type);
  op->digest = digest;
  fill_blocks(op->input, in, in_sizes);
  fill_blocks(op->output, out, out_sizes);
  return op;
}

template <class Vector>
std::shared_ptr<Operation> gather_of(const Vector& in, Vector& out, int ranks) {
  return operation_of(Collective::kAllGather, in.size(), in, {in.size()}, out,
                      equal_sizes(ranks, in.size()));
}

template <class Vector>
std::shared_ptr<Operation> scatter_of(const Vector& in, Vector& out, int ranks, Dtype dtype,
                                      ReduceOp reduce) {
  return operation_of(Collective::kReduceScatter, out.size(), in, equal_sizes(ranks, out.size()),
                      out, {out.size()}, dtype, reduce);
}

template <class Vector>
std::shared_ptr<Operation> all_reduce_of(Vector& data, int ranks, Dtype dtype, ReduceOp reduce) {
  Sizes parts;
  for (size_t r = 0, n = static_cast<size_t>(ranks); r < n; ++r)
    parts.push_back(data.size() * (r + 1) / n - data.size() * r / n);
  return operation_of(Collective::kAllReduce, data.size(), data, parts, data, parts, dtype, reduce);
}

inline uint64_t digest_of_root(size_t size, int root, int ranks) {
  return size * static_cast<size_t>(ranks) + static_cast<size_t>(root);
}

// From `data` of `root` to that of all ranks.
template <class Vector>
std::shared_ptr<Operation> broadcast_of(Vector& data, int root, int ranks) {
  return operation_of(Collective::kBroadcast, digest_of_root(data.size(), root, ranks), data, {0},
                      data, size_of_one(root, ranks, data.size()));
}

// From `data` of all ranks to that of `root`.
template <class Vector>
std::shared_ptr<Operation> reduce_of(Vector& data, int root, int rank, int ranks, Dtype dtype,
                                     ReduceOp reduce) {
  return operation_of(Collective::kReduce, digest_of_root(data.size(), root, ranks), data,
                      size_of_one(root, ranks, data.size()), data, {rank == root ? data.size() : 0},
                      dtype, reduce);
}

// An all-to-all of `out_sizes[r]` elements to rank r and `in_sizes[r]` of it; with `root`, a gather or a scatter.
template <class Vector>
std::shared_ptr<Operation> exchange_of(Collective collective, const Vector& data,
                                       const Sizes& out_sizes, const Vector& result,
                                       const Sizes& in_sizes, Rank root = 0) {
  auto op =
      operation_of(collective, static_cast<uint64_t>(root), data, out_sizes, result, in_sizes);
  op->root = root;
  return op;
}

}  // namespace smddp
