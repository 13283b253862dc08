#include "transport/ofi/rail_set.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "common/log.h"
#include "transport/ofi/link.h"
#include "transport/ofi/transfer.h"

namespace smddp::fabric {

// ---- opening and closing

Result<std::unique_ptr<RailSet>> RailSet::open(const Library& library, const RailChoices& choices,
                                               const std::string& transfer, fi_wait_obj wait) {
  std::unique_ptr<RailSet> set(new RailSet(library));
  Status status = set->set_up(choices, transfer, wait);
  if (!status) return status;
  return set;
}

Status RailSet::set_up(const RailChoices& choices, const std::string& transfer, fi_wait_obj wait) {
  if (Status status = limit_sizes(choices); !status) return status;
  bool emulated = false;
  for (const Choice& choice : choices) {
    auto rail = Rail::open(library_, choice, static_cast<uint8_t>(rails_.size()), wait,
                           max_message_, &counters_);
    if (!rail) return rail.status();
    emulated = emulated || rail.value()->emulates_writes();
    rails_text_ += rails_.empty() ? choice.offer.text() : ", " + choice.offer.place();
    links_ += (rails_.empty() ? "" : ", ") + describe_link(choice);
    rails_.push_back(std::move(rail.value()));
  }
  balance_.set_rails(rails_.size());
  const fi_info& info = *choices[0].info;
  Result<Transfer> chosen = choose_transfer(info, emulated, transfer);
  if (!chosen) return chosen.status();
  transfer_ = chosen.value();
  description_ =
      rails_text_ + ", libfabric " + library_.version_text() + " (" + library_.path + ")";
  PublishedAddress published{transfer_, {}};
  for (const std::unique_ptr<Rail>& rail : rails_) published.names.push_back(rail->name());
  address_ = pack_address(rails_[0]->info(), published);
  return open_wait_fd();
}

Status RailSet::limit_sizes(const RailChoices& choices) {
  max_message_ = kMaxMessage;
  max_chunk_ = SIZE_MAX;
  for (const Choice& choice : choices) {
    size_t limit = choice.info->ep_attr->max_msg_size;
    max_message_ = std::min(max_message_, limit / 64 * 64);
    max_chunk_ = std::min(max_chunk_, limit);
  }
  if (max_message_ >= kControlMessage) return Status();
  return Status(Code::kUnavailable,
                "its messages hold " + std::to_string(max_chunk_) + " bytes, too few");
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

bool RailSet::withdraw() {
  bool all = true;
  for (std::unique_ptr<Rail>& rail : rails_) {
    if (rail->withdraw()) continue;
    log(LogLevel::kInfo, "fabric: " + rail->text() + " is left open: a peer stopped in a message");
    (void)rail.release();
    all = false;
  }
  std::erase(rails_, nullptr);
  return all;
}

// ---- peers

Result<PublishedAddress> RailSet::unpack(const std::vector<uint8_t>& published) const {
  return unpack_address(rails_[0]->info(), published, rails_[0]->name().size());
}

Result<PeerAddress> RailSet::insert(const PublishedAddress& peer) {
  const std::vector<std::vector<uint8_t>>& names = peer.names;
  PeerAddress address;
  address.by_rail.fill(FI_ADDR_UNSPEC);
  address.rails = names.size();
  for (size_t ours = 0; ours < rails_.size(); ++ours) {
    for (size_t theirs = 0; theirs < names.size(); ++theirs) {
      bool sends_to = ours % names.size() == theirs, written_by = theirs % rails_.size() == ours;
      if (!sends_to && !written_by) continue;
      Result<fi_addr_t> inserted = rails_[ours]->insert(names[theirs]);
      if (!inserted) return inserted.status();
      if (sends_to) address.by_rail[ours] = inserted.value();
    }
  }
  return address;
}

// ---- the data path: nothing here allocates, locks or formats text except for an error

ssize_t RailSet::send(Slot* slot, const PeerAddress& to, const std::byte* data, size_t bytes) {
  size_t rail = balance_.choose();
  ssize_t rc = rails_[rail]->send(slot, to.by_rail[rail], data, bytes);
  count(rail, bytes, rc, &counters_.messages_sent, &counters_.bytes_sent);
  return rc;
}

// A write goes through any rail of the receiver, as each has a key in the grant. A tagged chunk
// must go to the rail that has posted its receive.
size_t RailSet::rail_of_chunk(const PeerAddress& to, uint32_t index) const {
  if (transfer_ == Transfer::kTagged) return index % std::min(rails_.size(), to.rails);
  return balance_.choose_for_chunk(index);
}

void RailSet::on_chunk_started(const Rail& rail, size_t bytes, ssize_t rc) {
  count(rail.index(), bytes, rc, &counters_.chunks_sent, &counters_.chunk_bytes_sent);
}

void RailSet::count(size_t rail, size_t bytes, ssize_t rc, uint64_t* starts,
                    uint64_t* started_bytes) {
  if (rc == 0) {
    balance_.sent(rail, bytes);
    ++*starts;
    *started_bytes += bytes;
  } else if (rc == -FI_EAGAIN) {
    ++counters_.retries;
  }
}

Status RailSet::refusal(const char* what, ssize_t rc, const Rail& rail) const {
  int error = static_cast<int>(-rc);
  return {code_of(error),
          std::string(what) + ": " + library_.error_text(error) + " (" + rail.text() + ")"};
}

// ---- memory of devices

Status RailSet::reaches(const MemoryOwner& owner) const {
  if (transfer_ != Transfer::kWrites) {
    return {Code::kUnavailable, description_ + " moves no chunks by writes"};
  }
  for (const std::unique_ptr<Rail>& rail : rails_) {
    if (owner.kind == MemoryOwner::Kind::kHost || rail->reaches_devices()) continue;
    return {Code::kUnavailable,
            rail->text() + " does not reach a GPU's memory by itself (FI_HMEM)"};
  }
  return {};
}

void RailSet::lend(const std::byte* at, size_t bytes, const MemoryOwner& owner) {
  for (std::unique_ptr<Rail>& rail : rails_) rail->registrations().lend(at, bytes, owner);
}

void RailSet::take_back(const std::byte* at) {
  for (std::unique_ptr<Rail>& rail : rails_) rail->registrations().take_back(at);
}

// ---- sleeping

bool RailSet::may_sleep() {
  return wait_fd_ >= 0 &&
         std::all_of(rails_.begin(), rails_.end(), [](auto& rail) { return rail->may_sleep(); });
}

bool RailSet::loses_wakeups() const {
  return std::any_of(rails_.begin(), rails_.end(),
                     [](const auto& rail) { return rail->loses_wakeups(); });
}

}  // namespace smddp::fabric
