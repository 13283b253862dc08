// Something that a thread can wait for: one collective of one group. Knows nothing of what it does.
// Made by groups, completed by the engine.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "common/status.h"

namespace smddp {

class Task {
 public:
  virtual ~Task() = default;
  // Its result, or its error, may be used.
  bool complete() const { return complete_.load(std::memory_order_acquire); }
  // Valid once complete().
  const Status& status() const { return status_; }

 protected:
  // Runs once, on the thread that drives the engine, without the engine's lock: it may wait for
  // other tasks. A thread that sees complete() also sees what on_complete() wrote. If it throws, the task's
  // status says so.
  virtual void on_complete() {}
  // For on_complete(): the result can't be delivered.
  void fail(Status why) { status_ = std::move(why); }

 private:
  friend class Engine;
  friend class TaskQueue;
  Status status_;
  std::atomic<bool> complete_{false};
  bool queued_ = false;         // has been in a queue
  std::shared_ptr<Task> next_;  // in the queue
};

// Complete tasks, in their order. Allocates nothing.
class TaskQueue {
 public:
  bool empty() const { return first_ == nullptr; }
  bool has_one() const { return first_ != nullptr && first_.get() == last_; }
  bool contains(const Task* task) const {
    for (const Task* at = first_.get(); at != nullptr; at = at->next_.get()) {
      if (at == task) return true;
    }
    return false;
  }
  // A task that has been in a queue stays out.
  void push(std::shared_ptr<Task> task, Status status) {
    if (std::exchange(task->queued_, true)) return;
    task->status_ = std::move(status);
    Task* raw = task.get();
    (empty() ? first_ : last_->next_) = std::move(task);
    last_ = raw;
  }
  // Takes those of another queue, in their order.
  void append(TaskQueue&& others) {
    if (others.empty()) return;
    (empty() ? first_ : last_->next_) = std::move(others.first_);
    last_ = others.last_;
  }
  std::shared_ptr<Task> pop() {
    std::shared_ptr<Task> task = std::move(first_);
    first_ = std::move(task->next_);
    return task;
  }

 private:
  std::shared_ptr<Task> first_;
  Task* last_ = nullptr;  // valid unless empty
};

}  // namespace smddp
