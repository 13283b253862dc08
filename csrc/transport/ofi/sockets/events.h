// The epoll instance of the sockets and of the file descriptors of libfabric: what is ready. Called by the
// classes of this room.
#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/errno_status.h"
#include "common/file_descriptor.h"
#include "common/forks.h"
#include "common/status.h"

namespace smddp::fabric {

// Whose file descriptor it is. `index`: among those of its kind.
enum class Source : uint32_t { kListener, kConnection, kRails };

class Events {
 public:
  static constexpr int kBatch = 32;

  Status open() {
    instance_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
    return instance_ ? Status() : errno_status("no epoll instance");
  }
  int fd() const { return instance_.get(); }

  Status add(int fd, Source source, size_t index, uint32_t what) {
    return set(EPOLL_CTL_ADD, fd, source, index, what);
  }
  Status change(int fd, Source source, size_t index, uint32_t what) {
    return set(EPOLL_CTL_MOD, fd, source, index, what);
  }
  // Ends the connection or the listening, and closes the descriptor. A forked child may hold the same socket: it
  // must not keep it alive, and its events end here. In that child only the descriptor is closed.
  void end(FileDescriptor& socket) {
    if (socket && fork_count() == opened_in_) {
      (void)::epoll_ctl(instance_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
      (void)::shutdown(socket.get(), SHUT_RDWR);
    }
    socket = FileDescriptor();
  }

  // What is ready now, without waiting.
  std::span<const epoll_event> ready() {
    int count = ::epoll_wait(instance_.get(), events_, kBatch, 0);
    return {events_, static_cast<size_t>(count > 0 ? count : 0)};
  }
  static Source source_of(const epoll_event& event) {
    return static_cast<Source>(event.data.u64 >> 32);
  }
  static size_t index_of(const epoll_event& event) {
    return static_cast<size_t>(event.data.u64 & 0xffffffff);
  }

 private:
  Status set(int operation, int fd, Source source, size_t index, uint32_t what) {
    epoll_event event = {};
    event.events = what;
    event.data.u64 = uint64_t{static_cast<uint32_t>(source)} << 32 | index;
    if (::epoll_ctl(instance_.get(), operation, fd, &event) == 0) return {};
    return errno_status("can't watch a socket");
  }

  FileDescriptor instance_;
  uint32_t opened_in_ = fork_count();
  epoll_event events_[kBatch];
};

}  // namespace smddp::fabric
