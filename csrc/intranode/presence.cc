#include "intranode/presence.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>
#include <utility>

#include "common/env.h"
#include "common/random.h"
#include "intranode/arena.h"

namespace smddp::intranode {
namespace {

// Puts a byte into a notification pipe. If the pipe is full, the reader wakes as well.
//
// write() would tell the scheduler that the writer is about to wait for the reader. If the reader's core
// is busy at that moment, the kernel then moves the reader to the writer's core, where the two take turns
// until the next load balancing. vmsplice() wakes the reader without that hint.
void notify(int pipe) {
  static const char kByte = 0;
  const iovec byte{const_cast<char*>(&kByte), 1};
  if (vmsplice(pipe, &byte, 1, SPLICE_F_NONBLOCK) == 1 || errno == EAGAIN) return;
  [[maybe_unused]] ssize_t n = write(pipe, &kByte, 1);  // some containers forbid vmsplice()
}

}  // namespace

Result<std::unique_ptr<Presence>> Presence::create() {
  auto presence = std::make_unique<Presence>();
  if (Status s = create_shared("smddp-presence", 4096).into(presence->shared_); !s) return s;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    return errno_status("could not create the notification pipe");
  presence->wake_read_ = FileDescriptor(ends[0]);
  presence->wake_write_ = FileDescriptor(ends[1]);
  uint64_t token = 0;
  if (!fill_random(&token, sizeof token))
    return Status(Code::kUnavailable, "could not draw a random token");
  presence->page()->token = token;
  presence->page()->arena_fd = Arena::process().table_fd();
  presence->page()->core = -1;
  // With Yama's ptrace_scope 1, only a process's ancestors can read its memory, unless the process allows
  // more. If the kernel has no Yama, the call fails, and reads are not restricted. Where the user wants no
  // such reads, nothing more is allowed.
  if (env::debug("single_copy") != "0") prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  return presence;
}

void Presence::announce_sleep() {
  page()->sleeping.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Presence::announce_awake() { page()->sleeping.store(0, std::memory_order_relaxed); }

bool Neighbor::polls_on(int core) const {
  return !dead_ && page()->sleeping.load(std::memory_order_relaxed) == 0 &&
         page()->core.load(std::memory_order_relaxed) == core;
}

void Presence::notify_self() { notify(wake_write_.get()); }

void Presence::drain() {
  char bytes[64];
  while (read(wake_read_.get(), bytes, sizeof bytes) == static_cast<ssize_t>(sizeof bytes)) {
  }
}

Result<std::unique_ptr<Neighbor>> Neighbor::open(int pid, uint64_t token, int presence_fd,
                                                 int wake_fd) {
  auto neighbor = std::make_unique<Neighbor>();
  neighbor->pid_ = pid;
  std::string what = "a rank on this host";
  if (Status s = map_shared(pid, presence_fd, what).into(neighbor->mapping_); !s) return s;
  if (neighbor->page()->token != token) {
    return Status(
        Code::kUnavailable,
        "process " + std::to_string(pid) +
            " is not the rank that announced itself: that rank has ended, or is in another "
            "pid namespace; give ranks in different pid namespaces different "
            "SMDDP_HOST_ID");
  }
  // O_RDWR: this process is a reader of the pipe too, so a write never raises SIGPIPE when the neighbour
  // has ended.
  neighbor->notification_ =
      FileDescriptor(::open(fd_path(pid, wake_fd).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!neighbor->notification_)
    return could_not_open("could not open the notification pipe of " + what, pid);
  if (pid != getpid()) neighbor->pidfd_ = open_process(pid);
  return neighbor;
}

void Neighbor::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (page()->sleeping.load(std::memory_order_relaxed) == 0) return;
  if (page()->sleeping.exchange(0, std::memory_order_relaxed) == 0)
    return;  // another thread notifies
  notify(notification_.get());
}

bool Neighbor::look_for_death() {
  dead_ = dead_ || has_ended(pidfd_);
  return dead_;
}

std::byte* Neighbor::find(const std::byte* owner_address, size_t bytes) {
  if (!std::exchange(looked_for_memory_, true)) {
    auto memory = PeerMemory::open(pid_, page()->arena_fd);
    if (memory) memory_ = std::move(memory.value());
  }
  return memory_ ? memory_->find(owner_address, bytes) : nullptr;
}

// The state is the letter behind the name in parentheses, which may itself contain any character: proc(5).
bool Neighbor::is_stopped() const {
  char path[32], text[256];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid_);
  FileDescriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  ssize_t bytes = file ? ::read(file.get(), text, sizeof text) : -1;
  if (bytes <= 0) return false;
  size_t name_end = std::string_view(text, static_cast<size_t>(bytes)).rfind(") ");
  return name_end != std::string_view::npos && name_end + 2 < static_cast<size_t>(bytes) &&
         text[name_end + 2] == 'T';
}

}  // namespace smddp::intranode
