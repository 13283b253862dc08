// Streams of the simulated device. As on a GPU, streams share a few hardware queues: what stands at the head
// of a queue, such as a wait for a flag, holds up every stream of that queue. A stream takes few commands
// before the thread that submits blocks. A stream may record its commands into a graph instead of running
// them, with the rules of CUDA: a stream joins a recording when it waits for an event of it, streams of two
// recordings do not mix, and all must have joined the first one again at the end.
//
// The work of a stream that is destroyed goes on, as on a GPU.
//
// HostDevice calls it, with its context locked but for drain().
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "common/condition_variable.h"
#include "common/status.h"

namespace smddp::device {

// A command. Returns false if it can't continue yet; the queue then calls it again.
using HostCommand = std::function<bool()>;

class HostStream;
struct HostRecording {
  std::vector<HostCommand> commands;
  std::set<HostStream*> streams;
};

// What a stream has recorded, and what it has waited for: commands by stream.
using HostClock = std::map<const HostStream*, uint64_t>;

struct HostEvent {
  std::atomic<uint64_t> recorded{0}, reached{0};
  std::shared_ptr<HostRecording> recording;  // that the last record() belongs to
  HostClock clock;
};

class HardwareQueue {
 public:
  HardwareQueue() : thread_([this] { run(); }) {}
  ~HardwareQueue();
  // Waits for room in the stream.
  void push(std::shared_ptr<HostStream> stream, HostCommand command);
  void drain(HostStream& stream);

 private:
  struct Entry {
    std::shared_ptr<HostStream> stream;
    HostCommand command;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  std::atomic<bool> stop_{false};
  std::thread thread_;  // last: it uses the others
};

class HostStream : public std::enable_shared_from_this<HostStream> {
 public:
  explicit HostStream(HardwareQueue& queue) : queue_(queue) {}
  // Nothing more is submitted to it.
  void close() {
    if (recording_) recording_->streams.erase(this);
    recording_.reset();
  }

  Status submit(HostCommand command);
  Status record(const std::shared_ptr<HostEvent>& event);
  Status wait(const std::shared_ptr<HostEvent>& event);
  void drain() { queue_.drain(*this); }

  bool recording() const { return recording_ != nullptr; }
  Status begin_recording();
  Result<std::vector<HostCommand>> end_recording();

 private:
  friend class HardwareQueue;
  HardwareQueue& queue_;
  uint64_t pushed_ = 0, run_ = 0;  // the queue's
  std::shared_ptr<HostRecording> recording_;
  HostClock clock_;
};

}  // namespace smddp::device
