// The checks that the operands of a collective must pass before anything is sent, the same for tensors
// on CPUs and on GPUs, and what the ranks compare of them. Every check throws ValueError.
#pragma once

#include "common/types.h"
#include "torch/tensors.h"

namespace smddp {

// In all of these, per tensor of the smaller side (AllGather's inputs, ReduceScatter's outputs) the
// larger side has either one tensor for each of `ranks` ranks (`list`), one after the other, or one
// tensor that holds the parts of all ranks.

// `output` is one of the tensors that receive all_gather's `input`.
void check_gathered(const at::Tensor& output, const at::Tensor& input, bool list, size_t ranks);
// `input` is one of the tensors whose sums reduce_scatter writes to `output`.
void check_scattered(const at::Tensor& input, const at::Tensor& output, bool list, size_t ranks);
// A coalesced sum takes tensors of one element type.
void check_one_type(Collective collective, TensorRefs tensors);

// Whether `source` must be read from a copy: it overlaps a block that a peer's data is written to, or overlaps the own
// block and begins at another byte. `blocks`: one per rank; `own`: the one that may stay where it is, or kNoBlock.
inline constexpr size_t kNoBlock = SIZE_MAX;
bool overlap(const Extent& a, const Extent& b);
bool overlaps_blocks(const Extent& source, const Extent* blocks, size_t ranks, size_t own);

// Throws unless there is one tensor, and `root` is a rank of a group of `size`.
void check_root(Collective collective, TensorRefs tensors, int64_t root, int size);

// all_to_all: `tensor`, the "input" or "output", has as many rows as `splits` say, or rows for `size` equal parts
// if there are none.
void check_splits(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& splits,
                  int size);
// `tensors`, the list of "input" or "output" tensors, has one for each of `size` ranks.
void check_one_per_rank(Collective collective, const char* name, TensorRefs tensors, int size);
// The two have the same element type.
void check_alike(Collective collective, const at::Tensor& a, const at::Tensor& b);
// all_to_all: what this rank sends to itself is what it takes of itself.
void check_own_block(const Extent& input, const Extent& output);
// Gather and scatter: `parts`, the list of "input" or "output" tensors, are `count` tensors that are each as large
// as `part`.
void check_parts(Collective collective, const char* name, TensorRefs parts, const at::Tensor& part,
                 int count);

// A digest of the parameters that the operations move which the calling thread begins from now on; 0: not known.
void set_moved_parameters(uint32_t digest);
// The digest of a signature: of the tensors' sizes and element types, in their order, and of those parameters.
uint64_t digest_of(TensorRefs tensors);
// Their element type; kBytes if they have several.
Dtype type_of(TensorRefs tensors);

}  // namespace smddp
