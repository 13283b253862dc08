// torch's caching allocator of GPU memory, which says when it is about to free a segment.
#pragma once

#include <cstddef>
#include <functional>

#include "common/status.h"

namespace smddp {

// Is told of memory that is about to be freed; returns why it must not be: nullptr: it may.
using Freeing = std::function<const char*(const void* at, size_t bytes)>;

// Calls `freeing` before a segment of GPU `index` is freed, and after a part of an expandable segment has been
// unmapped, from now on until the process ends, with the allocator's lock of that GPU held. A segment that must not be
// freed stays in the allocator's cache, and the call that would free it (empty_cache(), or an allocation for which
// there is no memory) raises the reason. Not ok: there is no such allocator, or this build does not know it.
Status follow_gpu_allocator(int index, Freeing freeing);

}  // namespace smddp
