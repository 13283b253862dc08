#include "gpu/device_group.h"

#include <utility>

#include "common/clock.h"
#include "common/exceptions.h"
#include "common/kept.h"
#include "common/log.h"

namespace smddp {
namespace {

constexpr auto kLeave = std::chrono::seconds(2);
// How long streams that were released may take to end. A stuck one does not. Not measured.
constexpr auto kGoOn = std::chrono::milliseconds(500);
constexpr auto kAsk = std::chrono::milliseconds(100);  // between two questions for errors

Status ending_with(const DeviceOperation& op) {
  return {Code::kAborted, "the process is ending, with " + describe(op.what) + " under way"};
}

}  // namespace

Result<std::shared_ptr<DeviceGroup>> DeviceGroup::create(Process& process, Group& cpu_group,
                                                         Store& store, const Status& usable,
                                                         device::Device* device,
                                                         intranode::Imports* imports,
                                                         device::Stream main, uint64_t limit_ns,
                                                         bool sums, EndProcess end_process) {
  auto links =
      DeviceLinks::open(process, cpu_group, store, usable, device, imports, main, limit_ns, sums);
  if (!links) return links.status();
  std::shared_ptr<DeviceGroup> group(new DeviceGroup(
      process.engine(), *device, main, limit_ns, std::move(links.value()), std::move(end_process)));
  group->watch_ = std::thread([raw = group.get()] { raw->watch(); });
  group->submitter_ = std::thread([raw = group.get()] { raw->submit_all(); });
  return group;
}

DeviceGroup::DeviceGroup(Engine& engine, device::Device& device, device::Stream main,
                         uint64_t limit_ns, std::unique_ptr<DeviceLinks> links,
                         EndProcess end_process)
    : engine_(engine),
      device_(device),
      main_(main),
      limit_ns_(limit_ns),
      links_(std::move(links)),
      end_process_(std::move(end_process)) {}

DeviceGroup::~DeviceGroup() { leave(); }

void DeviceGroup::leave() {
  if (engine_.forked()) {  // a forked child has neither the thread nor the device
    for (std::thread* thread : {&watch_, &submitter_}) {
      if (thread->joinable()) thread->detach();
    }
    return;
  }
  {
    std::unique_lock lock(mutex_);
    // Ends at the latest when watch() finds a deadline over.
    changed_.wait(lock, [this] {
      return closing_ || !broken_ || (in_flight_.empty() && !may_submit(nullptr));
    });
    if (!in_flight_.empty() || !pending_.empty())
      give_up({Code::kAborted, "the group was destroyed while operations were in flight"});
    if (broken_.ok()) broken_ = {Code::kAborted, "the group was destroyed"};
    // Streams that still wait are released before the flags are unmapped.
    changed_.wait_for(lock, kLeave, [this] { return closing_ || in_flight_.empty(); });
    closing_ = true;
    release(now_ns());
    // They go on while what they use is here.
    changed_.wait_for(lock, kGoOn, [this] { return in_flight_.empty(); });
  }
  changed_.notify_all();
  due_.notify_all();
  // watch() still releases the streams in which a thread that submits may wait for room.
  if (submitter_.joinable()) submitter_.join();
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !submitting_; });
    stop_ = true;
  }
  busy_.notify_all();
  if (watch_.joinable()) watch_.join();
  {
    // Operations that these still end may call back: they are destroyed without a lock, the pipelines
    // before the group.
    std::unique_ptr<Group> host_group;
    PipelineSet pipelines;
    std::scoped_lock lock(calls_, mutex_);
    pipelines = std::move(links_->pipelines);
    host_group = std::move(links_->own_group);
    links_->host_group = nullptr;
  }
  std::unique_lock lock(mutex_);
  submit_ready(lock, nullptr);                      // fails what is left
  for (auto& op : in_flight_) keep(std::move(op));  // with the group, which each of them holds
  in_flight_.clear();
  auto closed = std::move(closed_);
  lock.unlock();
}

Status DeviceGroup::open_for_all(Group& cpu_group, Store& store) {
  std::lock_guard calls(calls_);
  if (links_->pipelines.all) return {};
  auto made = links_->open_for_all(cpu_group, store, limit_ns_);
  if (!made) return made.status();
  std::lock_guard lock(mutex_);
  links_->pipelines.all = std::move(made.value());
  return {};
}

void DeviceGroup::set_limit(uint64_t limit_ns) {
  limit_ns_ = limit_ns;
  std::lock_guard calls(calls_);
  if (links_->own_group) links_->own_group->set_timeout(limit_ns);
  for (PinnedPipeline* pipeline : links_->pipelines.open()) pipeline->set_limit(limit_ns);
}

Status DeviceGroup::submit(const std::shared_ptr<DeviceOperation>& operation,
                           device::Stream callers) {
  DeviceOperation& op = *operation;
  std::lock_guard calls(calls_);
  if (Status ok = status(); !ok) return ok;
  if (Status s = device_.capturing(callers).into(op.captured_); !s) return s;
  if (Status room = links_->pipelines.reserve(op); !room) return room;
  op.group_ = shared_from_this();
  op.started_ns_ = now_ns();
  if (Status called = op.begin(device_, callers); !called) return called;
  op.offers_.offer(device_, links_->peers);
  {
    std::lock_guard lock(mutex_);
    ++called_;
    if (!op.captured_) op.turn_ = links_->enter_order(called_);
    pending_.push_back(operation);
  }
  links_->copy_engine->call(called_, op.offers_.mine());
  // It lives as long as the operation.
  links_->host_group->submit(std::shared_ptr<Operation>(operation, &op.offers_), {}, !op.captured_);
  {
    std::lock_guard lock(mutex_);
    if (!broken_) told_ = false;  // the CPU's group may have been told before it had the call
  }
  busy_.notify_all();
  if (!op.captured_) return {};
  if (!engine_.wait(op.offers_)) return ending_with(op);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return op.submitted_ || may_submit(&op); });
  submit_ready(lock, &op);
  return op.outcome_;
}

// Runs on the thread that drives the engine, which must neither call the device nor wait for a thread that
// does: if the driver waited for the GPU, and the GPU for the network, both would wait for ever.
void DeviceGroup::exchanged(DeviceOperation& operation) {
  if (operation.turn_ != 0 && operation.offers_.status())
    device_.order().set_last_call(operation.turn_, operation.offers_.last_call(links_->peers));
  std::unique_lock lock(mutex_);
  operation.exchanged_ = true;
  if (stop_) return submit_ready(lock, nullptr);  // fails it
  // Who waits for the exchange may have seen its end, and wait for this.
  std::condition_variable& waits = operation.submitter_waits_ ? changed_ : due_;
  lock.unlock();
  waits.notify_all();
}

bool DeviceGroup::may_submit(const DeviceOperation* recorded) const {
  if (submitting_ || pending_.empty() || !pending_.front()->exchanged_) return false;
  if (recorded != nullptr) return pending_.front().get() == recorded;
  return !pending_.front()->captured_ || stop_;
}

void DeviceGroup::submit_ready(std::unique_lock<std::mutex>& lock,
                               const DeviceOperation* recorded) {
  while (may_submit(recorded)) {
    std::shared_ptr<DeviceOperation> op = std::move(pending_.front());
    pending_.pop_front();
    op->number_on_device_ = ++numbered_;
    std::shared_ptr<DeviceOperation> before = in_flight_.empty() ? nullptr : in_flight_.back();
    if (!op->captured_) in_flight_.push_back(op);
    submitting_ = true;
    Status started = broken_;
    PinnedPipeline* pipeline = links_->pipelines.of(*op);
    lock.unlock();
    if (started && !op->offers_.status()) started = op->offers_.status();
    if (started && !op->captured_) device_.order().begin(op->turn_);
    if (started) {
      started = without_exceptions(
          [&] { return op->launch(device_, main_, *links_, pipeline, before.get()); });
    }
    before.reset();
    device_.order().end(op->turn_);
    op->offers_.drop();
    lock.lock();
    // Peers may have submitted what this rank has not. An operation that is refused as invalid is refused
    // by all ranks of this host, but other hosts may have submitted it.
    if (!started && (started.code() != Code::kInvalid || pipeline != nullptr)) give_up(started);
    submitting_ = false;
    op->outcome_ = started;
    op->began_ = started.ok();
    op->submitted_ = true;
    bool on_device = (op->began_ || op->in_part_) && !op->captured_;
    if (!on_device) std::erase(in_flight_, op);
    lock.unlock();
    changed_.notify_all();
    if (recorded != nullptr) due_.notify_all();
    // These calls may start further operations.
    if (op->began_) op->on_submitted();
    if (!on_device) op->close();
    op.reset();
    lock.lock();
  }
}

void DeviceGroup::submit_all() {
  std::unique_lock lock(mutex_);
  auto due = [this] { return closing_ || !closed_.empty() || may_submit(nullptr); };
  while (!closing_) {
    if (in_flight_.empty()) {
      due_.wait(lock, due);
    } else if (!due_.wait_for(lock, kAsk, due)) {
      ask_device(lock);
    }
    std::vector<std::shared_ptr<DeviceOperation>> closed;
    closed.swap(closed_);
    if (!closed.empty()) {
      lock.unlock();
      closed.clear();
      lock.lock();
    }
    if (!closing_) submit_ready(lock, nullptr);
  }
}

// A device that has failed writes no word.
void DeviceGroup::ask_device(std::unique_lock<std::mutex>& lock) {
  if (in_flight_.empty() || !in_flight_.front()->submitted_) return;
  std::shared_ptr<DeviceOperation> oldest = in_flight_.front();
  lock.unlock();
  Status asked = device_.done(oldest->end_event()).status();
  oldest.reset();
  lock.lock();
  if (!asked) give_up(std::move(asked));
}

bool DeviceGroup::await_ranks(DeviceOperation& op, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  op.submitter_waits_ = true;
  lock.unlock();
  if (engine_.wait(op.offers_, timeout) || engine_.ended())
    return true;  // order() says which, and submits
  lock.lock();
  op.submitter_waits_ = false;
  if (op.exchanged_) due_.notify_all();
  return false;
}

Status DeviceGroup::order(DeviceOperation& op, device::Stream stream) {
  if (!engine_.wait(op.offers_)) return ending_with(op);
  std::unique_lock lock(mutex_);
  while (!op.submitted_) {
    changed_.wait(lock, [&] { return op.submitted_ || may_submit(nullptr); });
    submit_ready(lock, nullptr);
  }
  if (!op.outcome_) return op.outcome_;
  if (!broken_ && !op.succeeded_) return broken_;
  lock.unlock();
  return device_.wait(stream, op.end_);
}

Status DeviceGroup::verdict(DeviceOperation& op) {
  std::lock_guard lock(mutex_);
  if (!op.outcome_) return op.outcome_;
  if (op.succeeded_) return {};
  if (!op.submitted_) return broken_;
  // Streams go on after a failure too, possibly before watch() has seen it.
  Status known = broken_;
  if (known && op.exchange_outcome_) known = op.exchange_outcome_->get();
  if (known) known = links_->peers_gave_up();
  if (known) op.count_on();
  return known;
}

bool DeviceGroup::closed(const DeviceOperation& op) {
  std::lock_guard lock(mutex_);
  if (!op.submitted_) return false;
  return !op.outcome_ || op.captured_ || op.succeeded_ ||
         links_->copy_engine->reached(op.number_on_device_);
}

Status DeviceGroup::status() {
  std::lock_guard lock(mutex_);
  return broken_ ? links_->status() : broken_;
}

void DeviceGroup::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  asked_ = true;
  give_up({Code::kAborted, reason});
  changed_.notify_all();
  busy_.notify_all();
}

void DeviceGroup::give_up(Status why) {
  if (!broken_) return;
  broken_ = std::move(why);
  broken_ns_ = now_ns();
  told_ = false;
  links_->copy_engine->give_up(broken_.message());
  log(LogLevel::kError, broken_.message());
}

}  // namespace smddp
