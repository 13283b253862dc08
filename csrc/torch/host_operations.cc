#include "torch/host_operations.h"

#include <algorithm>

#include "common/signature.h"
#include "patterns/pattern.h"

namespace smddp {
namespace {

using OperationPtr = std::shared_ptr<TensorOperation>;

std::string sizes_text(const at::Tensor& t) {
  std::string text = std::string(c10::toString(t.scalar_type())) + "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

using Extents = c10::SmallVector<Extent, 8>;

// Appends `count` equal parts of `whole`.
void append(Extents& extents, const Extent& whole, size_t count) {
  size_t bytes = whole.bytes / count;
  for (size_t i = 0; i < count; ++i) extents.push_back({whole.address + i * bytes, bytes});
}

// The parts of several tensors, tensor by tensor and in each rank by rank, become blocks.
void fill(Blocks& blocks, const Extents& parts, size_t ranks) {
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = r; i < parts.size(); i += ranks) blocks.add(parts[i].address, parts[i].bytes);
    blocks.end_block();
  }
}

OperationPtr begin(Collective collective, TensorRefs tensors) {
  auto op = std::make_shared<TensorOperation>();
  op->collective = collective;
  op->tensors = static_cast<uint32_t>(tensors.size());
  op->digest = 0xcbf29ce484222325ull;
  if (tensors.empty()) return op;
  at::ScalarType type = tensors[0]->scalar_type();
  op->dtype = dtype_of(type);
  op->element_size = tensors[0]->element_size();
  for (const at::Tensor* t : tensors) {
    op->digest = extend_digest(extend_digest(op->digest, t->nbytes()),
                               static_cast<uint64_t>(t->scalar_type()));
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
      require(t->scalar_type() == input.scalar_type(), [&] {
        return "all_gather: input is " + sizes_text(input) + ", output is " + sizes_text(*t) +
               "; the types must be equal";
      });
      require(t->numel() == input.numel() * (list ? 1 : size), [&] {
        return "all_gather: with input " + sizes_text(input) + " and " + std::to_string(size) +
               " ranks, output " + sizes_text(*t) + " has the wrong number of elements";
      });
      append(out, writable(*op, *t), ranks / each);
    }
    Extent source = readable(*op, input);
    const Extent* blocks = &out[m * ranks];
    const Extent& own = blocks[rank];
    auto wrong_place = [&](const Extent& e) {
      return overlap_askew(source, e) ||
             (e.address != own.address && source.bytes > 0 && source.address == e.address);
    };
    if (std::any_of(blocks, blocks + ranks, wrong_place)) {
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
  require(op->dtype != Dtype::kBytes,
          "a coalesced reduce_scatter needs tensors of one type; call it once per type");
  Extents in, out;
  for (size_t m = 0; m < outputs.size(); ++m) {
    const at::Tensor& output = *outputs[m];
    for (const at::Tensor* t : inputs.slice(m * each, each)) {
      require(t->scalar_type() == output.scalar_type(), [&] {
        return "reduce_scatter: input is " + sizes_text(*t) + ", output is " + sizes_text(output) +
               "; the types must be equal";
      });
      require(t->numel() == output.numel() * (list ? 1 : size), [&] {
        return "reduce_scatter: with output " + sizes_text(output) + " and " +
               std::to_string(size) + " ranks, input " + sizes_text(*t) +
               " has the wrong number of elements";
      });
      append(in, readable(*op, *t), ranks / each);
    }
    // The output may be the own block of the input, which nobody else reads; anywhere else in the
    // input it would overwrite what peers still need.
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
  require(op->dtype != Dtype::kBytes,
          "a coalesced all_reduce needs tensors of one type; call it once per type");
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
  // Both walk on together: the parts of the whole, and the tensors that it lies in.
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

// Every rank's byte has to arrive before anybody leaves.
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
