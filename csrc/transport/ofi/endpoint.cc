#include "transport/ofi/endpoint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "common/env.h"
#include "common/exceptions.h"
#include "common/log.h"
#include "common/signals.h"
#include "transport/ofi/chunk_receiver.h"
#include "transport/ofi/chunk_sender.h"
#include "transport/ofi/message_sender.h"
#include "transport/ofi/peer_table.h"
#include "transport/ofi/rail_set.h"
#include "transport/ofi/send_buffers.h"
#include "transport/ofi/slots.h"
#include "transport/ofi/transfer.h"

namespace smddp::fabric {
namespace {

constexpr int kBatches = 4;  // per rail and progress(), so that retries get their turn
constexpr int kShortSleepMs = 5;

void count_receive_error(Counters& counters, const std::string& why) {
  uint64_t errors = ++counters.receive_errors;
  if (!std::has_single_bit(errors)) return;
  log(LogLevel::kWarning, "fabric: receive error " + std::to_string(errors) + ": " + why);
}

}  // namespace

// ---- opening and closing

Options options_from_env() {
  return {"",
          env::get("FABRIC_PROVIDER"),
          env::get("FABRIC_INTERFACE"),
          env::debug("transfer"),
          env::debug("hmem") == "1",
          nullptr};
}

Result<std::unique_ptr<Endpoint>> Endpoint::open(const Options& options) {
  KeepSignalHandlers keep;  // psm's library takes SIGINT, SIGSEGV and others when it is loaded
  Result<Library> library =
      options.opened != nullptr ? *options.opened : load_library(options.library);
  if (!library) return library.status();
  Result<std::vector<RailChoices>> choices = choose(library.value(), options);
  if (!choices) return choices.status();
  auto open_over = [&](const RailChoices& rails,
                       fi_wait_obj wait) -> Result<std::unique_ptr<Endpoint>> {
    auto set = RailSet::open(library.value(), rails, options.transfer, wait);
    if (!set) return set.status();
    std::unique_ptr<Endpoint> endpoint(new Endpoint(std::move(set.value())));
    Status status = endpoint->buffers_->set_up(*endpoint->rails_);
    if (!status) return status;
    return endpoint;
  };
  Status first;  // why the best offer can't be opened
  for (const RailChoices& rails : choices.value()) {
    auto built = open_over(rails, rails[0].offer.wakes() ? FI_WAIT_FD : FI_WAIT_NONE);
    if (!built) built = open_over(rails, FI_WAIT_NONE);
    if (built) {
      if (!first) log(LogLevel::kWarning, first.message() + "; using " + rails[0].offer.text());
      log(LogLevel::kInfo, "fabric: " + built.value()->description() + ", chunks by " +
                               name_of(built.value()->transfer()));
      return built;
    }
    if (built.status().code() == Code::kInvalid) return built.status();
    if (first.ok()) {
      first = Status(Code::kUnavailable,
                     rails[0].offer.text() + " can't be opened (" + built.status().message() + ")");
    }
  }
  return Status(Code::kUnavailable, first.message() +
                                        "; name another in SMDDP_FABRIC_PROVIDER or "
                                        "SMDDP_FABRIC_INTERFACE");
}

Endpoint::Endpoint(std::unique_ptr<RailSet> rails)
    : buffers_(std::make_unique<SendBuffers>()),
      peers_(std::make_unique<PeerTable>(*rails, *buffers_)),
      messages_(std::make_unique<MessageSender>(*rails, *peers_, *buffers_)),
      chunk_sender_(std::make_unique<ChunkSender>(*rails, *peers_)),
      chunk_receiver_(std::make_unique<ChunkReceiver>(*rails, *peers_)),
      rails_(std::move(rails)) {}

Endpoint::~Endpoint() {
  if (!withdrawn_) withdraw();
}

bool Endpoint::withdraw() {
  withdrawn_ = true;
  if (rails_->withdraw()) return true;
  // libfabric may still use this memory: it is never freed.
  (void)buffers_.release();
  (void)chunk_sender_.release();
  (void)chunk_receiver_.release();
  return false;
}

const std::vector<uint8_t>& Endpoint::address() const { return rails_->address(); }
const std::string& Endpoint::rails_text() const { return rails_->rails_text(); }

const std::string& Endpoint::description() const { return rails_->description(); }

const std::string& Endpoint::links() const { return rails_->links(); }

std::string Endpoint::ip() const {
  const std::vector<uint8_t>& name = (*rails_)[0].name();
  return describe_ip(name.data(), name.size()).text;
}
size_t Endpoint::rails() const { return rails_->size(); }
size_t Endpoint::max_message() const { return rails_->max_message(); }
Transfer Endpoint::transfer() const { return rails_->transfer(); }
bool Endpoint::orders_messages() const { return rails_->orders_messages(); }
const Counters& Endpoint::counters() const { return rails_->counters(); }

Result<Peer> Endpoint::add_peer(const std::vector<uint8_t>& address) {
  return peers_->add(address);
}

void Endpoint::give_up(Peer peer, const std::string& why) {
  peers_->lose(peer, {Code::kPeerLost, why});
}

bool Endpoint::is_lost(Peer peer) const { return (*peers_)[peer].lost; }

bool Endpoint::has_lost_peers() const { return peers_->has_lost(); }

// ---- lent memory

Status Endpoint::reaches(const MemoryOwner& owner) const { return rails_->reaches(owner); }

Status Endpoint::lend(std::byte* at, size_t bytes, const MemoryOwner& owner) {
  if (Status able = reaches(owner); !able) return able;
  if (Status prepared = chunk_receiver_->prepare_flushes(); !prepared) return prepared;
  rails_->lend(at, bytes, owner);
  return {};
}

void Endpoint::take_back(std::byte* at) { rails_->take_back(at); }

// ---- progress: nothing here allocates, locks or formats text per message, except for an error

Result<int> Endpoint::progress(Sink& sink) {
  Result<int> reaped = poll_rails(sink);
  if (!reaped) return reaped.status();
  int handled = reaped.value() + messages_->retry_stalled();
  chunk_receiver_->retry();
  return peers_->has_losses() ? handled + peers_->tell_losses(sink) : handled;
}

Result<int> Endpoint::poll_rails(Sink& sink) {
  int handled = 0;
  for (size_t i = 0; i < rails_->size(); ++i) {
    Rail& rail = (*rails_)[i];
    if (Status status = rail.repost_refused(); !status) return status;
    for (int batch = 0; batch < kBatches; ++batch) {
      std::array<Event, Rail::kBatch> events;
      Result<size_t> reaped = rail.poll(events);
      if (!reaped) return reaped.status();
      size_t count = reaped.value();
      for (size_t n = 0; n < count; ++n) take(rail, events[n], sink);
      handled += static_cast<int>(count);
      // After an error, which comes alone, there may be more.
      bool more = count == Rail::kBatch || (count == 1 && events[0].kind == Event::kFailed);
      if (!more) break;
    }
  }
  return handled;
}

// An exception must not cost the events behind this one.
void Endpoint::take(Rail& rail, const Event& event, Sink& sink) {
  try {
    handle(rail, event, sink);
  } catch (...) {
    sink.on_exception(status_of_exception());
  }
}

void Endpoint::handle(Rail& rail, const Event& event, Sink& sink) {
  if (event.kind == Event::kWritten) {
    if (event.slot != nullptr) rail.receives().repost(static_cast<ReceiveSlot*>(event.slot));
    return count_foreign_write();
  }
  if (event.kind == Event::kFailed) return handle_failure(rail, event);
  switch (event.slot->kind) {
    case SlotKind::kReceive: {
      ReceiveSlot* slot = static_cast<ReceiveSlot*>(event.slot);
      deliver(slot->data, std::min(event.bytes, max_message()), sink);
      return rail.receives().repost(slot);
    }
    case SlotKind::kSend:
      return messages_->on_sent(static_cast<SendSlot*>(event.slot));
    case SlotKind::kChunkSend:
      return chunk_sender_->on_sent(static_cast<ChunkSendSlot*>(event.slot));
    case SlotKind::kChunkReceive:
      return chunk_receiver_->on_received(static_cast<ChunkReceiveSlot*>(event.slot), event.bytes);
    case SlotKind::kFlush:
      return chunk_receiver_->on_flushed(static_cast<FlushSlot*>(event.slot));
  }
}

// An exception must not cost the receive buffer.
void Endpoint::deliver(const std::byte* data, size_t size, Sink& sink) {
  Counters& counters = rails_->counters();
  ++counters.messages_received;
  counters.bytes_received += size;
  try {
    sink.on_message(data, size);
  } catch (...) {
    sink.on_exception(status_of_exception());
  }
}

void Endpoint::handle_failure(Rail& rail, const Event& event) {
  Status why{rail.error().code(), rail.error().message() + " (" + rail.text() + ")"};
  if (event.slot == nullptr) return count_receive_error(rails_->counters(), why.message());
  switch (event.slot->kind) {
    case SlotKind::kReceive:
      count_receive_error(rails_->counters(), why.message());
      return rail.receives().repost(static_cast<ReceiveSlot*>(event.slot));
    case SlotKind::kChunkReceive:
      if (chunk_receiver_->on_receive_failed(static_cast<ChunkReceiveSlot*>(event.slot)))
        count_receive_error(rails_->counters(), why.message());
      return;
    case SlotKind::kSend:
      return messages_->on_failed(static_cast<SendSlot*>(event.slot), why);
    case SlotKind::kChunkSend:
      return chunk_sender_->on_failed(static_cast<ChunkSendSlot*>(event.slot), why);
    case SlotKind::kFlush:
      return chunk_receiver_->on_flush_failed(static_cast<FlushSlot*>(event.slot), why);
  }
}

void Endpoint::count_foreign_write() {
  if (rails_->counters().foreign_chunks++ > 0) return;
  log(LogLevel::kWarning, "fabric: a write that no rank of the job makes was ignored");
}

bool Endpoint::idle() const {
  return buffers_->idle() && chunk_sender_->idle() && chunk_receiver_->idle();
}

// ---- sleeping

int Endpoint::wait_fd() const { return rails_->wait_fd(); }

bool Endpoint::may_sleep() {
  return !peers_->has_losses() && !chunk_receiver_->waits() && rails_->may_sleep();
}

int Endpoint::sleep_limit_ms() const {
  return rails_->loses_wakeups() || !peers_->stalled().empty() ? kShortSleepMs : -1;
}

}  // namespace smddp::fabric
