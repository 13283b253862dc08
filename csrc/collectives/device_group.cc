#include "collectives/device_group.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "common/clock.h"
#include "common/log.h"

namespace smddp {
namespace {

using intranode::CopyEngine;
using intranode::Offer;

constexpr auto kLook = std::chrono::milliseconds(2);
// Of three ranks one may be done and gone while another still reads the third's memory.
constexpr uint64_t kGraceNs = 5'000'000'000;
constexpr auto kLeave = std::chrono::seconds(2);
constexpr size_t kLeastRoom = 4096;
constexpr long kPidfdOpen = 434;  // SYS_pidfd_open, on all architectures

// What a rank says when the group is made.
struct Joining {
  int32_t usable;
  int32_t pid;
  int32_t flags;
  char reason[500];
};

// An AllGather of a few bytes of each rank, on the host.
Result<std::vector<std::byte>> gather(Engine& engine, Communicator& group, const void* mine,
                                      size_t bytes) {
  auto op = std::make_shared<Operation>();
  std::vector<std::byte> all(bytes * static_cast<size_t>(group.ranks()));
  op->collective = Collective::kAllGather;
  op->digest = bytes;
  op->input.add(const_cast<void*>(mine), bytes);
  op->input.end_block();
  for (int r = 0; r < group.ranks(); ++r) {
    op->output.add(all.data() + static_cast<size_t>(r) * bytes, bytes);
    op->output.end_block();
  }
  group.submit(op, {}, false);
  engine.wait(*op);
  if (!op->status()) return op->status();
  return all;
}

Joining joining(const Status& usable, int flags) {
  Joining card{};
  card.usable = usable.ok() ? 1 : 0;
  card.pid = getpid();
  card.flags = flags;
  std::strncpy(card.reason, usable.message().c_str(), sizeof card.reason - 1);
  return card;
}

// The first rank that can't, if there is one: the same on all ranks.
Status first_refusal(const std::vector<std::byte>& cards, Communicator& group) {
  for (int r = 0; r < group.ranks(); ++r) {
    Joining card;
    std::memcpy(&card, cards.data() + static_cast<size_t>(r) * sizeof card, sizeof card);
    if (card.usable == 0)
      return {Code::kUnavailable, group.describe(r) + ": " + std::string(card.reason)};
  }
  return {};
}

}  // namespace

DeviceOperation::~DeviceOperation() {
  if (!group_) return;
  if (ready_ != nullptr) group_->device().destroy_event(ready_);
  if (finished_ != nullptr) group_->device().destroy_event(finished_);
}

void DeviceOperation::on_done() { group_->exchanged(*this); }

Result<std::shared_ptr<DeviceGroup>> DeviceGroup::create(Engine& engine, Communicator& communicator,
                                                         Status usable, device::Device* device,
                                                         intranode::Imports* imports,
                                                         device::Stream main, uint64_t limit_ns) {
  std::shared_ptr<DeviceGroup> group;
  if (usable && communicator.topology().nodes() > 1)
    usable = {Code::kUnavailable, "the group spans several hosts"};
  if (usable) {
    group.reset(new DeviceGroup(engine, communicator, *device, *imports, main, limit_ns));
    auto made = CopyEngine::create(*device, *imports, main, group->index_, group->ranks_);
    usable = made.status();
    if (made) group->copy_engine_ = std::move(made.value());
  }
  Joining mine = joining(usable, usable ? group->copy_engine_->flags_descriptor() : -1);
  auto cards = gather(engine, communicator, &mine, sizeof mine);
  if (!cards) return cards.status();
  if (Status refused = first_refusal(cards.value(), communicator); !refused) return refused;
  mine = joining(group->join(cards.value()), -1);
  cards = gather(engine, communicator, &mine, sizeof mine);
  if (!cards) return cards.status();
  if (Status refused = first_refusal(cards.value(), communicator); !refused) return refused;
  group->watch_ = std::thread([raw = group.get()] { raw->watch(); });
  return group;
}

DeviceGroup::DeviceGroup(Engine& engine, Communicator& communicator, device::Device& device,
                         intranode::Imports& imports, device::Stream main, uint64_t limit_ns)
    : engine_(engine),
      device_(device),
      imports_(imports),
      main_(main),
      index_(communicator.rank()),
      ranks_(communicator.ranks()),
      limit_ns_(limit_ns),
      gone_since_ns_(static_cast<size_t>(ranks_)),
      communicator_(&communicator) {
  for (int r = 0; r < ranks_; ++r) names_.push_back(communicator.describe(r));
}

Status DeviceGroup::join(const std::vector<std::byte>& joined) {
  for (int r = 0; r < ranks_; ++r) {
    Joining card;
    std::memcpy(&card, joined.data() + static_cast<size_t>(r) * sizeof card, sizeof card);
    pids_.push_back(card.pid);
    alive_.emplace_back();
    if (r == index_) continue;
    if (card.pid != getpid())
      alive_.back() = intranode::Fd(static_cast<int>(syscall(kPidfdOpen, card.pid, 0)));
    if (Status s = copy_engine_->join(r, card.pid, card.flags); !s) return s;
  }
  return {};
}

DeviceGroup::~DeviceGroup() { leave(); }

void DeviceGroup::leave() {
  if (engine_.forked()) {  // a child has no such thread, and no device
    if (watch_.joinable()) watch_.detach();
    return;
  }
  {
    std::unique_lock lock(mutex_);
    // Not for ever: watch() knows a limit.
    changed_.wait(lock, [this] { return stop_ || !broken_ || in_flight_.empty(); });
    if (!in_flight_.empty() || !pending_.empty())
      give_up({Code::kAborted, "the group was destroyed while operations were in flight"});
    if (broken_.ok()) broken_ = {Code::kAborted, "the group was destroyed"};
    // Streams that still wait are let go of before the flags are unmapped.
    changed_.wait_for(lock, kLeave, [this] { return stop_ || in_flight_.empty(); });
    stop_ = true;
  }
  changed_.notify_all();
  if (watch_.joinable() && watch_.get_id() != std::this_thread::get_id()) watch_.join();
  std::lock_guard calls(calls_);
  communicator_ = nullptr;
}

Status DeviceGroup::submit(const std::shared_ptr<DeviceOperation>& operation,
                           device::Stream callers) {
  DeviceOperation& op = *operation;
  std::lock_guard calls(calls_);
  if (Status ok = status(); !ok) return ok;
  auto capturing = device_.capturing(callers);
  if (!capturing) return capturing.status();
  op.captured_ = capturing.value();
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
  communicator_->submit(operation, {}, !op.captured_);
  if (!op.captured_) return {};
  engine_.wait(op);
  std::unique_lock lock(mutex_);
  submit_ready(lock, &op);
  return op.outcome_;
}

// On whichever thread drives the engine.
void DeviceGroup::exchanged(DeviceOperation& operation) {
  std::unique_lock lock(mutex_);
  operation.exchanged_ = true;
  submit_ready(lock, nullptr);
}

void DeviceGroup::submit_ready(std::unique_lock<std::mutex>& lock,
                               const DeviceOperation* captured) {
  std::vector<std::shared_ptr<DeviceOperation>> started;
  while (!pending_.empty() && pending_.front()->exchanged_) {
    std::shared_ptr<DeviceOperation> op = pending_.front();
    if (op->captured_ && op.get() != captured) break;  // its own thread does it
    pending_.pop_front();
    op->outcome_ = start(*op);
    op->began_ = op->outcome_.ok();
    op->submitted_ = true;
    if (op->outcome_ && !op->captured_) in_flight_.push_back(op);
    started.push_back(std::move(op));
  }
  lock.unlock();
  changed_.notify_all();
  // What is called here may start operations of its own.
  for (const auto& op : started) {
    if (op->began_) op->on_submitted();
    if (!op->began_ || op->captured_) op->on_finished(op->outcome_);
  }
  started.clear();
  lock.lock();
}

Status DeviceGroup::start(DeviceOperation& op) {
  if (!broken_) return broken_;
  Status started = op.status() ? start_with(op) : op.status();
  // Peers may have submitted what this rank has not.
  if (!started && started.code() != Code::kInvalid) give_up(started);
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
  Status s = device_.wait(main_, op.ready_);
  if (s) s = copy_engine_->submit(op.plan, offers);
  if (s) s = device_.record(op.finished_, main_);
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
  return op.ended_ ? Status() : broken_;
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
  return broken_;
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

// Nobody waits for a device here: one thread looks, while there is something to look at.
void DeviceGroup::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock,
                  [this] { return stop_ || !told_ || !pending_.empty() || !in_flight_.empty(); });
    if (stop_) return;
    look(lock);
    changed_.wait_for(lock, kLook, [this] { return stop_; });
  }
}

void DeviceGroup::look(std::unique_lock<std::mutex>& lock) {
  std::vector<std::shared_ptr<DeviceOperation>> over;
  while (!in_flight_.empty()) {
    auto done = device_.done(in_flight_.front()->finished_);
    if (done && !done.value()) break;
    if (!done) give_up(done.status());
    DeviceOperation& op = *in_flight_.front();
    if (!broken_) op.outcome_ = broken_;
    op.ended_ = broken_.ok();
    over.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
  if (broken_) {
    if (Status why = trouble(); !why) give_up(std::move(why));
  }
  if (!broken_ && !in_flight_.empty()) copy_engine_->release();
  bool tell = !std::exchange(told_, true);
  std::string reason = broken_.message();
  lock.unlock();
  changed_.notify_all();
  if (tell) {
    std::lock_guard calls(calls_);
    if (communicator_ != nullptr) communicator_->abort(reason);
  }
  for (auto& op : over) op->on_finished(op->outcome_);
  over.clear();  // may free tensors: not under the lock
  lock.lock();
}

// Why the oldest operation will not end.
Status DeviceGroup::trouble() {
  for (int r = 0; r < ranks_; ++r) {
    if (r == index_) continue;
    if (const char* reason = copy_engine_->gave_up(r)) return {Code::kAborted, reason};
  }
  if (in_flight_.empty()) return {};
  const DeviceOperation& oldest = *in_flight_.front();
  uint64_t now = now_ns(), age = now - oldest.started_ns_;
  std::string what = describe(oldest.what) + " on a GPU";
  for (int r = 0; r < ranks_; ++r) {
    pollfd p{alive_[static_cast<size_t>(r)].get(), POLLIN, 0};
    if (p.fd < 0 || poll(&p, 1, 0) != 1) continue;
    uint64_t& since = gone_since_ns_[static_cast<size_t>(r)];
    if (since == 0) since = now;
    if (now - std::max(since, oldest.started_ns_) < kGraceNs) continue;
    return {Code::kPeerLost, names_[static_cast<size_t>(r)] + " (process " +
                                 std::to_string(pids_[static_cast<size_t>(r)]) + ") ended during " +
                                 what};
  }
  uint64_t limit = oldest.limit_ns != 0 ? oldest.limit_ns : limit_ns_.load();
  if (age < limit) return {};
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(limit) * 1e-9);
  return {Code::kTimeout, what + " did not finish within " + seconds + " s on " +
                              names_[static_cast<size_t>(index_)] +
                              ": all ranks have submitted it, and one GPU is not done"};
}

}  // namespace smddp
