#include "common/types.h"

namespace smddp {

size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBytes:
    case Dtype::kInt8:
    case Dtype::kUInt8:
      return 1;
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
    case Dtype::kInt16:
    case Dtype::kUInt16:
      return 2;
    case Dtype::kFloat32:
    case Dtype::kInt32:
    case Dtype::kUInt32:
      return 4;
    case Dtype::kFloat64:
    case Dtype::kInt64:
    case Dtype::kUInt64:
      return 8;
  }
  return 1;
}

const char* name_of(Collective collective) {
  static constexpr const char* kNames[kCollectives] = {"all_gather", "reduce_scatter", "all_reduce",
                                                       "barrier",    "broadcast",      "reduce",
                                                       "all_to_all", "gather",         "scatter"};
  auto i = static_cast<size_t>(collective);
  return i < kCollectives ? kNames[i] : "unknown collective";
}

const char* name_of(Dtype dtype) {
  static constexpr const char* kNames[] = {"bytes",  "float32", "float64", "bfloat16", "float16",
                                           "int8",   "uint8",   "int16",   "uint16",   "int32",
                                           "uint32", "int64",   "uint64"};
  auto i = static_cast<size_t>(dtype);
  return i < std::size_t{13} ? kNames[i] : "unknown dtype";
}

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[] = {"none", "sum", "avg", "min", "max", "product"};
  auto i = static_cast<size_t>(op);
  return i < std::size_t{6} ? kNames[i] : "unknown reduction";
}

}  // namespace smddp
