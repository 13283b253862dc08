// A rail: one NIC's endpoint with its completion queue, its address vector, its registrations and
// its receive buffers. Starts operations and reaps their completions. Knows nothing of peers, of
// operations that wait for room, and of the meaning of a completion. Called by the classes of this
// room only.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/ofi/provider.h"
#include "transport/ofi/receive_buffers.h"
#include "transport/ofi/registrations.h"
#include "transport/ofi/requests.h"
#include "transport/ofi/resource.h"

namespace smddp::ofi {

struct Completion {
  enum Kind : uint8_t {
    kDone,     // `request`; a receive has `bytes`
    kWritten,  // a peer's write; `bytes` is its immediate data
    kFailed    // `request`, or nullptr: a receive that had none; Rail::error() says why
  } kind;
  Request* request;
  size_t bytes;
};

// Of a refusal or failure by a (positive) fi_errno value: kUnavailable if this process is at a limit of its
// own, whatever the peer does; else kPeerLost.
Code code_of(int error);

class Rail {
 public:
  // Completions per poll(). 4 take as long, 64 up to 1.08 of the time over the loopback (2026-11-29-constants, AMD EPYC).
  static constexpr size_t kBatch = 16;

  // `wait`: FI_WAIT_FD, or FI_WAIT_NONE for a provider that has no file descriptor.
  static Result<std::unique_ptr<Rail>> open(const Library& library, const Choice& choice,
                                            uint8_t index, fi_wait_obj wait, size_t max_message,
                                            Counters* counters);

  size_t index() const { return index_; }  // among the endpoint's rails
  const fi_info& info() const { return *info_; }
  const std::string& text() const { return text_; }  // "tcp;ofi_rxm on lo (127.0.0.1)"
  const std::vector<uint8_t>& name() const { return name_; }
  bool reaches_devices() const { return reaches_devices_; }
  // A message is processed by the peer after the writes that were started before it, which may have immediate data and
  // take no receives for it.
  bool orders_messages() const {
    return (info_->tx_attr->msg_order & info_->rx_attr->msg_order & FI_ORDER_SAW) != 0 &&
           info_->domain_attr->cq_data_size >= sizeof(uint32_t) && !consumes_receives_;
  }
  bool local_registration() const { return (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0; }
  Registrations& registrations() { return *registrations_; }
  ReceiveBuffers& receives() { return receives_; }
  // Registers the send buffers if the provider asks for it.
  Status adopt(const Mapping& sends);

  Result<fi_addr_t> insert(std::span<const uint8_t> name);

  // Start a request: 0, -FI_EAGAIN, or the error that refused it. `descriptor`: of memory that
  // is neither this rail's nor adopted.
  ssize_t send(Request* request, fi_addr_t to, const std::byte* data, size_t bytes);
  // `immediate`: what the peer's Completion::kWritten tells. nullptr: it is not told; then the write completes when the
  // bytes are in the peer's memory, not before.
  ssize_t write(Request* request, fi_addr_t to, const std::byte* data, size_t bytes,
                void* descriptor, uint64_t address, uint64_t key, const uint32_t* immediate);
  ssize_t read(Request* request, fi_addr_t from, std::byte* to, size_t bytes, void* descriptor,
               uint64_t address, uint64_t key);
  void* sends_descriptor() const { return sends_mr_ ? ::fi_mr_desc(sends_mr_.get()) : nullptr; }

  // Takes the receives back, so that the rail may be closed: ofi_rxm crashes (1.17) when it closes
  // while it fetches a large message. False: one is still being fetched, from a peer that has
  // stopped; the rail must then stay open for the rest of the process.
  bool withdraw();

  // Gives the provider the receive buffers that it has refused before. An error here or in poll()
  // ends the rail.
  Status repost_refused();
  Result<size_t> poll(std::span<Completion, kBatch> reaped);
  const Status& error() const { return error_; }

  int wait_fd() const { return wait_fd_; }
  bool may_sleep();
  bool emulates_writes() const { return emulates_writes_; }
  bool loses_wakeups() const { return loses_wakeups_; }

 private:
  Rail(const Library& library, uint8_t index, size_t max_message)
      : library_(library), index_(index), max_message_(max_message) {}
  Status set_up(const Choice& choice, fi_wait_obj wait, Counters* counters);
  Status open_domain();
  Status open_address_vector();
  Status open_queue(fi_wait_obj wait);
  Status open_endpoint();
  Status read_wait_fd();
  void forbid_cuda();
  void set_efa_options();
  Status read_name();
  Status cut_receives();
  Registrar registrar() const;
  Result<MrHandle> pin(const Mapping& slab, uint64_t access);
  Result<size_t> read_error(Completion* failure);
  void describe_error(const fi_cq_err_entry& entry);
  Status receives_status(int rc) const;  // of an fi_recv that returned `rc`

  // In the order of opening; members are destroyed from the last to the first.
  Library library_;
  InfoHandle info_;
  FabricHandle fabric_;
  DomainHandle domain_;
  ReceiveBuffers receives_;
  MrHandle sends_mr_;  // only if the provider asks for FI_MR_LOCAL
  std::unique_ptr<Registrations> registrations_;
  AvHandle av_;
  CqHandle cq_;
  EpHandle ep_;

  uint8_t index_;
  size_t max_message_;
  std::string text_;
  std::vector<uint8_t> name_;
  bool consumes_receives_ = false;  // a write's immediate data takes a posted receive
  int wait_fd_ = -1;
  bool reaches_devices_ = false;  // the NIC reads and writes GPUs' memory by itself
  bool emulates_writes_ = false;
  bool loses_wakeups_ = false;
  Status error_;
};

}  // namespace smddp::ofi
