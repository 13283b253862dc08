#include "torch/tensors.h"

#include "torch/runtime.h"

namespace smddp {

Dtype dtype_of(at::ScalarType type) {
  static constexpr std::pair<at::ScalarType, Dtype> kTypes[] = {
      {at::kFloat, Dtype::kFloat32},     {at::kDouble, Dtype::kFloat64},
      {at::kBFloat16, Dtype::kBFloat16}, {at::kHalf, Dtype::kFloat16},
      {at::kChar, Dtype::kInt8},         {at::kByte, Dtype::kUInt8},
      {at::kShort, Dtype::kInt16},       {at::kUInt16, Dtype::kUInt16},
      {at::kInt, Dtype::kInt32},         {at::kUInt32, Dtype::kUInt32},
      {at::kLong, Dtype::kInt64},        {at::kUInt64, Dtype::kUInt64}};
  for (const auto& [torchs, ours] : kTypes) {
    if (type == torchs) return ours;
  }
  return Dtype::kBytes;
}

std::optional<ReduceOp> reduction_of(const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  static constexpr std::pair<Op::RedOpType, ReduceOp> kOps[] = {{Op::SUM, ReduceOp::kSum},
                                                                {Op::AVG, ReduceOp::kAvg},
                                                                {Op::MIN, ReduceOp::kMin},
                                                                {Op::MAX, ReduceOp::kMax},
                                                                {Op::PRODUCT, ReduceOp::kProduct}};
  for (const auto& [torchs, ours] : kOps) {
    if (op.op_ == torchs) return ours;
  }
  return std::nullopt;
}

TensorRefList refs(const std::vector<at::Tensor>& tensors) {
  TensorRefList all;
  for (const at::Tensor& t : tensors) all.push_back(&t);
  return all;
}

TensorRefList refs(const std::vector<std::vector<at::Tensor>>& lists) {
  TensorRefList all;
  for (const auto& list : lists) {
    for (const at::Tensor& t : list) all.push_back(&t);
  }
  return all;
}

const char* why_fallback(TensorRefs tensors) {
  for (const at::Tensor* t : tensors) {
    if (!t->is_cpu() && !t->is_cuda()) return "smddp carries tensors on CPUs and GPUs only";
    if (t->device() != tensors[0]->device()) return "the tensors lie on several devices";
    if (t->layout() != at::kStrided) return "smddp carries dense tensors only";
  }
  return nullptr;
}

const char* why_fallback(TensorRefs tensors, const c10d::ReduceOp& op) {
  if (const char* reason = why_fallback(tensors)) return reason;
  auto reduction = reduction_of(op);
  if (!reduction) return "smddp sums with SUM, AVG, MIN, MAX and PRODUCT only";
  for (const at::Tensor* t : tensors) {
    if (dtype_of(t->scalar_type()) == Dtype::kBytes) return "smddp does not sum this element type";
    require(*reduction != ReduceOp::kAvg || t->is_floating_point(), [&] {
      return std::string("ReduceOp.AVG needs a floating type, this tensor is ") +
             c10::toString(t->scalar_type());
    });
  }
  return nullptr;
}

const char* why_not_on_host(TensorRefs tensors, const c10d::ReduceOp* op) {
  for (const at::Tensor* t : tensors) {
    if (!t->is_cpu()) return "smddp carries it on CPUs only";
  }
  return op != nullptr ? why_fallback(tensors, *op) : why_fallback(tensors);
}

const char* why_not_paired(const Topology& topology, TensorRefs tensors) {
  if (const char* reason = why_not_on_host(tensors)) return reason;
  static_assert(pattern::kPairedRanks == 256);
  return pattern::pairs_ranks(topology)
             ? nullptr
             : "between hosts, smddp carries it in groups of at most 256 ranks";
}

bool is_plain(const at::Tensor& t) { return t.is_contiguous() && !t.is_conj() && !t.is_neg(); }

Extent readable(TensorOperation& op, const at::Tensor& input) {
  op.keep.push_back(is_plain(input) ? input
                                    : input.detach().contiguous().resolve_conj().resolve_neg());
  return extent_of(op.keep.back());
}

Extent writable(TensorOperation& op, const at::Tensor& output, bool stand_in) {
  op.results.push_back(output);
  if (!stand_in && is_plain(output)) {
    return {static_cast<std::byte*>(output.mutable_data_ptr()), output.nbytes()};
  }
  at::Tensor contiguous = at::empty(output.sizes(), output.options());
  op.copy_back.emplace_back(output.detach(), contiguous);
  return extent_of(contiguous);
}

bool overlap_askew(const Extent& a, const Extent& b) {
  if (a.bytes == 0 || b.bytes == 0 || a.address == b.address) return false;
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

Extent extent_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())), tensor.nbytes()};
}

void refuse(const std::string& sentence) { throw_status({Code::kInvalid, sentence}); }

}  // namespace smddp
