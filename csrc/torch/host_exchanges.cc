#include "torch/host_exchanges.h"

#include "common/signature.h"
#include "torch/operands.h"

namespace smddp {
namespace {

using OperationPtr = std::shared_ptr<TensorOperation>;
using Extents = c10::SmallVector<Extent, 8>;  // by rank

bool overlap(const Extent& a, const Extent& b) {
  return a.bytes > 0 && b.bytes > 0 && (a.address == b.address || overlap_askew(a, b));
}

// `any` is a tensor of the operation; all of them have its type. The ranks compare the type and the root: each
// pair compares the size of its block itself.
OperationPtr begin(Collective collective, const at::Tensor& any, int64_t root) {
  auto op = std::make_shared<TensorOperation>();
  op->collective = collective;
  op->root = static_cast<Rank>(root);
  op->dtype = dtype_of(any.scalar_type());
  op->element_size = any.element_size();
  op->digest = extend_digest(extend_digest(0, static_cast<uint64_t>(any.scalar_type())),
                             static_cast<uint64_t>(root));
  return op;
}

void fill(Blocks& blocks, const Extents& by_rank) {
  for (const Extent& extent : by_rank) {
    blocks.add(extent.address, extent.bytes);
    blocks.end_block();
  }
}

// Bytes of other ranks must not overwrite what is still to be sent. Only this rank's own block may stay where it
// is. `input` is the tensor of `from`.
bool is_overwritten(const Extent& from, const Extents& outputs, size_t own, bool is_own) {
  for (size_t r = 0; r < outputs.size(); ++r) {
    bool stays = is_own && r == own && from.address == outputs[r].address;
    if (!stays && overlap(from, outputs[r])) return true;
  }
  return false;
}

// The memory of a copy of the tensor that was kept last.
Extent copy_of_last(TensorOperation& op) {
  at::Tensor copy = op.keep.back().clone();
  op.keep.push_back(copy);
  return extent_of(copy);
}

// `inputs` and `outputs`: by rank; nullptr for a block that does not exist.
OperationPtr exchange_of(OperationPtr op, TensorRefs outputs, TensorRefs inputs, int rank) {
  auto own = static_cast<size_t>(rank);
  Extents in, out;
  for (const at::Tensor* t : outputs) out.push_back(t != nullptr ? writable(*op, *t) : Extent{});
  for (size_t r = 0; r < inputs.size(); ++r) {
    Extent source = inputs[r] != nullptr ? readable(*op, *inputs[r]) : Extent{};
    if (is_overwritten(source, out, own, r == own)) source = copy_of_last(*op);
    in.push_back(source);
  }
  fill(op->input, in);
  fill(op->output, out);
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

OperationPtr all_to_all_of(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<int64_t>& output_splits,
                           const std::vector<int64_t>& input_splits, int rank, int size) {
  check_splits("output", output, output_splits, size);
  check_splits("input", input, input_splits, size);
  check_alike(Collective::kAllToAll, input, output);
  OperationPtr op = begin(Collective::kAllToAll, input, 0);
  Extent to = writable(*op, output), from = readable(*op, input);
  if (overlap(from, to)) from = copy_of_last(*op);
  Extents in = parts_of(from, input.size(0), input_splits, size);
  Extents out = parts_of(to, output.size(0), output_splits, size);
  check_own_block(in[static_cast<size_t>(rank)], out[static_cast<size_t>(rank)]);
  fill(op->input, in);
  fill(op->output, out);
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
  return exchange_of(begin(Collective::kAllToAll, *outputs[0], 0), outputs, inputs, rank);
}

OperationPtr gather_to_root_of(TensorRefs outputs, TensorRefs inputs, int64_t root, int rank,
                               int size) {
  check_root(Collective::kGather, inputs, root, size);
  check_parts(Collective::kGather, "output", outputs, *inputs[0], rank == root ? size : 0);
  TensorRefList none(static_cast<size_t>(size), nullptr);
  return exchange_of(begin(Collective::kGather, *inputs[0], root),
                     rank == root ? outputs : TensorRefs(none), only(inputs[0], root, size), rank);
}

OperationPtr scatter_from_root_of(TensorRefs outputs, TensorRefs inputs, int64_t root, int rank,
                                  int size) {
  check_root(Collective::kScatter, outputs, root, size);
  check_parts(Collective::kScatter, "input", inputs, *outputs[0], rank == root ? size : 0);
  TensorRefList none(static_cast<size_t>(size), nullptr);
  return exchange_of(begin(Collective::kScatter, *outputs[0], root), only(outputs[0], root, size),
                     rank == root ? inputs : TensorRefs(none), rank);
}

}  // namespace smddp
