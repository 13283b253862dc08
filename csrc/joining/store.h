// The key-value store through which ranks find each other. It knows nothing of c10d: csrc/torch
// adapts a c10d::Store to it, tests use one in memory. Called where a group is made.
#pragma once

#include <cstdint>
#include <string>
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
};

}  // namespace smddp
