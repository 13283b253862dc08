// Handles of memory that processes share: mappings and anonymous segments. Knows nothing of the contents.
// Called by the other files of this folder.
#pragma once

#include <cstddef>
#include <string>

#include "common/file_descriptor.h"
#include "common/status.h"

namespace smddp::intranode {

// Owns a shared mapping of a memfd.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* address, size_t size) : address_(address), size_(size) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  void* address() const { return address_; }
  size_t size() const { return size_; }
  void* release();  // the caller then owns the mapping

 private:
  void* address_ = nullptr;
  size_t size_ = 0;
};

struct Shared {
  FileDescriptor fd;
  Mapping mapping;
};

// A zeroed anonymous shared segment, mode 0600, whose size no process can change.
Result<Shared> create_shared(const char* label, size_t size);
// Maps the segment that is descriptor `fd` of process `pid`; an error if it is not one of create_shared(). `what` names the segment's owner in error
// texts.
Result<Mapping> map_shared(int pid, int fd, const std::string& what);

// The path through which descriptor `fd` of process `pid` can be opened.
std::string fd_path(int pid, int fd);

}  // namespace smddp::intranode
