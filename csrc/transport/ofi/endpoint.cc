#include "transport/ofi/endpoint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "common/clock.h"
#include "common/descriptors.h"
#include "common/env.h"
#include "common/exceptions.h"
#include "common/log.h"
#include "common/signals.h"
#include "transport/ofi/chunk_sender.h"
#include "transport/ofi/message_sender.h"
#include "transport/ofi/peer_table.h"
#include "transport/ofi/rail_set.h"
#include "transport/ofi/regions.h"
#include "transport/ofi/send_buffers.h"

namespace smddp::ofi {
namespace {

// Per rail and poll(), so that retries get their turn. While a thread drives, 1 and 16 take as long (2026-11-29-constants);
// what has come to a rank that waits for nothing is taken by one poll() in 50 ms.
constexpr int kBatches = 4;
// Where a wake-up may be lost, or a peer's queue is full. Not measured.
constexpr int kShortSleepMs = 5;
// A process has those of its program as well: the usual soft limit of 1,024 is little.
constexpr size_t kDescriptors = 4096;

void count_receive_error(Counters& counters, const std::string& why) {
  uint64_t errors = ++counters.receive_errors;
  if (!std::has_single_bit(errors)) return;
  log(LogLevel::kWarning, "fabric: receive error " + std::to_string(errors) + ": " + why);
}

void count_foreign_write(Counters& counters) {
  if (counters.foreign_writes++ > 0) return;
  log(LogLevel::kWarning, "fabric: a write that no rank of the job makes was ignored");
}

}  // namespace

// ---- opening and closing

Options options_from_env() {
  return {"", env::get("FABRIC_PROVIDER"), env::get("FABRIC_INTERFACE"), env::debug("transfer"),
          env::debug("hmem") == "1"};
}

Result<std::unique_ptr<transport::Transport>> open(const Options& options) {
  auto endpoint = Endpoint::open(options);
  if (!endpoint) return endpoint.status();
  return std::unique_ptr<transport::Transport>(std::move(endpoint.value()));
}

Result<std::unique_ptr<Endpoint>> Endpoint::open(const Options& options) {
  KeepSignalHandlers keep;  // psm's library takes SIGINT, SIGSEGV and others when it is loaded
  Result<Library> library = load_library(options.library);
  if (!library) return library.status();
  Result<std::vector<RailChoices>> choices = choose(library.value(), options);
  if (!choices) return choices.status();
  auto open_over = [&](const RailChoices& rails,
                       fi_wait_obj wait) -> Result<std::unique_ptr<Endpoint>> {
    std::unique_ptr<Endpoint> endpoint(new Endpoint());
    auto set = RailSet::open(library.value(), rails, options.transfer, wait, &endpoint->counters_);
    if (!set) return set.status();
    if (Status status = endpoint->open_rails(std::move(set.value())); !status) return status;
    return endpoint;
  };
  Status first;  // why the best offer can't be opened
  for (const RailChoices& rails : choices.value()) {
    auto built = open_over(rails, rails[0].offer.wakes() ? FI_WAIT_FD : FI_WAIT_NONE);
    if (!built) built = open_over(rails, FI_WAIT_NONE);
    if (built) {
      if (!first) log(LogLevel::kWarning, first.message() + "; using " + rails[0].offer.text());
      const transport::Facts& facts = built.value()->facts();
      log(LogLevel::kInfo,
          "fabric: " + facts.description + ", chunks by " + (facts.writes ? "writes" : "messages"));
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

Endpoint::Endpoint() = default;

Status Endpoint::open_rails(std::unique_ptr<RailSet> rails) {
  rails_ = std::move(rails);
  facts_ = rails_->facts();
  make_room_for_descriptors(kDescriptors, "connections between hosts");
  for (size_t i = 0; i < rails_->size(); ++i) silent_.guard((*rails_)[i].name());
  buffers_ = std::make_unique<SendBuffers>();
  peers_ = std::make_unique<PeerTable>(*rails_, *buffers_);
  messages_ = std::make_unique<MessageSender>(*rails_, *peers_, *buffers_);
  chunks_ = std::make_unique<ChunkSender>(*rails_, *peers_);
  regions_ = std::make_unique<Regions>(*rails_, *peers_);
  return buffers_->set_up(*rails_);
}

Endpoint::~Endpoint() {
  if (!closed_ && rails_) close();
}

bool Endpoint::close() {
  closed_ = true;
  if (rails_->withdraw()) return true;
  // libfabric may still use this memory: it is never freed.
  (void)buffers_.release();
  (void)chunks_.release();
  (void)regions_.release();
  return false;
}

// ---- peers, messages and chunks

Result<Peer> Endpoint::add_peer(const std::vector<uint8_t>& address) {
  return peers_->add(address);
}

void Endpoint::give_up(Peer peer, const std::string& why) {
  peers_->lose(peer, {Code::kPeerLost, why});
}

bool Endpoint::is_lost(Peer peer) const { return (*peers_)[peer].lost; }
bool Endpoint::has_lost_peers() const { return peers_->has_lost(); }

MessageBuffer* Endpoint::acquire(Peer to, bool control) { return buffers_->acquire(to, control); }
void Endpoint::post(MessageBuffer* buffer, size_t size) { messages_->post(buffer, size); }

bool Endpoint::open_region(Peer from, std::byte* memory, size_t bytes, uint32_t* region,
                           wire::Grant* grant) {
  return regions_->open(from, memory, bytes, region, grant);
}
size_t Endpoint::arrived(uint32_t region) const { return regions_->arrived(region); }
bool Endpoint::visible(uint32_t region) { return regions_->visible(region); }
void Endpoint::close_region(uint32_t region, bool abandoned) { regions_->close(region, abandoned); }

bool Endpoint::write(Peer to, const wire::Grant& grant, uint32_t index, const std::byte* data,
                     size_t bytes, uint32_t* pending) {
  return chunks_->write(to, grant, index, data, bytes, pending);
}
void Endpoint::write(MessageBuffer* buffer, const wire::Grant& grant, uint32_t index, size_t bytes,
                     uint32_t* pending) {
  messages_->write(buffer, grant, index, bytes, pending);
}

// ---- lent memory

Status Endpoint::reaches(const MemoryOwner& owner) const { return rails_->reaches(owner); }

Status Endpoint::lend(std::byte* at, size_t bytes, const MemoryOwner& owner) {
  if (Status able = reaches(owner); !able) return able;
  if (Status prepared = regions_->prepare_flushes(); !prepared) return prepared;
  rails_->lend(at, bytes, owner);
  return {};
}

void Endpoint::take_back(std::byte* at) { rails_->take_back(at); }

// ---- progress: nothing here allocates, locks or formats text per message, except for an error

Result<int> Endpoint::poll(Sink& sink) {
  int handled = 0;
  for (size_t i = 0; i < rails_->size(); ++i) {
    Rail& rail = (*rails_)[i];
    if (Status status = rail.repost_refused(); !status) return status;
    for (int batch = 0; batch < kBatches; ++batch) {
      std::array<Completion, Rail::kBatch> completions;
      Result<size_t> reaped = rail.poll(completions);
      if (!reaped) return reaped.status();
      size_t count = reaped.value();
      for (size_t n = 0; n < count; ++n) take(rail, completions[n], sink);
      handled += static_cast<int>(count);
      // After an error, which comes alone, there may be more.
      bool more =
          count == Rail::kBatch || (count == 1 && completions[0].kind == Completion::kFailed);
      if (!more) break;
    }
  }
  silent_.look(recent_ns());
  handled += messages_->retry_stalled();
  regions_->retry();
  return peers_->has_losses() ? handled + peers_->tell_losses(sink) : handled;
}

// An exception must not cost the completions behind this one.
void Endpoint::take(Rail& rail, const Completion& completion, Sink& sink) {
  try {
    handle(rail, completion, sink);
  } catch (...) {
    sink.on_exception(status_of_exception());
  }
}

void Endpoint::handle(Rail& rail, const Completion& completion, Sink& sink) {
  Request* request = completion.request;
  if (completion.kind == Completion::kWritten) {
    if (request != nullptr) rail.receives().repost(static_cast<MessageReceive*>(request));
    return regions_->on_chunk(completion.bytes) ? void() : count_foreign_write(counters_);
  }
  if (completion.kind == Completion::kFailed) return handle_failure(rail, completion);
  switch (request->kind) {
    case Request::Kind::kReceive: {
      auto* receive = static_cast<MessageReceive*>(request);
      deliver(receive->data, std::min(completion.bytes, rails_->max_message()), sink);
      return rail.receives().repost(receive);
    }
    case Request::Kind::kSend:
      return messages_->on_sent(static_cast<MessageSend*>(request));
    case Request::Kind::kWrite:
      return chunks_->on_sent(static_cast<ChunkWrite*>(request));
    case Request::Kind::kFlush:
      return regions_->on_flushed(static_cast<FlushRead*>(request));
  }
}

// An exception must not cost the receive buffer.
void Endpoint::deliver(const std::byte* data, size_t size, Sink& sink) {
  ++counters_.messages_received;
  counters_.bytes_received += size;
  try {
    sink.on_message(data, size);
  } catch (...) {
    sink.on_exception(status_of_exception());
  }
}

void Endpoint::handle_failure(Rail& rail, const Completion& completion) {
  Status why{rail.error().code(), rail.error().message() + " (" + rail.text() + ")"};
  Request* request = completion.request;
  if (request == nullptr) return count_receive_error(counters_, why.message());
  switch (request->kind) {
    case Request::Kind::kReceive:
      count_receive_error(counters_, why.message());
      return rail.receives().repost(static_cast<MessageReceive*>(request));
    case Request::Kind::kSend:
      return messages_->on_failed(static_cast<MessageSend*>(request), why);
    case Request::Kind::kWrite:
      return chunks_->on_failed(static_cast<ChunkWrite*>(request), why);
    case Request::Kind::kFlush:
      return regions_->on_flush_failed(static_cast<FlushRead*>(request), why);
  }
}

bool Endpoint::idle() const { return buffers_->idle() && chunks_->idle() && regions_->idle(); }

// ---- sleeping

int Endpoint::wait_fd() const { return rails_->wait_fd(); }

// ofi_rxm loses a wake-up now and then while it connects or moves a large message, and only poll() retries the
// messages in a FIFO.
int Endpoint::sleep_limit_ms() {
  bool waits =
      peers_->has_losses() || regions_->waits() || (wait_fd() >= 0 && !rails_->may_sleep());
  if (waits) return 1;
  return rails_->loses_wakeups() || !peers_->stalled().empty() ? kShortSleepMs : -1;
}

}  // namespace smddp::ofi
