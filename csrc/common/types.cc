#include "common/types.h"

namespace smddp {

size_t size_of(Dtype dtype) {
  static constexpr uint8_t kSizes[kDtypes] = {1, 4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};
  auto i = static_cast<size_t>(dtype);
  return i < kDtypes ? kSizes[i] : 1;
}

const char* name_of(Collective collective) {
  static constexpr const char* kNames[kCollectives] = {
      "all_gather", "reduce_scatter", "all_reduce", "barrier", "broadcast", "reduce",
      "all_to_all", "gather",         "scatter",    "send",    "recv"};
  auto i = static_cast<size_t>(collective);
  return i < kCollectives ? kNames[i] : "unknown collective";
}

const char* name_of(Dtype dtype) {
  static constexpr const char* kNames[kDtypes] = {
      "bytes", "float32", "float64", "bfloat16", "float16", "int8",  "uint8",
      "int16", "uint16",  "int32",   "uint32",   "int64",   "uint64"};
  auto i = static_cast<size_t>(dtype);
  return i < kDtypes ? kNames[i] : "unknown dtype";
}

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[] = {"none", "sum", "avg", "min", "max", "product"};
  auto i = static_cast<size_t>(op);
  return i < std::size_t{6} ? kNames[i] : "unknown reduction";
}

}  // namespace smddp
