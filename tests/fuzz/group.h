// A group of which this process is one rank and the fuzz input all others: what they publish when the group
// is made, and operations on memory of exactly their size. Used by the targets of a group's messages and of
// its shared segments.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/group.h"
#include "input.h"
#include "joining/rank_info.h"

namespace smddp::fuzz {

template <class T>
T value_of(Result<T>&& result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.status().message().c_str());
    std::abort();
  }
  return std::move(result.value());
}

// The other ranks have published all that they ever publish.
class OthersStore : public Store {
 public:
  // `heard` is told what this rank publishes of itself.
  OthersStore(const std::vector<RankInfo>& infos, int own,
              std::function<void(const RankInfo&)> heard)
      : own_("rank_info/" + std::to_string(own)), heard_(std::move(heard)) {
    for (size_t r = 0; r < infos.size(); ++r) {
      values_["rank_info/" + std::to_string(r)] = encode(infos[r]);
      values_["joined/" + std::to_string(r)] = {1};
      values_["measured/" + std::to_string(r)] = {1};
    }
  }
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    values_[key] = value;
    if (key == own_) heard_(value_of(decode<RankInfo>(value)));
    return {};
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string&) override {
    std::vector<std::vector<uint8_t>> found;
    for (const std::string& key : keys) found.push_back(values_[key]);
    return found;
  }
  bool has(const std::string& key) override { return values_.count(key) > 0; }
  void remove(const std::string& key) override { values_.erase(key); }

 private:
  std::string own_;
  std::function<void(const RankInfo&)> heard_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

// Operations, and the memory that they work on.
class Operations {
 public:
  // Of a kind and a size that the input chooses.
  void submit(Group& group, Input& input) {
    constexpr size_t kSizes[] = {8, 1000, 40'000, 300'000};
    auto ranks = static_cast<size_t>(group.ranks());
    auto op = std::make_shared<Operation>();
    size_t kind = input.up_to(2), bytes = kSizes[input.up_to(3)];
    auto& in = memory_.emplace_back(bytes * ranks);
    auto& out = memory_.emplace_back(bytes * ranks);
    op->digest = bytes;
    op->collective = static_cast<Collective>(kind);
    if (op->collective != Collective::kAllGather) {
      op->dtype = Dtype::kFloat32;
      op->reduce_op = ReduceOp::kSum;
      op->element_size = sizeof(float);
    }
    bool gathers = op->collective == Collective::kAllGather;
    bool scatters = op->collective == Collective::kReduceScatter;
    add(op->input, in, bytes, gathers ? 1 : ranks);
    add(op->output, out, bytes, scatters ? 1 : ranks);
    Tuning tuning;
    tuning.algorithm = static_cast<Algorithm>(input.up_to(3));
    group.submit(op, tuning, true);
    all_.push_back(std::move(op));
  }
  bool empty() const { return all_.empty(); }
  const Operation& one_of(Input& input) const { return *all_[input.up_to(all_.size() - 1)]; }
  size_t size() const { return all_.size(); }

 private:
  static void add(Blocks& blocks, std::vector<uint8_t>& memory, size_t bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      blocks.add(memory.data() + i * bytes, bytes);
      blocks.end_block();
    }
  }
  std::deque<std::vector<uint8_t>> memory_;
  std::vector<std::shared_ptr<Operation>> all_;
};

// As the operation's, or, one time in eight, one that differs.
inline Signature signature_from(Input& input, const Operations& operations) {
  Signature signature;
  if (!operations.empty()) signature = operations.one_of(input).signature();
  if (input.up_to(7) != 7) return signature;
  std::vector<uint8_t> other = input.bytes(sizeof signature);
  std::copy(other.begin(), other.end(), reinterpret_cast<uint8_t*>(&signature));
  return signature;
}

}  // namespace smddp::fuzz
