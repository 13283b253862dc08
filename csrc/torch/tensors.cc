#include "torch/tensors.h"

#include "torch/runtime.h"

namespace smddp {

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kChar:
      return Dtype::kInt8;
    case at::kByte:
      return Dtype::kUInt8;
    case at::kShort:
      return Dtype::kInt16;
    case at::kUInt16:
      return Dtype::kUInt16;
    case at::kInt:
      return Dtype::kInt32;
    case at::kUInt32:
      return Dtype::kUInt32;
    case at::kLong:
      return Dtype::kInt64;
    case at::kUInt64:
      return Dtype::kUInt64;
    default:
      return Dtype::kBytes;
  }
}

std::optional<ReduceOp> reduction_of(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op.op_)) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    default:
      return std::nullopt;
  }
}

const char* foreign(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors) {
    if (!t.device().is_cpu()) return "smddp carries CPU tensors only so far";
    if (t.layout() != at::kStrided) return "smddp carries dense tensors only";
  }
  return nullptr;
}

const char* foreign(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  if (const char* reason = foreign(tensors)) return reason;
  auto reduction = reduction_of(op);
  if (!reduction) return "smddp sums with SUM, AVG, MIN, MAX and PRODUCT only";
  for (const at::Tensor& t : tensors) {
    if (dtype_of(t.scalar_type()) == Dtype::kBytes) return "smddp does not sum this element type";
    require(*reduction != ReduceOp::kAvg || t.is_floating_point(),
            std::string("ReduceOp.AVG needs a floating type, this tensor is ") +
                c10::toString(t.scalar_type()));
  }
  return nullptr;
}

at::Tensor readable(TensorOperation& op, const at::Tensor& input) {
  at::Tensor contiguous = input.detach().contiguous().resolve_conj().resolve_neg();
  op.keep.push_back(contiguous);
  return contiguous;
}

at::Tensor writable(TensorOperation& op, const at::Tensor& output, bool stand_in) {
  if (!stand_in && output.is_contiguous() && !output.is_conj() && !output.is_neg()) {
    op.keep.push_back(output);
    return output;
  }
  at::Tensor contiguous = at::empty(output.sizes(), output.options());
  op.copy_back.emplace_back(output.detach(), contiguous);
  return contiguous;
}

bool overlap_askew(const Extent& a, const Extent& b) {
  if (a.bytes == 0 || b.bytes == 0 || a.address == b.address) return false;
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

Extent extent_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())), tensor.nbytes()};
}

void require(bool good, const std::string& sentence) {
  if (!good) throw_status({Code::kInvalid, sentence});
}

}  // namespace smddp
