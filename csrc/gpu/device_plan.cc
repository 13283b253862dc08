#include "gpu/device_plan.h"

#include <algorithm>

#include "topology/pattern.h"

namespace smddp {
namespace {

// The next level of a collective begins once so many bytes have come along the rail, or are summed for it; each part
// costs some flags and commands. A kernel sums no less than kLeastSum of a block only to make parts. Not measured.
constexpr size_t kLeastPart = 4 << 20, kPartGrain = 256, kLeastSum = 256 << 10;

// Of several hosts. What the ranks of one rail do then is what all ranks do.
bool one_rank_per_host(const Topology& topology) {
  return topology.nodes() > 1 && topology.nodes() == topology.ranks();
}

DeviceExchange exchange_of(const DeviceOperation& op, const DevicePlace& place) {
  DeviceExchange exchange;
  exchange.collective = op.what.collective;
  exchange.dtype = op.what.dtype;
  exchange.reduce_op = op.what.reduce_op;
  exchange.divisor = place.topology.ranks();
  exchange.thread_blocks = op.plan.how.blocks;
  if (op.what.dtype != Dtype::kBytes) exchange.element_size = size_of(op.what.dtype);
  exchange.tensors = op.what.segments;
  exchange.digest = op.what.digest;
  exchange.timeout_ns = op.limit_ns;
  exchange.tuning = place.tuning;
  return exchange;
}

// Makes it a ReduceScatter that the device sums, as a part of an operation that `option` tells.
void sum_on_device(DeviceExchange& exchange, uint8_t option) {
  exchange.collective = Collective::kReduceScatter;
  exchange.sums_on_device = true;
  exchange.options = option;
}

// Makes two exchanges of the operation's one, an AllReduce in place: the sums of this rank's block, then a gather
// of all ranks' sums.
void sum_then_gather(DeviceOperation& op, Blocks own) {
  DeviceExchange gather = op.exchanges.front();
  sum_on_device(op.exchanges.front(), kOfAllReduce);
  op.exchanges.front().in = own;
  gather.collective = Collective::kAllGather;
  gather.reduce_op = ReduceOp::kNone;
  gather.options = kOfAllReduce;
  gather.out = std::move(own);
  op.exchanges.push_back(std::move(gather));
}

// The sums inside the host are partial sums: the division comes after the sum over hosts.
void leave_the_average(DeviceOperation& op) {
  if (op.plan.how.op == ReduceOp::kAvg) op.plan.how.op = ReduceOp::kSum;
  op.plan.how.divisor = 1;
}

// Part `which` of `parts` of each tensor.
std::vector<Extent> part_of(const std::vector<Extent>& tensors, size_t element, int parts,
                            int which) {
  std::vector<Extent> found;
  for (const Extent& t : tensors) {
    std::vector<size_t> starts = pattern::equal_parts(t.bytes / element, parts, pattern::kGranule);
    size_t from = starts[static_cast<size_t>(which)] * element;
    size_t to = starts[static_cast<size_t>(which) + 1] * element;
    found.push_back({t.address + from, to - from});
  }
  return found;
}

Blocks blocks_of(const std::vector<Extent>& tensors, size_t element, int parts) {
  Blocks blocks;
  for (int p = 0; p < parts; ++p) {
    for (const Extent& e : part_of(tensors, element, parts, p)) blocks.add(e.address, e.bytes);
    blocks.end_block();
  }
  return blocks;
}

Blocks one_block(const std::vector<Extent>& extents) {
  Blocks blocks;
  for (const Extent& e : extents) blocks.add(e.address, e.bytes);
  blocks.end_block();
  return blocks;
}

// Where the parts of a block end, of which one comes from each of `nodes` hosts: in equal parts of at least `least`,
// the last of them with the block.
std::vector<size_t> ends_of_parts(size_t bytes, size_t nodes, size_t least = 1) {
  size_t most = std::clamp<size_t>(bytes / least, 1, intranode::CopyEngine::kMostParts);
  size_t parts = std::clamp<size_t>(bytes * nodes / kLeastPart, 1, most);
  std::vector<size_t> ends;
  for (size_t p = 1; p < parts; ++p) ends.push_back(bytes / parts * p / kPartGrain * kPartGrain);
  ends.push_back(bytes);
  return ends;
}

void set_parts(DeviceOperation& op, const std::vector<size_t>& ends) {
  op.plan.parts = ends.size();
  op.exchanges.front().part_ends.assign(ends.begin(), ends.end() - 1);
}

// Calls f(part, offset, bytes) for each part's bytes of a tensor, which has [begin, begin + bytes) of a block, and
// once for a tensor without bytes.
template <class F>
void for_parts(const std::vector<size_t>& ends, size_t begin, size_t bytes, F f) {
  if (bytes == 0) f(size_t{0}, size_t{0}, size_t{0});
  size_t from = begin;
  for (size_t part = 0; part < ends.size(); ++part) {
    size_t to = std::clamp(ends[part], from, begin + bytes);
    if (from < to) f(part, from - begin, to - from);
    from = to;
  }
}

// The ranks of the host sum part `own` of each tensor and gather the others'. Each is cut into one block for each
// of `nodes` hosts if the sums pass other hosts between: in parts, of which the exchange carries all blocks' bytes
// at once.
void plan_levels(DeviceOperation& op, const std::vector<Extent>& tensors, int ranks, int own,
                 int nodes, const std::vector<size_t>& ends) {
  size_t element = size_of(op.what.dtype);
  for (int p = 0; p < ranks; ++p) {
    std::vector<Extent> of_rank = part_of(tensors, element, ranks, p);
    for (int n = 0; n < nodes; ++n) {
      std::vector<Extent> block = part_of(of_rank, element, nodes, n);
      size_t begin = 0;
      // Parts without bytes as well: all ranks must agree on whether there are sums and moves.
      for (size_t m = 0; m < tensors.size(); begin += block[m].bytes, ++m) {
        auto first = static_cast<size_t>(block[m].address - tensors[m].address);
        for_parts(ends, begin, block[m].bytes, [&](size_t part, size_t offset, size_t bytes) {
          std::byte* at = block[m].address + offset;
          if (p == own) {
            op.plan.sums.push_back({m, first + offset, bytes, at, part});
          } else {
            op.plan.moves.push_back({p, m, first + offset, bytes, at, part});
          }
        });
      }
    }
  }
}

}  // namespace

bool device_sums_hosts(const DevicePlace& place) {
  auto hosts = static_cast<size_t>(place.topology.nodes());
  return one_rank_per_host(place.topology) && place.kernels && !place.sums_on_cpu &&
         hosts <= kernels::kMostSources;
}

DeviceWay device_way(const DevicePlace& place, bool sums) {
  const Topology& topology = place.topology;
  if (one_rank_per_host(topology)) return DeviceWay::kRails;  // of all ranks
  if (sums && place.sums_on_cpu) return DeviceWay::kAll;
  if (topology.nodes() == 1) return DeviceWay::kHost;
  if (!pattern::equal_nodes(topology)) return DeviceWay::kAll;
  return sums && place.tuning.reduce_precision_fp32 ? DeviceWay::kAll : DeviceWay::kRails;
}

const char* name_of_way(const DevicePlace& place, bool sums) {
  bool alone = place.ranks() == 1;
  switch (device_way(place, sums)) {
    case DeviceWay::kHost:
      return sums ? "gpu-kernel" : "copy-engine";
    case DeviceWay::kRails:
      if (sums && device_sums_hosts(place)) return "pinned + fabric + gpu-kernel";
      if (place.by_nic && !sums) return alone ? "hmem + fabric" : "copy-engine + hmem + fabric";
      return alone ? "pinned + fabric" : sums ? "gpu-kernel + fabric" : "copy-engine + fabric";
    case DeviceWay::kAll:
      return place.topology.nodes() > 1 ? "pinned + fabric" : "pinned";
  }
  return "";
}

void plan_gather(DeviceOperation& op, const DevicePlace& place, const std::vector<Extent>& inputs,
                 const std::vector<Extent>& blocks) {
  auto ranks = static_cast<size_t>(place.topology.ranks());
  auto block = [&](size_t m, size_t rank) { return blocks[m * ranks + rank]; };
  DeviceWay way = device_way(place, false);
  if (way == DeviceWay::kHost) {
    for (size_t m = 0; m < inputs.size(); ++m) {
      op.offered.push_back(inputs[m]);
      for (size_t r = 0; r < ranks; ++r)
        op.plan.moves.push_back({static_cast<int>(r), m, 0, inputs[m].bytes, block(m, r).address});
    }
    return;
  }
  DeviceExchange& exchange = op.exchanges.emplace_back(exchange_of(op, place));
  op.among_all = way == DeviceWay::kAll;
  exchange.out = one_block(inputs);
  std::vector<size_t> others;  // the ranks of the exchange
  for (int n = 0; n < place.nodes() && !op.among_all; ++n)
    others.push_back(place.at(n, place.index()));
  for (size_t r = 0; r < ranks && op.among_all; ++r) others.push_back(r);
  for (size_t r : others) {
    for (size_t m = 0; m < inputs.size(); ++m) {
      Extent e = block(m, r);
      if (r == static_cast<size_t>(place.rank) && e.address != inputs[m].address && e.bytes > 0)
        exchange.copies.push_back({e.address, inputs[m].address, e.bytes});
      exchange.in.add(e.address, e.bytes);
    }
    exchange.in.end_block();
  }
  if (op.among_all || place.ranks() == 1) return;
  // The peers of the host read what this rank received along the rail.
  size_t nodes = others.size();
  std::vector<size_t> ends = ends_of_parts(exchange.out.largest(), nodes);
  set_parts(op, ends);
  size_t begin = 0;  // of the tensor's bytes in a rank's block
  for (size_t m = 0; m < inputs.size(); begin += inputs[m].bytes, ++m) {
    for (size_t n = 0; n < nodes; ++n) op.offered.push_back(block(m, others[n]));
    for_parts(ends, begin, inputs[m].bytes, [&](size_t part, size_t offset, size_t bytes) {
      for (size_t n = 0; n < nodes; ++n) {
        for (int peer = 0; peer < place.ranks(); ++peer) {
          if (peer == place.index()) continue;
          std::byte* at = block(m, place.at(static_cast<int>(n), peer)).address;
          op.plan.moves.push_back({peer, m * nodes + n, offset, bytes, at + offset, part});
        }
      }
    });
  }
}

void plan_scatter(DeviceOperation& op, const DevicePlace& place, std::vector<Extent> whole,
                  const std::vector<DevicePart>& blocks, const std::vector<Extent>& outputs,
                  const std::function<std::byte*(size_t)>& temporary) {
  auto ranks = static_cast<size_t>(place.topology.ranks());
  auto block = [&](size_t m, size_t rank) { return blocks[m * ranks + rank]; };
  DeviceWay way = device_way(place, true);
  if (way == DeviceWay::kHost) {
    op.offered = std::move(whole);
    for (size_t m = 0; m < outputs.size(); ++m) {
      DevicePart own = block(m, static_cast<size_t>(place.rank));
      op.plan.sums.push_back({own.extent, own.offset, own.bytes, outputs[m].address});
    }
    return;
  }
  DeviceExchange& exchange = op.exchanges.emplace_back(exchange_of(op, place));
  op.among_all = way == DeviceWay::kAll;
  exchange.in = one_block(outputs);
  if (device_sums_hosts(place)) sum_on_device(exchange, kOfReduceScatter);
  Blocks& out = exchange.out;
  if (op.among_all) {
    for (size_t r = 0; r < ranks; ++r) {
      for (size_t m = 0; m < outputs.size(); ++m) out.add(block(m, r).address, block(m, r).bytes);
      out.end_block();
    }
    return;
  }
  bool alone = place.ranks() == 1;
  if (!alone) {
    op.offered = std::move(whole);
    leave_the_average(op);
  }
  auto hosts = static_cast<size_t>(place.nodes());
  std::vector<size_t> ends = ends_of_parts(exchange.in.largest(), hosts, kLeastSum);
  if (!alone) set_parts(op, ends);
  for (int n = 0; n < place.nodes(); ++n) {
    size_t begin = 0;  // of the tensor's bytes in the block
    for (size_t m = 0; m < outputs.size(); begin += outputs[m].bytes, ++m) {
      DevicePart sum = block(m, place.at(n, place.index()));
      if (!alone) {
        sum.address = temporary(sum.bytes);
        for_parts(ends, begin, sum.bytes, [&](size_t part, size_t offset, size_t bytes) {
          op.plan.sums.push_back(
              {sum.extent, sum.offset + offset, bytes, sum.address + offset, part});
        });
      }
      out.add(sum.address, sum.bytes);
    }
    out.end_block();
  }
}

void plan_reduce(DeviceOperation& op, const DevicePlace& place,
                 const std::vector<Extent>& tensors) {
  size_t element = size_of(op.what.dtype);
  DeviceWay way = device_way(place, true);
  if (way != DeviceWay::kHost) {
    op.exchanges.push_back(exchange_of(op, place));
    op.among_all = way == DeviceWay::kAll;
  }
  if (op.among_all || (way == DeviceWay::kRails && place.ranks() == 1)) {
    DeviceExchange& all = op.exchanges.front();
    all.out = blocks_of(tensors, element, op.among_all ? place.topology.ranks() : place.nodes());
    all.in = all.out;
    if (device_sums_hosts(place))
      sum_then_gather(op, one_block(part_of(tensors, element, place.nodes(), place.node())));
    return;
  }
  op.offered = tensors;
  if (way == DeviceWay::kHost)
    return plan_levels(op, tensors, place.ranks(), place.index(), 1, {SIZE_MAX});
  leave_the_average(op);
  size_t largest = 0;  // of all ranks' blocks: they have equally many parts
  for (int p = 0; p < place.ranks(); ++p) {
    Blocks blocks = blocks_of(part_of(tensors, element, place.ranks(), p), element, place.nodes());
    largest = std::max(largest, blocks.largest());
    if (p == place.index()) op.exchanges.front().out = std::move(blocks);
  }
  op.exchanges.front().in = op.exchanges.front().out;
  std::vector<size_t> ends = ends_of_parts(largest, static_cast<size_t>(place.nodes()), kLeastSum);
  set_parts(op, ends);
  // One part needs no blocks.
  int cut = ends.size() == 1 ? 1 : place.nodes();
  if (cut == 1) ends = {SIZE_MAX};
  plan_levels(op, tensors, place.ranks(), place.index(), cut, ends);
}

}  // namespace smddp
