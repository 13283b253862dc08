// Random numbers that no other process can guess, for keys of groups, of memory and of messages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace smddp {

// Fills `to` from the kernel's generator. False if the kernel gives none; `to` is then not to be used.
[[nodiscard]] bool fill_random(void* to, size_t bytes) noexcept;

// One number, without a system call for each. Differs from call to call, and in forked children.
// Thread-safe. False as of fill_random().
[[nodiscard]] bool draw_number(uint64_t* number) noexcept;

}  // namespace smddp
