#include "device/host_device.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "common/align.h"
#include "common/condition_variable.h"
#include "common/errno_status.h"
#include "kernels/reduce_arithmetic.h"

namespace smddp::device {
namespace {

// Returns false if it can't continue yet. The queue then calls it again.
using Step = std::function<bool()>;

constexpr auto kLook = std::chrono::microseconds(20);
// The commands that a stream holds, among them the one that runs. A GPU's driver has room for about a
// thousand; the fewer, the more often tests see a full queue.
constexpr size_t kCommands = 64;

struct Moment {
  std::atomic<uint64_t> recorded{0}, reached{0};
};
using MomentPtr = std::shared_ptr<Moment>;

class Queue {
 public:
  explicit Queue(std::mutex& context) : context_(context), thread_([this] { run(); }) {}
  // Steps that have not run by now never run.
  ~Queue() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // As in a GPU's driver, a thread that submits to a full stream blocks, and every other thread that calls
  // the device then blocks too.
  void push(Step step) {
    std::lock_guard context(context_);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return pushed_ - run_ < kCommands; });
      steps_.push_back(std::move(step));
      ++pushed_;
    }
    changed_.notify_all();
  }

  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, until = pushed_] { return run_ >= until; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || !steps_.empty(); });
      if (stop_) return;
      Step step = std::move(steps_.front());
      steps_.pop_front();
      lock.unlock();
      bool over = step();
      while (!over && !stop_) {
        std::this_thread::sleep_for(kLook);
        over = step();
      }
      step = nullptr;
      lock.lock();
      ++run_;
      changed_.notify_all();
    }
  }

  std::mutex& context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> steps_;
  uint64_t pushed_ = 0, run_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;  // last: it uses the others
};

Queue& queue(Stream stream) { return *static_cast<Queue*>(stream); }
const MomentPtr& moment(Event event) { return *static_cast<MomentPtr*>(event); }

size_t pages(size_t bytes) { return align_up(bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE))); }

Result<void*> map_segment(int descriptor, size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return errno_status("could not map " + std::to_string(bytes) + " bytes");
  return at;
}

}  // namespace

HostDevice::~HostDevice() {
  while (!allocations_.empty()) free(reinterpret_cast<void*>(allocations_.begin()->first));
}

Result<void*> HostDevice::allocate(size_t bytes) {
  std::lock_guard context(context_);
  bytes = pages(std::max<size_t>(bytes, 1));
  int descriptor = memfd_create("smddp-host-device", MFD_CLOEXEC);
  if (descriptor < 0) return errno_status("could not create a segment (memfd_create)");
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    Status why =
        errno_status("could not set the size of a segment to " + std::to_string(bytes) + " bytes");
    close(descriptor);
    return why;
  }
  auto at = map_segment(descriptor, bytes);
  if (!at) {
    close(descriptor);
    return at;
  }
  std::lock_guard lock(mutex_);
  Allocation allocation;
  allocation.base = reinterpret_cast<uintptr_t>(at.value());
  allocation.bytes = bytes;
  allocation.id = next_id_++;
  allocation.descriptor = descriptor;
  allocations_[allocation.base] = allocation;
  return at;
}

void HostDevice::free(void* address) {
  std::lock_guard context(context_);
  std::lock_guard lock(mutex_);
  auto found = allocations_.find(reinterpret_cast<uintptr_t>(address));
  if (found == allocations_.end()) return;
  munmap(address, found->second.bytes);
  close(found->second.descriptor);
  allocations_.erase(found);
}

bool HostDevice::owns(const void* address, size_t bytes) const {
  auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(mutex_);
  auto next = allocations_.upper_bound(at);
  if (next == allocations_.begin()) return false;
  const Allocation& a = std::prev(next)->second;
  return at + bytes <= a.base + a.bytes;
}

Result<Stream> HostDevice::create_stream() {
  std::lock_guard context(context_);
  return static_cast<Stream>(new Queue(context_));
}
void HostDevice::destroy_stream(Stream stream) { delete static_cast<Queue*>(stream); }
Result<Event> HostDevice::create_event() {
  std::lock_guard context(context_);
  return static_cast<Event>(new MomentPtr(std::make_shared<Moment>()));
}
void HostDevice::destroy_event(Event event) { delete static_cast<MomentPtr*>(event); }

Status HostDevice::record(Event event, Stream stream) {
  MomentPtr m = moment(event);
  uint64_t turn = ++m->recorded;
  queue(stream).push([m, turn] {
    m->reached.store(turn, std::memory_order_release);
    return true;
  });
  return {};
}

Status HostDevice::wait(Stream stream, Event event) {
  MomentPtr m = moment(event);
  queue(stream).push([m, turn = m->recorded.load()] {
    return m->reached.load(std::memory_order_acquire) >= turn;
  });
  return {};
}

Result<bool> HostDevice::done(Event event) {
  std::lock_guard context(context_);
  const MomentPtr& m = moment(event);
  return m->reached.load(std::memory_order_acquire) >= m->recorded.load();
}

Status HostDevice::synchronize(Stream stream) {
  queue(stream).drain();
  return {};
}

Result<bool> HostDevice::capturing(Stream) {
  std::lock_guard context(context_);
  return false;
}

Status HostDevice::copy(Stream stream, void* to, const void* from, size_t bytes) {
  queue(stream).push([=] {
    std::memcpy(to, from, bytes);
    return true;
  });
  return {};
}

Status HostDevice::reduce(Stream stream, const kernels::Reduction& reduction) {
  // The threads of a multiprocessor run one after the other.
  constexpr uint32_t kThreads = 8;
  queue(stream).push([reduction] {
    uint32_t all = kThreads * static_cast<uint32_t>(reduction.blocks);
    for (uint32_t thread = 0; thread < all; ++thread) reduce_share(reduction, thread, all);
    return true;
  });
  return {};
}

Status HostDevice::write_flag(Stream stream, uint32_t* flag, uint32_t value) {
  queue(stream).push([=] {
    std::atomic_ref(*flag).store(value, std::memory_order_release);
    return true;
  });
  return {};
}

Status HostDevice::wait_flag(Stream stream, uint32_t* flag, uint32_t value) {
  queue(stream).push(
      [=] { return std::atomic_ref(*flag).load(std::memory_order_acquire) == value; });
  return {};
}

Status HostDevice::call(Stream stream, void (*function)(void*), void* argument) {
  queue(stream).push([=] {
    function(argument);
    return true;
  });
  return {};
}

Result<std::vector<Allocation>> HostDevice::export_memory(const void* address, size_t bytes) {
  std::lock_guard context(context_);
  if (!owns(address, bytes)) return Status(Code::kInvalid, "this is not memory of the device");
  std::lock_guard lock(mutex_);
  return std::vector<Allocation>{
      std::prev(allocations_.upper_bound(reinterpret_cast<uintptr_t>(address)))->second};
}

bool HostDevice::still_allocated(const Allocation& allocation) {
  std::scoped_lock lock(context_, mutex_);
  auto known = allocations_.find(allocation.base);
  return known != allocations_.end() && known->second.id == allocation.id;
}

Result<void*> HostDevice::import_memory(const Allocation& allocation, int pid) {
  std::lock_guard context(context_);
  if (peers_ == Peers::kAbsent)
    return Status(Code::kUnavailable, "peer access is not supported between these two devices");
  if (peers_ == Peers::kWrong) {
    void* other =
        mmap(nullptr, allocation.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return other != MAP_FAILED ? Result<void*>(other) : errno_status("could not map a segment");
  }
  std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(allocation.descriptor);
  int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0)
    return errno_status("could not open a segment of process " + std::to_string(pid));
  auto at = map_segment(descriptor, allocation.bytes);
  close(descriptor);
  return at;
}

void HostDevice::release_memory(const Allocation& allocation, void* address) {
  std::lock_guard context(context_);
  munmap(address, allocation.bytes);
}

Result<void*> HostDevice::map_host(void* address, size_t) {
  std::lock_guard context(context_);
  return address;
}
void HostDevice::unmap_host(void*) { std::lock_guard context(context_); }

}  // namespace smddp::device
