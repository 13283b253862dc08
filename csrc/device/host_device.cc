#include "device/host_device.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/align.h"
#include "common/file_descriptor.h"
#include "common/mapping.h"
#include "kernels/reduce_arithmetic.h"

namespace smddp::device {
namespace {

using EventPtr = std::shared_ptr<HostEvent>;

constexpr int kNeverWritten = 0xbd;

using StreamPtr = std::shared_ptr<HostStream>;
HostStream& host_stream(Stream stream) { return **static_cast<StreamPtr*>(stream); }
const EventPtr& host_event(Event event) { return *static_cast<EventPtr*>(event); }

size_t pages(size_t bytes) { return align_up(bytes, static_cast<size_t>(sysconf(_SC_PAGESIZE))); }

// A page behind each segment counts the mappings of other processes.
size_t with_counter(size_t bytes) { return bytes + kPage; }
std::atomic_ref<uint32_t> mappings(void* segment, size_t bytes) {
  return std::atomic_ref(*reinterpret_cast<uint32_t*>(static_cast<std::byte*>(segment) + bytes));
}

Result<void*> map_segment(int descriptor, size_t bytes) {
  auto mapped = Mapping::map(with_counter(bytes), MAP_SHARED, descriptor);
  if (!mapped) return mapped.status();
  return static_cast<void*>(mapped.value().release());
}

// Calls half(0) at once and half(1) `duration` later.
template <class Half>
HostCommand lasting(std::chrono::microseconds duration, Half half) {
  using Clock = std::chrono::steady_clock;
  return [=, end = Clock::time_point()]() mutable {
    if (end == Clock::time_point()) {
      half(0);
      end = Clock::now() + duration;
    }
    if (Clock::now() < end) return false;
    half(1);
    end = {};  // a graph runs it again
    return true;
  };
}

}  // namespace

HostDevice::~HostDevice() {
  destroy_lanes();
  queues_.clear();  // nothing uses the memory any more
  while (!allocations_.empty()) free(reinterpret_cast<void*>(allocations_.begin()->first));
}

Result<void*> HostDevice::allocate(size_t bytes) {
  std::lock_guard context(context_);
  bytes = pages(std::max<size_t>(bytes, 1));
  if (bytes > largest_allocation_) return Status(Code::kUnavailable, "out of memory");
  FileDescriptor segment(memfd_create("smddp-host-device", MFD_CLOEXEC));
  if (!segment) return errno_status("could not create a segment (memfd_create)");
  if (ftruncate(segment.get(), static_cast<off_t>(with_counter(bytes))) != 0)
    return errno_status("could not set the size of a segment to " + std::to_string(bytes) +
                        " bytes");
  auto at = map_segment(segment.get(), bytes);
  if (!at) return at;
  std::lock_guard lock(mutex_);
  Allocation allocation;
  allocation.base = reinterpret_cast<uintptr_t>(at.value());
  allocation.bytes = bytes;
  allocation.id = next_id_++;
  allocation.descriptor = segment.release();
  allocations_[allocation.base] = allocation;
  auto kept = kept_bytes_.find(bytes);
  if (keeps_bytes_ && kept != kept_bytes_.end()) {
    std::memcpy(at.value(), kept->second.data(), bytes);
  } else {
    std::memset(at.value(), kNeverWritten, bytes);
  }
  return at;
}

void HostDevice::free(void* address) {
  std::lock_guard context(context_);
  std::lock_guard lock(mutex_);
  auto found = allocations_.find(reinterpret_cast<uintptr_t>(address));
  if (found == allocations_.end()) return;
  size_t bytes = found->second.bytes;
  if (mappings(address, bytes) > 0) ++freed_while_mapped_;
  if (keeps_bytes_) {
    auto* at = static_cast<std::byte*>(address);
    kept_bytes_[bytes].assign(at, at + bytes);
  }
  munmap(address, with_counter(bytes));
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
  std::unique_ptr<HardwareQueue>& queue = queues_[streams_++ % queues_.size()];
  if (!queue) queue = std::make_unique<HardwareQueue>();
  return static_cast<Stream>(new StreamPtr(std::make_shared<HostStream>(*queue)));
}
void HostDevice::destroy_stream(Stream stream) {
  if (stream == nullptr) return;
  std::lock_guard context(context_);
  host_stream(stream).close();
  delete static_cast<StreamPtr*>(stream);
}
Result<Event> HostDevice::create_event() {
  std::lock_guard context(context_);
  return static_cast<Event>(new EventPtr(std::make_shared<HostEvent>()));
}
void HostDevice::destroy_event(Event event) { delete static_cast<EventPtr*>(event); }

Status HostDevice::record(Event event, Stream stream) {
  std::lock_guard context(context_);
  if (auto instead = fault(Command::kEvent)) return *instead;
  return host_stream(stream).record(host_event(event));
}

Status HostDevice::wait(Stream stream, Event event) {
  std::lock_guard context(context_);
  if (auto instead = fault(Command::kEvent)) return *instead;
  return host_stream(stream).wait(host_event(event));
}

Result<bool> HostDevice::done(Event event) {
  std::lock_guard context(context_);
  const HostEvent& asked = *host_event(event);
  if (asked.recording) return Status(Code::kInternal, "the event belongs to a recording");
  return asked.reached.load(std::memory_order_acquire) >= asked.recorded.load();
}

Status HostDevice::synchronize(Stream stream) {
  {
    std::lock_guard context(context_);
    if (host_stream(stream).recording())
      return {Code::kInternal, "a stream that records can't be waited for"};
  }
  host_stream(stream).drain();
  return {};
}

Result<bool> HostDevice::capturing(Stream stream) {
  std::lock_guard context(context_);
  return host_stream(stream).recording();
}

Status HostDevice::begin_recording(Stream stream) {
  std::lock_guard context(context_);
  return host_stream(stream).begin_recording();
}

Result<HostDevice::Graph> HostDevice::end_recording(Stream stream) {
  std::lock_guard context(context_);
  auto commands = host_stream(stream).end_recording();
  if (!commands) return commands.status();
  return std::make_shared<const std::vector<HostCommand>>(std::move(commands.value()));
}

// One command of the stream, as the launch of a graph is.
Status HostDevice::launch(const Graph& graph, Stream stream) {
  return submit(stream, Command::kOther, [graph, next = size_t{0}]() mutable {
    for (; next < graph->size(); ++next) {
      if (!(*graph)[next]()) return false;
    }
    return true;
  });
}

std::optional<Status> HostDevice::fault(Command kind) const {
  switch (faults_[static_cast<size_t>(kind)]) {
    case Fault::kNone:
      break;
    case Fault::kRefused:
      return Status(Code::kUnavailable, "the driver refuses the command");
    case Fault::kLost:
      return Status();
  }
  return std::nullopt;
}

Status HostDevice::submit(Stream stream, Command kind, HostCommand command) {
  std::lock_guard context(context_);
  if (auto instead = fault(kind)) return *instead;
  return host_stream(stream).submit(std::move(command));
}

HostCommand HostDevice::copying(const Copy& copy) const {
  HostCommand command = lasting(duration_, [copy, unordered = unordered_](size_t half) {
    size_t begin = copy.bytes / 2 * half, end = half == 0 ? copy.bytes / 2 : copy.bytes;
    auto *to = static_cast<std::byte*>(copy.to),
         *from = static_cast<std::byte*>(const_cast<void*>(copy.from));
    if (!unordered) std::memcpy(to + begin, from + begin, end - begin);
    for (size_t i = begin; i < end && unordered; ++i) {
      std::byte read = std::atomic_ref(from[i]).load(std::memory_order_relaxed);
      std::atomic_ref(to[i]).store(read, std::memory_order_relaxed);
    }
  });
  bool by_kernel = owns(copy.to, copy.bytes) && owns(copy.from, copy.bytes);
  return [=, this, gate = gate_, command = std::move(command)] {
    return !(by_kernel && held_) && (!gate || gate(copy.to, copy.from)) && command();
  };
}

Status HostDevice::copy(Stream stream, void* to, const void* from, size_t bytes) {
  return submit(stream, Command::kCopy, copying({to, from, bytes}));
}

Status HostDevice::copies(Stream stream, std::span<const Copy> all) {
  if (all.empty()) return {};
  {
    std::lock_guard context(context_);
    if (host_stream(stream).recording())
      return {Code::kInternal, "a batch of copies can't be recorded"};
  }
  // The last one first: no order is kept.
  std::vector<HostCommand> commands;
  for (size_t i = all.size(); i-- > 0;) commands.push_back(copying(all[i]));
  return submit(stream, Command::kCopies, [left = std::move(commands)]() mutable {
    std::erase_if(left, [](HostCommand& command) { return command(); });
    return left.empty();
  });
}

Status HostDevice::reduce(Stream stream, const kernels::Reduction& reduction) {
  // The threads of a multiprocessor run one after the other.
  constexpr uint32_t kThreads = 8;
  HostCommand sum = lasting(sum_duration_, [this, reduction](uint32_t half) {
    uint32_t all = kThreads * static_cast<uint32_t>(reduction.blocks);
    for (uint32_t thread = half; thread < all; thread += 2) reduce_share(reduction, thread, all);
    sums_ += half;
  });
  return submit(stream, Command::kSum, [this, sum = std::move(sum)] { return !held_ && sum(); });
}

Status HostDevice::flags(Stream stream, std::span<const FlagStep> steps) {
  return submit(stream, Command::kFlags,
                [all = std::vector(steps.begin(), steps.end()), next = size_t{0}]() mutable {
                  for (; next < all.size(); ++next) {
                    std::atomic_ref flag(*all[next].flag);
                    if (all[next].kind == FlagStep::Kind::kWrite) {
                      flag.store(all[next].value, std::memory_order_release);
                    } else if (flag.load(std::memory_order_acquire) != all[next].value) {
                      return false;
                    }
                  }
                  next = 0;  // a graph runs it again
                  return true;
                });
}

Result<std::vector<Allocation>> HostDevice::export_memory(const void* address, size_t bytes) {
  std::lock_guard context(context_);
  if (!owns(address, bytes)) return Status(Code::kInvalid, "this is not memory of the device");
  std::lock_guard lock(mutex_);
  if (!recalls_) {
    if (Status s = RecallServer::open().into(recalls_); !s) return s;
  }
  Allocation& found =
      std::prev(allocations_.upper_bound(reinterpret_cast<uintptr_t>(address)))->second;
  auto exported = [](const auto& known) { return known.second.owner != RecallName{}; };
  if (found.owner == RecallName{} &&
      static_cast<size_t>(std::count_if(allocations_.begin(), allocations_.end(), exported)) >=
          most_exported_) {
    errno = EMFILE;
    return errno_status("could not export memory of the device");
  }
  found.owner = recalls_->name();
  return std::vector<Allocation>{found};
}

// Without a lock while it waits: peers may need this device's streams to go on.
size_t HostDevice::recall(const void* address, size_t bytes) {
  std::vector<RecalledMemory> recalled;
  {
    auto from = reinterpret_cast<uintptr_t>(address);
    std::lock_guard lock(mutex_);
    for (auto at = allocations_.lower_bound(from);
         at != allocations_.end() && at->first < from + bytes; ++at) {
      if (at->second.owner != RecallName{}) recalled.push_back({at->first, at->second.id});
    }
  }
  return recalled.empty() ? 0 : recalls_->recall(recalled);
}

Result<void*> HostDevice::import_memory(const Allocation& allocation, int pid) {
  std::lock_guard context(context_);
  if (peers_ == Peers::kAbsent)
    return Status(Code::kUnavailable, "peer access is not supported between these two devices");
  if (peers_ == Peers::kWrong) return map_segment(-1, allocation.bytes);  // other pages
  std::string path =
      "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(allocation.descriptor);
  FileDescriptor segment(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!segment) return errno_status("could not open a segment of process " + std::to_string(pid));
  struct stat of{};
  size_t bytes = allocation.bytes;
  if (fstat(segment.get(), &of) != 0 || pages(bytes) != bytes ||
      static_cast<size_t>(of.st_size) != with_counter(bytes))
    return Status(Code::kInternal, "the memory offer of a peer names another file");
  auto at = map_segment(segment.get(), allocation.bytes);
  if (at && peers_ == Peers::kStale) {
    auto copy = map_segment(-1, bytes);
    if (copy) std::memcpy(copy.value(), at.value(), bytes);
    munmap(at.value(), with_counter(bytes));
    return copy;
  }
  if (at) ++mappings(at.value(), allocation.bytes);
  return at;
}

void HostDevice::release_memory(const Allocation& allocation, void* address) {
  std::lock_guard context(context_);
  --mappings(address, allocation.bytes);
  munmap(address, with_counter(allocation.bytes));
}

Result<void*> HostDevice::map_host(void* address, size_t) {
  std::lock_guard context(context_);
  return address;
}
void HostDevice::unmap_host(void*) { std::lock_guard context(context_); }

}  // namespace smddp::device
