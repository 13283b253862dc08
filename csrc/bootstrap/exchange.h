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

// How a process is reached from other hosts.
struct FabricAddress {
  enum class State : uint8_t { kUnopened, kOpen, kUnavailable };
  State state = State::kUnopened;
  std::vector<uint8_t> address;  // kOpen: the endpoint's published form
  std::string reason;            // kUnavailable: why there is no endpoint
};

// What a rank tells the others of itself when a group is made.
struct RankInfo {
  std::string host;       // identity: equal means shared memory works
  std::string host_name;  // for people
  JobKey key{};           // rank 0's is the group's
  uint64_t token = 0;     // random, names the process's presence beyond its pid
  int32_t pid = 0;
  int32_t presence_fd = -1;  // memfd and pipe that neighbours open through /proc/<pid>/fd
  int32_t doorbell_fd = -1;
  int32_t outbox_fd = -1;  // memfd of this group's outbox, -1 where the rank did not need one
  FabricAddress fabric;
};

std::vector<uint8_t> encode(const RankInfo& info);
Result<RankInfo> decode(const std::vector<uint8_t>& blob);
// The fabric address alone, for ranks that opened their endpoint after their info was out.
std::vector<uint8_t> encode(const FabricAddress& fabric);
Result<FabricAddress> decode_fabric(const std::vector<uint8_t>& blob);

// A round over the store: every rank publishes `blob` under `topic`/`rank` and collects those of
// `from`, in order, with one multi-get. On a deadline the error names the ranks that did not
// publish.
Status publish(Store& store, const std::string& topic, int rank, const std::vector<uint8_t>& blob);
Result<std::vector<std::vector<uint8_t>>> collect(Store& store, const std::string& topic,
                                                  const std::vector<int>& from);

}  // namespace smddp
