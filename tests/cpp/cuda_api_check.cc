// Compares cuda_api.h with the header of the CUDA toolkit. Compiled if CMake found a toolkit; never run.

// Before cuda.h, whose macros rename some functions to their latest version.
#include "device/cuda_api.h"

#include <cuda.h>
#if CUDA_VERSION >= 12080 && __has_include(<cudaTypedefs.h>)
#include <cudaTypedefs.h>  // each function in each of its versions
#define SMDDP_HAVE_TYPEDEFS
#endif

#include <type_traits>

namespace smddp::device::cuda {
namespace {

// Enumerations and handles are the same as the integer or pointer type in which they are passed.
template <class A, class B>
constexpr bool kSameArgument =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
    std::is_class_v<A> == std::is_class_v<B>;

template <class A, class B>
constexpr bool kSameFunction = false;
template <class... A, class... B>
constexpr bool kSameFunction<::CUresult (*)(A...), CUresult (*)(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) {
    return (kSameArgument<A, B> && ...);
  } else {
    return false;
  }
}();

#define SMDDP_SAME(name, parameters) \
  static_assert(kSameFunction<decltype(&::name), CUresult(*) parameters>);
SMDDP_CUDA_FUNCTIONS(SMDDP_SAME)

#if defined(SMDDP_HAVE_TYPEDEFS)
#undef cuMemcpyBatchAsync
static_assert(kSameFunction<PFN_cuMemcpyBatchAsync_v12080, decltype(Api::cuMemcpyBatchAsync)>);
static_assert(sizeof(CUmemcpyAttributes) == sizeof(::CUmemcpyAttributes) &&
              offsetof(CUmemcpyAttributes, source) == offsetof(::CUmemcpyAttributes, srcLocHint) &&
              offsetof(CUmemcpyAttributes, destination) ==
                  offsetof(::CUmemcpyAttributes, dstLocHint) &&
              offsetof(CUmemcpyAttributes, flags) == offsetof(::CUmemcpyAttributes, flags));
static_assert(kInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
              kBesideCompute == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
#endif
static_assert(sizeof(CUipcMemHandle) == sizeof(::CUipcMemHandle));
static_assert(sizeof(CUmemAccessDesc) == sizeof(::CUmemAccessDesc) &&
              offsetof(CUmemAccessDesc, flags) == offsetof(::CUmemAccessDesc, flags) &&
              offsetof(CUmemLocation, id) == offsetof(::CUmemLocation, id));
using RealStep = ::CUstreamBatchMemOpParams;
static_assert(sizeof(CUstreamBatchMemOpParams) == sizeof(RealStep) &&
              offsetof(CUstreamBatchMemOpParams, address) ==
                  offsetof(RealStep, waitValue.address) &&
              offsetof(CUstreamBatchMemOpParams, value) == offsetof(RealStep, waitValue.value) &&
              offsetof(CUstreamBatchMemOpParams, flags) == offsetof(RealStep, waitValue.flags) &&
              offsetof(CUstreamBatchMemOpParams, address) ==
                  offsetof(RealStep, writeValue.address) &&
              offsetof(CUstreamBatchMemOpParams, value) == offsetof(RealStep, writeValue.value) &&
              offsetof(CUstreamBatchMemOpParams, flags) == offsetof(RealStep, writeValue.flags));
static_assert(kWaitValue == CU_STREAM_MEM_OP_WAIT_VALUE_32 &&
              kWriteValue == CU_STREAM_MEM_OP_WRITE_VALUE_32);
static_assert(kSuccess == CUDA_SUCCESS && kNotReady == CUDA_ERROR_NOT_READY &&
              kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT &&
              kUnifiedAddressing == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING &&
              kCanFlushRemoteWrites == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);
static_assert(kBufferId == CU_POINTER_ATTRIBUTE_BUFFER_ID &&
              kIpcCapable == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE &&
              kAllowedHandleTypes == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES &&
              kMappingSize == CU_POINTER_ATTRIBUTE_MAPPING_SIZE &&
              kMappingBase == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR &&
              kMemoryBlockId == CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING &&
              kEventDisableTiming == CU_EVENT_DISABLE_TIMING &&
              kWaitEqual == CU_STREAM_WAIT_VALUE_EQ && kWaitFlush == CU_STREAM_WAIT_VALUE_FLUSH &&
              kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE &&
              kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE &&
              kRegisterMapped == CU_MEMHOSTREGISTER_DEVICEMAP &&
              kLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS &&
              kPosixDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
              kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE &&
              kReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

}  // namespace
}  // namespace smddp::device::cuda
