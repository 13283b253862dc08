#include "torch/fallback.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/exceptions.h"
#include "device/cuda_device.h"
#include "torch/error_state.h"
#include "torch/runtime.h"
#include "torch/statistics.h"
#include "torch/torch_device.h"

namespace smddp {
namespace {

constexpr std::chrono::milliseconds kSettle{500}, kStep{2};

// A Work of Gloo as the caller sees it: the flight recorder hears of its waits and of its end, and a failure is
// told before it is raised.
class ForwardedWork final : public c10d::Work {
 public:
  // `what`: how an error names the operation.
  ForwardedWork(c10::intrusive_ptr<c10d::Work> work, recorder::Mark record, std::string what)
      : Work(-1, work->retrieveOpType()),
        work_(std::move(work)),
        record_(record),
        what_(std::move(what)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    record_.enter_wait(now_ns());
    try {
      bool done = work_->wait(timeout);
      uint64_t now = now_ns();
      record_.leave_wait(now);
      record_.end(now, done);
      return done;
    } catch (const std::exception& error) {
      failed(text_of(error));
      throw;
    }
  }

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return work_->getFutureResult();
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  void failed(const std::string& why) {
    uint64_t now = now_ns();
    record_.leave_wait(now);
    record_.end(now, false);
    ErrorState::process().tell({Code::kUnavailable, what_ + " failed: " + why});
    ErrorState::process().hold();
  }

  c10::intrusive_ptr<c10d::Work> work_;
  recorder::Mark record_;
  std::string what_;
};

struct NotedWork {
  c10::weak_intrusive_ptr<c10d::Work> work;
  recorder::Mark record;
};

struct Works {
  std::mutex mutex;
  std::vector<NotedWork> under_way;
};

// The operation that this thread took last.
struct ForwardedCall {
  recorder::Mark record;
  bool on_gloo = false, recorded = false;  // into a graph
  std::string what;
};
thread_local ForwardedCall taken;

Works& works() {
  static auto* all = new Works();  // never freed, as threads may use it until the process ends
  return *all;
}

// A work that nothing refers to any more is complete. When it completed is not known.
bool gone(const NotedWork& noted) {
  if (!noted.work.expired()) return false;
  noted.record.end(0, true);
  return true;
}

const char* name_for(c10::DeviceType device) { return device == c10::kCUDA ? "nccl" : "gloo"; }

bool is_point_to_point(std::string_view operation) {
  return operation == "send" || operation == "recv";
}

// True the first time that this process hands `operation` to `backend`.
bool first_time(const std::string& operation, const std::string& backend) {
  static std::mutex mutex;
  static auto* seen = new std::set<std::string>();
  std::lock_guard lock(mutex);
  return seen->insert(operation + "/" + backend).second;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> Fallback::note(c10::intrusive_ptr<c10d::Work> work) {
  if (taken.recorded) {  // to ask whether it is complete would invalidate the recording
    taken.record.end(0, true);
    return work;
  }
  {
    std::lock_guard lock(works().mutex);
    if (works().under_way.size() >= 64) std::erase_if(works().under_way, gone);
    works().under_way.push_back({c10::weak_intrusive_ptr<c10d::Work>(work), taken.record});
  }
  if (!taken.on_gloo) return work;
  return c10::make_intrusive<ForwardedWork>(std::move(work), taken.record, taken.what);
}

void Fallback::look_at_works() {
  std::vector<c10::intrusive_ptr<c10d::Work>>
      seen;  // destroyed after the lock: they may be the last references
  std::lock_guard lock(works().mutex);
  std::erase_if(works().under_way, gone);
  for (const NotedWork& noted : works().under_way) {
    seen.push_back(noted.work.lock());
    const auto& work = seen.back();
    if (work && work->isCompleted()) noted.record.end(0, work->isSuccess());
  }
}

Fallback::Fallback(std::string group, std::string rendezvous, Factory factory, Address address)
    : group_(std::move(group)),
      rendezvous_(std::move(rendezvous)),
      recorded_group_(recorder::FlightRecorder::process().text(group_ + " (forwarded)")),
      factory_(std::move(factory)),
      address_(std::move(address)) {}

void Fallback::settle() {
  std::unique_lock lock(works().mutex);
  if (works().under_way.empty()) return;
  auto until = std::chrono::steady_clock::now() + kSettle;
  do {
    lock.unlock();
    std::this_thread::sleep_for(kStep);
    lock.lock();
    std::erase_if(works().under_way, gone);
  } while (!works().under_way.empty() && std::chrono::steady_clock::now() < until);
  lock.unlock();
  std::this_thread::sleep_for(kStep);
}

uint64_t bytes_of(TensorRefs tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor* t : tensors) bytes += t->is_sparse() ? 0 : t->nbytes();
  return bytes;
}

// Gloo knows fewer types than NCCL, no averages, and no outputs that are stacked.
bool Fallback::takes(TensorRefs tensors, const c10d::ReduceOp* op) {
  static constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                              at::kChar,  at::kByte,   at::kInt,  at::kLong};
  if (op != nullptr && *op == c10d::ReduceOp::AVG && tensors[0]->is_cpu()) return false;
  for (const at::Tensor* t : tensors) {
    if (!is_plain(*t)) return false;
    if (t->is_cpu() && t->dim() != tensors[0]->dim()) return false;
    if (std::ranges::find(kTypes, t->scalar_type()) == std::end(kTypes)) return false;
  }
  return true;
}

c10d::Backend& Fallback::take(const char* operation, TensorRefs tensors, const char* reason) {
  c10::DeviceType device = tensors.empty() ? c10::kCPU : tensors[0]->device().type();
  uint64_t bytes = bytes_of(tensors);
  const char* name = name_for(device);
  // What was chosen is no surprise: nothing to forbid, and nothing to warn of.
  bool routed = reason == kRouted;
  FallbackMode mode = routed ? FallbackMode::kSilent : settings().fallback;
  const std::string path = std::string(routed ? "route:" : "fallback:") + name;
  if (mode == FallbackMode::kError) {
    throw_status({Code::kUnavailable, std::string(operation) + " on group '" + group_ +
                                          "' would go to " + name + ": " + reason +
                                          "; set smddp.fallback to \"warn\" to allow that"});
  }
  if (mode == FallbackMode::kWarn && first_time(operation, name)) {
    std::fprintf(stderr,
                 "smddp: %s goes to %s: %s (said once per operation; all calls are counted in the "
                 "statistics)\n",
                 operation, name, reason);
  }
  c10d::Backend& chosen = backend(device);
  auto& recorder = recorder::FlightRecorder::process();
  // Two ranks alone call a send and its receive, so that these have no place among the group's operations.
  uint64_t number = is_point_to_point(operation) ? 0 : ++collectives_;
  bool recorded = TorchDevice::records(tensors);
  if (device == c10::kCUDA && number > 0) {
    if (recorded) connect(tensors[0]->device());
    connected_ = true;
  }
  uint64_t now = now_ns();
  taken = {recorder.begin({recorded_group_, recorder.text(operation), 0, number, bytes, now}),
           device != c10::kCUDA, recorded,
           std::string(operation) + (number > 0 ? " #" + std::to_string(number) : "") +
               " of group '" + group_ + "' over " + name};
  taken.record.start(now, recorder.text(path));
  Statistics::process().update(operation, path, [&](StatisticsRow& row) {
    ++row.calls;
    row.bytes += bytes;
  });
  return chosen;
}

void Fallback::connect(c10::Device gpu) {
  if (connected_) return;
  c10d::Backend& nccl = backend(c10::kCUDA);
  device::outside_of_recordings([&] { nccl.eagerConnectSingleDevice(gpu); });
  connected_ = true;
}

c10d::Backend& Fallback::backend(c10::DeviceType device) {
  if (device != c10::kCUDA) device = c10::kCPU;
  {
    std::lock_guard lock(mutex_);
    auto known = backends_.find(device);
    if (known != backends_.end()) return *known->second;
  }
  // Called without the lock: the factory takes the GIL, and a thread that holds the GIL may wait for this
  // lock.
  auto made = factory_(device == c10::kCUDA ? "cuda" : "cpu", rendezvous_, address_());
  std::lock_guard lock(mutex_);
  return *backends_.try_emplace(device, std::move(made)).first->second;
}

void Fallback::set_timeout(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  for (auto& [device, backend] : backends_) backend->setTimeout(timeout);
}

void Fallback::abort() {
  std::lock_guard lock(mutex_);
  for (auto& [device, backend] : backends_) backend->abort();
}

void Fallback::shutdown() {
  std::lock_guard lock(mutex_);
  for (auto& [device, backend] : backends_) backend->shutdown();
  backends_.clear();
}

}  // namespace smddp
