// A rail's data path. Nothing here allocates, locks or formats text except for an error.
#include "transport/ofi/rail.h"

#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <sched.h>

#include <array>
#include <cerrno>
#include <new>

#include "common/clock.h"

namespace smddp::fabric {
namespace {

constexpr uint64_t kWithdrawNs = 200'000'000;

}  // namespace

Code code_of(int error) {
  bool own = error == FI_EMFILE || error == ENFILE || error == FI_ENOMEM;
  return own ? Code::kUnavailable : Code::kPeerLost;
}

ssize_t Rail::send(Slot* slot, fi_addr_t to, const std::byte* data, size_t bytes) {
  slot->rail = index_;
  return ::fi_send(ep_.get(), data, bytes, sends_descriptor(), to, &slot->context);
}

ssize_t Rail::write(Slot* slot, fi_addr_t to, const std::byte* data, size_t bytes, void* descriptor,
                    uint64_t address, uint64_t key, bool delivered) {
  slot->rail = index_;
  if (!delivered) {
    return ::fi_write(ep_.get(), data, bytes, descriptor, to, address, key, &slot->context);
  }
  iovec local = {const_cast<std::byte*>(data), bytes};
  fi_rma_iov remote = {address, bytes, key};
  fi_msg_rma message = {&local, &descriptor, 1, to, &remote, 1, &slot->context, 0};
  return ::fi_writemsg(ep_.get(), &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
}

ssize_t Rail::read(Slot* slot, fi_addr_t from, std::byte* to, size_t bytes, void* descriptor,
                   uint64_t address, uint64_t key) {
  slot->rail = index_;
  return ::fi_read(ep_.get(), to, bytes, descriptor, from, address, key, &slot->context);
}

ssize_t Rail::send_tagged(Slot* slot, fi_addr_t to, const std::byte* data, size_t bytes,
                          void* descriptor, uint64_t tag) {
  slot->rail = index_;
  return ::fi_tsend(ep_.get(), data, bytes, descriptor, to, tag, &slot->context);
}

ssize_t Rail::receive_tagged(Slot* slot, std::byte* data, size_t bytes, void* descriptor,
                             uint64_t tag) {
  slot->rail = index_;
  return ::fi_trecv(ep_.get(), data, bytes, descriptor, FI_ADDR_UNSPEC, tag, 0, &slot->context);
}

Status Rail::repost_refused() { return receives_status(receives_.repost_refused()); }

Result<size_t> Rail::poll(std::span<Event, kBatch> events) {
  fi_cq_data_entry entries[kBatch];
  ssize_t n = ::fi_cq_read(cq_.get(), entries, kBatch);
  if (n == -FI_EAGAIN || n == 0) return size_t{0};
  if (n == -FI_EAVAIL) return read_error(events.data());
  if (n < 0) {
    return Status(Code::kInternal,
                  "fi_cq_read: " + library_.error_text(static_cast<int>(n)) + " (" + text_ + ")");
  }
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    const fi_cq_data_entry& entry = entries[i];
    Slot* slot = Slot::of(entry.op_context);
    if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & (FI_RMA | FI_REMOTE_WRITE)) != 0) {
      // Without FI_RX_CQ_DATA the context belongs to no slot; its value has no meaning.
      events[i] = {Event::kWritten, consumes_receives_ ? slot : nullptr, entry.len};
    } else {
      events[i] = {Event::kDone, slot, entry.len};
    }
    Slot* done = events[i].slot;
    if (done != nullptr && done->kind == SlotKind::kReceive) receives_.count_completion();
  }
  return static_cast<size_t>(n);
}

Result<size_t> Rail::read_error(Event* event) {
  fi_cq_err_entry entry = {};  // zeroed: providers take err_data as an input
  ssize_t rc = ::fi_cq_readerr(cq_.get(), &entry, 0);
  if (rc == -FI_EAGAIN) return size_t{0};
  if (rc < 0) {
    return Status(Code::kInternal, "fi_cq_readerr: " + library_.error_text(static_cast<int>(rc)) +
                                       " (" + text_ + ")");
  }
  *event = {Event::kFailed, Slot::of(entry.op_context), 0};
  if (event->slot != nullptr && event->slot->kind == SlotKind::kReceive) {
    receives_.count_completion();
  }
  try {
    describe_error(entry);
  } catch (const std::bad_alloc&) {  // the event must not be lost
    error_ = {code_of(entry.err), ""};
  }
  return size_t{1};
}

void Rail::describe_error(const fi_cq_err_entry& entry) {
  std::string why = library_.error_text(entry.err);
  char text[256] = {};
  const char* detail =
      ::fi_cq_strerror(cq_.get(), entry.prov_errno, entry.err_data, text, sizeof text - 1);
  if (entry.prov_errno != 0 && detail != nullptr && *detail != '\0' && why != detail) {
    why += std::string(", ") + detail;
  }
  error_ = {code_of(entry.err), why};
}

bool Rail::withdraw() {
  if (!loses_wakeups_) return true;  // not ofi_rxm
  receives_.cancel_all();
  for (uint64_t until = now_ns() + kWithdrawNs; receives_.posted() > 0 && now_ns() < until;) {
    std::array<Event, kBatch> events;
    Result<size_t> reaped = poll(events);
    if (!reaped) return false;
    if (reaped.value() == 0) sched_yield();
  }
  return receives_.posted() == 0;
}

bool Rail::may_sleep() {
  if (wait_fd_ < 0 || !receives_.all_posted()) return false;
  fid* queue = &cq_->fid;
  return ::fi_trywait(fabric_.get(), &queue, 1) == 0;
}

}  // namespace smddp::fabric
