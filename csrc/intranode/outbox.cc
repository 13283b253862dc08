#include "intranode/outbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <vector>

#include "common/align.h"
#include "common/clock.h"
#include "common/processor.h"
#include "kernels/reduce.h"

namespace smddp::intranode {
namespace {

// The first bytes of a piece, up to this many, are prefetched: AllGather of 1 KiB 0.75 us for 0.80 (2026-11-21, AMD EPYC).
// Without, AllReduce of 1 KiB takes 1.04 of its time; up to 4 KiB 1.07 (2026-11-29-constants).
constexpr size_t kSmallPiece = 1 << 10;

size_t counts_at() { return align_up(sizeof(OutboxHead), 128); }
size_t slots_at(uint32_t readers) { return counts_at() + kLanes * readers * sizeof(ReadCount); }
size_t bytes_at(uint32_t readers) {
  return align_up(slots_at(readers) + kLanes * kSlots * sizeof(SlotHead), 4096);
}
size_t segment_size(uint32_t readers) { return bytes_at(readers) + kLanes * kSlots * kSlotBytes; }

// The number of a lane's piece `index` among the slots of all lanes.
size_t slot_of(Lane lane, uint64_t index) {
  return static_cast<size_t>(lane) * kSlots + index % kSlots;
}

ReadCount* counts(const Mapping& m, uint32_t readers, Lane lane) {
  return reinterpret_cast<ReadCount*>(m.data() + counts_at()) + static_cast<size_t>(lane) * readers;
}

SlotHead* slot_head(const Mapping& m, uint32_t readers, Lane lane, uint64_t index) {
  return reinterpret_cast<SlotHead*>(m.data() + slots_at(readers)) + slot_of(lane, index);
}

std::byte* slot_bytes(const Mapping& m, uint32_t readers, Lane lane, uint64_t index) {
  return m.data() + bytes_at(readers) + slot_of(lane, index) * kSlotBytes;
}

OutboxHead* head_of(const Mapping& m) { return reinterpret_cast<OutboxHead*>(m.data()); }

// Does not use std::atomic::wait(), which sleeps on a futex private to the process. The kernel compares
// the word with the value that was seen, so the sleep does not miss a reader that attaches in between.
void sleep_on(std::atomic<uint32_t>& attached, uint32_t readers, uint64_t timeout_ns) {
  uint32_t seen = attached.load(std::memory_order_acquire);
  if (seen == readers) return;
  timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000),
                 static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, &attached, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

// The cost of a write past the caches. Measured once per process, in some microseconds.
double streamed_ns_per_byte() {
  static const double cost = [] {
    std::vector<std::byte> from(kSlotBytes, std::byte{1}), to(kSlotBytes, std::byte{1});
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 8; ++i) {
      uint64_t begin = now_ns();
      kernels::copy(to.data(), from.data(), kSlotBytes, true);
      least = std::min(least, now_ns() - begin);
    }
    return static_cast<double>(least) / kSlotBytes;
  }();
  return cost;
}

}  // namespace

Outbox::Outbox() : writes_(streamed_ns_per_byte()) {}

Result<std::unique_ptr<Outbox>> Outbox::create(const JobKey& key, int capacity, uint64_t knows) {
  auto outbox = std::make_unique<Outbox>();
  outbox->capacity_ = static_cast<uint32_t>(capacity);
  if (Status s =
          create_shared("smddp-outbox", segment_size(outbox->capacity_)).into(outbox->shared_);
      !s)
    return s;
  uint64_t value = 0;
  std::memcpy(&value, key.data(), sizeof value);
  outbox->probe_ = value ^ reinterpret_cast<uint64_t>(outbox.get());
  OutboxHead* head = outbox->head();
  head->key = key;
  head->capacity = outbox->capacity_;
  head->probe_address = reinterpret_cast<uint64_t>(&outbox->probe_);
  head->probe_value = outbox->probe_;
  head->knows = knows;
  return outbox;
}

OutboxHead* Outbox::head() const { return head_of(shared_.mapping); }

bool Outbox::all_attached() {
  if (head()->attached.load(std::memory_order_acquire) != readers_) return false;
  if (shared_.fd) shared_.fd = FileDescriptor();
  return true;
}

void Outbox::wait_attached(uint64_t timeout_ns) const {
  sleep_on(head()->attached, readers_, timeout_ns);
}

bool Outbox::any_denied() const { return head()->denied.load(std::memory_order_acquire) != 0; }

std::byte* Outbox::next(Lane lane) {
  const Ring& ring = of(lane);
  if (ring.published - ring.read >= kSlots && ring.published - read_by_all(lane) >= kSlots)
    return nullptr;
  return slot_bytes(shared_.mapping, capacity_, lane, ring.published);
}

void Outbox::publish(Lane lane, const Piece& piece) {
  uint64_t& published = of(lane).published;
  SlotHead* slot = slot_head(shared_.mapping, capacity_, lane, published);
  slot->piece = piece;
  ++published;
  slot->published.store(published, std::memory_order_release);
}

uint64_t Outbox::read_by_all(Lane lane) {
  uint64_t least = published(lane);
  for (uint32_t i = 0; i < readers_; ++i)
    least = std::min(least, read_by(lane, static_cast<int>(i)));
  return of(lane).read = least;
}

uint64_t Outbox::read_by(Lane lane, int reader) const {
  return counts(shared_.mapping, capacity_, lane)[reader].pieces.load(std::memory_order_acquire);
}

void Outbox::abort(const std::string& reason, uint64_t first, GaveUp how) {
  OutboxHead* h = head();
  if (h->aborted.load(std::memory_order_relaxed) != GaveUp::kNo) return;
  std::strncpy(h->reason, reason.c_str(), kReasonBytes - 1);
  h->aborted_from = first;
  h->aborted.store(how, std::memory_order_release);
  // What the owner writes into its memory from now on comes after: see Inbox::gave_up().
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

Result<std::unique_ptr<Inbox>> Inbox::open(int pid, int fd, const JobKey& key, int reader,
                                           int readers, bool allow_single_copy) {
  auto inbox = std::make_unique<Inbox>();
  if (Status s = map_shared(pid, fd, "a rank on this host").into(inbox->mapping_); !s) return s;
  inbox->pid_ = pid;
  inbox->reader_ = static_cast<uint32_t>(reader);
  OutboxHead* head = head_of(inbox->mapping_);
  bool whole = inbox->mapping_.size() >= sizeof(OutboxHead);
  if (whole) inbox->capacity_ = std::atomic_ref(head->capacity).load(std::memory_order_relaxed);
  if (!whole || head->key != key || inbox->mapping_.size() != segment_size(inbox->capacity_) ||
      inbox->reader_ >= inbox->capacity_) {
    return Status(Code::kUnavailable, "the shared segment of process " + std::to_string(pid) +
                                          " does not belong to this group; did a rank restart?");
  }
  uint64_t word = 0;
  Extent from{reinterpret_cast<std::byte*>(head->probe_address), sizeof word};
  Extent to{reinterpret_cast<std::byte*>(&word), sizeof word};
  bool readable = allow_single_copy &&
                  single_copy_read(pid, &from, 1, 0, sizeof word, &to, 1).ok() &&
                  word == head->probe_value;
  if (!readable) head->denied.fetch_add(1, std::memory_order_relaxed);
  // The release publishes `denied` as well.
  uint32_t before = head->attached.fetch_add(1, std::memory_order_release);
  if (before + 1 == static_cast<uint32_t>(readers)) {
    syscall(SYS_futex, &head->attached, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  return inbox;
}

uint64_t Inbox::owner_knows() const { return head_of(mapping_)->knows; }

const Piece* Inbox::head(Lane lane) const {
  Ring& ring = of(lane);
  SlotHead* s = slot_head(mapping_, capacity_, lane, ring.read);
  // Equal, not greater: the owner does not reuse a slot before this reader has popped its piece.
  if (s->published.load(std::memory_order_acquire) != ring.read + 1) return nullptr;
  if (ring.copied == ring.read + 1) return &ring.piece;
  // The caller reads the number of bytes from the piece first. Prefetching the first bytes at the same
  // time saves one cache miss.
  prefetch(reinterpret_cast<const std::byte*>(s) + kCacheLine, sizeof(SlotHead) - kCacheLine);
  prefetch(bytes(lane), kSmallPiece);
  ring.piece = s->piece;
  ring.copied = ring.read + 1;
  return &ring.piece;
}

const std::byte* Inbox::bytes(Lane lane) const {
  return slot_bytes(mapping_, capacity_, lane, of(lane).read);
}

const Extent* Inbox::extents(Lane lane) const {
  return reinterpret_cast<const Extent*>(bytes(lane));
}

void Inbox::pop(Lane lane) {
  uint64_t& read = of(lane).read;
  ++read;
  counts(mapping_, capacity_, lane)[reader_].pieces.store(read, std::memory_order_release);
}

bool Inbox::all_attached(int readers) const {
  return head_of(mapping_)->attached.load(std::memory_order_acquire) ==
         static_cast<uint32_t>(readers);
}

void Inbox::wait_attached(int readers, uint64_t timeout_ns) const {
  sleep_on(head_of(mapping_)->attached, static_cast<uint32_t>(readers), timeout_ns);
}

bool Inbox::any_denied() const {
  return head_of(mapping_)->denied.load(std::memory_order_acquire) != 0;
}

const char* Inbox::aborted() const {
  OutboxHead* head = head_of(mapping_);
  if (head->aborted.load(std::memory_order_acquire) == GaveUp::kNo) return nullptr;
  if (reason_[0] == 0) std::memcpy(reason_, head->reason, sizeof reason_ - 1);
  return reason_;
}

bool Inbox::destroyed() const {
  return head_of(mapping_)->aborted.load(std::memory_order_relaxed) == GaveUp::kDestroyed;
}

uint64_t Inbox::aborted_from() const { return head_of(mapping_)->aborted_from; }

bool Inbox::gave_up(uint64_t seq) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  return aborted() != nullptr && aborted_from() <= seq;
}

}  // namespace smddp::intranode
