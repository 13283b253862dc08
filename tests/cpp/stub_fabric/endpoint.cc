// fi_endpoint and the calls on it.
#include <cstring>

#include "stub_fabric/objects.h"

namespace stub {
namespace {

constexpr int kEmulatedWrite = FI_OPT_EFA_RNR_RETRY + 2;
constexpr int kCudaPermitted = FI_OPT_XPU_TRIGGER + 1;

Ep* of(fid* object) { return static_cast<Ep*>(reinterpret_cast<fid_ep*>(object)); }

ssize_t start(fid_ep* raw, Flight flight, fi_addr_t to, void* descriptor, uint64_t access) {
  Ep* ep = static_cast<Ep*>(raw);
  if (!ep->enabled) violation("an operation before fi_enable");
  if (to >= ep->av->names.size()) {
    violation("an address that is not in the address vector");
    return -FI_EINVAL;
  }
  check_descriptor(*ep, flight.data, flight.bytes, descriptor, access);
  if (busy()) return -FI_EAGAIN;
  flight.from = ep;
  flight.from_name = ep->name;
  flight.to = ep->av->names[to];
  flight.sequence = world().next_sequence++;
  state().bytes_of_domain[ep->domain->index] += flight.bytes;
  world().flights.push_back(flight);
  return 0;
}

Flight flight_of(Flight::Kind kind, const void* data, size_t bytes, void* context) {
  Flight flight = {};
  flight.kind = kind;
  flight.data = data;
  flight.bytes = bytes;
  flight.context = context;
  return flight;
}

ssize_t send(fid_ep* ep, const void* data, size_t bytes, void* descriptor, fi_addr_t to,
             void* context) {
  return start(ep, flight_of(Flight::kSend, data, bytes, context), to, descriptor, FI_SEND);
}

ssize_t write(fid_ep* ep, const void* data, size_t bytes, void* descriptor, fi_addr_t to,
              uint64_t address, uint64_t key, void* context) {
  Flight flight = flight_of(Flight::kWrite, data, bytes, context);
  flight.address = address;
  flight.key = key;
  return start(ep, flight, to, descriptor, FI_WRITE);
}

ssize_t write_message(fid_ep* ep, const fi_msg_rma* message, uint64_t flags) {
  if (message->iov_count != 1 || message->rma_iov_count != 1) violation("a write in parts");
  if ((flags & FI_COMPLETION) == 0) violation("a write without a completion");
  const iovec& local = message->msg_iov[0];
  const fi_rma_iov& remote = message->rma_iov[0];
  if (local.iov_len != remote.len) violation("a write of two lengths");
  Flight flight = flight_of(Flight::kWrite, local.iov_base, local.iov_len, message->context);
  flight.address = remote.addr;
  flight.key = remote.key;
  flight.delivered = (flags & FI_DELIVERY_COMPLETE) != 0;
  return start(ep, flight, message->addr, message->desc[0], FI_WRITE);
}

ssize_t read(fid_ep* ep, void* to, size_t bytes, void* descriptor, fi_addr_t from, uint64_t address,
             uint64_t key, void* context) {
  Flight flight = flight_of(Flight::kRead, to, bytes, context);
  flight.address = address;
  flight.key = key;
  return start(ep, flight, from, descriptor, FI_READ);
}

ssize_t post(fid_ep* raw, PostedReceive receive, void* descriptor) {
  Ep* ep = static_cast<Ep*>(raw);
  if (!ep->enabled) violation("a receive before fi_enable");
  check_descriptor(*ep, receive.data, receive.bytes, descriptor, FI_RECV);
  if (busy()) return -FI_EAGAIN;
  ep->receives.push_back(receive);
  return 0;
}

ssize_t receive(fid_ep* ep, void* data, size_t bytes, void* descriptor, fi_addr_t, void* context) {
  return post(ep, {data, bytes, context}, descriptor);
}

ssize_t cancel_receive(fid* object, void* context) {
  return cancel(*of(object), context) ? 0 : -FI_ENOENT;
}

int set_option(fid* object, int, int option, const void* value, size_t size) {
  Ep* ep = of(object);
  if (ep->enabled) violation("fi_setopt after fi_enable");
  if (ep->cq == nullptr || ep->av == nullptr) violation("fi_setopt before fi_ep_bind");
  if (option == FI_OPT_EFA_RNR_RETRY && size == sizeof(size_t)) {
    called("fi_setopt FI_OPT_EFA_RNR_RETRY " + std::to_string(*static_cast<const size_t*>(value)));
    return 0;
  }
  if (option == kCudaPermitted && size == sizeof(bool) && !*static_cast<const bool*>(value)) {
    called("fi_setopt FI_OPT_CUDA_API_PERMITTED false");
    return state().settings.needs_cuda ? -FI_EOPNOTSUPP : 0;
  }
  return -FI_ENOPROTOOPT;
}

int get_option(fid*, int, int option, void* value, size_t* size) {
  if (option != kEmulatedWrite || !state().settings.knows_efa_options) return -FI_ENOPROTOOPT;
  if (*size < sizeof(bool)) return -FI_ETOOSMALL;
  *static_cast<bool*>(value) = state().settings.emulates_writes;
  *size = sizeof(bool);
  called("fi_getopt FI_OPT_EFA_EMULATED_WRITE");
  return 0;
}

int name(fid* object, void* address, size_t* size) {
  size_t room = *size;
  *size = 32;  // as long as efa's
  if (room < 32) return -FI_ETOOSMALL;
  std::memset(address, 0, 32);
  std::memcpy(address, &of(object)->name, sizeof(uint64_t));
  return 0;
}

}  // namespace

int endpoint(fid_domain* domain, fi_info*, fid_ep** out, void*) {
  static auto general = table<fi_ops_ep>([](fi_ops_ep& ep) {
    ep.cancel = cancel_receive;
    ep.setopt = set_option;
    ep.getopt = get_option;
  });
  static auto names = table<fi_ops_cm>([](fi_ops_cm& cm) { cm.getname = name; });
  static auto messages = table<fi_ops_msg>([](fi_ops_msg& msg) {
    msg.recv = receive;
    msg.send = send;
  });
  static auto writes = table<fi_ops_rma>([](fi_ops_rma& rma) {
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
  ep->domain = static_cast<Domain*>(domain);
  ep->name = world().next_name++;
  world().endpoints[ep->name] = ep;
  called("fi_endpoint " + state().settings.domains[ep->domain->index]);
  ++state().objects;
  *out = ep;
  return 0;
}

}  // namespace stub
