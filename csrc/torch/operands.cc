#include "torch/operands.h"

#include "common/signature.h"

namespace smddp {
namespace {

thread_local uint32_t moved_parameters = 0;

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

void check_root(Collective collective, TensorRefs tensors, int64_t root, int size) {
  require(tensors.size() == 1, [&] {
    return std::string(name_of(collective)) + " needs one tensor; it got " +
           std::to_string(tensors.size());
  });
  require(root >= 0 && root < size, [&] {
    return std::string(name_of(collective)) + ": the root is rank " + std::to_string(root) +
           ", and the group has the ranks 0 to " + std::to_string(size - 1);
  });
}

void check_splits(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& splits,
                  int size) {
  auto begin = [&] { return std::string("all_to_all: the ") + name + " is " + sizes_text(tensor); };
  require(tensor.dim() > 0, [&] { return begin() + "; it needs a dimension to be cut along"; });
  if (splits.empty()) {
    require(tensor.size(0) % size == 0, [&] {
      return begin() + ", and its first dimension can't be cut into " + std::to_string(size) +
             " equal parts";
    });
    return;
  }
  int64_t rows = 0;
  bool negative = false;
  for (int64_t split : splits) {
    rows += split;
    negative |= split < 0;
  }
  require(splits.size() == static_cast<size_t>(size) && !negative && rows == tensor.size(0), [&] {
    return begin() + ", and " + name + "_split_sizes has " + std::to_string(splits.size()) +
           " numbers with the sum " + std::to_string(rows) + (negative ? ", some below 0" : "") +
           "; it needs one for each of the " + std::to_string(size) +
           " ranks, and the size of the first dimension as their sum";
  });
}

void check_one_per_rank(Collective collective, const char* name, TensorRefs tensors, int size) {
  require(tensors.size() == static_cast<size_t>(size), [&] {
    return std::string(name_of(collective)) + " needs one " + name + " tensor for each of the " +
           std::to_string(size) + " ranks; it got " + std::to_string(tensors.size());
  });
}

void check_alike(Collective collective, const at::Tensor& a, const at::Tensor& b) {
  require(a.scalar_type() == b.scalar_type(), [&] {
    return std::string(name_of(collective)) + ": there are tensors " + sizes_text(a) + " and " +
           sizes_text(b) + "; the types must be equal";
  });
}

void check_own_block(const Extent& input, const Extent& output) {
  require(input.bytes == output.bytes, [&] {
    return "all_to_all: this rank sends " + std::to_string(input.bytes) +
           " bytes to itself and takes " + std::to_string(output.bytes) +
           " of itself; the two sizes must be equal";
  });
}

void check_parts(Collective collective, const char* name, TensorRefs parts, const at::Tensor& part,
                 int count) {
  std::string many = std::to_string(count);
  require(parts.size() == static_cast<size_t>(count), [&] {
    return std::string(name_of(collective)) + " needs " + many + " " + name + " tensors on this " +
           "rank, " + (count == 0 ? "as it is not the root" : "the root: one for each rank") +
           "; it got " + std::to_string(parts.size());
  });
  for (const at::Tensor* t : parts) {
    check_alike(collective, *t, part);
    require(t->numel() == part.numel(), [&] {
      return std::string(name_of(collective)) + ": the " + name + " list has " + sizes_text(*t) +
             ", and this rank's own part is " + sizes_text(part) +
             "; the numbers of elements must be equal";
    });
  }
}

bool overlap(const Extent& a, const Extent& b) {
  return a.bytes > 0 && b.bytes > 0 && (a.address == b.address || overlap_askew(a, b));
}

bool overlaps_blocks(const Extent& source, const Extent* blocks, size_t ranks, size_t own) {
  for (size_t r = 0; r < ranks; ++r) {
    bool stays = r == own && source.address == blocks[r].address;
    if (!stays && overlap(source, blocks[r])) return true;
  }
  return false;
}

void set_moved_parameters(uint32_t digest) { moved_parameters = digest; }

uint64_t digest_of(TensorRefs tensors) {
  uint64_t digest = 0xcbf29ce484222325ull;
  for (const at::Tensor* t : tensors)
    digest =
        extend_digest(extend_digest(digest, t->nbytes()), static_cast<uint64_t>(t->scalar_type()));
  return (digest & UINT32_MAX) | uint64_t{moved_parameters} << 32;
}

Dtype type_of(TensorRefs tensors) {
  for (const at::Tensor* t : tensors) {
    if (t->scalar_type() != tensors[0]->scalar_type()) return Dtype::kBytes;
  }
  return tensors.empty() ? Dtype::kBytes : dtype_of(tensors[0]->scalar_type());
}

}  // namespace smddp
