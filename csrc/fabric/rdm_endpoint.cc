// The data path of an endpoint: nothing here allocates, locks or formats per message.
#include "fabric/rdm_endpoint.h"

#include <algorithm>
#include <bit>
#include <cassert>

#include "common/log.h"
#include "fabric/address.h"

namespace smddp::fabric {
namespace {

constexpr size_t kBatch = 16;  // completions per fi_cq_read
constexpr int kBatches = 4;    // per progress(), so that retries get their turn
constexpr int kShortSleepMs = 5;

}  // namespace

Result<Peer> RdmEndpoint::add_peer(const std::vector<uint8_t>& address) {
  Result<std::vector<uint8_t>> name = unpack_address(*info_, address, name_size_);
  if (!name) return name.status();
  std::string key(name.value().begin(), name.value().end());
  if (auto found = known_.find(key); found != known_.end()) return found->second;
  fi_addr_t inserted = FI_ADDR_UNSPEC;
  int rc = ::fi_av_insert(av_.get(), name.value().data(), 1, &inserted, 0, nullptr);
  if (rc != 1) {
    return Status(Code::kInvalid, "fi_av_insert refused a peer's address: " +
                                      (rc < 0 ? library_.error_text(rc) : "it is damaged"));
  }
  Peer peer = static_cast<Peer>(peers_.size());
  peers_.emplace_back();
  peers_.back().address = inserted;
  stalled_.reserve(peers_.size());
  known_.emplace(std::move(key), peer);
  return peer;
}

// Dynamic threshold (Choudhury and Hahne, 1998) with factor 1.
SendBuffer* RdmEndpoint::acquire(Peer to, bool control) {
  assert(to < peers_.size());
  PeerState& peer = peers_[to];
  SlotQueue& free = free_[control];
  if (peer.held[control] >= free.size()) return nullptr;
  SendSlot* slot = free.pop();
  slot->to = to;
  ++peer.held[control];
  return slot;
}

void RdmEndpoint::release(SendBuffer* buffer) {
  SendSlot* slot = static_cast<SendSlot*>(buffer);
  --peers_[slot->to].held[slot->control];
  free_[slot->control].push(slot);
}

void RdmEndpoint::take_back(SendSlot* slot) {
  --posted_;
  release(slot);
}

void RdmEndpoint::post(SendBuffer* buffer, size_t size) {
  assert(size <= buffer->capacity);
  SendSlot* slot = static_cast<SendSlot*>(buffer);
  PeerState& peer = peers_[slot->to];
  slot->size = size;
  ++posted_;
  if (peer.lost) return take_back(slot);
  if (peer.waiting.empty() && try_send(slot) == 0) return;
  peer.waiting.push(slot);
  if (!peer.listed) {
    peer.listed = true;
    stalled_.push_back(slot->to);
  }
}

int RdmEndpoint::try_send(SendSlot* slot) {
  ssize_t rc = ::fi_send(ep_.get(), slot->data, slot->size, descriptor(), peers_[slot->to].address,
                         &slot->context);
  if (rc == 0) {
    ++counters_.messages_sent;
    counters_.bytes_sent += slot->size;
    return 0;
  }
  if (rc == -FI_EAGAIN) {
    ++counters_.retries;
    return -FI_EAGAIN;
  }
  Peer to = slot->to;
  take_back(slot);
  lose(to, "fi_send: " + library_.error_text(static_cast<int>(rc)));
  return 0;
}

void RdmEndpoint::retry_stalled(int& handled) {
  size_t kept = 0;
  for (size_t i = 0; i < stalled_.size(); ++i) {
    PeerState& peer = peers_[stalled_[i]];
    while (!peer.waiting.empty()) {
      SendSlot* slot = peer.waiting.pop();
      if (try_send(slot) != 0) {
        peer.waiting.push_front(slot);
        break;
      }
      ++handled;
    }
    if (peer.waiting.empty()) {
      peer.listed = false;
    } else {
      stalled_[kept++] = stalled_[i];
    }
  }
  stalled_.resize(kept);
}

void RdmEndpoint::lose(Peer peer, const std::string& why) {
  PeerState& state = peers_[peer];
  if (state.lost) return;
  state.lost = true;
  while (!state.waiting.empty()) take_back(state.waiting.pop());
  losses_.push_back({peer, Status(Code::kPeerLost, why + " (" + description_ + ")")});
}

void RdmEndpoint::post_receive(ReceiveSlot* slot) {
  ssize_t rc =
      ::fi_recv(ep_.get(), slot->data, max_message_, descriptor(), FI_ADDR_UNSPEC, &slot->context);
  if (rc == 0) return;
  unposted_.push_back(slot);
  if (rc != -FI_EAGAIN && broken_.ok()) {
    broken_ = Status(Code::kUnavailable, "fi_recv: " + library_.error_text(static_cast<int>(rc)) +
                                             " (" + description_ + ")");
  }
}

void RdmEndpoint::deliver(ReceiveSlot* slot, size_t size, Sink& sink) {
  ++counters_.messages_received;
  counters_.bytes_received += size;
  sink.on_message(slot->data, std::min(size, max_message_));
  post_receive(slot);
}

Result<int> RdmEndpoint::handle_error() {
  fi_cq_err_entry error = {};
  ssize_t rc = ::fi_cq_readerr(cq_.get(), &error, 0);
  if (rc == -FI_EAGAIN) return 0;
  if (rc < 0) {
    return Status(Code::kInternal, "fi_cq_readerr: " + library_.error_text(static_cast<int>(rc)));
  }
  std::string why = library_.error_text(error.err);
  char text[256] = {};
  const char* detail =
      ::fi_cq_strerror(cq_.get(), error.prov_errno, error.err_data, text, sizeof text - 1);
  if (error.prov_errno != 0 && detail != nullptr && *detail != '\0' && why != detail) {
    why += std::string(", ") + detail;
  }
  Slot* slot = Slot::of(error.op_context);
  if (slot != nullptr && slot->is_send) {
    SendSlot* send = static_cast<SendSlot*>(slot);
    Peer to = send->to;
    take_back(send);
    lose(to, "a message could not be sent: " + why);
    return 1;
  }
  ++counters_.receive_errors;
  if (std::has_single_bit(counters_.receive_errors)) {
    log(LogLevel::kWarning, "fabric: receive error " + std::to_string(counters_.receive_errors) +
                                ": " + why + " (" + description_ + ")");
  }
  if (slot != nullptr) post_receive(static_cast<ReceiveSlot*>(slot));
  return 1;
}

Result<int> RdmEndpoint::progress(Sink& sink) {
  int handled = 0;
  for (size_t n = unposted_.size(); n > 0 && broken_.ok(); --n) {
    ReceiveSlot* slot = unposted_.front();
    unposted_.erase(unposted_.begin());
    post_receive(slot);
  }
  for (int batch = 0; batch < kBatches; ++batch) {
    fi_cq_msg_entry entries[kBatch];
    ssize_t n = ::fi_cq_read(cq_.get(), entries, kBatch);
    if (n == -FI_EAGAIN || n == 0) break;
    if (n == -FI_EAVAIL) {
      Result<int> error = handle_error();
      if (!error) return error;
      handled += error.value();
      continue;
    }
    if (n < 0) {
      return Status(Code::kInternal, "fi_cq_read: " + library_.error_text(static_cast<int>(n)));
    }
    for (ssize_t i = 0; i < n; ++i) {
      Slot* slot = Slot::of(entries[i].op_context);
      if (slot->is_send) {
        take_back(static_cast<SendSlot*>(slot));
      } else {
        deliver(static_cast<ReceiveSlot*>(slot), entries[i].len, sink);
      }
    }
    handled += static_cast<int>(n);
    if (static_cast<size_t>(n) < kBatch) break;
  }
  retry_stalled(handled);
  // The sink may post, and so lose a peer more: told next time.
  std::vector<Loss> losses = std::exchange(losses_, {});
  for (const Loss& loss : losses) sink.on_peer_lost(loss.peer, loss.why);
  handled += static_cast<int>(losses.size());
  if (!broken_.ok()) return broken_;
  return handled;
}

bool RdmEndpoint::may_sleep() {
  if (wait_fd_ < 0 || !unposted_.empty() || !losses_.empty()) return false;
  fid* queue = &cq_->fid;
  return ::fi_trywait(fabric_.get(), &queue, 1) == 0;
}

int RdmEndpoint::sleep_limit_ms() const {
  return loses_wakeups_ || !stalled_.empty() ? kShortSleepMs : -1;
}

}  // namespace smddp::fabric
