#include "torch/allocator_trace.h"

#include <dlfcn.h>

#include <utility>

#if defined(SMDDP_HAVE_CUDA_RUNTIME)
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace smddp {

#if defined(SMDDP_HAVE_CUDA_RUNTIME)

// The module links no CUDA library, so that one build runs under every torch of its minor version.
Status follow_gpu_allocator(int index, Freeing freeing) {
  namespace torch_memory = c10::cuda::CUDACachingAllocator;
  void* library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = library != nullptr ? dlsym(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE")
                                   : nullptr;
  auto* allocator = static_cast<std::atomic<torch_memory::CUDAAllocator*>*>(found);
  if (allocator == nullptr || allocator->load() == nullptr)
    return {Code::kUnavailable, "torch's allocator of GPU memory was not found"};
  allocator->load()->attachAllocatorTraceTracker(
      [index, freeing = std::move(freeing)](const torch_memory::TraceEntry& entry) {
        using Entry = torch_memory::TraceEntry;
        if (entry.action_ != Entry::SEGMENT_FREE && entry.action_ != Entry::SEGMENT_UNMAP) return;
        if (entry.device_ != index) return;
        const char* why = freeing(reinterpret_cast<const void*>(entry.addr_), entry.size_);
        TORCH_CHECK(why == nullptr || entry.action_ == Entry::SEGMENT_UNMAP, why);
      });
  return {};
}

#else

Status follow_gpu_allocator(int, Freeing) {
  return {Code::kUnavailable, "this build had no CUDA headers"};
}

#endif

}  // namespace smddp
