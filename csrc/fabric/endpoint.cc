// Opening an endpoint: library, offers, rails.
#include "fabric/endpoint.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <tuple>

#include "common/env.h"
#include "common/log.h"
#include "common/signals.h"
#include "fabric/address.h"
#include "fabric/rail_set.h"
#include "fabric/transfer.h"

namespace smddp::fabric {

Options options_from_env() {
  return {"", env::get("FABRIC_PROVIDER"), env::get("FABRIC_INTERFACE"),
          env::get("FABRIC_TRANSFER"), env::get("FABRIC_HMEM") == "1"};
}

Result<std::unique_ptr<Endpoint>> Endpoint::open(const Options& options) {
  KeepSignalHandlers keep;  // psm's library takes SIGINT, SIGSEGV and others when it is loaded
  Result<Library> library = load_library(options.library);
  if (!library) return library.status();
  Result<std::vector<RailChoices>> choices = choose(library.value(), options);
  if (!choices) return choices.status();
  Status first;  // why the best offer can't be had
  for (const RailChoices& rails : choices.value()) {
    fi_wait_obj wait = rails[0].offer.wakes() ? FI_WAIT_FD : FI_WAIT_NONE;
    auto built = RailSet::open(library.value(), rails, options.transfer, wait);
    if (!built) built = RailSet::open(library.value(), rails, options.transfer, FI_WAIT_NONE);
    if (built) {
      if (!first) log(LogLevel::kWarning, first.message() + "; using " + rails[0].offer.text());
      log(LogLevel::kInfo, "fabric: " + built.value()->description() + ", chunks by " +
                               name_of(built.value()->transfer()));
      return std::unique_ptr<Endpoint>(std::move(built.value()));
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

Result<std::unique_ptr<RailSet>> RailSet::open(const Library& library, const RailChoices& choices,
                                               const std::string& transfer, fi_wait_obj wait) {
  std::unique_ptr<RailSet> set(new RailSet(library));
  Status status = set->set_up(choices, transfer, wait);
  if (!status) return status;
  return set;
}

Status RailSet::set_up(const RailChoices& choices, const std::string& transfer, fi_wait_obj wait) {
  const fi_info& info = *choices[0].info;
  virtual_addresses_ = (info.domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  max_message_ = kMaxMessage;
  max_chunk_ = SIZE_MAX;
  for (const Choice& choice : choices) {
    size_t limit = choice.info->ep_attr->max_msg_size;
    max_message_ = std::min(max_message_, limit / 64 * 64);
    max_chunk_ = std::min(max_chunk_, limit);
  }
  if (max_message_ < kControlMessage) {
    return Status(Code::kUnavailable,
                  "its messages hold " + std::to_string(max_chunk_) + " bytes, too few");
  }
  bool emulated = false;
  PublishedAddress published;
  for (const Choice& choice : choices) {
    auto rail = Rail::open(library_, choice, static_cast<uint8_t>(rails_.size()), wait,
                           max_message_, &counters_);
    if (!rail) return rail.status();
    published.names.push_back(rail.value()->name());
    emulated = emulated || rail.value()->emulates_writes();
    description_ += rails_.empty() ? choice.offer.text() : ", " + choice.offer.place();
    rails_.push_back(std::move(rail.value()));
  }
  balance_.set_rails(rails_.size());
  Result<Transfer> chosen = choose_transfer(info, emulated, transfer);
  if (!chosen) return chosen.status();
  published.transfer = transfer_ = chosen.value();
  description_ += ", libfabric " + library_.version_text();
  address_ = pack_address(info, published);
  if (Status status = open_wait_fd(); !status) return status;
  return cut_sends();
}

Status RailSet::open_wait_fd() {
  wait_fd_ = rails_[0]->wait_fd();
  if (rails_.size() == 1 || wait_fd_ < 0) return Status();
  all_wait_fds_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  wait_fd_ = all_wait_fds_.get();
  for (std::unique_ptr<Rail>& rail : rails_) {
    epoll_event readable = {};
    readable.events = EPOLLIN;
    if (wait_fd_ < 0 || ::epoll_ctl(wait_fd_, EPOLL_CTL_ADD, rail->wait_fd(), &readable) != 0) {
      return Status(Code::kUnavailable,
                    "no epoll instance for its NICs: " + library_.error_text(errno));
    }
  }
  return Status();
}

RailSet::~RailSet() {
  for (std::unique_ptr<Rail>& rail : rails_) {
    if (rail->withdraw()) continue;
    log(LogLevel::kInfo, "fabric: " + rail->text() + " is left open: a peer stopped in a message");
    (void)rail.release();
    // What libfabric may still look at stays with it.
    new auto(std::tuple(std::move(slab_), std::move(sends_), std::move(chunk_sends_),
                        std::move(chunk_receives_), std::move(flush_slab_), std::move(flushes_)));
  }
}

Status RailSet::cut_sends() {
  Result<Slab> slab = Slab::map(kDataSends * max_message_ + kControlSends * kControlMessage);
  if (!slab) return slab.status();
  slab_ = std::move(slab.value());
  for (std::unique_ptr<Rail>& rail : rails_) {
    if (Status status = rail->adopt(slab_); !status) return status;
  }
  sends_.resize(kDataSends + kControlSends);
  std::byte* at = slab_.data();
  for (size_t i = 0; i < sends_.size(); ++i) {
    SendSlot& slot = sends_[i];
    slot.operation = Operation::kSend;
    slot.control = i >= kDataSends;
    slot.data = at;
    slot.capacity = slot.control ? kControlMessage : max_message_;
    at += slot.capacity;
    free_[slot.control].push(&slot);
  }
  if (transfer_ == Transfer::kMessages) return Status();
  chunk_sends_.resize(kChunkSends);
  for (ChunkSendSlot& slot : chunk_sends_) {
    slot.operation = Operation::kChunkSend;
    free_chunk_sends_.push(&slot);
  }
  if (transfer_ != Transfer::kTagged) return Status();
  chunk_receives_.resize(kChunkReceives);
  for (ChunkReceiveSlot& slot : chunk_receives_) {
    slot.operation = Operation::kChunkReceive;
    free_chunk_receives_.push(&slot);
  }
  return Status();
}

}  // namespace smddp::fabric
