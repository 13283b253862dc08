// How an operation is carried out: a pure function of sizes, the shape of the group, the network
// model and the settings, so all ranks compute the same result. docs/dev/one-allgather.md has a table
// of its choices. It must not know buffers, peers or the state of anything. The group asks it once per
// operation.
#pragma once

#include <cstddef>
#include <string>

#include "common/status.h"
#include "common/types.h"
#include "flows/coding_choice.h"
#include "network/model.h"
#include "topology/pattern.h"

namespace smddp {

using pattern::Pattern;

// The pattern between hosts (SMDDP_DEBUG=algorithm): the model's choice, or one that overrides it.
enum class Algorithm : uint8_t { kAuto, kDirect, kLog, kJoint };

// Settings of the process that change what goes over the wire. Ranks must agree; the signature detects it
// if they do not.
struct Tuning {
  // Output bytes of one AllGather on the wire, 0: no bound.
  size_t allgather_bucket_bytes = 0;
  // The same in elements, as DeepSpeed counts; the smaller bound applies.
  size_t allgather_bucket_elements = 0;
  // Input bytes of one ReduceScatter, 0: no bound.
  size_t reduce_scatter_bucket_bytes = 0;
  bool reduce_precision_fp32 = false;  // partial sums of half types travel in fp32
  Algorithm algorithm = Algorithm::kAuto;
  Coding coding = Coding::kOff;  // ranks need not agree
};

// The shape of a group.
struct Shape {
  int ranks = 1;
  int nodes = 1;  // hosts
  // Blocks of at most so many bytes may be read straight from the memory of the host's other ranks (process_vm_readv)
  // instead of through slots: read_directly() says which. 0: none.
  size_t reads_up_to = 0;
  bool equal_nodes = true;  // as many ranks on each host
  NetworkModel network;
};

struct Query {
  Collective collective;
  size_t block_bytes;  // of the largest rank's shard or block
  size_t element_size;
  Dtype dtype = Dtype::kBytes;
};

struct Plan {
  Pattern pattern;  // between hosts
  // Bytes of each rank's block that one fragment carries: a multiple of the element size.
  size_t fragment_bytes;
  size_t chunk_bytes;  // in which a flow crosses the network
  // One exchange: each rank sends all that the others of its host need in one piece, and, in an AllReduce between hosts,
  // the first of them exchange their sums.
  bool whole = false;
};

// The values of algorithm in SMDDP_DEBUG. kInvalid, with what the text may be, if it is something else.
Result<Algorithm> parse_algorithm(const std::string& text);

Plan select(const Query& query, const Shape& shape, const Tuning& tuning);

// The type of a host's sum in an AllReduce that is one exchange. A sum of several values of a half type would be rounded
// once more in its own.
Dtype whole_sum_type(Dtype dtype, const Shape& shape);

// Bytes that may be under way to one rank from all sides together.
size_t receive_budget_bytes(const Shape& shape);

// Bytes that cross the network to one rank between the time when they leave and the time when the rank knows
// that they are there; at most the receive budget. The first: messages arrive after the writes before them. The
// second: the sender waits for a write's completion to tell of it, and has `rails` NICs.
size_t reach_bytes(const Shape& shape);
size_t reach_bytes(const Shape& shape, size_t chunk_bytes, size_t rails);

// In the second case: bytes of chunks that a rank has with its NICs at once. As many as cross the network until
// completions are back, and what the NICs have to do meanwhile: more would not be faster, and what this rank has to
// say of earlier chunks would queue behind it.
size_t send_window_bytes(const Shape& shape, size_t chunk_bytes, size_t rails);

// Inside a host: true if a block of so many bytes is read straight from the peers' memory instead of through slots. It
// is not if the network sets the pace: slots keep up with the network, in smaller pieces. Of an AllReduce only the sums that
// it gathers are read: where their inputs are read as well it takes as long, where less than a direct piece is gathered so
// 1.0 to 1.3 times as long (2026-11-29-intel-xeon). Nor is the input of a Reduce, which one rank would read alone.
bool read_directly(Collective collective, size_t block_bytes, const Shape& shape);
// Inside a host: a message goes in parts of at least this size, one after another, so that both ranks copy at the same
// time. Measured: all_to_all.cc.
inline constexpr size_t kLeastMessagePart = 8 << 10;
// Inside a host: for smaller pieces of sums a copy into a slot costs less than the wait for the readers of this rank's
// memory. Without it eight ranks took 1.2 times as long for blocks of 5 to 8 KiB; with 32 KiB 1.65 times for blocks of 16
// (2026-11-29-constants, AMD EPYC).
inline constexpr size_t kSharedPiece = 8 << 10;
// The largest piece that is read straight from a peer's memory: of a larger one, no byte is passed on before all are
// read. Sums of an AllReduce are gathered in such parts: 4 MiB in place of 1 took 1.4 times as long, 256 KiB to 1.5 MiB as
// long (2026-11-29-intel-xeon).
inline constexpr size_t kDirectPiece = 1 << 20;

// Inside a host: true if memory that the ranks share is read where it lies. It is not in an AllReduce of
// less than a MiB: each of its two fragments would wait until the other ranks have read this rank's block.
// That block is still in this rank's caches and has to come back to them afterwards; slots cost half as
// much.
bool read_shared(Collective collective, size_t bytes);

}  // namespace smddp
