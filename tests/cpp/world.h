// Ranks as threads of one process, each with an engine of its own: real segments, real libfabric.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "collectives/communicator.h"

namespace smddp {

class MemoryStore : public Store {
 public:
  explicit MemoryStore(std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : timeout_(timeout) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
    return {};
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys) override {
    std::unique_lock lock(mutex_);
    auto all = [&] {
      return std::all_of(keys.begin(), keys.end(), [&](auto& k) { return values_.count(k) > 0; });
    };
    if (!changed_.wait_for(lock, timeout_, all)) return Status(Code::kTimeout, "a key is missing");
    std::vector<std::vector<uint8_t>> out;
    for (const auto& key : keys) out.push_back(values_[key]);
    return out;
  }
  bool has(const std::string& key) override {
    std::lock_guard lock(mutex_);
    return values_.count(key) > 0;
  }

 private:
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

struct RankContext {
  int rank;
  int ranks;
  Engine& engine;
  Communicator& group;

  // Submits, waits, and hands out how it ended.
  Status run(const std::shared_ptr<Operation>& op, const Tuning& tuning = {}) {
    group.submit(op, tuning, false);
    engine.wait(*op);
    return op->status();
  }
};

struct WorldOptions {
  bool single_copy = true;
  double timeout_seconds = 60;
};

// Runs `body` on one thread per letter of `layout`; equal letters share a host.
inline void run_world(const std::string& layout, const std::function<void(RankContext&)>& body,
                      const WorldOptions& options = {}) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (size_t r = 0; r < layout.size(); ++r) {
    threads.emplace_back([&, r] {
      auto engine = Engine::create();
      ASSERT_TRUE(engine.ok()) << engine.status().message();
      Communicator::Options group_options{"test",
                                          static_cast<uint64_t>(options.timeout_seconds * 1e9),
                                          std::string("host-") + layout[r], options.single_copy};
      auto group = Communicator::create(*engine.value(), store, static_cast<int>(r),
                                        static_cast<int>(layout.size()), group_options);
      ASSERT_TRUE(group.ok()) << group.status().message();
      RankContext context{static_cast<int>(r), static_cast<int>(layout.size()), *engine.value(),
                          *group.value()};
      body(context);
      group.value().reset();
    });
  }
  for (std::thread& t : threads) t.join();
}

// One tensor per operation, laid out as torch's base forms do.
template <class T>
std::shared_ptr<Operation> gather_of(const std::vector<T>& in, std::vector<T>& out, int ranks) {
  auto op = std::make_shared<Operation>();
  op->collective = Collective::kAllGather;
  op->element_size = sizeof(T);
  op->digest = in.size();
  op->input.add(const_cast<T*>(in.data()), in.size() * sizeof(T));
  op->input.end_block();
  for (int r = 0; r < ranks; ++r) {
    op->output.add(out.data() + static_cast<size_t>(r) * in.size(), in.size() * sizeof(T));
    op->output.end_block();
  }
  return op;
}

template <class T>
std::shared_ptr<Operation> scatter_of(const std::vector<T>& in, std::vector<T>& out, int ranks,
                                      Dtype dtype, ReduceOp reduce) {
  auto op = std::make_shared<Operation>();
  op->collective = Collective::kReduceScatter;
  op->dtype = dtype;
  op->reduce_op = reduce;
  op->element_size = sizeof(T);
  op->digest = out.size();
  for (int r = 0; r < ranks; ++r) {
    op->input.add(const_cast<T*>(in.data()) + static_cast<size_t>(r) * out.size(),
                  out.size() * sizeof(T));
    op->input.end_block();
  }
  op->output.add(out.data(), out.size() * sizeof(T));
  op->output.end_block();
  return op;
}

template <class T>
std::shared_ptr<Operation> all_reduce_of(std::vector<T>& data, int ranks, Dtype dtype,
                                         ReduceOp reduce) {
  auto op = std::make_shared<Operation>();
  op->collective = Collective::kAllReduce;
  op->dtype = dtype;
  op->reduce_op = reduce;
  op->element_size = sizeof(T);
  op->digest = data.size();
  for (int r = 0; r < ranks; ++r) {
    size_t from = data.size() * static_cast<size_t>(r) / static_cast<size_t>(ranks);
    size_t to = data.size() * static_cast<size_t>(r + 1) / static_cast<size_t>(ranks);
    op->input.add(data.data() + from, (to - from) * sizeof(T));
    op->input.end_block();
  }
  op->output = op->input;
  return op;
}

}  // namespace smddp
