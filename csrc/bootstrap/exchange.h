// The address exchange: every rank publishes one versioned blob and reads the others'.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/store.h"
#include "common/signature.h"
#include "common/status.h"

namespace smddp {

// What a rank tells the others of itself when a group is made.
struct Card {
  std::string host;       // identity: equal means shared memory works
  std::string host_name;  // for people
  JobKey key{};           // rank 0's is the group's
  uint64_t token = 0;     // random, names the process's presence beyond its pid
  int32_t pid = 0;
  int32_t presence_fd = -1;  // memfd and pipe that neighbours open through /proc/<pid>/fd
  int32_t doorbell_fd = -1;
  int32_t outbox_fd = -1;  // memfd of this group's outbox, -1 where the rank did not need one
};

std::vector<uint8_t> encode(const Card& card);
Result<Card> decode(const std::vector<uint8_t>& blob);

// One round over the store: publishes `blob` under `topic`/`rank` and returns those of `from`, in
// order. On a deadline the error names the ranks that did not publish.
Result<std::vector<std::vector<uint8_t>>> exchange(Store& store, const std::string& topic, int rank,
                                                   const std::vector<uint8_t>& blob,
                                                   const std::vector<int>& from);

}  // namespace smddp
