// A Store whose keys all begin with a prefix: a part of another store, for one group. Called where
// a group is made of some ranks of another one.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "joining/store.h"

namespace smddp {

// `store` must outlive it.
class PrefixStore : public Store {
 public:
  PrefixStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
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

 private:
  Store& store_;
  const std::string prefix_;
};

}  // namespace smddp
