// DeviceGroup's thread that watches: it ends operations that the device has done, and finds failures.
#include <utility>

#include "common/clock.h"
#include "gpu_collectives/device_group.h"

namespace smddp {
namespace {

constexpr auto kLook = std::chrono::milliseconds(2);
// Of three ranks, one may have finished and ended while the second still reads the third's memory.
constexpr uint64_t kLostGraceNs = 5'000'000'000;
constexpr uint64_t kPipelineGraceNs = 3'000'000'000;

Status gave_up(const intranode::CopyEngine& copy_engine, const HostPeers& peers) {
  for (int r = 0; r < peers.count(); ++r) {
    if (r == peers.own()) continue;
    if (auto reason = copy_engine.gave_up(r)) return {Code::kAborted, std::move(*reason)};
  }
  return {};
}

Status timed_out(const std::string& what, uint64_t limit_ns, const std::string& rank,
                 const char* waits) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(limit_ns) * 1e-9);
  return {Code::kTimeout,
          what + " did not finish within " + seconds + " s on " + rank + ": " + waits};
}

}  // namespace

// No thread blocks on the device: this one polls it while operations are under way.
void DeviceGroup::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait(lock,
                  [this] { return stop_ || !told_ || !pending_.empty() || !in_flight_.empty(); });
    if (stop_) break;
    Status looked = without_exceptions([&] { return look(lock); });
    if (!lock.owns_lock()) lock.lock();
    if (!looked) give_up(std::move(looked));
    changed_.wait_for(lock, kLook,
                      [this] { return stop_ || (pipelines_.any() && may_submit(nullptr)); });
  }
}

Status DeviceGroup::look(std::unique_lock<std::mutex>& lock) {
  if (pipelines_.any()) submit_ready(lock, nullptr);
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
  for (auto& op : over) op->finish();
  return {};  // destroys `over`, which may free tensors: not under the lock
}

// Called without mutex_, which threads that drive the engine take.
void DeviceGroup::tell() {
  Status why = status();
  std::lock_guard calls(calls_);
  pipelines_.abort(why.message());
  if (cpu_group_ != nullptr) cpu_group_->abort(why.message());
}

// Not ok: why the oldest operation will not end.
Status DeviceGroup::trouble() {
  if (Status why = gave_up(*copy_engine_, peers_); !why) return why;
  if (Status s = pipelines_.status(); !s) return s;
  if (in_flight_.empty()) return {};
  const DeviceOperation& oldest = *in_flight_.front();
  uint64_t now = now_ns(), age = now - oldest.started_ns_;
  std::string what = describe(oldest.what) + " on a GPU";
  if (Status lost = peers_.lost(now, oldest.started_ns_, kLostGraceNs, what); !lost) return lost;
  uint64_t limit = oldest.limit_ns != 0 ? oldest.limit_ns : limit_ns_.load();
  PinnedPipeline* pipeline = pipelines_.of(oldest);
  if (pipeline != nullptr && engine_.ended())
    return {Code::kAborted, "the process is ending, with " + what + " under way"};
  if (age < limit + (pipeline != nullptr ? kPipelineGraceNs : 0)) return {};
  if (pipeline != nullptr && pipeline->between_ranks()) return {};
  const char* waits = pipeline != nullptr && pipeline->awaits_copy_out()
                          ? "its GPU has not copied the data out"
                          : "all ranks have submitted it, and one GPU is not done";
  return timed_out(what, limit, peers_.name(peers_.own()), waits);
}

}  // namespace smddp
