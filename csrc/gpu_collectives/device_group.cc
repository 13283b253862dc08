#include "gpu_collectives/device_group.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/log.h"

namespace smddp {
namespace {

constexpr auto kLeave = std::chrono::seconds(2);

}  // namespace

DeviceGroup::~DeviceGroup() { leave(); }

void DeviceGroup::leave() {
  if (engine_.forked()) {  // a forked child has neither the thread nor the device
    if (watch_.joinable()) watch_.detach();
    return;
  }
  {
    std::unique_lock lock(mutex_);
    // Ends at the latest when watch() finds a deadline over.
    changed_.wait(lock, [this] {
      return stop_ || !broken_ ||
             (in_flight_.empty() && !(pipelines_.any() && may_submit(nullptr)));
    });
    if (!in_flight_.empty() || !pending_.empty())
      give_up({Code::kAborted, "the group was destroyed while operations were in flight"});
    if (broken_.ok()) broken_ = {Code::kAborted, "the group was destroyed"};
    // Streams that still wait are released before the flags are unmapped.
    changed_.wait_for(lock, kLeave, [this] { return stop_ || in_flight_.empty(); });
    stop_ = true;
  }
  changed_.notify_all();
  if (watch_.joinable() && watch_.get_id() != std::this_thread::get_id()) watch_.join();
  {
    // Operations that these still end may call back: they are destroyed without a lock, the pipelines
    // before the group.
    std::unique_ptr<Group> host_group;
    PipelineSet pipelines;
    std::scoped_lock lock(calls_, mutex_);
    pipelines.take(pipelines_);
    host_group = std::move(host_group_);
    cpu_group_ = nullptr;
  }
  std::unique_lock lock(mutex_);
  submit_ready(lock, nullptr);  // fails what is left
}

void DeviceGroup::set_limit(uint64_t limit_ns) {
  limit_ns_ = limit_ns;
  std::lock_guard calls(calls_);
  if (host_group_) host_group_->set_timeout(limit_ns);
  pipelines_.set_limit(limit_ns);
}

Status DeviceGroup::submit(const std::shared_ptr<DeviceOperation>& operation,
                           device::Stream callers) {
  DeviceOperation& op = *operation;
  std::lock_guard calls(calls_);
  if (Status ok = status(); !ok) return ok;
  auto capturing = device_.capturing(callers);
  if (!capturing) return capturing.status();
  op.captured_ = capturing.value();
  if (op.exchange) {
    if (op.captured_) {
      return {
          Code::kInvalid,
          "a collective that goes through the CPU can't be recorded in a CUDA graph: one between "
          "hosts, or a sum with reduce_on \"cpu\"; call it outside of the graph"};
    }
    PinnedPipeline* pipeline = pipelines_.of(op);
    if (pipeline == nullptr)
      return {Code::kInternal, "an operation needs a pipeline between ranks that was not opened"};
    if (Status room = pipeline->reserve(*op.exchange); !room) return room;
  }
  op.group_ = shared_from_this();
  op.started_ns_ = now_ns();
  if (Status made = op.make_events(device_); !made) return made;
  if (Status s = device_.record(op.ready_, callers); !s) return s;

  op.make_offer(device_, peers_.count());
  {
    std::lock_guard lock(mutex_);
    pending_.push_back(operation);
  }
  changed_.notify_all();
  cpu_group_->submit(operation, {}, !op.captured_);
  if (!op.captured_) return {};
  engine_.wait(op);
  std::unique_lock lock(mutex_);
  submit_ready(lock, &op);
  return op.outcome_;
}

// Runs on the thread that drives the engine. If there is a pipeline, that thread must neither call the
// device nor wait for a thread that does: if the driver waited for the GPU, and the GPU for the network,
// no thread would drive the network. watch() looks within kLook, even if it misses the notification.
void DeviceGroup::exchanged(DeviceOperation& operation) {
  operation.exchanged_ = true;
  if (pipelines_.any() && !stop_) return changed_.notify_all();
  std::unique_lock lock(mutex_);
  submit_ready(lock, nullptr);
}

// The thread that records a graph submits what the graph records.
bool DeviceGroup::may_submit(const DeviceOperation* captured) const {
  if (pending_.empty() || !pending_.front()->exchanged_) return false;
  return !pending_.front()->captured_ || pending_.front().get() == captured;
}

void DeviceGroup::submit_ready(std::unique_lock<std::mutex>& lock,
                               const DeviceOperation* captured) {
  std::vector<std::shared_ptr<DeviceOperation>> started;
  while (may_submit(captured)) {
    const auto& op = started.emplace_back(std::move(pending_.front()));
    pending_.pop_front();
    op->outcome_ = start(*op);
    op->began_ = op->outcome_.ok();
    op->submitted_ = true;
    if ((op->began_ || op->in_part_) && !op->captured_) in_flight_.push_back(op);
  }
  if (started.empty()) return;
  lock.unlock();
  changed_.notify_all();
  // These calls may start further operations.
  for (const auto& op : started) {
    if (op->began_) op->on_submitted();
    if (op->captured_ || !(op->began_ || op->in_part_)) op->finish();
  }
  started.clear();
  lock.lock();
}

Status DeviceGroup::start(DeviceOperation& op) {
  if (!broken_) return broken_;
  Status started = without_exceptions([&] { return op.status() ? start_with(op) : op.status(); });
  // Peers may have submitted what this rank has not. An operation that is refused as invalid is refused
  // by all ranks of this host, but other hosts may have submitted it.
  if (!started && (started.code() != Code::kInvalid || op.exchange)) give_up(started);
  op.sent_ = {};
  op.received_ = {};
  return started;
}

Status DeviceGroup::start_with(DeviceOperation& op) {
  auto offers = op.offers(peers_);
  if (!offers) return offers.status();
  std::function<Status()> between;
  if (op.exchange) {
    between = [this, &op]() -> Status {
      auto outcome = pipelines_.of(op)->submit(main_, *op.exchange);
      if (outcome) op.exchange_outcome_ = std::move(outcome.value());
      return outcome.status();
    };
  }
  Status s = device_.wait(main_, op.ready_);
  if (s) s = copy_engine_->submit(op.plan, offers.value(), between);
  Status end =
      device_.record(op.finished_, main_);  // of what was submitted, so that it can be released
  op.in_part_ = !s && end;
  if (s) s = end;
  // kInvalid is for refusals that all ranks share; this one is not.
  if (!s && s.code() == Code::kInvalid) s = {Code::kInternal, s.message()};
  return s;
}

Status DeviceGroup::order(DeviceOperation& op, device::Stream stream,
                          std::chrono::nanoseconds timeout) {
  if (!engine_.wait(op, timeout)) {
    return {Code::kTimeout, std::string(name_of(op.what.collective)) +
                                " was not called by all ranks within the time given to wait()"};
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return op.submitted_; });
  if (!op.outcome_) return op.outcome_;
  if (!broken_ && !op.ended_) return broken_;
  return device_.wait(stream, op.finished_);
}

Status DeviceGroup::verdict(const DeviceOperation& op) {
  std::lock_guard lock(mutex_);
  if (!op.outcome_) return op.outcome_;
  if (op.ended_) return {};
  // Streams go on after a failure too, possibly before watch() has seen it.
  if (op.exchange_outcome_ && broken_) return op.exchange_outcome_->get();
  return broken_;
}

bool DeviceGroup::finished(const DeviceOperation& op) {
  std::lock_guard lock(mutex_);
  if (!op.submitted_) return false;
  if (!op.outcome_ || op.captured_) return true;
  auto done = device_.done(op.finished_);
  return !done || done.value();
}

Status DeviceGroup::status() {
  std::lock_guard lock(mutex_);
  Status known = broken_;
  return known ? pipelines_.status() : known;
}

void DeviceGroup::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  give_up({Code::kAborted, reason});
  changed_.notify_all();
}

void DeviceGroup::give_up(Status why) {
  if (!broken_) return;
  broken_ = std::move(why);
  told_ = false;
  copy_engine_->give_up(broken_.message());
  log(LogLevel::kError, broken_.message());
}

}  // namespace smddp
