#include "torch/operands.h"

#include <algorithm>

#include "common/signature.h"

namespace smddp {
namespace {

std::string sizes_text(const at::Tensor& t) {
  std::string text = std::string(c10::toString(t.scalar_type())) + "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

// `smaller` and `larger` are called by the names that the caller gave them.
void check_pair(const char* collective, const at::Tensor& input, const at::Tensor& output,
                bool inputs_are_larger, bool list, size_t ranks) {
  require(input.scalar_type() == output.scalar_type(), [&] {
    return std::string(collective) + ": input is " + sizes_text(input) + ", output is " +
           sizes_text(output) + "; the types must be equal";
  });
  const at::Tensor& larger = inputs_are_larger ? input : output;
  const at::Tensor& smaller = inputs_are_larger ? output : input;
  require(larger.numel() == smaller.numel() * (list ? 1 : static_cast<int64_t>(ranks)), [&] {
    return std::string(collective) + ": with " + (inputs_are_larger ? "output " : "input ") +
           sizes_text(smaller) + " and " + std::to_string(ranks) + " ranks, " +
           (inputs_are_larger ? "input " : "output ") + sizes_text(larger) +
           " has the wrong number of elements";
  });
}

}  // namespace

void check_gathered(const at::Tensor& output, const at::Tensor& input, bool list, size_t ranks) {
  check_pair("all_gather", input, output, false, list, ranks);
}

void check_scattered(const at::Tensor& input, const at::Tensor& output, bool list, size_t ranks) {
  check_pair("reduce_scatter", input, output, true, list, ranks);
}

void check_one_type(Collective collective, TensorRefs tensors) {
  for (const at::Tensor* t : tensors) {
    require(t->scalar_type() == tensors[0]->scalar_type(), [&] {
      return std::string("a coalesced ") + name_of(collective) +
             " needs tensors of one type; call it once per type";
    });
  }
}

bool overlaps_blocks(const Extent& source, const Extent* blocks, size_t ranks, size_t own) {
  return std::any_of(blocks, blocks + ranks, [&](const Extent& block) {
    return overlap_askew(source, block) || (block.address != blocks[own].address &&
                                            source.bytes > 0 && source.address == block.address);
  });
}

uint64_t digest_of(TensorRefs tensors) {
  uint64_t digest = 0xcbf29ce484222325ull;
  for (const at::Tensor* t : tensors)
    digest =
        extend_digest(extend_digest(digest, t->nbytes()), static_cast<uint64_t>(t->scalar_type()));
  return digest;
}

}  // namespace smddp
