// The Endpoint over one libfabric RDM endpoint.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/buffers.h"
#include "fabric/endpoint.h"
#include "fabric/provider.h"
#include "fabric/resource.h"

namespace smddp::fabric {

class RdmEndpoint final : public Endpoint {
 public:
  // `wait`: FI_WAIT_FD, or FI_WAIT_NONE for a provider that has no file descriptor.
  static Result<std::unique_ptr<RdmEndpoint>> build(const Library& library, const Choice& choice,
                                                    fi_wait_obj wait);

  const std::vector<uint8_t>& address() const override { return address_; }
  const std::string& description() const override { return description_; }
  size_t max_message() const override { return max_message_; }
  const Counters& counters() const override { return counters_; }
  Result<Peer> add_peer(const std::vector<uint8_t>& address) override;
  SendBuffer* acquire(Peer to, bool control) override;
  void post(SendBuffer* buffer, size_t size) override;
  void release(SendBuffer* buffer) override;
  Transfer transfer() const override { return Transfer::kMessages; }
  bool open_landing(Peer, std::byte*, size_t, size_t, Inflow*, wire::Grant*) override {
    return false;
  }
  void close_landing(uint32_t, bool) override {}
  bool send_chunk(Peer, const wire::Grant&, uint32_t, const std::byte*, size_t,
                  uint32_t*) override {
    return false;
  }
  void post_chunk(SendBuffer* buffer, const wire::Grant&, uint32_t, size_t) override {
    release(buffer);
  }
  Result<int> progress(Sink& sink) override;
  bool idle() const override { return posted_ == 0; }
  int wait_fd() const override { return wait_fd_; }
  bool may_sleep() override;
  int sleep_limit_ms() const override;

 private:
  struct PeerState {
    fi_addr_t address = FI_ADDR_UNSPEC;
    SlotQueue waiting;
    size_t held[2] = {0, 0};  // buffers acquired and not back yet: data, control
    bool lost = false;
    bool listed = false;  // in stalled_
  };
  struct Loss {
    Peer peer;
    Status why;
  };

  explicit RdmEndpoint(const Library& library) : library_(library) {}
  Status set_up(const Choice& choice, fi_wait_obj wait);
  Status open_objects(fi_wait_obj wait);
  Status read_address();
  Status cut_buffers();

  // 0, -FI_EAGAIN, or 0 with the peer marked lost where libfabric refused for good.
  int try_send(SendSlot* slot);
  void retry_stalled(int& handled);
  void take_back(SendSlot* slot);
  void lose(Peer peer, const std::string& why);
  void deliver(ReceiveSlot* slot, size_t size, Sink& sink);
  void post_receive(ReceiveSlot* slot);
  Result<int> handle_error();
  void* descriptor() const { return mr_ ? ::fi_mr_desc(mr_.get()) : nullptr; }

  // In the order of opening; members are destroyed from the last to the first.
  Library library_;
  InfoHandle info_;
  FabricHandle fabric_;
  DomainHandle domain_;
  Slab slab_;
  std::vector<ReceiveSlot> receives_;
  std::vector<SendSlot> sends_;
  MrHandle mr_;  // of the slab, where the provider asks for FI_MR_LOCAL
  AvHandle av_;
  CqHandle cq_;
  EpHandle ep_;

  std::vector<uint8_t> address_;
  size_t name_size_ = 0;
  std::string description_;
  size_t max_message_ = 0;
  int wait_fd_ = -1;
  bool loses_wakeups_ = false;
  Counters counters_;

  SlotQueue free_[2];            // data, control
  size_t posted_ = 0;            // sends with libfabric or in a FIFO
  std::deque<PeerState> peers_;  // grows during callbacks; elements stay where they are
  std::unordered_map<std::string, Peer> known_;
  std::vector<Peer> stalled_;  // peers whose FIFO is not empty
  std::vector<ReceiveSlot*> unposted_;
  std::vector<Loss> losses_;  // to be told at the next progress()
  Status broken_;             // the endpoint as a whole
};

}  // namespace smddp::fabric
