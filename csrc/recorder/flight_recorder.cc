#include "recorder/flight_recorder.h"

#include <algorithm>
#include <bit>

#include "common/env.h"

namespace smddp::recorder {
namespace {

constexpr double kMostEntries = 1 << 20;

thread_local Text thread_label = 0;

size_t entries_from_env() {
  double entries = env::debug_number("flight_recorder").value_or(0);
  return static_cast<size_t>(std::clamp(entries, 0.0, kMostEntries));
}

// The next operation's entry has left this core's nearest cache since it was last written: it is fetched
// while this operation moves its bytes.
void prefetch(const Entry& slot) {
  const char* at = reinterpret_cast<const char*>(&slot);
  __builtin_prefetch(at, 1);
  __builtin_prefetch(at + sizeof(Entry) / 2, 1);
}

// Of an operation that is called: another one, or parts of two, have the same sum by chance only (2^-64). The
// factors are random odd numbers.
uint64_t check_of(uint64_t id, const Call& call, Text label) {
  auto both = [](Text low, Text high) { return uint64_t{high} << 32 | low; };
  return id * 0x9e3779b97f4a7c15 + both(call.group, call.operation) * 0xbf58476d1ce4e5b9 +
         both(call.dtype, label) * 0x94d049bb133111eb + call.sequence * 0xd6e8feb86659fd93 +
         call.bytes * 0xa0761d6478bd642f + call.called_ns * 0xe7037ed1a0b428db;
}

}  // namespace

void write(Entry& slot, uint64_t id, const Call& call, Text label) {
  auto put = [](auto& field, auto value) { field.store(value, std::memory_order_relaxed); };
  put(slot.id, Entry::kPassing);
  // A reader that sees a field of the new operation sees that `id` is no longer the old one's.
  std::atomic_thread_fence(std::memory_order_release);
  put(slot.check, check_of(id, call, label));
  put(slot.state, Entry::tagged(id, State::kQueued));
  put(slot.group, call.group);
  put(slot.operation, call.operation);
  put(slot.dtype, call.dtype);
  put(slot.label, label);
  put(slot.path, Text{0});
  put(slot.sequence, call.sequence);
  put(slot.bytes, call.bytes);
  put(slot.called_ns, call.called_ns);
  for (auto* time : {&slot.started_ns, &slot.first_byte_ns, &slot.ended_ns, &slot.wait_entered_ns,
                     &slot.wait_left_ns}) {
    put(*time, uint64_t{0});
  }
  slot.id.store(id, std::memory_order_release);
}

bool read(const Entry& slot, Record* out) {
  auto get = [](const auto& field) { return field.load(std::memory_order_relaxed); };
  out->id = slot.id.load(std::memory_order_acquire);
  uint64_t check = get(slot.check), state = get(slot.state);
  out->call = {get(slot.group),    get(slot.operation), get(slot.dtype),
               get(slot.sequence), get(slot.bytes),     get(slot.called_ns)};
  out->label = get(slot.label);
  out->path = get(slot.path);
  out->started_ns = get(slot.started_ns);
  out->first_byte_ns = get(slot.first_byte_ns);
  out->ended_ns = get(slot.ended_ns);
  out->wait_entered_ns = get(slot.wait_entered_ns);
  out->wait_left_ns = get(slot.wait_left_ns);
  // The fields are read before the second look at `id`: a seqlock's reader.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (out->id == 0 || out->id == Entry::kPassing || get(slot.id) != out->id) return false;
  out->state = static_cast<State>(state & ((1 << Entry::kStateBits) - 1));
  return state >> Entry::kStateBits == out->id && check == check_of(out->id, out->call, out->label);
}

FlightRecorder::FlightRecorder(size_t entries)
    : entries_(entries),
      slots_size_(std::bit_ceil(entries)),
      slots_(entries > 0 ? new Entry[slots_size_] : nullptr),
      recording_(entries > 0) {
  text("");
}

FlightRecorder& FlightRecorder::process() {
  // Never freed, as threads may write until the process ends.
  static auto* recorder = new FlightRecorder(entries_from_env());
  return *recorder;
}

// One locked instruction: the entry is not owned, but checked by its readers.
Mark FlightRecorder::begin(const Call& call) {
  if (!recording_.load(std::memory_order_relaxed)) return {};
  uint64_t id = begun_.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& slot = slots_[(id - 1) & (slots_size_ - 1)];
  // If this thread, or the entry's writer, was interrupted while others went once around the ring: the
  // operation is left out. Both look now; Entry says what becomes of those who are interrupted after it.
  if (slot.id.load(std::memory_order_relaxed) >= id) return {};
  write(slot, id, call, thread_label);
  prefetch(slots_[id & (slots_size_ - 1)]);
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
  all.reserve(slots_size_);
  for (size_t i = 0; entries_ > 0 && i < slots_size_; ++i) {
    Record record;
    if (read(slots_[i], &record)) all.push_back(record);
  }
  std::sort(all.begin(), all.end(), [](const Record& a, const Record& b) { return a.id < b.id; });
  // Older ones are in entries that the ring has beyond what was asked for, or of a writer that was late.
  uint64_t newest = all.empty() ? 0 : all.back().id;
  std::erase_if(all, [&](const Record& record) { return record.id + entries_ <= newest; });
  return all;
}

}  // namespace smddp::recorder
