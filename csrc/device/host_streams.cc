#include "device/host_streams.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace smddp::device {
namespace {

constexpr auto kLook = std::chrono::microseconds(20);
// The commands that a stream holds, among them the one that runs. A GPU's driver has room for about a
// thousand; the fewer, the more often tests see a full stream.
constexpr size_t kCommands = 64;

}  // namespace

HardwareQueue::~HardwareQueue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HardwareQueue::push(std::shared_ptr<HostStream> stream, HostCommand command) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stream->pushed_ - stream->run_ < kCommands; });
    ++stream->pushed_;
    entries_.push_back({std::move(stream), std::move(command)});
  }
  changed_.notify_all();
}

void HardwareQueue::drain(HostStream& stream) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&, until = stream.pushed_] { return stream.run_ >= until; });
}

void HardwareQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !entries_.empty(); });
    if (stop_) return;
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    while (!entry.command() && !stop_) std::this_thread::sleep_for(kLook);
    entry.command = nullptr;
    lock.lock();
    ++entry.stream->run_;
    changed_.notify_all();
  }
}

Status HostStream::submit(HostCommand command) {
  if (recording_) {
    recording_->commands.push_back(std::move(command));
    ++clock_[this];
  } else {
    queue_.push(shared_from_this(), std::move(command));
  }
  return {};
}

Status HostStream::record(const std::shared_ptr<HostEvent>& event) {
  event->recording = recording_;
  if (recording_) {
    event->clock = clock_;
    return {};
  }
  return submit([event, turn = ++event->recorded] {
    event->reached.store(turn, std::memory_order_release);
    return true;
  });
}

Status HostStream::wait(const std::shared_ptr<HostEvent>& event) {
  if (!event->recording) {
    if (recording_)
      return {Code::kInternal, "a stream that records waits for work outside of the recording"};
    return submit([event, turn = event->recorded.load()] {
      return event->reached.load(std::memory_order_acquire) >= turn;
    });
  }
  if (recording_ && recording_ != event->recording)
    return {Code::kInternal, "a stream would belong to two recordings"};
  recording_ = event->recording;
  recording_->streams.insert(this);
  for (const auto& [stream, commands] : event->clock)
    clock_[stream] = std::max(clock_[stream], commands);
  return {};
}

Status HostStream::begin_recording() {
  if (recording_) return {Code::kInternal, "the stream records already"};
  recording_ = std::make_shared<HostRecording>();
  recording_->streams.insert(this);
  return {};
}

Result<std::vector<HostCommand>> HostStream::end_recording() {
  if (!recording_) return Status(Code::kInternal, "the stream records nothing");
  std::shared_ptr<HostRecording> recording = recording_;
  HostClock seen = std::move(clock_);
  bool joined = true;
  for (HostStream* stream : recording->streams) {
    if (stream != this) joined &= stream->clock_[stream] == seen[stream];
    stream->clock_.clear();
    stream->recording_ = nullptr;
  }
  if (!joined)
    return Status(Code::kInternal, "a stream has not joined the recording's first one again");
  return std::move(recording->commands);
}

}  // namespace smddp::device
