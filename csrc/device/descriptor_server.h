// Hands file descriptors of this process to processes of the same user on this host, over a Unix socket. A
// container's default rules refuse the system call that takes them without the owner's help (pidfd_getfd).
// A process that asks must know the socket's name, 16 random bytes, and a descriptor's number in this class,
// which no two descriptors share. Knows no CUDA. CudaSharing calls it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "common/file_descriptor.h"
#include "common/status.h"
#include "device/unix_sockets.h"

namespace smddp::device {

class DescriptorServer {
 public:
  static Result<std::unique_ptr<DescriptorServer>> open();
  ~DescriptorServer();
  const SocketName& name() const { return name_; }

  // Takes the descriptor, until withdraw() closes it.
  void offer(uint64_t id, FileDescriptor descriptor);
  void withdraw(uint64_t id);

  // Descriptor `id` of the process whose server has this name. Waits for it for up to five seconds.
  // kUnavailable if the server cannot be reached: it may be in another network namespace.
  static Result<FileDescriptor> take(const SocketName& name, uint64_t id);

 private:
  DescriptorServer() = default;
  void serve();
  void answer(const FileDescriptor& asking);

  SocketName name_{};
  FileDescriptor listener_, wake_;
  std::mutex mutex_;
  std::map<uint64_t, FileDescriptor> offered_;
  std::thread thread_;
};

}  // namespace smddp::device
