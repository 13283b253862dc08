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
    if (overlaps_blocks(source, &out[m * ranks], ranks, static_cast<size_t>(rank))) {
      at::Tensor copy = op->keep.back().clone();
      source = extent_of(copy);
      op->keep.push_back(std::move(copy));
    }
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

// An AllGather of one byte per rank: it is over once the bytes of all ranks have arrived.
OperationPtr barrier_of(int size) {
  OperationPtr op = begin(Collective::kBarrier, {});
  op->scratch.resize(static_cast<size_t>(size) + 1);
  op->input.add(&op->scratch.back(), 1);
  op->input.end_block();
  for (int r = 0; r < size; ++r) {
    op->output.add(&op->scratch[static_cast<size_t>(r)], 1);
    op->output.end_block();
  }
  return op;
}

}  // namespace smddp
