#include "device/descriptor_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace smddp::device {
namespace {

constexpr time_t kPatienceSeconds = 5;
constexpr const char* kDescriptors = "descriptors";

void set_patience(int socket) {
  timeval limit{kPatienceSeconds, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// A message of one byte, with a descriptor if there is one.
struct Answer {
  char known = 0;
  iovec data{&known, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  Answer() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
};

}  // namespace

Result<std::unique_ptr<DescriptorServer>> DescriptorServer::open() {
  std::unique_ptr<DescriptorServer> made(new DescriptorServer());
  if (Status s = listen_as(kDescriptors, &made->name_).into(made->listener_); !s) return s;
  made->wake_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  if (!made->wake_) return errno_status("could not open an eventfd");
  made->thread_ = std::thread([server = made.get()] { server->serve(); });
  return made;
}

DescriptorServer::~DescriptorServer() {
  uint64_t one = 1;
  if (wake_ && write(wake_.get(), &one, sizeof one) != sizeof one) std::abort();
  if (thread_.joinable()) thread_.join();
}

void DescriptorServer::offer(uint64_t id, FileDescriptor descriptor) {
  std::lock_guard lock(mutex_);
  offered_.insert_or_assign(id, std::move(descriptor));
}

void DescriptorServer::withdraw(uint64_t id) {
  std::lock_guard lock(mutex_);
  offered_.erase(id);
}

void DescriptorServer::serve() {
  pollfd watched[] = {{listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  while (true) {
    if (poll(watched, 2, -1) < 0 && errno != EINTR) return;
    if (watched[1].revents != 0) return;
    if ((watched[0].revents & POLLIN) == 0) continue;
    FileDescriptor asking(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (asking) answer(asking);
  }
}

void DescriptorServer::answer(const FileDescriptor& asking) {
  if (!of_this_user(asking.get())) return;
  set_patience(asking.get());
  uint64_t id = 0;
  if (recv(asking.get(), &id, sizeof id, 0) != sizeof id) return;
  Answer answer;
  std::lock_guard lock(mutex_);  // the descriptor stays open while it is sent
  auto found = offered_.find(id);
  if (found != offered_.end()) {
    answer.known = 1;
    cmsghdr* header = CMSG_FIRSTHDR(&answer.message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    int descriptor = found->second.get();
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  } else {
    answer.message.msg_control = nullptr;
    answer.message.msg_controllen = 0;
  }
  (void)sendmsg(asking.get(), &answer.message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Result<FileDescriptor> DescriptorServer::take(const SocketName& name, uint64_t id) {
  auto connected = connect_to(kDescriptors, name);
  if (!connected) return connected.status();
  const FileDescriptor& socket = connected.value();
  set_patience(socket.get());
  Answer answer;
  if (send(socket.get(), &id, sizeof id, MSG_NOSIGNAL) != sizeof id ||
      recvmsg(socket.get(), &answer.message, MSG_CMSG_CLOEXEC) != 1)
    return errno_status("the owner's socket gave no answer");
  cmsghdr* header = CMSG_FIRSTHDR(&answer.message);
  if (answer.known != 1 || header == nullptr || header->cmsg_type != SCM_RIGHTS)
    return Status(Code::kInternal,
                  "the owner has freed the memory, or this process has no descriptor left");
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  FileDescriptor taken(descriptor);
  char end;
  (void)!recv(socket.get(), &end, 1,
              0);  // until the server has closed its end, so that it keeps none open
  return taken;
}

}  // namespace smddp::device
