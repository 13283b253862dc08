// The flight recorder: the last operations of this process, in the order of their calls, over all groups.
// Threads that submit and drive operations write it, without a lock and without memory of their own; any
// thread may read it at any time. It knows nothing of groups and tensors, only numbers and texts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace smddp::recorder {

// The number of a text that is kept for the rest of the process; 0: "".
using Text = uint32_t;

enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };

// What is known of an operation when it is called.
struct Call {
  Text group = 0;
  Text operation = 0;
  Text dtype = 0;
  uint64_t sequence = 0;  // its place among those of its group, from 1
  uint64_t bytes = 0;
  uint64_t called_ns = 0;
};

// An operation as it is read. Times are those of now_ns(); 0: not yet, or not known.
struct Record {
  uint64_t id = 0;  // its place among all operations of the process, from 1
  Call call;
  Text label = 0;  // who called it, by the thread's set_label()
  Text path = 0;
  State state = State::kQueued;
  uint64_t started_ns = 0;
  uint64_t first_byte_ns = 0;
  uint64_t ended_ns = 0;
  uint64_t wait_entered_ns = 0, wait_left_ns = 0;
};

// One entry of the ring. Everything is atomic, as its reader and its writers share no lock. `id` is kPassing
// while the entry passes to another operation, and 0 before the first.
//
// No writer owns the entry: one that is interrupted in begin() while others go once around the ring may write
// beside a later one. The two values that hold the operation's id tell a reader: `check` is a sum over the id
// and what is known at the call, `state` holds the id above the State. The reader leaves out what does not
// agree.
struct alignas(64) Entry {
  static constexpr uint64_t kPassing = UINT64_MAX;
  static constexpr int kStateBits = 2;
  std::atomic<uint64_t> id{0}, check{0}, state{0};
  std::atomic<Text> group{0}, operation{0}, dtype{0}, label{0}, path{0};
  std::atomic<uint64_t> sequence{0}, bytes{0}, called_ns{0}, started_ns{0}, first_byte_ns{0},
      ended_ns{0}, wait_entered_ns{0}, wait_left_ns{0};

  static uint64_t tagged(uint64_t id, State state) {
    return id << kStateBits | static_cast<uint64_t>(state);
  }
};
static_assert(sizeof(Entry) == 128);

// The entry passes to operation `id`, called by a thread with `label`.
void write(Entry& slot, uint64_t id, const Call& call, Text label);
// False if the entry passed to another operation meanwhile, or two wrote it together.
bool read(const Entry& slot, Record* out);

// The entry of one operation, for those that carry it out. An operation that the ring has forgotten, or
// never had, takes notes in vain; if it is forgotten during the call, a time may be noted in its successor's
// entry, but no state. Each function is called by one thread at a time.
class Mark {
 public:
  Mark() = default;
  Mark(Entry* slot, uint64_t id) : slot_(slot), id_(id) {}

  // False: all notes are in vain, so that no clock need be read for them.
  bool valid() const {
    return slot_ != nullptr && slot_->id.load(std::memory_order_relaxed) == id_;
  }
  void start(uint64_t now, Text path) const {
    if (!valid()) return;
    put(slot_->path, path);
    put(slot_->started_ns, now);
    put(slot_->state, Entry::tagged(id_, State::kRunning));
  }
  // True until first_byte() was called.
  bool awaits_first_byte() const {
    return valid() && slot_->first_byte_ns.load(std::memory_order_relaxed) == 0;
  }
  void first_byte(uint64_t now) const {
    if (valid()) put(slot_->first_byte_ns, now);
  }
  void end(uint64_t now, bool ok) const {
    if (ok && awaits_first_byte()) put(slot_->first_byte_ns, now);
    end_unseen(now, ok);
  }
  // The same for an operation whose first byte no thread of this process sees.
  void end_unseen(uint64_t now, bool ok) const {
    if (!valid()) return;
    put(slot_->ended_ns, now);
    put(slot_->state, Entry::tagged(id_, ok ? State::kDone : State::kFailed));
  }
  void enter_wait(uint64_t now) const {
    if (valid()) put(slot_->wait_entered_ns, now);
  }
  void leave_wait(uint64_t now) const {
    if (valid()) put(slot_->wait_left_ns, now);
  }

 private:
  template <class T>
  static void put(std::atomic<T>& field, T value) {
    field.store(value, std::memory_order_relaxed);
  }

  Entry* slot_ = nullptr;
  uint64_t id_ = 0;
};

class FlightRecorder {
 public:
  // Of the last `entries` operations; 0 records nothing.
  explicit FlightRecorder(size_t entries);
  // As many entries as SMDDP_DEBUG=flight_recorder says.
  static FlightRecorder& process();

  // An operation is called. Any thread.
  Mark begin(const Call& call);
  // Whether operations that begin from now on are recorded, for a measurement of what that costs.
  void set_recording(bool on) { recording_.store(on && entries_ > 0, std::memory_order_relaxed); }
  // The operations that the calling thread begins from now on get this label.
  static void set_label(Text label);
  static Text label();

  // Takes a lock: for what is known ahead.
  Text text(std::string_view text);
  std::string text(Text number) const;

  // The latest operations, oldest first; entries that change meanwhile are left out.
  std::vector<Record> records() const;

 private:
  const size_t entries_;
  const size_t slots_size_;  // a power of two, at least entries_
  const std::unique_ptr<Entry[]> slots_;
  std::atomic<uint64_t> begun_{0};
  std::atomic<bool> recording_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Text> numbers_;
  std::vector<const std::string*> texts_;
};

}  // namespace smddp::recorder
