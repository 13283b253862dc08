// Random numbers that no other process can guess, for keys of groups, of memory and of messages.
#pragma once

#include <cstddef>

namespace smddp {

// Fills `to` from the kernel's generator. False if the kernel gives none; `to` is then not to be used.
[[nodiscard]] bool fill_random(void* to, size_t bytes) noexcept;

}  // namespace smddp
