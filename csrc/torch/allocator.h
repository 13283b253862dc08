// torch tensors in the process's arena: memory that collectives between ranks of a host read and
// write in place.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include "intranode/arena.h"

namespace smddp {

// Allocates CPU memory from the arena, or by torch's own allocator if the arena has no room. One object for
// the whole process, never destroyed.
c10::Allocator& shared_allocator();
// From now on every new CPU tensor of at least 64 KiB lies in shared memory. It can't be undone, as torch
// does not know which objects still refer to the allocator. Idempotent.
void install_shared_allocator();
bool shared_allocator_installed();

// A contiguous CPU tensor, not initialised. Throws if `options` ask for anything else.
at::Tensor shared_empty(at::IntArrayRef size, const at::TensorOptions& options);
// Moves the tensor's whole storage, and so all its views, into the arena. Returns whether the storage lies
// there now. False if it can't be moved: its memory is not torch's own (numpy's, a file's), or the arena has
// no room.
bool share_storage(const at::Tensor& tensor);
bool is_shared(const at::Tensor& tensor);

}  // namespace smddp
