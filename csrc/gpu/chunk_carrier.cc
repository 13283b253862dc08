#include "gpu/chunk_carrier.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/clock.h"

namespace smddp {
namespace {

// How long the thread sleeps between two reads of a flag that a stream sets; the longer it waits, the longer
// it sleeps. Not measured.
constexpr uint64_t kShortestNapNs = 20'000, kLongestNapNs = 500'000;

}  // namespace

void Chunk::give_up(const Status& why) {
  outcome->fail(why);
  all_->fail(why);
}

void Chunk::on_complete() {
  Operation::on_complete();
  all_->under_way.fetch_sub(1);
  outcome->count(sent);
  if (!status()) {
    give_up(status());
  } else {
    ring->set_arrived(buffer, flag_value);
  }
  ring.reset();  // the engine may keep the operation for longer than there is a device
}

void ChunkCarrier::start() {
  thread_ = std::thread([this] { run(); });
}

void ChunkCarrier::stop() {
  if (!ranks_) return;     // stopped before
  outcome_->tell({});      // the engine may keep the outcome for longer than there is whom it tells
  if (engine_.forked()) {  // a forked child has neither the thread nor the device
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  ranks_.reset();
  engine_.kick(engine_.lock());  // chunks that a shut-down engine left finished free their rings
  for (const auto& left : queue_) {
    left->give_up({Code::kAborted, "the group was destroyed"});
    left->ring->set_arrived(left->buffer, left->flag_value);
  }
  queue_.clear();
}

void ChunkCarrier::push(std::shared_ptr<Chunk> chunk) {
  chunk->all_ = outcome_;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(chunk));
  }
  changed_.notify_all();
}

// Starts the collectives of the chunks in order, each once its chunk is copied out, until the pipeline is broken.
void ChunkCarrier::run() {
  // Else a nap of 20 us takes 90, and 41 with it (2026-11-29, Intel Xeon).
  (void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  std::unique_lock lock(mutex_);
  uint64_t since = 0;  // when this chunk became the next
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    if (!queue_.front()->filled()) {
      uint64_t now = now_ns();
      if (since == 0) since = now;
      uint64_t nap = std::clamp((now - since) / 16, kShortestNapNs, kLongestNapNs);
      changed_.wait_for(lock, std::chrono::nanoseconds(nap), [this] { return stop_; });
      continue;
    }
    since = 0;
    std::shared_ptr<Chunk> next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Status broken = outcome_->get();
    if (broken) {
      outcome_->under_way.fetch_add(1);
      ranks_->submit(next, next->tuning, true);
    } else {
      next->give_up(broken);
    }
    next.reset();
    lock.lock();
  }
}

bool ChunkCarrier::awaits_copy_out(const ExchangeOutcome* of) {
  std::lock_guard lock(mutex_);
  if (queue_.empty() || queue_.front()->filled()) return false;
  return of == nullptr || queue_.front()->outcome.get() == of;
}

void ChunkCarrier::abort(const std::string& reason) {
  outcome_->fail({Code::kAborted, reason});
  ranks_->abort(reason, true);
}

}  // namespace smddp
