// The compiled kernels, embedded in this library.
#include "device/cuda_kernels.h"

#include "kernels/reduce_arithmetic.h"

#if defined(SMDDP_KERNELS)
asm(".section .rodata\n"
    ".balign 64\n"
    ".global smddp_kernels\n"
    ".hidden smddp_kernels\n"
    "smddp_kernels:\n"
    ".incbin \"" SMDDP_KERNELS
    "\"\n"
    ".byte 0\n"
    ".previous\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char smddp_kernels[];
#endif

namespace smddp::device {

const void* cuda_kernels() {
#if defined(SMDDP_KERNELS)
  return smddp_kernels;
#else
  return nullptr;
#endif
}

#define SMDDP_NAME(type, element, name, op, suffix) "smddp_reduce_" #name "_" #suffix,
#define SMDDP_NAMES(type, element, name)                                                           \
  case Dtype::type: {                                                                              \
    static constexpr const char* kNames[] = {SMDDP_REDUCING_OPS(SMDDP_NAME, type, element, name)}; \
    return kNames[which];                                                                          \
  }

const char* kernel_name(Dtype dtype, ReduceOp op) {
  int which = 0;  // in the order of SMDDP_REDUCING_OPS
  if (op == ReduceOp::kProduct) which = 1;
  if (op == ReduceOp::kMin) which = 2;
  if (op == ReduceOp::kMax) which = 3;
  switch (dtype) {
    SMDDP_REDUCED_TYPES(SMDDP_NAMES)
    case Dtype::kBytes:
      return nullptr;
  }
  return nullptr;
}

}  // namespace smddp::device
