// The provider's endpoints: operations leave through a NIC, arrive at another, and complete.
#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/simulated/objects.h"

namespace smddp::fabric::simulated {
namespace {

Network& network() { return *world().network; }

Ep* of(uint64_t name) {
  auto found = world().endpoints.find(name);
  return found != world().endpoints.end() ? found->second : nullptr;
}

// An operation on its way. It becomes an event three times: when its first byte reaches the receiver's NIC,
// when it has been received as a whole, and when its sender hears of it. The sender's memory is read when it
// has been received, that of a message when it leaves.
struct Transfer {
  enum class Kind : uint8_t { kMessage, kWrite, kRead } kind;
  uint64_t from, to;  // names of endpoints
  const std::byte* data;
  size_t bytes;
  uint64_t address = 0, key = 0;
  void* context = nullptr;
  bool delivered = false;  // the sender hears of it a latency after it has been received
  std::vector<std::byte> copy = {};
  int error = 0;
};

class Step : public Action {
 public:
  explicit Step(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}

 protected:
  std::unique_ptr<Transfer> transfer_;
};

class Completed final : public Step {
 public:
  using Step::Step;
  void run() override {
    Ep* from = of(transfer_->from);
    if (from == nullptr) return;
    uint64_t flags = transfer_->kind == Transfer::Kind::kMessage ? FI_MSG | FI_SEND
                     : transfer_->kind == Transfer::Kind::kWrite ? FI_RMA | FI_WRITE
                                                                 : FI_RMA | FI_READ;
    complete(*from, transfer_->context, flags, 0, transfer_->error);
  }
};

// The receiver's registration that opens the memory of a write or read, or nullptr.
const Registered* opened(const Transfer& transfer) {
  auto found = world().registrations.find(transfer.key);
  if (found == world().registrations.end()) return nullptr;
  const Registered& mr = *found->second;
  bool inside =
      transfer.address >= mr.base && transfer.address + transfer.bytes <= mr.base + mr.bytes;
  return inside ? &mr : nullptr;
}

class Received final : public Step {
 public:
  using Step::Step;
  void run() override {
    Transfer& transfer = *transfer_;
    Ep* to = of(transfer.to);
    if (to == nullptr) {
      transfer.error = FI_ECONNRESET;
    } else if (transfer.kind == Transfer::Kind::kMessage) {
      take(*to, transfer.data, transfer.bytes);
    } else if (opened(transfer) == nullptr) {
      transfer.error = FI_EKEYREJECTED;
    } else if (transfer.kind == Transfer::Kind::kRead) {
      std::memcpy(const_cast<std::byte*>(transfer.data), reinterpret_cast<void*>(transfer.address),
                  transfer.bytes);
    } else if (network().model().moves_writes && of(transfer.from) != nullptr) {
      std::memcpy(reinterpret_cast<void*>(transfer.address), transfer.data, transfer.bytes);
    }
    double back = transfer.delivered ? network().model().latency_ns : 0;
    network().at(network().now() + static_cast<uint64_t>(back),
                 std::make_unique<Completed>(std::move(transfer_)));
  }
};

class Arrives final : public Step {
 public:
  using Step::Step;
  void run() override {
    Ep* to = of(transfer_->to);
    uint64_t all = network().now();
    if (to != nullptr)
      all = network().receive(network().host_of(to->process), to->nic, transfer_->bytes);
    network().at(all, std::make_unique<Received>(std::move(transfer_)));
  }
};

ssize_t start(fid_ep* raw, std::unique_ptr<Transfer> transfer, fi_addr_t to) {
  Ep* ep = static_cast<Ep*>(raw);
  if (to >= ep->av->names.size()) return -FI_EINVAL;
  transfer->from = ep->name;
  transfer->to = ep->av->names[to];
  Counters& counters = network().counters();
  network().charge(network().model().message_ns);
  if (transfer->kind == Transfer::Kind::kMessage) {
    transfer->copy.assign(transfer->data, transfer->data + transfer->bytes);
    transfer->data = transfer->copy.data();
    ++counters.messages;
    counters.message_bytes += transfer->bytes;
  } else {
    ++counters.writes;
    counters.write_bytes += transfer->bytes;
  }
  uint64_t first = network().leave(ep->nic, transfer->bytes);
  network().at(first, std::make_unique<Arrives>(std::move(transfer)));
  return 0;
}

std::unique_ptr<Transfer> transfer_of(Transfer::Kind kind, const void* data, size_t bytes,
                                      void* context) {
  auto transfer = std::make_unique<Transfer>();
  transfer->kind = kind;
  transfer->data = static_cast<const std::byte*>(data);
  transfer->bytes = bytes;
  transfer->context = context;
  return transfer;
}

ssize_t send(fid_ep* ep, const void* data, size_t bytes, void*, fi_addr_t to, void* context) {
  return start(ep, transfer_of(Transfer::Kind::kMessage, data, bytes, context), to);
}

ssize_t write(fid_ep* ep, const void* data, size_t bytes, void*, fi_addr_t to, uint64_t address,
              uint64_t key, void* context) {
  auto transfer = transfer_of(Transfer::Kind::kWrite, data, bytes, context);
  transfer->address = address;
  transfer->key = key;
  return start(ep, std::move(transfer), to);
}

ssize_t write_message(fid_ep* ep, const fi_msg_rma* message, uint64_t flags) {
  const iovec& local = message->msg_iov[0];
  auto transfer =
      transfer_of(Transfer::Kind::kWrite, local.iov_base, local.iov_len, message->context);
  transfer->address = message->rma_iov[0].addr;
  transfer->key = message->rma_iov[0].key;
  transfer->delivered = (flags & FI_DELIVERY_COMPLETE) != 0;
  return start(ep, std::move(transfer), message->addr);
}

ssize_t read(fid_ep* ep, void* to, size_t bytes, void*, fi_addr_t from, uint64_t address,
             uint64_t key, void* context) {
  auto transfer = transfer_of(Transfer::Kind::kRead, to, bytes, context);
  transfer->address = address;
  transfer->key = key;
  return start(ep, std::move(transfer), from);
}

ssize_t receive(fid_ep* raw, void* data, size_t bytes, void*, fi_addr_t, void* context) {
  Ep* ep = static_cast<Ep*>(raw);
  ep->receives.push_back({data, bytes, context});
  if (!ep->waiting.empty()) {
    Waiting first = std::move(ep->waiting.front());
    ep->waiting.pop_front();
    take(*ep, first.data.data(), first.data.size());
  }
  return 0;
}

ssize_t cancel(fid* object, void* context) {
  Ep* ep = static_cast<Ep*>(reinterpret_cast<fid_ep*>(object));
  auto found = std::find_if(ep->receives.begin(), ep->receives.end(),
                            [&](const PostedReceive& r) { return r.context == context; });
  if (found == ep->receives.end()) return -FI_ENOENT;
  ep->receives.erase(found);
  complete(*ep, context, FI_RECV, 0, FI_ECANCELED);
  return 0;
}

int set_option(fid*, int, int, const void*, size_t) { return 0; }

// The only one that is asked for: whether the provider emulates writes.
int get_option(fid*, int, int, void* value, size_t* size) {
  *static_cast<bool*>(value) = false;
  *size = sizeof(bool);
  return 0;
}

int name(fid* object, void* address, size_t* size) {
  size_t room = *size;
  *size = 32;  // as long as efa's
  if (room < 32) return -FI_ETOOSMALL;
  std::memset(address, 0, 32);
  std::memcpy(address, &static_cast<Ep*>(reinterpret_cast<fid_ep*>(object))->name,
              sizeof(uint64_t));
  return 0;
}

}  // namespace

void complete(Ep& ep, void* context, uint64_t flags, size_t bytes, int error) {
  fi_cq_err_entry entry = {};
  entry.op_context = context;
  entry.flags = flags;
  entry.len = bytes;
  entry.err = entry.prov_errno = error;
  ep.cq->ready.push_back(entry);
  network().wake(ep.process, network().now());
}

void take(Ep& ep, const std::byte* data, size_t bytes) {
  if (ep.receives.empty() || !ep.waiting.empty()) {
    ++network().counters().waiting_messages;
    ep.waiting.push_back({{data, data + bytes}});
    if (ep.receives.empty()) return;
  }
  PostedReceive receive = ep.receives.front();
  ep.receives.pop_front();
  if (!ep.waiting.empty()) {  // this message went behind those that wait
    Waiting first = std::move(ep.waiting.front());
    ep.waiting.pop_front();
    std::memcpy(receive.data, first.data.data(), std::min(first.data.size(), receive.bytes));
    return complete(ep, receive.context, FI_MSG | FI_RECV, first.data.size(), 0);
  }
  std::memcpy(receive.data, data, std::min(bytes, receive.bytes));
  complete(ep, receive.context, FI_MSG | FI_RECV, bytes, bytes > receive.bytes ? FI_ETRUNC : 0);
}

int open_endpoint(fid_domain* domain, fi_info*, fid_ep** out, void*) {
  static auto general = own::table<fi_ops_ep>([](fi_ops_ep& ep) {
    ep.cancel = cancel;
    ep.setopt = set_option;
    ep.getopt = get_option;
  });
  static auto names = own::table<fi_ops_cm>([](fi_ops_cm& cm) { cm.getname = name; });
  static auto messages = own::table<fi_ops_msg>([](fi_ops_msg& msg) {
    msg.recv = receive;
    msg.send = send;
  });
  static auto writes = own::table<fi_ops_rma>([](fi_ops_rma& rma) {
    rma.write = write;
    rma.writemsg = write_message;
    rma.read = read;
  });
  Ep* ep = new Ep();
  ep->fid = {FI_CLASS_EP, nullptr, &fid_ops};
  ep->ops = &general;
  ep->cm = &names;
  ep->msg = &messages;
  ep->rma = &writes;
  ep->nic = static_cast<Domain*>(domain)->nic;
  ep->process = network().current();
  ep->name = world().next_name++;
  world().endpoints[ep->name] = ep;
  *out = ep;
  return 0;
}

}  // namespace smddp::fabric::simulated
