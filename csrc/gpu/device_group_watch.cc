// DeviceGroup's thread that watches: it ends operations that the device has done, and finds failures.
#include <algorithm>
#include <utility>

#include "common/clock.h"
#include "gpu/device_group.h"

namespace smddp {
namespace {

// Between two looks at what is under way. Not measured.
constexpr auto kLook = std::chrono::milliseconds(2);
// Of three ranks, one may have finished and ended while the second still reads the third's memory.
constexpr uint64_t kLostGraceNs = 5'000'000'000;
constexpr uint64_t kPipelineGraceNs = 3'000'000'000;
// After a failure: so long an operation may still end by itself, before the process ends that counts on it; and so long
// a process waits with the release of its streams, so that peers which read its memory have ended.
constexpr uint64_t kEndGraceNs = 500'000'000, kReleaseGraceNs = 1'000'000'000;

}  // namespace

// No thread blocks on the device: this one polls it while operations are under way.
void DeviceGroup::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_ || !told_) {
    busy_.wait(lock,
               [this] { return stop_ || !told_ || !pending_.empty() || !in_flight_.empty(); });
    if (stop_ && told_) break;
    Status looked = without_exceptions([&] { return look(lock); });
    if (!lock.owns_lock()) lock.lock();
    if (!looked) give_up(std::move(looked));
    busy_.wait_for(lock, kLook, [this] { return stop_.load(); });
  }
}

Status DeviceGroup::look(std::unique_lock<std::mutex>& lock) {
  std::vector<std::shared_ptr<DeviceOperation>> closed;
  while (!in_flight_.empty()) {
    DeviceOperation& op = *in_flight_.front();
    if (!op.submitted_ || !links_->copy_engine->reached(op.number_on_device_)) break;
    if (op.exchange_outcome_) {
      if (Status carried = op.exchange_outcome_->get(); !carried) give_up(std::move(carried));
      op.sent = op.exchange_outcome_->sent();
    }
    // A peer's streams may have gone on without what this rank has read from it.
    if (Status theirs = links_->peers_gave_up(); !theirs) {
      misled_ = misled_ || op.awaited_;
      give_up(std::move(theirs));
    }
    if (!broken_) op.outcome_ = broken_;
    op.succeeded_ = broken_.ok();
    closed.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
  if (broken_) {
    if (Status why = failure(); !why) give_up(std::move(why));
  }
  uint64_t now = now_ns();
  bool end = must_end(now) && !std::exchange(ended_, true);
  Status why = copy_of(broken_);
  release(now);
  bool untold = !std::exchange(told_, true);
  lock.unlock();
  changed_.notify_all();
  if (end) end_process_(why);
  if (untold) tell();
  if (closed.empty()) return {};
  for (auto& op : closed) op->close();
  lock.lock();
  std::move(closed.begin(), closed.end(), std::back_inserter(closed_));
  due_.notify_all();
  return {};
}

bool DeviceGroup::must_end(uint64_t now) {
  bool unasked = !broken_ && end_process_ && !asked_ && !engine_.ended();
  if (!unasked || misled_) return unasked;
  if (now < broken_ns_ + kEndGraceNs) return false;
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [](const auto& op) { return op->awaited_.load(); });
}

void DeviceGroup::release(uint64_t now) {
  if (broken_ || in_flight_.empty()) return;
  bool held = end_process_ && (ended_ || now < broken_ns_ + kReleaseGraceNs);
  if (held && !closing_) return;
  links_->copy_engine->release();
  for (PinnedPipeline* pipeline : links_->pipelines.open()) pipeline->release();
}

// Called without mutex_, which threads that drive the engine take, and without calls_, which a thread may
// hold that waits for the device. leave() ends this thread before it destroys what is told here.
void DeviceGroup::tell() {
  std::unique_lock lock(mutex_);
  std::string why = broken_.message();
  auto pipelines = links_->pipelines.open();
  lock.unlock();
  for (PinnedPipeline* pipeline : pipelines) pipeline->abort(why);
  links_->host_group->abort(why);
}

// The oldest one for which this rank's device is all that is waited for: the device has it, or could have it.
const DeviceOperation* DeviceGroup::oldest_on_device() const {
  if (!in_flight_.empty()) return in_flight_.front().get();
  bool could = !pending_.empty() && pending_.front()->exchanged_ && !pending_.front()->captured_;
  return could ? pending_.front().get() : nullptr;
}

// Not ok: why the oldest operation will not end.
Status DeviceGroup::failure() {
  if (Status why = links_->status(); !why) return why;
  const DeviceOperation* called = oldest_on_device();
  if (called == nullptr) return {};
  const DeviceOperation& oldest = *called;
  uint64_t now = now_ns(), age = now - oldest.started_ns_;
  std::string what = describe(oldest.what) + " on a GPU";
  if (Status lost = links_->peers.lost(now, oldest.started_ns_, kLostGraceNs, what); !lost)
    return lost;
  uint64_t limit = oldest.limit_ns != 0 ? oldest.limit_ns : limit_ns_.load();
  PinnedPipeline* pipeline = links_->pipelines.of(oldest);
  if (pipeline != nullptr && engine_.ended())
    return {Code::kAborted, "the process is ending, with " + what + " under way"};
  if (age < limit + (pipeline != nullptr ? kPipelineGraceNs : 0)) return {};
  if (pipeline != nullptr && pipeline->between_ranks()) return {};
  const ExchangeOutcome* outcome = oldest.submitted_ ? oldest.exchange_outcome_.get() : nullptr;
  const char* waits = pipeline != nullptr && pipeline->awaits_copy_out(outcome)
                          ? "its GPU has not copied the data out"
                      : oldest.submitted_ ? "all ranks have submitted it, and one GPU is not done"
                                          : "its GPU does not take more work";
  return {Code::kTimeout, what + " timed out after " + seconds_text(limit) + " on " +
                              links_->peers.name(links_->peers.own()) + ": " + waits};
}

}  // namespace smddp
