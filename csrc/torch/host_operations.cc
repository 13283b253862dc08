#include "torch/host_operations.h"

#include <algorithm>

#include "common/signature.h"
#include "topology/pattern.h"
#include "torch/operands.h"

namespace smddp {
namespace {

using OperationPtr = std::shared_ptr<TensorOperation>;

using Extents = c10::SmallVector<Extent, 8>;

// Appends `count` equal parts of `whole`.
void append(Extents& extents, const Extent& whole, size_t count) {
  size_t bytes = whole.bytes / count;
  for (size_t i = 0; i < count; ++i) extents.push_back({whole.address + i * bytes, bytes});
}

// `parts` holds, tensor by tensor, one part per rank. Block r gets part r of every tensor.
void fill(Blocks& blocks, const Extents& parts, size_t ranks) {
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = r; i < parts.size(); i += ranks) blocks.add(parts[i].address, parts[i].bytes);
    blocks.end_block();
  }
}

// One block, which is `root`'s; the blocks of the other ranks are empty.
void fill_one(Blocks& blocks, const Extent& block, int64_t root, int size) {
  for (int r = 0; r < size; ++r) {
    if (r == root) blocks.add(block.address, block.bytes);
    blocks.end_block();
  }
}

OperationPtr begin(Collective collective, TensorRefs tensors) {
  auto op = std::make_shared<TensorOperation>();
  op->collective = collective;
  op->tensors = static_cast<uint32_t>(tensors.size());
  op->digest = digest_of(tensors);
  if (tensors.empty()) return op;
  at::ScalarType type = tensors[0]->scalar_type();
  op->dtype = dtype_of(type);
  op->element_size = tensors[0]->element_size();
  for (const at::Tensor* t : tensors) {
    if (t->scalar_type() == type) continue;
    op->dtype = Dtype::kBytes;  // mixed types can be moved, in whole bytes
    op->element_size = 1;
  }
  return op;
}

// `any` is a tensor of the operation; all of them have its type. The ranks compare the type and the root: each
// pair compares the size of its block itself.
OperationPtr begin_exchange(Collective collective, const at::Tensor& any, int64_t root) {
  auto op = std::make_shared<TensorOperation>();
  op->collective = collective;
  op->root = static_cast<Rank>(root);
  op->dtype = dtype_of(any.scalar_type());
  op->element_size = any.element_size();
  op->digest = extend_digest(extend_digest(0, static_cast<uint64_t>(any.scalar_type())),
                             static_cast<uint64_t>(root));
  return op;
}

// The memory of a copy of the tensor that was kept last.
Extent copy_of_last(TensorOperation& op) {
  at::Tensor copy = op.keep.back().clone();
  op.keep.push_back(copy);
  return extent_of(copy);
}

// `inputs` and `outputs`: by rank; nullptr for a block that does not exist. Bytes of other ranks must not overwrite
// what is still to be sent; only this rank's own block may stay where it is.
OperationPtr exchange_of(OperationPtr op, TensorRefs outputs, TensorRefs inputs, int rank) {
  auto own = static_cast<size_t>(rank);
  Extents in, out;
  for (const at::Tensor* t : outputs) out.push_back(t != nullptr ? writable(*op, *t) : Extent{});
  for (size_t r = 0; r < inputs.size(); ++r) {
    Extent source = inputs[r] != nullptr ? readable(*op, *inputs[r]) : Extent{};
    if (overlaps_blocks(source, out.data(), out.size(), r == own ? own : kNoBlock))
      source = copy_of_last(*op);
    in.push_back(source);
  }
  fill(op->input, in, in.size());
  fill(op->output, out, out.size());
  return op;
}

// The parts of `whole`, the memory of a tensor with `rows` rows.
Extents parts_of(const Extent& whole, int64_t rows, const std::vector<int64_t>& splits, int size) {
  Extents parts;
  size_t row = rows > 0 ? whole.bytes / static_cast<size_t>(rows) : 0;
  size_t at = 0;
  for (int r = 0; r < size; ++r) {
    int64_t count = splits.empty() ? rows / size : splits[static_cast<size_t>(r)];
    size_t bytes = static_cast<size_t>(count) * row;
    parts.push_back({whole.address + at, bytes});
    at += bytes;
  }
  return parts;
}

TensorRefList only(const at::Tensor* tensor, int64_t rank, int size) {
  TensorRefList list(static_cast<size_t>(size), nullptr);
  list[static_cast<size_t>(rank)] = tensor;
  return list;
}

}  // namespace

OperationPtr gather_of(TensorRefs outputs, TensorRefs inputs, bool list, int rank, int size) {
  auto ranks = static_cast<size_t>(size);
  size_t each = list ? ranks : 1;
  OperationPtr op = begin(Collective::kAllGather, inputs);
  Extents in, out;
  for (size_t m = 0; m < inputs.size(); ++m) {
    const at::Tensor& input = *inputs[m];
    for (const at::Tensor* t : outputs.slice(m * each, each)) {
      check_gathered(*t, input, list, ranks);
      append(out, writable(*op, *t), ranks / each);
    }
    Extent source = readable(*op, input);
    if (overlaps_blocks(source, &out[m * ranks], ranks, static_cast<size_t>(rank)))
      source = copy_of_last(*op);
    in.push_back(source);
  }
  fill(op->input, in, 1);
  fill(op->output, out, ranks);
  return op;
}

OperationPtr scatter_of(TensorRefs outputs, TensorRefs inputs, bool list, ReduceOp reduce_op,
                        int rank, int size) {
  auto ranks = static_cast<size_t>(size);
  size_t each = list ? ranks : 1;
  OperationPtr op = begin(Collective::kReduceScatter, outputs);
  op->reduce_op = reduce_op;
  check_one_type(op->collective, outputs);
  Extents in, out;
  for (size_t m = 0; m < outputs.size(); ++m) {
    const at::Tensor& output = *outputs[m];
    for (const at::Tensor* t : inputs.slice(m * each, each)) {
      check_scattered(*t, output, list, ranks);
      append(in, readable(*op, *t), ranks / each);
    }
    // The output may be this rank's block of the input, as no peer reads that block. Anywhere else in
    // the input it would overwrite bytes that peers still need.
    Extent target = extent_of(output);
    bool askew = false;
    for (size_t r = 0; r < ranks; ++r) {
      const Extent& e = in[m * ranks + r];
      askew |= overlap_askew(target, e) ||
               (r != static_cast<size_t>(rank) && target.bytes > 0 && target.address == e.address);
    }
    out.push_back(writable(*op, output, askew));
  }
  fill(op->input, in, ranks);
  fill(op->output, out, 1);
  return op;
}

OperationPtr sum_of(TensorRefs tensors, ReduceOp reduce_op, int size) {
  OperationPtr op = begin(Collective::kAllReduce, tensors);
  op->reduce_op = reduce_op;
  check_one_type(op->collective, tensors);
  Extents whole;
  size_t count = 0;
  for (const at::Tensor* t : tensors) {
    size_t stand_ins = op->copy_back.size();
    whole.push_back(writable(*op, *t));
    // A stand-in starts with the values, as it is summed in place.
    if (op->copy_back.size() > stand_ins) op->copy_back.back().second.copy_(t->detach());
    count += static_cast<size_t>(t->numel());
  }
  std::vector<size_t> starts = pattern::equal_parts(count, size, pattern::kGranule);
  // `at` and `offset`: the tensor, and the byte in it, at which the next part begins.
  auto at = whole.begin();
  size_t offset = 0;
  for (size_t r = 0; r + 1 < starts.size(); ++r) {
    size_t left = (starts[r + 1] - starts[r]) * op->element_size;
    while (left > 0) {
      size_t bytes = std::min(left, at->bytes - offset);
      op->input.add(at->address + offset, bytes);
      left -= bytes;
      offset += bytes;
      if (offset == at->bytes) {
        ++at;
        offset = 0;
      }
    }
    op->input.end_block();
  }
  op->output = op->input;
  return op;
}

OperationPtr broadcast_of(TensorRefs tensors, int64_t root, int rank, int size) {
  OperationPtr op = begin(Collective::kBroadcast, tensors);
  check_root(op->collective, tensors, root, size);
  op->digest = extend_digest(op->digest, static_cast<uint64_t>(root));
  const at::Tensor& tensor = *tensors[0];
  Extent block = rank == root ? readable(*op, tensor) : writable(*op, tensor);
  if (rank == root) op->results.push_back(tensor);
  op->input.end_block();
  fill_one(op->output, block, root, size);
  return op;
}

OperationPtr reduce_of(TensorRefs tensors, ReduceOp reduce_op, int64_t root, int rank, int size) {
  OperationPtr op = begin(Collective::kReduce, tensors);
  op->reduce_op = reduce_op;
  check_root(op->collective, tensors, root, size);
  op->digest = extend_digest(op->digest, static_cast<uint64_t>(root));
  const at::Tensor& tensor = *tensors[0];
  fill_one(op->input, readable(*op, tensor), root, size);
  if (rank == root) {
    Extent out = writable(*op, tensor);
    op->output.add(out.address, out.bytes);
  } else {
    op->results.push_back(tensor);
  }
  op->output.end_block();
  return op;
}

// An AllGather of one byte per rank: it is complete once the bytes of all ranks have arrived.
OperationPtr barrier_of(int size) {
  OperationPtr op = begin(Collective::kBarrier, {});
  op->scratch.resize(static_cast<size_t>(size) + 1);
  op->gather(&op->scratch.back(), 1, op->scratch.data(), size);
  return op;
}

OperationPtr all_to_all_of(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<int64_t>& output_splits,
                           const std::vector<int64_t>& input_splits, int rank, int size) {
  check_splits("output", output, output_splits, size);
  check_splits("input", input, input_splits, size);
  check_alike(Collective::kAllToAll, input, output);
  OperationPtr op = begin_exchange(Collective::kAllToAll, input, 0);
  Extent to = writable(*op, output), from = readable(*op, input);
  if (overlap(from, to)) from = copy_of_last(*op);
  Extents in = parts_of(from, input.size(0), input_splits, size);
  Extents out = parts_of(to, output.size(0), output_splits, size);
  check_own_block(in[static_cast<size_t>(rank)], out[static_cast<size_t>(rank)]);
  fill(op->input, in, in.size());
  fill(op->output, out, out.size());
  return op;
}

OperationPtr all_to_all_of(TensorRefs outputs, TensorRefs inputs, int rank, int size) {
  check_one_per_rank(Collective::kAllToAll, "output", outputs, size);
  check_one_per_rank(Collective::kAllToAll, "input", inputs, size);
  for (TensorRefs list : {outputs, inputs}) {
    for (const at::Tensor* t : list) check_alike(Collective::kAllToAll, *t, *outputs[0]);
  }
  check_own_block(extent_of(*inputs[static_cast<size_t>(rank)]),
                  extent_of(*outputs[static_cast<size_t>(rank)]));
  return exchange_of(begin_exchange(Collective::kAllToAll, *outputs[0], 0), outputs, inputs, rank);
}

OperationPtr gather_to_root_of(TensorRefs outputs, TensorRefs inputs, int64_t root, int rank,
                               int size) {
  check_root(Collective::kGather, inputs, root, size);
  check_parts(Collective::kGather, "output", outputs, *inputs[0], rank == root ? size : 0);
  TensorRefList none(static_cast<size_t>(size), nullptr);
  return exchange_of(begin_exchange(Collective::kGather, *inputs[0], root),
                     rank == root ? outputs : TensorRefs(none), only(inputs[0], root, size), rank);
}

OperationPtr message_of(const at::Tensor& tensor, bool sends, int tag) {
  constexpr Rank kReceiver = 1;
  OperationPtr op =
      begin_exchange(sends ? Collective::kSend : Collective::kReceive, tensor, kReceiver);
  op->tag = tag;
  Extent block = sends ? readable(*op, tensor) : writable(*op, tensor);
  if (sends) op->results.push_back(tensor);
  fill_one(op->input, sends ? block : Extent{}, kReceiver, 2);
  fill_one(op->output, sends ? Extent{} : block, 0, 2);
  return op;
}

OperationPtr scatter_from_root_of(TensorRefs outputs, TensorRefs inputs, int64_t root, int rank,
                                  int size) {
  check_root(Collective::kScatter, outputs, root, size);
  check_parts(Collective::kScatter, "input", inputs, *outputs[0], rank == root ? size : 0);
  TensorRefList none(static_cast<size_t>(size), nullptr);
  return exchange_of(begin_exchange(Collective::kScatter, *outputs[0], root),
                     only(outputs[0], root, size), rank == root ? inputs : TensorRefs(none), rank);
}

}  // namespace smddp
