// What rank 0 of a large group hands on: the blobs of all ranks in one table, and who hands the table to the
// ranks of each host. Knows the formats, not who reads what. The exchange of a large group calls it.
#pragma once

#include <cstdint>
#include <vector>

#include "joining/exchange.h"

namespace smddp {

using Blob = std::vector<uint8_t>;

// Each blob as its difference from the one before: ranks of one host have much in common.
Blob pack_table(const std::vector<Blob>& blobs);
Result<std::vector<Blob>> unpack_table(const Blob& table);

// The first rank of a host, which hands the table to the others.
struct HostLeader {
  int32_t rank = -1;
  int32_t ranks = 0;  // of its host
  RankInfo info;
};
Blob encode(const HostLeader& leader);
Result<HostLeader> decode_leader(const Blob& blob);

// The shared segment in which it does so.
struct HandedTable {
  int32_t fd = -1;
  uint64_t bytes = 0;
};
Blob encode(const HandedTable& handed);
Result<HandedTable> decode_handed(const Blob& blob);

}  // namespace smddp
