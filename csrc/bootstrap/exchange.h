// The exchange of rank information: every rank publishes one versioned blob and reads those of the
// others. Knows the format of the information, not its use. Called where a group is made.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/store.h"
#include "common/signature.h"
#include "common/siphash.h"
#include "common/status.h"

namespace smddp {

// How a process is reached from other hosts.
struct FabricAddress {
  enum class State : uint8_t { kUnopened, kOpen, kUnavailable };
  State state = State::kUnopened;
  std::vector<uint8_t> address;   // kOpen: the endpoint's address, as it publishes it
  std::string reason;             // kUnavailable: why there is no endpoint
  std::vector<uint8_t> liveness;  // how to ask whether the process lives; empty: it can't be asked
};

// What a rank tells the others about itself when a group is made.
struct RankInfo {
  std::string host;       // identity: ranks with equal identity share memory
  std::string host_name;  // for people
  JobKey key{};           // rank 0's is the group's
  // Whether the user has given this rank a job secret, and then the proof that the rank has it. If not,
  // `drawn` of rank 0 is the group's secret.
  bool has_secret = false;
  uint64_t proof = 0;
  siphash::Key drawn;
  uint64_t token = 0;  // random; tells the process from another one with the same pid
  int32_t pid = 0;
  int32_t presence_fd = -1;  // memfd and pipe that neighbors open through /proc/<pid>/fd
  int32_t doorbell_fd = -1;
  int32_t outbox_fd = -1;  // memfd of this group's outbox, -1 if the rank needs none
  uint64_t routes = 0;     // digest of Group::Options::routes
  // The network model that the rank was given or, if none was, that of its latest group between hosts; "": none.
  std::string network;
  bool network_given = false;
  FabricAddress fabric;
};

std::vector<uint8_t> encode(const RankInfo& info);
Result<RankInfo> decode(const std::vector<uint8_t>& blob);
// The fabric address alone, for ranks that opened their endpoint after they had published their
// info.
std::vector<uint8_t> encode(const FabricAddress& fabric);
Result<FabricAddress> decode_fabric(const std::vector<uint8_t>& blob);

// Where a rank publishes its blob of an exchange.
std::string key_of(const std::string& topic, int rank);
// The blobs that the ranks `from` have published under `topic`, in order, with one multi-get. If a rank has
// published that it can't join, that is the error. On a timeout the error names the ranks that did not publish.
Result<std::vector<std::vector<uint8_t>>> collect(Store& store, const std::string& topic,
                                                  const std::vector<int>& from);
// Those of `from` that have not published.
std::vector<int> missing(Store& store, const std::string& topic, const std::vector<int>& from);
// The error of a rank that has waited for `ranks`: kTimeout.
Status did_not_join(const std::vector<int>& ranks);
// Tells all ranks of the group that it can't be made, in a sentence that names the rank. The first such
// sentence counts: it is the cause of the others.
void publish_failure(Store& store, const Status& why) noexcept;
// Ok if no rank has.
Status published_failure(Store& store);

}  // namespace smddp
