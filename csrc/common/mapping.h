// Owns mapped memory and unmaps it once. Used by every folder that maps some.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <string>
#include <utility>

#include "common/status.h"

namespace smddp {

class Mapping {
 public:
  Mapping() = default;
  // Maps `bytes` bytes of the file `fd`, or anonymous pages, which are zeroed and not resident before they are
  // first touched. `sharing`: MAP_PRIVATE, or MAP_SHARED, with which fork() never replaces a page by a copy.
  static Result<Mapping> map(size_t bytes, int sharing, int fd = -1,
                             int protection = PROT_READ | PROT_WRITE) {
    void* at = mmap(nullptr, bytes, protection, sharing | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    if (at == MAP_FAILED) return errno_status("could not map " + std::to_string(bytes) + " bytes");
    Mapping mapping;
    mapping.data_ = static_cast<std::byte*>(at);
    mapping.size_ = bytes;
    return mapping;
  }
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) munmap(data_, size_);
  }
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::byte* release() {
    return std::exchange(data_, nullptr);
  }  // the caller then owns the mapping

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace smddp
