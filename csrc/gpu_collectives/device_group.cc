#include "gpu_collectives/device_group.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/log.h"

namespace smddp {
namespace {

using intranode::Offer;

constexpr auto kLeave = std::chrono::seconds(2);
constexpr size_t kLeastRoom = 4096;

}  // namespace

DeviceOperation::~DeviceOperation() {
  if (!group_) return;
  if (ready_ != nullptr) group_->device().destroy_event(ready_);
  if (finished_ != nullptr) group_->device().destroy_event(finished_);
}

void DeviceOperation::on_done() { group_->exchanged(*this); }

DeviceGroup::~DeviceGroup() { leave(); }

void DeviceGroup::leave() {
  if (engine_.forked()) {  // a child has no such thread, and no device
    if (watch_.joinable()) watch_.detach();
    return;
  }
  {
    std::unique_lock lock(mutex_);
    // Not for ever: watch() knows a limit.
    changed_.wait(lock, [this] {
      return stop_ || !broken_ || (in_flight_.empty() && !(piped_ && may_submit(nullptr)));
    });
    if (!in_flight_.empty() || !pending_.empty())
      give_up({Code::kAborted, "the group was destroyed while operations were in flight"});
    if (broken_.ok()) broken_ = {Code::kAborted, "the group was destroyed"};
    // Streams that still wait are let go of before the flags are unmapped.
    changed_.wait_for(lock, kLeave, [this] { return stop_ || in_flight_.empty(); });
    stop_ = true;
  }
  changed_.notify_all();
  if (watch_.joinable() && watch_.get_id() != std::this_thread::get_id()) watch_.join();
  std::unique_ptr<PinnedPipeline> rail, all;
  std::unique_ptr<Group> node;
  {
    std::scoped_lock lock(calls_, mutex_);
    rail = std::move(rail_);
    all = std::move(all_);
    node = std::move(node_);
    cpu_group_ = nullptr;
  }
  // What these still end may call back: no lock is held.
  rail.reset();
  all.reset();
  node.reset();
  std::unique_lock lock(mutex_);
  submit_ready(lock, nullptr);  // which says no to what is left
}

PinnedPipeline* DeviceGroup::pipeline_of(const DeviceOperation& op) const {
  return !op.exchange ? nullptr : op.among_all ? all_.get() : rail_.get();
}

void DeviceGroup::set_limit(uint64_t limit_ns) {
  limit_ns_ = limit_ns;
  std::lock_guard calls(calls_);
  if (node_) node_->set_timeout(limit_ns);
  if (rail_) rail_->set_limit(limit_ns);
  if (all_) all_->set_limit(limit_ns);
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
    PinnedPipeline* pipeline = pipeline_of(op);
    if (pipeline == nullptr)
      return {Code::kInternal, "an operation wants a way between ranks that was not opened"};
    if (Status room = pipeline->reserve(*op.exchange); !room) return room;
  }
  op.group_ = shared_from_this();
  op.started_ns_ = now_ns();
  for (device::Event* event : {&op.ready_, &op.finished_}) {
    auto made = device_.create_event();
    if (!made) return made.status();
    *event = made.value();
  }
  if (Status s = device_.record(op.ready_, callers); !s) return s;

  std::vector<size_t> sizes;
  for (const Extent& e : op.offered) sizes.push_back(e.bytes);
  // Rounded up, so that calls that do not match mostly get as far as to say how.
  size_t room = std::bit_ceil(std::max(Offer::room(sizes), kLeastRoom));
  op.sent_.resize(room);
  op.received_.resize(room * static_cast<size_t>(ranks_));
  Offer::make(device_, op.what, op.offered).encode(op.sent_.data(), room);
  op.collective = Collective::kAllGather;
  op.dtype = Dtype::kBytes;
  op.timeout_ns = op.limit_ns;
  op.tensors = op.what.segments;
  op.input.add(op.sent_.data(), room);
  op.input.end_block();
  for (int r = 0; r < ranks_; ++r) {
    op.output.add(op.received_.data() + static_cast<size_t>(r) * room, room);
    op.output.end_block();
  }
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

// On whichever thread drives the engine. Where there is a pipeline, that thread must neither call the
// device nor wait for one that does: should the driver wait for the GPU, and the GPU for the network,
// nobody would drive that. watch() looks soon, even if it misses the word.
void DeviceGroup::exchanged(DeviceOperation& operation) {
  operation.exchanged_ = true;
  if (piped_ && !stop_) return changed_.notify_all();
  std::unique_lock lock(mutex_);
  submit_ready(lock, nullptr);
}

// What a graph records is submitted by the thread that records it.
bool DeviceGroup::may_submit(const DeviceOperation* captured) const {
  if (pending_.empty() || !pending_.front()->exchanged_) return false;
  return !pending_.front()->captured_ || pending_.front().get() == captured;
}

void DeviceGroup::submit_ready(std::unique_lock<std::mutex>& lock,
                               const DeviceOperation* captured) {
  std::vector<std::shared_ptr<DeviceOperation>> started;
  while (may_submit(captured)) {
    std::shared_ptr<DeviceOperation> op = std::move(pending_.front());
    pending_.pop_front();
    op->outcome_ = start(*op);
    op->began_ = op->outcome_.ok();
    op->submitted_ = true;
    if ((op->began_ || op->in_part_) && !op->captured_) in_flight_.push_back(op);
    started.push_back(std::move(op));
  }
  if (started.empty()) return;
  lock.unlock();
  changed_.notify_all();
  // What is called here may start operations of its own.
  for (const auto& op : started) {
    if (op->began_) op->on_submitted();
    if (op->captured_ || !(op->began_ || op->in_part_)) op->on_finished(op->outcome_);
  }
  started.clear();
  lock.lock();
}

Status DeviceGroup::start(DeviceOperation& op) {
  if (!broken_) return broken_;
  Status started = op.status() ? start_with(op) : op.status();
  // Peers may have submitted what this rank has not. What is refused as invalid, all ranks of this host
  // refuse, but other hosts may not.
  if (!started && (started.code() != Code::kInvalid || op.exchange)) give_up(started);
  op.sent_ = {};
  op.received_ = {};
  return started;
}

Status DeviceGroup::start_with(DeviceOperation& op) {
  std::vector<Offer> offers;
  size_t room = op.sent_.size();
  for (int r = 0; r < ranks_; ++r) {
    auto offer = Offer::decode(op.received_.data() + static_cast<size_t>(r) * room, room);
    if (!offer) return offer.status();
    if (r == index_) offer.value().claim();
    offers.push_back(std::move(offer.value()));
  }
  for (int r = 0; r < ranks_; ++r) {
    const Offer& offer = offers[static_cast<size_t>(r)];
    if (offer.signature() != op.what) {
      return {Code::kMismatch,
              names_[static_cast<size_t>(r)] + " called " + describe(offer.signature()) +
                  " while " + names_[static_cast<size_t>(index_)] + " called " + describe(op.what)};
    }
    // All ranks see that alike: the group lives on.
    if (!offer.refusal().empty())
      return {Code::kInvalid, names_[static_cast<size_t>(r)] + ": " + offer.refusal()};
    bool same = offer.extents() == op.offered.size();
    for (size_t i = 0; same && i < op.offered.size(); ++i)
      same = offer.bytes(i) == op.offered[i].bytes;
    if (!same) return {Code::kMismatch, names_[static_cast<size_t>(r)] + " offers other sizes"};
  }
  std::function<Status()> between;
  if (op.exchange) {
    between = [this, &op]() -> Status {
      auto outcome = pipeline_of(op)->submit(main_, *op.exchange);
      if (outcome) op.exchange_outcome_ = std::move(outcome.value());
      return outcome.status();
    };
  }
  Status s = device_.wait(main_, op.ready_);
  if (s) s = copy_engine_->submit(op.plan, offers, between);
  Status end = device_.record(op.finished_, main_);  // of what there is, to be let go of
  op.in_part_ = !s && end;
  if (s) s = end;
  // Ready for use, but not here.
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
  // Streams go on after a failure too, and maybe before watch() has seen it.
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
  for (const PinnedPipeline* pipeline : {rail_.get(), all_.get()}) {
    if (known && pipeline != nullptr) known = pipeline->status();
  }
  return known;
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
