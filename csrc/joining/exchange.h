// The exchange of rank information: every rank publishes one versioned blob and reads those of the
// others. Knows the format of the information, not its use. Called where a group is made.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "joining/store.h"
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
  bool operator==(const FabricAddress&) const = default;
};

// What a process is in all its groups. Ranks that know it from an earlier group need not read it again.
struct ProcessInfo {
  std::string host;         // identity: ranks with equal identity share memory
  std::string host_name;    // for people
  bool has_secret = false;  // whether the user has given this rank a job secret
  uint64_t token = 0;       // random; tells the process from another one with the same pid
  int32_t pid = 0;
  int32_t presence_fd = -1;  // memfd and pipe that neighbors open through /proc/<pid>/fd
  int32_t doorbell_fd = -1;
  uint64_t routes = 0;  // digest of Group::Options::routes
  FabricAddress fabric;
  bool operator==(const ProcessInfo&) const = default;
};

// What a rank tells of itself for one group alone.
struct GroupPart {
  JobKey key{};  // rank 0's is the group's
  // Above 0: `key` is own_key(token, serial), and the serial is published in its place. Not so rank 0's, which is
  // random.
  uint32_t serial = 0;
  uint64_t proof = 0;      // that the rank has the job secret that the user has given it
  siphash::Key drawn;      // of rank 0, if no rank was given a secret: the group's secret
  int32_t outbox_fd = -1;  // memfd of this group's outbox, -1 if the rank needs none
  // Digest of the network model that the rank was given or, if none was, of that of its latest group between
  // hosts; 0: none.
  uint64_t network = 0;
  bool network_given = false;
};

// What a rank tells the others about itself when a group is made.
struct RankInfo : ProcessInfo, GroupPart {};

// The key of a rank that does not publish it: differs from group to group, and from process to process.
JobKey own_key(uint64_t token, uint32_t serial);

std::vector<uint8_t> encode(const RankInfo& info);
Result<RankInfo> decode(const std::vector<uint8_t>& blob);
// What a rank publishes in place of its information if it stands in a directory (process_directory.h).
struct Reference {
  uint64_t directory = 0;
  int32_t offset = 0;  // its place there, less its rank in the group: the same for many ranks
  GroupPart part;
};
std::vector<uint8_t> encode(const Reference& reference);
bool is_reference(const std::vector<uint8_t>& blob);
// The key stays open where the part has a serial.
Result<Reference> decode_reference(const std::vector<uint8_t>& blob);
// The process alone, for a directory.
std::vector<uint8_t> encode_process(const ProcessInfo& process);
Result<ProcessInfo> decode_process(const std::vector<uint8_t>& blob);
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
