#include "collectives/selector.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/processor.h"
#include "intranode/outbox.h"
#include "kernels/reduce.h"
#include "transport/transport.h"

namespace smddp {
namespace {

// 512 KiB took 36 us through slots and 67 in place; from here on in place wins (2026-11-22, AMD EPYC).
constexpr size_t kSharedAllReduce = 1 << 20;
// Partial sums of other hosts wait at the owner until all have arrived, and partial sums for other hosts
// wait until they are sent. This bounds that memory, per fragment.
constexpr size_t kStagingBytes = 4 << 20;
// With many hosts more memory is worth it, as long as it makes flows longer than a few messages: simulated
// (docs/dev/scale.md). Not measured: the least bytes of a flow.
constexpr size_t kManyHostsStagingBytes = 16 << 20;
constexpr size_t kLongFlow = 256 << 10;
constexpr size_t kSmallestFragment = 64 << 10;
// 256 KiB by the usual model. Steps of 512 KiB took 1.14 times as long on 4 x 1 (2026-11-22, AMD EPYC).
constexpr double kLatenciesPerStep = 16;
// On a slow network a rank waits longer for its processor than for the wire. So the least bytes of a step, and of
// the reach of a host's ranks together, are those of 10 Gbit/s.
constexpr NetworkModel kTenGigabit{};
constexpr size_t at_ten_gigabit(double ns) {
  return std::bit_floor(static_cast<size_t>(ns * kTenGigabit.bytes_per_ns));
}
constexpr size_t kSmallestStep = at_ten_gigabit(kLatenciesPerStep * kTenGigabit.latency_ns);
constexpr size_t kSmallestReach =
    at_ten_gigabit(kTenGigabit.latency_ns + 2 * kTenGigabit.overhead_ns);
static_assert(kSmallestStep == 256 << 10 && kSmallestReach == 32 << 10);
// Copying out of a slot into the output, into a message or out of it, by one core. Not measured by itself; the choices
// that follow from it are (2026-11-26-forced-patterns, AMD EPYC).
constexpr double kCopyBytesPerNs = 5;
// Headers of a message: this library's, the provider's and those of TCP/IP, with the acknowledgement's
// share. Counted at the interface (2026-11-22).
constexpr double kHeaderBytes = 256;
// A pattern may be taken because it saves messages only if a host's shards together are at most so large.
// Such a pattern copies what it sends. Larger shards are sent faster from where they are, and they take
// several messages with a header each in any pattern. On 8 x 4 joint lost at this size, and won at half of it
// (2026-11-22-patterns, AMD EPYC).
constexpr size_t kSavesMessages = 64 << 10;
// An AllReduce in one exchange saves a wait, but each rank reads all that the others push. So a rank's
// vector fits a slot, and a rank reads no more from all others than it copies in the time of that wait. With two ranks a
// full slot took 5.4 us for 6.7 (2026-11-21, AMD EPYC). Four and eight ranks on two cores, where a wait is a switch of
// threads, would gain by 256 KiB, 0.6 to 0.8 of the time at 16 and 32 KiB (2026-11-29-constants); ranks with a core each were
// not at hand.
constexpr size_t kWholeBytes = intranode::kSlotBytes;
constexpr size_t kWholeFromAll = 64 << 10;
// The smallest blocks that are read from a peer's memory where reads pay: less is copied in and out of slots in the time of the
// system call. Of slots' time gathers took 1.0, 0.9, 0.65 with blocks of 16, 32, 64 KiB, sums 1.0 to 1.1, 0.8 to 1.0, 0.7 to
// 0.9 with 32, 64, 128 KiB (2026-11-29-intel-xeon).
constexpr size_t kLeastRead = intranode::kSlotBytes, kLeastSummed = 2 * intranode::kSlotBytes;
// Smaller chunks cost more processor time than they save: chunks as small as a message already took some per cent longer
// on 4 x 1 (2026-11-25, AMD EPYC). Larger ones do not fit a send buffer.
constexpr size_t kSmallestChunk = transport::kEagerPayload;
constexpr size_t kLargestChunk = transport::kMaxPayload;
// On a network that is faster than the model says, a shorter window or reach would leave the link idle. Simulated, with
// four NICs: docs/dev/scale.md.
constexpr size_t kLeastWindow = 256 << 10;
// What a network carries in a message's processor time, for the choice of a chunk, at the least: that of
// 10 Gbit/s. On slower networks the formula asks for chunks that cost processor time and save nothing.
constexpr double kLeastInOverhead = kTenGigabit.overhead_ns * kTenGigabit.bytes_per_ns;

size_t bound(size_t limit, size_t bucket, int ranks) {
  if (bucket == 0) return limit;
  return std::min(limit, std::max<size_t>(1, bucket / static_cast<size_t>(ranks)));
}

double per_host(const Shape& shape) { return static_cast<double>(shape.ranks) / shape.nodes; }

// The time that a host's NICs need for `messages` messages of all its ranks, with `bytes` bytes in them.
double wire_ns(double messages, double bytes, const Shape& shape) {
  return (messages * kHeaderBytes + bytes) / shape.network.bytes_per_ns;
}

// Of one rank's processor, at one end of a flow of `bytes` bytes: they go in messages, into which and out of which they
// are copied. A pattern other than kDirect is considered only for shards that go so in each of them.
double processor_ns(double bytes, const Shape& shape) {
  double messages = std::max(1.0, bytes / transport::kEagerPayload);
  return messages * shape.network.overhead_ns + bytes / kCopyBytesPerNs;
}

// Of a rank that sends `flows` flows at once and receives as many, while the NICs of its host are busy for `wire` ns. It
// has one processor for both ends.
double at_once_ns(double flows, double bytes, double wire, const Shape& shape) {
  return shape.network.latency_ns + std::max(flows * 2 * processor_ns(bytes, shape), wire);
}

// Time of a fragment between hosts, with `bytes` bytes per shard.
double direct_ns(double bytes, const Shape& shape) {
  double others = shape.nodes - 1;
  double wire = wire_ns(others * per_host(shape), others * bytes * per_host(shape), shape);
  return at_once_ns(others, bytes, wire, shape);
}

// Each of Bruck's steps needs the one before, so each costs a latency, and all bytes follow one another. For each step
// a rank also sends a READY and takes one.
double log_ns(double bytes, const Shape& shape) {
  double ns = 0;
  for (int have = 1; have < shape.nodes; have *= 2) {
    double flow = std::min(have, shape.nodes - have) * bytes;
    ns += shape.network.latency_ns + 2 * processor_ns(0, shape) + 2 * processor_ns(flow, shape) +
          wire_ns(per_host(shape), flow * per_host(shape), shape);
  }
  return ns;
}

// The shards of a host take one extra copy inside the host, and half a message's processor time until
// another rank has them. As many ranks share the messages as there are distances between hosts.
double joint_ns(double bytes, const Shape& shape) {
  double others = shape.nodes - 1, of_host = bytes * per_host(shape);
  double senders = std::min(std::floor(per_host(shape)), std::floor(shape.nodes / 2.0));
  double wire = wire_ns(others, others * of_host, shape);
  return shape.network.overhead_ns / 2 + of_host / kCopyBytesPerNs +
         at_once_ns(std::ceil(others / senders), of_host, wire, shape);
}

struct Choice {
  Pattern pattern;
  double ns;  // by the model
};

// `sums`: partial sums have no joint pattern, because each rail sums its own blocks.
Choice choose_pattern(size_t block_bytes, bool sums, const Shape& shape, Algorithm wanted) {
  if (shape.nodes == 1) return {Pattern::kDirect, 0};
  bool may_log = shape.equal_nodes && shape.nodes > 2;
  bool may_join = !sums && shape.ranks >= 2 * shape.nodes;
  auto bytes = static_cast<double>(block_bytes);
  if (wanted == Algorithm::kLog && may_log) return {Pattern::kLog, log_ns(bytes, shape)};
  if (wanted == Algorithm::kJoint && may_join) return {Pattern::kJoint, joint_ns(bytes, shape)};
  Choice best{Pattern::kDirect, direct_ns(bytes, shape)};
  if (wanted != Algorithm::kAuto) return best;
  auto host_bytes = block_bytes * static_cast<size_t>(shape.ranks / shape.nodes);
  auto consider = [&](Pattern pattern, double ns) {
    if (ns < best.ns) best = {pattern, ns};
  };
  if (host_bytes > kSavesMessages) return best;
  if (may_log) consider(Pattern::kLog, log_ns(bytes, shape));
  if (may_join) consider(Pattern::kJoint, joint_ns(bytes, shape));
  return best;
}

// An exchange of `bytes` bytes between the first ranks of all hosts, and their way to the other ranks of the host.
double leaders_ns(double bytes, const Shape& shape) {
  double others = shape.nodes - 1;
  double inside = per_host(shape) > 1 ? shape.network.overhead_ns / 2 + bytes / kCopyBytesPerNs : 0;
  return inside + at_once_ns(others, bytes, wire_ns(others, others * bytes, shape), shape);
}

// Whether an operation of one fragment, which could take `choice`, is one exchange (Plan::whole). Inside a host what a
// rank sends fits a slot. In an AllReduce what a rank reads of all others of its host costs less than a wait, and between
// hosts there is one wait and, for each pair of hosts, one message.
bool takes_one_exchange(const Query& query, const Choice& choice, const Shape& shape) {
  auto ranks = static_cast<size_t>(shape.ranks), nodes = static_cast<size_t>(shape.nodes);
  size_t here = (ranks + nodes - 1) / nodes, vector = query.block_bytes * ranks;
  if (ranks == 1) return false;
  if (read_directly(query.collective, query.block_bytes, shape)) return false;
  if (!sums(query.collective)) return nodes == 1 && query.block_bytes <= kWholeBytes;
  if (query.block_bytes > kWholeBytes / ranks) return false;
  if (query.collective == Collective::kReduceScatter) return nodes == 1;
  if (vector * (here - 1) > kWholeFromAll) return false;
  if (nodes == 1) return true;
  const Dtype sum = whole_sum_type(query.dtype, shape);
  if (sum != query.dtype) vector *= size_of(sum) / query.element_size;
  return leaders_ns(static_cast<double>(vector), shape) <= 2 * choice.ns;
}

// Between more than two hosts, the flows of a fragment follow one another in steps, each behind a latency. A
// step is long enough to hide that latency, and short enough that ranks that are out of step are soon in step
// again.
size_t step_bytes(const NetworkModel& network) {
  double bytes = kLatenciesPerStep * network.latency_ns * network.bytes_per_ns;
  return std::bit_floor(std::max(kSmallestStep, static_cast<size_t>(bytes)));
}

// A flow of S bytes goes in chunks of c bytes through two stages, the wire and the host. That takes
// (S/c + 1)(overhead + c/B), which has its minimum at c = sqrt(S * overhead * B).
size_t choose_chunk(size_t fragment_bytes, const Shape& shape) {
  if (shape.nodes == 1) return kSmallestChunk;
  const NetworkModel& network = shape.network;
  double in_overhead = std::max(kLeastInOverhead, network.overhead_ns * network.bytes_per_ns);
  double best = std::sqrt(static_cast<double>(fragment_bytes) * in_overhead);
  return std::bit_floor(std::clamp(static_cast<size_t>(best), kSmallestChunk, kLargestChunk));
}

// The partial sums of other hosts that wait for a fragment of so many bytes of a block have room.
size_t bound_by_staging(size_t limit, const Shape& shape) {
  if (shape.nodes < 2) return limit;
  auto others = static_cast<size_t>(shape.nodes - 1);
  size_t part = std::max(kStagingBytes / others,
                         std::clamp(kManyHostsStagingBytes / others, kSmallestFragment, kLongFlow));
  return std::min(limit, part);
}

// Whole elements; whole cache lines if there is more than one fragment.
size_t whole_elements(size_t limit, const Query& query) {
  bool lines = limit >= kCacheLine && limit < query.block_bytes;
  size_t grain = lines ? std::max(kCacheLine, query.element_size) : query.element_size;
  return std::max(query.element_size, limit / grain * grain);
}

// A Broadcast or a Reduce has one block: no bucket bounds it, and no steps of other blocks follow. The
// logarithmic pattern is a binomial tree then: a host sends to at most ceil(log2 n) others, and each passes on
// what has come so far. A sum keeps the order of the hosts, which only the owner can.
//
// An all-to-all, a gather or a scatter goes from rank to rank, in one fragment: a rank does not know the size
// of the others' blocks.
Plan plan_of_one_block(const Query& query, const Shape& shape) {
  size_t bytes = std::max(query.block_bytes, query.element_size);
  if (query.collective == Collective::kReduce) bytes = bound_by_staging(bytes, shape);
  if (!pairwise(query.collective)) bytes = whole_elements(bytes, query);
  bool tree = query.collective == Collective::kBroadcast && shape.nodes > 2 && shape.equal_nodes;
  bool whole = is_message(query.collective) && shape.nodes == 1 && shape.ranks > 1 &&
               bytes <= kLeastMessagePart;
  return {tree ? Pattern::kLog : Pattern::kDirect, bytes, choose_chunk(bytes, shape), whole};
}

// What a rank's share of the NICs carries in so many latencies and two overheads, and `more` bytes.
size_t reach_after(double latencies, size_t more, const Shape& shape) {
  const NetworkModel& network = shape.network;
  double ns = latencies * network.latency_ns + 2 * network.overhead_ns;
  double of_host = std::max(static_cast<double>(kSmallestReach), ns * network.bytes_per_ns);
  auto bytes = static_cast<size_t>(of_host / per_host(shape));
  return std::min(bytes + more, receive_budget_bytes(shape));
}

}  // namespace

Result<Algorithm> parse_algorithm(const std::string& text) {
  if (text == "auto") return Algorithm::kAuto;
  if (text == "direct") return Algorithm::kDirect;
  if (text == "log") return Algorithm::kLog;
  if (text == "joint") return Algorithm::kJoint;
  return Status(Code::kInvalid, "algorithm in SMDDP_DEBUG is \"" + text +
                                    "\"; it may be auto, direct, log or joint");
}

Dtype whole_sum_type(Dtype dtype, const Shape& shape) {
  return shape.ranks == shape.nodes ? dtype : kernels::accumulator_of(dtype);
}

Plan select(const Query& query, const Shape& shape, const Tuning& tuning) {
  if (pairwise(query.collective) || query.collective == Collective::kBroadcast ||
      query.collective == Collective::kReduce)
    return plan_of_one_block(query, shape);
  size_t limit = std::max(query.block_bytes, query.element_size);
  bool sums = smddp::sums(query.collective);
  if (sums) limit = bound_by_staging(limit, shape);
  if (shape.nodes > 2) limit = std::min(limit, step_bytes(shape.network));
  // An AllReduce is cut into parts, so that the gather of one part overlaps the sums of the next, and finds them in a cache if it
  // reads them there.
  if (query.collective == Collective::kAllReduce)
    limit = std::min(
        limit, read_directly(query.collective, kDirectPiece, shape) ? kDirectPiece : kStagingBytes);
  if (query.collective != Collective::kReduceScatter) {
    limit = bound(limit, tuning.allgather_bucket_bytes, shape.ranks);
    limit = bound(limit, tuning.allgather_bucket_elements * query.element_size, shape.ranks);
  }
  if (sums) limit = bound(limit, tuning.reduce_scatter_bucket_bytes, shape.ranks);
  size_t fragment_bytes = whole_elements(limit, query);
  Choice choice =
      choose_pattern(std::min(fragment_bytes, query.block_bytes), sums, shape, tuning.algorithm);
  bool whole = query.block_bytes <= fragment_bytes && takes_one_exchange(query, choice, shape);
  return {whole ? Pattern::kDirect : choice.pattern, fragment_bytes,
          choose_chunk(fragment_bytes, shape), whole};
}

// What the host's NICs carry in a millisecond, at least 1 MiB (the least that a port of a common switch
// keeps), divided among the host's ranks. A rank's part is at least what arrives while the rank waits for a
// processor. With 384 KiB AllGathers of 16 MiB took 3 % longer on 4 x 1 (2026-11-21, AMD EPYC). Not measured: the least of a
// rank.
size_t receive_budget_bytes(const Shape& shape) {
  auto host = std::max<size_t>(1 << 20, static_cast<size_t>(shape.network.bytes_per_ns * 1e6));
  size_t ranks = static_cast<size_t>(std::max(1, shape.ranks / std::max(1, shape.nodes)));
  return std::max<size_t>(256 << 10, host / ranks);
}

// A message takes a latency, and the processors of both ends.
size_t reach_bytes(const Shape& shape) { return reach_after(1, 0, shape); }

// A write takes a latency to the target, its completion one back, and the message that tells of it one more. It
// queues behind the two chunks that each NIC has in the send window, one is under way, and two wait to be
// told of.
size_t reach_bytes(const Shape& shape, size_t chunk_bytes, size_t rails) {
  return reach_after(3, std::max(kLeastWindow, (3 * rails + 2) * chunk_bytes), shape);
}

// A completion takes a latency to the target and one back.
size_t send_window_bytes(const Shape& shape, size_t chunk_bytes, size_t rails) {
  const NetworkModel& network = shape.network;
  double bytes = 2 * network.latency_ns * network.bytes_per_ns / per_host(shape);
  return std::max(kLeastWindow, static_cast<size_t>(bytes) + 2 * rails * chunk_bytes);
}

bool read_directly(Collective collective, size_t block_bytes, const Shape& shape) {
  if (shape.nodes > 1 || block_bytes > shape.reads_up_to) return false;
  switch (collective) {
    case Collective::kReduceScatter:
      return block_bytes >= kLeastSummed;
    case Collective::kAllReduce:
      return block_bytes >= kDirectPiece;
    case Collective::kReduce:
    case Collective::kSend:
    case Collective::kReceive:
      return false;
    default:
      return block_bytes >= kLeastRead;
  }
}

bool read_shared(Collective collective, size_t bytes) {
  return collective != Collective::kAllReduce || bytes >= kSharedAllReduce;
}

}  // namespace smddp
