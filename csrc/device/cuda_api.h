// The functions of CUDA's driver API that this folder uses. They are declared here, so that the library
// builds without the CUDA toolkit and opens libcuda.so.1 at run time. If a build with tests finds a toolkit,
// tests/cpp/cuda_api_check.cc compares these declarations with it. Nothing outside of this folder and its tests
// includes this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/status.h"

namespace smddp::device::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct Context*;
using CUstream = struct StreamObject*;
using CUevent = struct EventObject*;
using CUmodule = struct Module*;
using CUfunction = struct Function*;
using CUmemGenericAllocationHandle = unsigned long long;
struct CUipcMemHandle {
  char reserved[64];
};
struct CUmemLocation {
  int type;
  int id;
};
// A union of the operations of cuStreamBatchMemOp(); of those used here, all have this form.
struct CUstreamBatchMemOpParams {
  int operation;
  CUdeviceptr address;
  uint32_t value, upper_half;
  unsigned flags;
  uint64_t others[2];
};
struct CUmemcpyAttributes {
  int source_order;
  CUmemLocation source, destination;  // hints for memory without a fixed location
  unsigned flags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

inline CUdeviceptr pointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

inline constexpr CUresult kSuccess = 0;             // CUDA_SUCCESS
inline constexpr CUresult kNotReady = 600;          // CUDA_ERROR_NOT_READY
inline constexpr CUresult kNotSupported = 801;      // CUDA_ERROR_NOT_SUPPORTED
inline constexpr int kInStreamOrder = 1;            // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
inline constexpr unsigned kBesideCompute = 1;       // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
inline constexpr int kMultiprocessorCount = 16;     // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int kUnifiedAddressing = 41;       // CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
inline constexpr int kCanFlushRemoteWrites = 98;    // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
inline constexpr int kBufferId = 7;                 // CU_POINTER_ATTRIBUTE_BUFFER_ID
inline constexpr int kIpcCapable = 10;              // ..._IS_LEGACY_CUDA_IPC_CAPABLE
inline constexpr int kAllowedHandleTypes = 14;      // ..._ALLOWED_HANDLE_TYPES
inline constexpr int kMappingSize = 18;             // ..._MAPPING_SIZE
inline constexpr int kMappingBase = 19;             // ..._MAPPING_BASE_ADDR
inline constexpr int kMemoryBlockId = 20;           // ..._MEMORY_BLOCK_ID
inline constexpr unsigned kStreamNonBlocking = 1;   // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kWaitEqual = 1;           // CU_STREAM_WAIT_VALUE_EQ
inline constexpr unsigned kWaitFlush = 1u << 30;    // CU_STREAM_WAIT_VALUE_FLUSH
inline constexpr int kWaitValue = 1;                // CU_STREAM_MEM_OP_WAIT_VALUE_32
inline constexpr int kWriteValue = 2;               // CU_STREAM_MEM_OP_WRITE_VALUE_32
inline constexpr int kCaptureNone = 0;              // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kCaptureRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr unsigned kRegisterPortable = 1;    // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kRegisterMapped = 2;      // CU_MEMHOSTREGISTER_DEVICEMAP
inline constexpr unsigned kLazyPeerAccess = 1;      // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr int kPosixDescriptor = 1;          // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kLocationDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kReadWrite = 3;                // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

// The API version of the functions below. Drivers from version 525 on have it.
inline constexpr int kVersion = 12000;

// X(name, parameters)
#define SMDDP_CUDA_FUNCTIONS(X)                                                                   \
  X(cuInit, (unsigned))                                                                           \
  X(cuGetErrorName, (CUresult, const char**))                                                     \
  X(cuGetErrorString, (CUresult, const char**))                                                   \
  X(cuDriverGetVersion, (int*))                                                                   \
  X(cuDeviceGetCount, (int*))                                                                     \
  X(cuDeviceGet, (CUdevice*, int))                                                                \
  X(cuDeviceCanAccessPeer, (int*, CUdevice, CUdevice))                                            \
  X(cuDeviceGetName, (char*, int, CUdevice))                                                      \
  X(cuDeviceGetAttribute, (int*, int, CUdevice))                                                  \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                             \
  X(cuDevicePrimaryCtxRelease, (CUdevice))                                                        \
  X(cuCtxPushCurrent, (CUcontext))                                                                \
  X(cuCtxPopCurrent, (CUcontext*))                                                                \
  X(cuCtxSynchronize, ())                                                                         \
  X(cuCtxGetStreamPriorityRange, (int*, int*))                                                    \
  X(cuStreamCreateWithPriority, (CUstream*, unsigned, int))                                       \
  X(cuStreamDestroy, (CUstream))                                                                  \
  X(cuStreamSynchronize, (CUstream))                                                              \
  X(cuStreamIsCapturing, (CUstream, int*))                                                        \
  X(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                             \
  X(cuStreamBatchMemOp, (CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned))                \
  X(cuThreadExchangeStreamCaptureMode, (int*))                                                    \
  X(cuEventCreate, (CUevent*, unsigned))                                                          \
  X(cuEventDestroy, (CUevent))                                                                    \
  X(cuEventRecord, (CUevent, CUstream))                                                           \
  X(cuEventQuery, (CUevent))                                                                      \
  X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                  \
  X(cuMemAlloc, (CUdeviceptr*, size_t))                                                           \
  X(cuMemFree, (CUdeviceptr))                                                                     \
  X(cuMemHostRegister, (void*, size_t, unsigned))                                                 \
  X(cuMemHostUnregister, (void*))                                                                 \
  X(cuMemHostGetDevicePointer, (CUdeviceptr*, void*, unsigned))                                   \
  X(cuMemGetAddressRange, (CUdeviceptr*, size_t*, CUdeviceptr))                                   \
  X(cuPointerGetAttribute, (void*, int, CUdeviceptr))                                             \
  X(cuIpcGetMemHandle, (CUipcMemHandle*, CUdeviceptr))                                            \
  X(cuIpcOpenMemHandle, (CUdeviceptr*, CUipcMemHandle, unsigned))                                 \
  X(cuIpcCloseMemHandle, (CUdeviceptr))                                                           \
  X(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle*, void*))                          \
  X(cuMemExportToShareableHandle, (void*, CUmemGenericAllocationHandle, int, unsigned long long)) \
  X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle*, void*, int))                  \
  X(cuMemRelease, (CUmemGenericAllocationHandle))                                                 \
  X(cuMemAddressReserve, (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))         \
  X(cuMemAddressFree, (CUdeviceptr, size_t))                                                      \
  X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))    \
  X(cuMemUnmap, (CUdeviceptr, size_t))                                                            \
  X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                        \
  X(cuModuleLoadData, (CUmodule*, const void*))                                                   \
  X(cuModuleUnload, (CUmodule))                                                                   \
  X(cuModuleGetFunction, (CUfunction*, CUmodule, const char*))                                    \
  X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,      \
                     unsigned, CUstream, void**, void**))

// The API version of the functions that only newer drivers have: nullptr with an older one.
inline constexpr int kNewerVersion = 12080;
#define SMDDP_NEWER_CUDA_FUNCTIONS(X)                                                      \
  X(cuMemcpyBatchAsync, (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, \
                         size_t*, size_t, size_t*, CUstream))

struct Api {
#define SMDDP_MEMBER(name, parameters) CUresult(*name) parameters = nullptr;
  SMDDP_CUDA_FUNCTIONS(SMDDP_MEMBER)
  SMDDP_NEWER_CUDA_FUNCTIONS(SMDDP_MEMBER)
#undef SMDDP_MEMBER

  // Ok, or an error with `what`, the error's name, CUDA's text for it, and a remedy if one is known.
  Status check(CUresult result, const char* what) const;
};

// The driver, opened and initialised on first use. The error says why there is none.
const Result<Api>& api();
// Opens and initialises the driver in library `path`, at each call.
Result<Api> load_api(const std::string& path);

}  // namespace smddp::device::cuda
