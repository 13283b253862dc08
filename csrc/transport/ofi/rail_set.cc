#include "transport/ofi/rail_set.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "common/log.h"

namespace smddp::ofi {
namespace {

// Providers that move chunks by writes unless they are told otherwise. Those over tcp were measured with
// benchmarks/fabric.cc over loopback (libfabric 1.17 and 2.5): from 64 KiB on chunks are faster than messages.
// Over udp;ofi_rxd, which is not listed, they gain nothing. efa and verbs could not be measured: there a write
// saves a copy.
constexpr std::string_view kWriters[] = {"tcp", "tcp;ofi_rxm", "net", "efa", "verbs;ofi_rxm"};

// Whether chunks are written, as `wanted` ("writes", "messages") says, or by default if it is empty. kInvalid for
// another word, kUnavailable if the provider can't write. `emulated`: the provider turns writes into messages of
// its own, with copies; then it counts as one that has no writes.
Result<bool> choose_writes(const fi_info& info, bool emulated, const std::string& wanted) {
  const std::string_view provider = info.fabric_attr->prov_name;
  // A Grant holds keys of 64 bits.
  bool able = !emulated && (info.caps & FI_RMA) != 0 &&
              (info.domain_attr->mr_mode & FI_MR_RAW) == 0 &&
              info.domain_attr->mr_key_size <= sizeof(uint64_t);
  if (wanted == "messages") return false;
  if (wanted == "writes" && !able) {
    return Status(Code::kUnavailable,
                  "provider " + std::string(provider) +
                      " can't do the transfer of SMDDP_DEBUG, 'writes'; leave it unset or ask "
                      "for messages");
  }
  if (wanted == "writes") return true;
  if (!wanted.empty()) {
    return Status(Code::kInvalid,
                  "transfer in SMDDP_DEBUG is '" + wanted + "'; it may be writes or messages");
  }
  return able &&
         std::find(std::begin(kWriters), std::end(kWriters), provider) != std::end(kWriters);
}

}  // namespace

// ---- opening and closing

Result<std::unique_ptr<RailSet>> RailSet::open(const Library& library, const RailChoices& choices,
                                               const std::string& transfer, fi_wait_obj wait,
                                               Counters* counters) {
  std::unique_ptr<RailSet> set(new RailSet(library, counters));
  Status status = set->set_up(choices, transfer, wait);
  if (!status) return status;
  return set;
}

Status RailSet::set_up(const RailChoices& choices, const std::string& transfer, fi_wait_obj wait) {
  if (Status status = limit_sizes(choices); !status) return status;
  bool emulated = false;
  PublishedAddress published;
  for (const Choice& choice : choices) {
    auto rail = Rail::open(library_, choice, static_cast<uint8_t>(rails_.size()), wait,
                           facts_.max_message, counters_);
    if (!rail) return rail.status();
    emulated = emulated || rail.value()->emulates_writes();
    facts_.rails += rails_.empty() ? choice.offer.text() : ", " + choice.offer.place();
    facts_.links += (rails_.empty() ? "" : ", ") + describe_link(choice);
    published.names.push_back(rail.value()->name());
    rails_.push_back(std::move(rail.value()));
  }
  balance_.set_rails(rails_.size());
  Result<bool> writes = choose_writes(*choices[0].info, emulated, transfer);
  if (!writes) return writes.status();
  facts_.writes = published.writes = writes.value();
  facts_.address = pack_address(rails_[0]->info(), published);
  facts_.ip = describe_ip(rails_[0]->name().data(), rails_[0]->name().size()).text;
  facts_.description =
      facts_.rails + ", libfabric " + library_.version_text() + " (" + library_.path + ")";
  facts_.nics = rails_.size();
  facts_.ordered = rails_.size() == 1 && rails_[0]->orders_messages();
  return open_wait_fd();
}

Status RailSet::limit_sizes(const RailChoices& choices) {
  size_t longest = kMaxMessage;
  for (const Choice& choice : choices)
    longest = std::min(longest, choice.info->ep_attr->max_msg_size);
  facts_.max_message = longest / 64 * 64;
  if (facts_.max_message >= kControlMessage) return Status();
  return Status(Code::kUnavailable,
                "its messages hold " + std::to_string(longest) + " bytes, too few");
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

ssize_t RailSet::send(Request* request, const PeerAddress& to, std::span<const std::byte> data) {
  size_t rail = balance_.choose();
  ssize_t rc = rails_[rail]->send(request, to.by_rail[rail], data.data(), data.size());
  count(rail, data.size(), rc, &counters_->messages_sent, &counters_->bytes_sent);
  return rc;
}

ssize_t RailSet::write(Rail& rail, Request* request, const PeerAddress& to,
                       const wire::Grant& grant, uint32_t index, std::span<const std::byte> data,
                       void* descriptor) {
  size_t ours = rail.index();
  ssize_t rc = rail.write(request, to.by_rail[ours], data.data(), data.size(), descriptor,
                          grant.address + uint64_t{index} * grant.chunk_bytes,
                          grant.keys[ours % to.rails], facts_.ordered ? &grant.region : nullptr);
  count(ours, data.size(), rc, &counters_->chunks_sent, &counters_->chunk_bytes_sent);
  return rc;
}

void RailSet::count(size_t rail, size_t bytes, ssize_t rc, uint64_t* starts,
                    uint64_t* started_bytes) {
  if (rc == 0) {
    balance_.sent(rail, bytes);
    ++*starts;
    *started_bytes += bytes;
  } else if (rc == -FI_EAGAIN) {
    ++counters_->retries;
  }
}

Status RailSet::refusal(const char* what, ssize_t rc, const Rail& rail) const {
  int error = static_cast<int>(-rc);
  return {code_of(error),
          std::string(what) + ": " + library_.error_text(error) + " (" + rail.text() + ")"};
}

// ---- memory of devices

Status RailSet::reaches(const MemoryOwner& owner) const {
  if (!facts_.writes)
    return {Code::kUnavailable, facts_.description + " moves no chunks by writes"};
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

}  // namespace smddp::ofi
