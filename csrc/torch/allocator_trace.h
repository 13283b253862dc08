// torch's caching allocator of GPU memory, which says when it is about to free a segment.
#pragma once

#include <cstddef>
#include <functional>

#include "common/status.h"

namespace smddp {

// Calls `freed` before a segment of GPU `index` is freed, and after a part of an expandable segment has been
// unmapped, from now on until the process ends, with the allocator's lock of that GPU held. Not ok: there is no
// such allocator, or this build does not know it.
Status follow_gpu_allocator(int index, std::function<void(const void* at, size_t bytes)> freed);

}  // namespace smddp
