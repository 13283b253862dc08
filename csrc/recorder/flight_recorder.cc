#include "recorder/flight_recorder.h"

#include <algorithm>

#include "common/env.h"

namespace smddp::recorder {
namespace {

constexpr double kMostEntries = 1 << 20;

thread_local Text thread_label = 0;

size_t entries_from_env() {
  double entries = env::get_number("FLIGHT_RECORDER").value_or(0);
  return static_cast<size_t>(std::clamp(entries, 0.0, kMostEntries));
}

// False if the entry passed to another operation meanwhile.
bool read(const Slot& slot, Record* out) {
  auto get = [](const auto& field) { return field.load(std::memory_order_relaxed); };
  out->id = slot.id.load(std::memory_order_acquire);
  out->call = {get(slot.group),    get(slot.operation), get(slot.dtype),
               get(slot.sequence), get(slot.bytes),     get(slot.called_ns)};
  out->label = get(slot.label);
  out->path = get(slot.path);
  out->state = get(slot.state);
  out->started_ns = get(slot.started_ns);
  out->first_byte_ns = get(slot.first_byte_ns);
  out->ended_ns = get(slot.ended_ns);
  out->wait_entered_ns = get(slot.wait_entered_ns);
  out->wait_left_ns = get(slot.wait_left_ns);
  // The fields are read before the second look at `id`: a seqlock's reader.
  std::atomic_thread_fence(std::memory_order_acquire);
  return out->id != 0 && get(slot.id) == out->id;
}

}  // namespace

FlightRecorder::FlightRecorder(size_t entries)
    : entries_(entries), slots_(entries > 0 ? new Slot[entries] : nullptr) {
  text("");
}

FlightRecorder& FlightRecorder::process() {
  // Never freed, as threads may write until the process ends.
  static auto* recorder = new FlightRecorder(entries_from_env());
  return *recorder;
}

Mark FlightRecorder::begin(const Call& call) {
  if (entries_ == 0) return {};
  auto put = [](auto& field, auto value) { field.store(value, std::memory_order_relaxed); };
  uint64_t id = begun_.fetch_add(1, std::memory_order_relaxed) + 1;
  Slot& slot = slots_[(id - 1) % entries_];
  put(slot.id, uint64_t{0});
  // A reader that sees a field of the new operation sees that `id` is no longer the old one's.
  std::atomic_thread_fence(std::memory_order_release);
  put(slot.group, call.group);
  put(slot.operation, call.operation);
  put(slot.dtype, call.dtype);
  put(slot.sequence, call.sequence);
  put(slot.bytes, call.bytes);
  put(slot.called_ns, call.called_ns);
  put(slot.label, thread_label);
  put(slot.path, Text{0});
  put(slot.state, State::kQueued);
  for (auto* time : {&slot.started_ns, &slot.first_byte_ns, &slot.ended_ns, &slot.wait_entered_ns,
                     &slot.wait_left_ns}) {
    put(*time, uint64_t{0});
  }
  slot.id.store(id, std::memory_order_release);
  return {&slot, id};
}

void FlightRecorder::set_label(Text label) { thread_label = label; }

Text FlightRecorder::label() { return thread_label; }

Text FlightRecorder::text(std::string_view text) {
  std::lock_guard lock(mutex_);
  auto [at, fresh] = numbers_.try_emplace(std::string(text), static_cast<Text>(texts_.size()));
  if (fresh) texts_.push_back(&at->first);  // keys of the map stay where they are
  return at->second;
}

std::string FlightRecorder::text(Text number) const {
  std::lock_guard lock(mutex_);
  return number < texts_.size() ? *texts_[number] : "";
}

std::vector<Record> FlightRecorder::records() const {
  std::vector<Record> all;
  all.reserve(entries_);
  for (size_t i = 0; i < entries_; ++i) {
    Record record;
    if (read(slots_[i], &record)) all.push_back(record);
  }
  std::sort(all.begin(), all.end(), [](const Record& a, const Record& b) { return a.id < b.id; });
  return all;
}

}  // namespace smddp::recorder
