// What the ranks of a group publish of themselves, and how it is encoded. Knows the format of the information,
// not its use. Called where a group is made.
#pragma once

#include <cstdint>
#include <string>

#include "common/signature.h"
#include "common/siphash.h"
#include "common/status.h"
#include "joining/encoding.h"
#include "network/agreement.h"

namespace smddp {

// How a process is reached from other hosts.
struct FabricAddress {
  enum class State : uint8_t { kUnopened, kOpen, kUnavailable };
  State state = State::kUnopened;
  Blob address;        // kOpen: the endpoint's address, as it publishes it
  std::string reason;  // kUnavailable: why there is no endpoint
  Blob liveness;       // how to ask whether the process lives; empty: it can't be asked
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
  int32_t wake_fd = -1;
  uint64_t routes = 0;  // digest of GroupOptions::routes
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
  NetworkClaim network;
  bool operator==(const GroupPart&) const = default;
};

// What a rank tells the others about itself when a group is made.
struct RankInfo : ProcessInfo, GroupPart {
  bool operator==(const RankInfo&) const = default;
};

// What a rank publishes in place of its information if it stands in a directory (process_directory.h).
struct Reference {
  uint64_t directory = 0;
  int32_t offset = 0;  // its place there, less its rank in the group: the same for many ranks
  GroupPart part;
};

// The first rank of a host, which hands the table of all ranks to the others.
struct HostLeader {
  int32_t rank = -1;
  int32_t ranks = 0;  // of its host
  RankInfo info;
};

// The shared segment in which it does so.
struct HandedTable {
  int32_t fd = -1;
  uint64_t bytes = 0;
};

// For each of ProcessInfo (alone, for a directory), RankInfo, Reference (whose key stays open where the part has a
// serial), FabricAddress (alone, for ranks that opened their endpoint after they had published their information),
// HostLeader and HandedTable. kMismatch: of another version; kInternal: damaged.
template <class T>
Blob encode(const T& value);
template <class T>
Result<T> decode(const Blob& blob);

// The key of a rank that does not publish it: differs from group to group, and from process to process.
JobKey own_key(uint64_t token, uint32_t serial);
bool is_reference(const Blob& blob);

}  // namespace smddp
