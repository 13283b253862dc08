// torch tensors in the process's arena: memory that collectives between ranks of a host read and
// write in place.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <memory>

#include "intranode/arena.h"

namespace smddp {

// CPU memory from the arena; what the arena has none for, it takes from torch's own allocator. One
// object for the whole process, never destroyed.
c10::Allocator& shared_allocator();
// Makes every CPU tensor of at least 64 KiB that is created from now on a shared one. Not undone:
// torch has no way to know who holds the allocator. Idempotent.
void install_shared_allocator();
bool shared_allocator_installed();

// A contiguous CPU tensor, not initialised. Throws where `options` ask for anything else.
at::Tensor shared_empty(at::IntArrayRef size, const at::TensorOptions& options);
// Moves the tensor's whole storage, and with it every view of it, into the arena; true where it lies
// there already or now. False where it can't: the storage's memory is not torch's own (numpy's, a
// file's), or the arena has no room.
bool share_storage(const at::Tensor& tensor);
bool is_shared(const at::Tensor& tensor);

}  // namespace smddp
