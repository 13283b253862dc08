// A rail's data path. Nothing here allocates, locks or formats text except for an error.
#include "transport/ofi/rail.h"

#include <rdma/fi_rma.h>
#include <sched.h>

#include <array>
#include <cerrno>
#include <new>

#include "common/clock.h"

namespace smddp::ofi {
namespace {

constexpr uint64_t kWithdrawNs = 200'000'000;

}  // namespace

Code code_of(int error) {
  bool own = error == FI_EMFILE || error == ENFILE || error == FI_ENOMEM;
  return own ? Code::kUnavailable : Code::kPeerLost;
}

ssize_t Rail::send(Request* request, fi_addr_t to, const std::byte* data, size_t bytes) {
  request->rail = index_;
  return ::fi_send(ep_.get(), data, bytes, sends_descriptor(), to, &request->context);
}

ssize_t Rail::write(Request* request, fi_addr_t to, const std::byte* data, size_t bytes,
                    void* descriptor, uint64_t address, uint64_t key, const uint32_t* immediate) {
  request->rail = index_;
  iovec local = {const_cast<std::byte*>(data), bytes};
  fi_rma_iov remote = {address, bytes, key};
  uint64_t told = immediate != nullptr ? *immediate : 0;
  fi_msg_rma message = {&local, &descriptor, 1, to, &remote, 1, &request->context, told};
  uint64_t way = immediate != nullptr ? FI_REMOTE_CQ_DATA : FI_DELIVERY_COMPLETE;
  return ::fi_writemsg(ep_.get(), &message, FI_COMPLETION | way);
}

ssize_t Rail::read(Request* request, fi_addr_t from, std::byte* to, size_t bytes, void* descriptor,
                   uint64_t address, uint64_t key) {
  request->rail = index_;
  return ::fi_read(ep_.get(), to, bytes, descriptor, from, address, key, &request->context);
}

Status Rail::repost_refused() { return receives_status(receives_.repost_refused()); }

Result<size_t> Rail::poll(std::span<Completion, kBatch> reaped) {
  fi_cq_data_entry entries[kBatch];
  ssize_t n = ::fi_cq_read(cq_.get(), entries, kBatch);
  if (n == -FI_EAGAIN || n == 0) return size_t{0};
  if (n == -FI_EAVAIL) return read_error(reaped.data());
  if (n < 0) {
    return Status(Code::kInternal,
                  "fi_cq_read: " + library_.error_text(static_cast<int>(n)) + " (" + text_ + ")");
  }
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    const fi_cq_data_entry& entry = entries[i];
    Request* request = Request::of(entry.op_context);
    if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & (FI_RMA | FI_REMOTE_WRITE)) != 0) {
      // Without FI_RX_CQ_DATA the context belongs to no request of ours; its value has no meaning.
      reaped[i] = {Completion::kWritten, consumes_receives_ ? request : nullptr, entry.data};
    } else {
      reaped[i] = {Completion::kDone, request, entry.len};
    }
    Request* done = reaped[i].request;
    if (done != nullptr && done->kind == Request::Kind::kReceive) receives_.count_completion();
  }
  return static_cast<size_t>(n);
}

Result<size_t> Rail::read_error(Completion* failure) {
  fi_cq_err_entry entry = {};  // zeroed: providers take err_data as an input
  ssize_t rc = ::fi_cq_readerr(cq_.get(), &entry, 0);
  if (rc == -FI_EAGAIN) return size_t{0};
  if (rc < 0) {
    return Status(Code::kInternal, "fi_cq_readerr: " + library_.error_text(static_cast<int>(rc)) +
                                       " (" + text_ + ")");
  }
  *failure = {Completion::kFailed, Request::of(entry.op_context), 0};
  if (failure->request != nullptr && failure->request->kind == Request::Kind::kReceive) {
    receives_.count_completion();
  }
  try {
    describe_error(entry);
  } catch (const std::bad_alloc&) {  // the completion must not be lost
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
    std::array<Completion, kBatch> reaped;
    Result<size_t> count = poll(reaped);
    if (!count) return false;
    if (count.value() == 0) sched_yield();
  }
  return receives_.posted() == 0;
}

bool Rail::may_sleep() {
  if (wait_fd_ < 0 || !receives_.all_posted()) return false;
  fid* queue = &cq_->fid;
  return ::fi_trywait(fabric_.get(), &queue, 1) == 0;
}

}  // namespace smddp::ofi
