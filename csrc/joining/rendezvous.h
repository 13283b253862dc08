// Ranks that make a group find each other, over a store that may hold what an earlier making of the
// same group left: torchrun's store outlives the ranks that it restarts. It knows nothing of what the
// ranks exchange afterwards. Called where a group is made.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "joining/store.h"

namespace smddp {

// One making of a group. Each rank publishes a random number; rank 0 answers each number that it reads
// with the name of this rendezvous, until all ranks have said that their number was answered. So a rank
// takes no answer to its predecessor for its own, and rank 0 ends with no rank's predecessor.
class Rendezvous {
 public:
  Rendezvous(Store& store, int rank, int ranks, std::chrono::milliseconds timeout)
      : store_(store), rank_(rank), ranks_(ranks), timeout_(timeout) {}
  // The name of the rendezvous: random, the same on all ranks of the group. Keys that begin with it belong
  // to this making of the group alone. kTimeout names the ranks that did not come; kUnavailable: the
  // kernel gives no random bytes, or the store fails.
  Result<std::string> meet();
  // Once the group is made: removes from the store what this rank has left there.
  void forget();

 private:
  using Clock = std::chrono::steady_clock;
  using Value = std::vector<uint8_t>;

  Result<std::string> lead(const std::string& name);
  Result<std::string> follow(const Value& number);
  // Answers the ranks whose number is not the one in `answered`, and notes it there.
  Status answer(const std::string& name, std::vector<Value>* answered);
  Status missing() const;

  Store& store_;
  const int rank_;
  const int ranks_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace smddp
