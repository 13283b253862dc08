#include "torch/allocator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>

namespace smddp {
namespace {

using intranode::Arena;

// Of the installed allocator: smaller tensors go through slots. Not measured.
constexpr size_t kThreshold = 64 << 10;

// The allocator that torch used before. An allocator must have a single deleter, so its pointers and the
// arena's come to the same one: the address tells which allocator a pointer is from.
c10::Allocator* plain = nullptr;

void give_back(void* data) {
  if (data == nullptr) return;
  Arena& arena = Arena::process();
  if (arena.may_own(data)) {
    c10::profiledCPUMemoryReporter().Delete(data);
    if (arena.free(data)) return;
  }
  plain->raw_deallocate(data);
}

class SharedAllocator final : public c10::Allocator {
 public:
  explicit SharedAllocator(size_t threshold) : threshold_(threshold) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > 0 && bytes >= threshold_) {
      if (void* block = Arena::process().allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &give_back, c10::Device(c10::kCPU)};
      }
    }
    void* data = plain->raw_allocate(bytes);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  const size_t threshold_;
};

// Must run before the first use of either allocator. `plain` is torch's allocator, or the one that another
// extension installed.
void remember_plain() {
  static const bool once = [] {
    c10::Allocator* current = c10::GetCPUAllocator();
    plain = current->raw_deleter() != nullptr ? current : c10::GetDefaultCPUAllocator();
    return true;
  }();
  (void)once;
}

std::atomic<bool> installed{false};

}  // namespace

c10::Allocator& shared_allocator() {
  remember_plain();
  static auto* allocator = new SharedAllocator(0);
  return *allocator;
}

void install_shared_allocator() {
  remember_plain();
  if (installed.exchange(true)) return;
  static auto* allocator = new SharedAllocator(kThreshold);
  c10::SetCPUAllocator(allocator, /*priority=*/255);
}

bool shared_allocator_installed() { return installed; }

at::Tensor shared_empty(at::IntArrayRef size, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(),
                    "smddp: shared memory holds CPU tensors, not ones on ", options.device());
  TORCH_CHECK_VALUE(options.layout() == at::kStrided && !options.pinned_memory(),
                    "smddp: shared memory holds dense tensors that are not pinned");
  at::Tensor tensor = at::detail::empty_generic(
      size, &shared_allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::typeMetaToScalarType(options.dtype()), options.memory_format_opt());
  return tensor.requires_grad_(options.requires_grad());
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.has_storage() && tensor.storage().nbytes() > 0 &&
         Arena::process().contains(tensor.storage().data(), tensor.storage().nbytes());
}

bool share_storage(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.has_storage(),
                    "smddp: shared memory holds dense CPU tensors, not a ", tensor.toString());
  if (is_shared(tensor)) return true;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  // The owner of foreign memory (numpy, a file, another process) may rely on its address. Such storage is
  // not resizable.
  if (!storage->resizable() || storage->allocator() == nullptr) return false;
  size_t bytes = storage->nbytes();
  if (bytes == 0) return true;
  TORCH_CHECK_VALUE(storage->data() != nullptr, "smddp: a ", tensor.toString(),
                    " without memory of its own has none to share");
  c10::DataPtr fresh = shared_allocator().allocate(bytes);
  if (!Arena::process().contains(fresh.get(), bytes)) return false;
  std::memcpy(fresh.get(), storage->mutable_data(), bytes);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_allocator(&shared_allocator());
  return true;
}

}  // namespace smddp
