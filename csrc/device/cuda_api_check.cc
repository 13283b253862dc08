// Compares cuda_api.h with the header of the CUDA toolkit, if CMake found a toolkit.
#if defined(SMDDP_HAVE_CUDA_H)
#include <cuda.h>
#if CUDA_VERSION >= 12080 && __has_include(<cudaTypedefs.h>)
#include <cudaTypedefs.h>  // each function in each of its versions
#define SMDDP_HAVE_TYPEDEFS
#endif

#include <type_traits>

// These macros of cuda.h would rename the members of Api.
#undef cuMemAlloc
#undef cuMemFree
#undef cuMemHostRegister
#undef cuMemHostGetDevicePointer
#undef cuMemGetAddressRange
#undef cuStreamDestroy
#undef cuEventDestroy
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuIpcOpenMemHandle
#undef cuStreamBatchMemOp
#undef cuDevicePrimaryCtxRelease
#undef cuDeviceGetUuid
#undef cuMemcpyBatchAsync

#include "device/cuda_api.h"
#include "device/device.h"

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

#define SMDDP_SAME(name) static_assert(kSameFunction<decltype(&::name), decltype(Api::name)>)
#define SMDDP_SAME_AS(real, name) \
  static_assert(kSameFunction<decltype(&::real), decltype(Api::name)>)
SMDDP_SAME(cuInit);
SMDDP_SAME(cuDeviceGetCount);
SMDDP_SAME(cuDeviceCanAccessPeer);
SMDDP_SAME(cuGetErrorName);
SMDDP_SAME(cuGetErrorString);
SMDDP_SAME(cuDriverGetVersion);
SMDDP_SAME(cuDeviceGet);
SMDDP_SAME(cuDeviceGetName);
SMDDP_SAME_AS(cuDeviceGetUuid_v2, cuDeviceGetUuid);
SMDDP_SAME(cuDeviceGetAttribute);
SMDDP_SAME(cuDevicePrimaryCtxRetain);
SMDDP_SAME_AS(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease);
SMDDP_SAME_AS(cuCtxPushCurrent_v2, cuCtxPushCurrent);
SMDDP_SAME_AS(cuCtxPopCurrent_v2, cuCtxPopCurrent);
SMDDP_SAME(cuCtxSynchronize);
SMDDP_SAME(cuCtxGetStreamPriorityRange);
SMDDP_SAME(cuStreamCreateWithPriority);
SMDDP_SAME_AS(cuStreamDestroy_v2, cuStreamDestroy);
SMDDP_SAME(cuStreamSynchronize);
SMDDP_SAME(cuStreamIsCapturing);
SMDDP_SAME(cuStreamWaitEvent);
SMDDP_SAME_AS(cuStreamBatchMemOp_v2, cuStreamBatchMemOp);
SMDDP_SAME(cuThreadExchangeStreamCaptureMode);
SMDDP_SAME(cuEventCreate);
SMDDP_SAME_AS(cuEventDestroy_v2, cuEventDestroy);
SMDDP_SAME(cuEventRecord);
SMDDP_SAME(cuEventQuery);
SMDDP_SAME(cuMemcpyAsync);
SMDDP_SAME(cuLaunchHostFunc);
SMDDP_SAME_AS(cuMemHostRegister_v2, cuMemHostRegister);
SMDDP_SAME(cuMemHostUnregister);
SMDDP_SAME_AS(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer);
SMDDP_SAME_AS(cuMemGetAddressRange_v2, cuMemGetAddressRange);
SMDDP_SAME_AS(cuMemAlloc_v2, cuMemAlloc);
SMDDP_SAME_AS(cuMemFree_v2, cuMemFree);
SMDDP_SAME(cuPointerGetAttribute);
SMDDP_SAME(cuIpcGetMemHandle);
SMDDP_SAME_AS(cuIpcOpenMemHandle_v2, cuIpcOpenMemHandle);
SMDDP_SAME(cuIpcCloseMemHandle);
SMDDP_SAME(cuMemRetainAllocationHandle);
SMDDP_SAME(cuMemExportToShareableHandle);
SMDDP_SAME(cuMemImportFromShareableHandle);
SMDDP_SAME(cuMemRelease);
SMDDP_SAME(cuMemAddressReserve);
SMDDP_SAME(cuMemAddressFree);
SMDDP_SAME(cuMemMap);
SMDDP_SAME(cuMemUnmap);
SMDDP_SAME(cuMemSetAccess);
SMDDP_SAME(cuModuleLoadData);
SMDDP_SAME(cuModuleUnload);
SMDDP_SAME(cuModuleGetFunction);
SMDDP_SAME(cuLaunchKernel);

#if defined(SMDDP_HAVE_TYPEDEFS)
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
static_assert(sizeof(CUuuid) == sizeof(::CUuuid));
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
#if CUDA_VERSION >= 12030
static_assert(kFabricHandle == CU_MEM_HANDLE_TYPE_FABRIC &&
              sizeof(::CUmemFabricHandle) == sizeof(Allocation::handle));
#endif
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
#endif
