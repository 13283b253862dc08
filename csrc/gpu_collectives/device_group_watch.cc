// What becomes of operations that the device has, and of a group that fails.
#include <poll.h>

#include <utility>

#include "common/clock.h"
#include "gpu_collectives/device_group.h"

namespace smddp {
namespace {

constexpr auto kLook = std::chrono::milliseconds(2);
// Of three ranks one may be done and gone while another still reads the third's memory.
constexpr uint64_t kGraceNs = 5'000'000'000;
constexpr uint64_t kPipelineGraceNs = 3'000'000'000;

}  // namespace

// Nobody waits for a device here: one thread looks, while there is something to look at.
void DeviceGroup::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock,
                  [this] { return stop_ || !told_ || !pending_.empty() || !in_flight_.empty(); });
    if (stop_) break;
    if (piped_) submit_ready(lock, nullptr);
    look(lock);
    changed_.wait_for(lock, kLook, [this] { return stop_ || (piped_ && may_submit(nullptr)); });
  }
}

void DeviceGroup::look(std::unique_lock<std::mutex>& lock) {
  std::vector<std::shared_ptr<DeviceOperation>> over;
  while (!in_flight_.empty()) {
    auto done = device_.done(in_flight_.front()->finished_);
    if (done && !done.value()) break;
    if (!done) give_up(done.status());
    DeviceOperation& op = *in_flight_.front();
    if (op.exchange_outcome_) {
      if (Status carried = op.exchange_outcome_->get(); !carried) give_up(std::move(carried));
    }
    if (!broken_) op.outcome_ = broken_;
    op.ended_ = broken_.ok();
    over.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
  if (broken_) {
    if (Status why = trouble(); !why) give_up(std::move(why));
  }
  if (!broken_ && !in_flight_.empty()) copy_engine_->release();
  bool untold = !std::exchange(told_, true);
  lock.unlock();
  changed_.notify_all();
  if (untold) tell();
  for (auto& op : over) op->on_finished(op->outcome_);
  over.clear();  // may free tensors: not under the lock
  lock.lock();
}

// Not under the lock, which those take who drive the engine.
void DeviceGroup::tell() {
  Status why = status();
  std::lock_guard calls(calls_);
  if (rail_) rail_->abort(why.message());
  if (all_) all_->abort(why.message());
  if (cpu_group_ != nullptr) cpu_group_->abort(why.message());
}

// Why the oldest operation will not end.
Status DeviceGroup::trouble() {
  for (int r = 0; r < ranks_; ++r) {
    if (r == index_) continue;
    if (const char* reason = copy_engine_->gave_up(r)) return {Code::kAborted, reason};
  }
  for (const PinnedPipeline* pipeline : {rail_.get(), all_.get()}) {
    if (pipeline == nullptr) continue;
    if (Status s = pipeline->status(); !s) return s;
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
  PinnedPipeline* pipeline = pipeline_of(oldest);
  if (pipeline != nullptr && engine_.ended())
    return {Code::kAborted, "the process is ending, with " + what + " under way"};
  if (age < limit + (pipeline != nullptr ? kPipelineGraceNs : 0)) return {};
  if (pipeline != nullptr && pipeline->between_ranks()) return {};
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(limit) * 1e-9);
  const char* waits = pipeline != nullptr && pipeline->awaits_copy_out()
                          ? "its GPU has not copied the data out"
                          : "all ranks have submitted it, and one GPU is not done";
  return {Code::kTimeout, what + " did not finish within " + seconds + " s on " +
                              names_[static_cast<size_t>(index_)] + ": " + waits};
}

}  // namespace smddp
