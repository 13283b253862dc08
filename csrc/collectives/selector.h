// How an operation is carried out: a pure function of sizes, shape of the group, network and
// settings, equal on all ranks by construction. docs/selector.md has a table of its choices.
#pragma once

#include <cstddef>
#include <string>

#include "common/status.h"
#include "common/types.h"
#include "patterns/pattern.h"

namespace smddp {

using pattern::Pattern;

// Which pattern is to be used between nodes, whatever the model says (SMDDP_ALGORITHM).
enum class Algorithm : uint8_t { kAuto, kDirect, kLog, kJoint };

// Settings of the process that change what goes over the wire. Ranks must agree; the signature
// tells when they do not.
struct Tuning {
  size_t allgather_bucket_bytes = 0;  // output bytes of one AllGather on the wire, 0: no bound
  size_t allgather_bucket_elements =
      0;  // the same in elements, as DeepSpeed counts; the smaller holds
  size_t reduce_scatter_bucket_bytes = 0;  // input bytes of one ReduceScatter, 0: no bound
  bool reduce_precision_fp32 = false;      // partial sums of half types travel in fp32
  Algorithm algorithm = Algorithm::kAuto;
};

// The network between two hosts, in the terms of LogGP (Alexandrov et al., SPAA 1995).
struct NetworkModel {
  double latency_ns = 20'000;  // from a send to its arrival
  double overhead_ns = 4'000;  // of a processor, per message
  double bytes_per_ns = 1.25;  // of a host's NICs together
};

struct Shape {
  int ranks = 1;
  int nodes = 1;
  bool single_copy = false;  // every rank of the node may read every other's memory
  bool equal_nodes = true;   // as many ranks on each
  NetworkModel curve;
};

struct Query {
  Collective collective;
  size_t block_bytes;  // of the largest rank's shard or block
  size_t element_size;
};

struct Plan {
  Pattern pattern;  // between nodes
  size_t
      fragment_bytes;  // of each rank's block that one round carries, a multiple of the element size
  size_t chunk_bytes;  // in which a flow crosses the network
  bool whole = false;  // AllReduce: one exchange of all bytes instead of sums and a gather
};

// SMDDP_ALGORITHM and SMDDP_FABRIC_CURVE; kInvalid with what the text may be.
Result<Algorithm> parse_algorithm(const std::string& text);
Result<NetworkModel> parse_network_model(const std::string& text);

Plan select(const Query& query, const Shape& shape, const Tuning& tuning);

// Bytes that may be under way to one rank from all sides.
size_t receive_budget_bytes(const Shape& shape);

// Within a node: true where a round is read straight from the peers' memory instead of through
// slots. Not where the network sets the pace: slots keep up with it, in smaller pieces.
bool read_directly(size_t fragment_bytes, const Shape& shape);

// Within a node: true where memory that the ranks share is read where it lies. Not in an AllReduce of
// less than a MiB: each of its two rounds would wait until the other ranks have read this one's block,
// which is still in this one's caches and has to come back to them afterwards; slots cost half.
bool read_shared(Collective collective, size_t bytes);

}  // namespace smddp
