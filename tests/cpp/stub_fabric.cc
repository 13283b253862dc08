// A stub of libfabric. It moves bytes between endpoints of one process, and claims to be a provider
// that this host lacks. It uses the freedom that the interface gives a provider: it completes
// operations in shuffled order, and is busy now and then. It checks every call against the rules of
// the provider that it simulates. Opened like the real library, through Options::library. For one thread.
#include "stub_fabric.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <utility>

namespace stub {

namespace {

void called(const std::string& what) { state().calls.push_back(what); }

unsigned chance(size_t n) {
  static std::mt19937 random(20240607);
  return static_cast<unsigned>(random() % n);
}
bool busy() {
  bool is = chance(state().settings.busy_one_in) == 0;
  state().busy += is;
  return is;
}

// ---- objects

int bind(fid*, fid*, uint64_t);  // of endpoints only, as the next
int enable(fid*, int, void*);

// An object of libfabric, whose structure C begins with a fid.
template <class Self, class C, size_t kClass>
struct Object : C {
  Object() : C{} {
    static fi_ops ops = {sizeof ops, close, bind, enable, nullptr};
    this->fid = {kClass, nullptr, &ops};
    ++state().objects;
  }
  ~Object() { --state().objects; }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  static Self* of(struct fid* object) { return static_cast<Self*>(reinterpret_cast<C*>(object)); }
  static int close(struct fid* object) {
    delete of(object);
    return 0;
  }
};

struct Domain;
struct Registered;
struct Ep;

// An operation between its post and its completion. The sender's memory is read on arrival.
struct Flight {
  enum Kind { kSend, kWrite, kRead } kind;
  const void* data;  // kRead: where it goes
  size_t bytes;
  void* context;
  uint64_t address = 0, key = 0;
  // Of a write: its sender hears of it when it has arrived, and may before if it did not ask for that. Then
  // its memory has been copied.
  bool delivered = false, acknowledged = false;
  Ep* from = nullptr;
  uint64_t to = 0;  // endpoint's name
  uint64_t sequence = 0;
  std::vector<std::byte> copy = {};
};

std::map<uint64_t, Ep*> endpoints;  // by name
std::map<uint64_t, Registered*> registrations;
std::deque<Flight> flights;
uint64_t next_name = 1, next_key = 77, next_sequence = 0, last_arrived = 0;

struct Fabric : Object<Fabric, fid_fabric, FI_CLASS_FABRIC> {};
struct Av : Object<Av, fid_av, FI_CLASS_AV> {
  bool knows(uint64_t name) const {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  std::vector<uint64_t> names;  // by fi_addr_t
};
struct Cq : Object<Cq, fid_cq, FI_CLASS_CQ> {
  void complete(void* context, uint64_t flags, size_t bytes, int error) {
    fi_cq_err_entry& entry = ready.emplace_back();
    entry.op_context = context;
    entry.flags = flags;
    entry.len = bytes;
    entry.err = entry.prov_errno = error;
  }
  std::deque<fi_cq_err_entry> ready;
};
struct Registered : Object<Registered, fid_mr, FI_CLASS_MR> {
  ~Registered() {
    registrations.erase(key);
    --state().registrations;
  }
  bool holds(uintptr_t at, size_t size) const { return at >= base && at + size <= base + bytes; }
  Domain* domain = nullptr;
  uintptr_t base = 0;
  size_t bytes = 0;
  uint64_t access = 0;
  bool gpu = false;
  // Writes into a GPU's memory that the GPU sees only after a read by this NIC.
  std::vector<std::pair<uintptr_t, std::vector<std::byte>>> late;
};
struct Domain : Object<Domain, fid_domain, FI_CLASS_DOMAIN> {
  ~Domain() {
    for (auto& [key, mr] : registrations) {
      if (mr->domain == this) violation("a domain closed before its registrations");
    }
  }
  size_t index = 0;  // in Settings::domains
};
struct PostedReceive {
  void* data;
  size_t bytes;
  void* context;
};
struct Ep : Object<Ep, fid_ep, FI_CLASS_EP> {
  ~Ep() {
    endpoints.erase(name);
    std::erase_if(flights, [this](const Flight& flight) { return flight.from == this; });
  }
  Domain* domain = nullptr;
  uint64_t name = next_name++;
  Cq* cq = nullptr;
  Av* av = nullptr;
  bool enabled = false;
  std::deque<PostedReceive> receives;
};

int bind(fid* object, fid* other, uint64_t) {
  Ep* ep = Ep::of(object);
  if (ep->enabled) violation("fi_ep_bind after fi_enable");
  bool queue = other->fclass == FI_CLASS_CQ;
  (queue ? static_cast<void>(ep->cq = Cq::of(other)) : static_cast<void>(ep->av = Av::of(other)));
  called(queue ? "fi_ep_bind cq" : "fi_ep_bind av");
  return 0;
}

int enable(fid* object, int command, void*) {
  if (command != FI_ENABLE) return -FI_ENOSYS;
  Ep* ep = Ep::of(object);
  if (ep->cq == nullptr || ep->av == nullptr) violation("fi_enable before fi_ep_bind");
  ep->enabled = true;
  called("fi_enable");
  return 0;
}

// ---- arrivals

// The registration at `target` that the flight's key opens for `access`, or nullptr.
Registered* opened(const Flight& flight, const Ep& target, uint64_t access) {
  auto found = registrations.find(flight.key);
  if (found == registrations.end()) return nullptr;
  Registered& mr = *found->second;
  bool opens = mr.domain == target.domain && (mr.access & access) != 0 &&
               mr.holds(flight.address, flight.bytes);
  return opens ? &mr : nullptr;
}

int read(const Flight& flight, const Ep& target) {
  Registered* mr = opened(flight, target, FI_REMOTE_READ);
  if (mr == nullptr) return FI_EKEYREJECTED;
  for (const auto& [at, bytes] : std::exchange(mr->late, {}))
    std::memcpy(reinterpret_cast<void*>(at), bytes.data(), bytes.size());
  std::memcpy(const_cast<void*>(flight.data), reinterpret_cast<void*>(flight.address),
              flight.bytes);
  return 0;
}

int write(const Flight& flight, const Ep& target) {
  Registered* mr = opened(flight, target, FI_REMOTE_WRITE);
  if (mr == nullptr) return FI_EKEYREJECTED;
  if (!target.av->knows(flight.from->name)) {
    violation("a write by an endpoint that the target's address vector lacks");
    return FI_EHOSTUNREACH;
  }
  if (mr->gpu) {
    auto data = static_cast<const std::byte*>(flight.data);
    mr->late.emplace_back(flight.address, std::vector<std::byte>(data, data + flight.bytes));
  } else {
    std::memcpy(reinterpret_cast<void*>(flight.address), flight.data, flight.bytes);
  }
  return 0;
}

// 0, an error for the sender, or -1: not yet.
int land(const Flight& flight) {
  if (state().fail_operations > 0) {
    --state().fail_operations;
    return state().error;
  }
  auto found = endpoints.find(flight.to);
  if (found == endpoints.end()) return FI_ECONNRESET;
  Ep& target = *found->second;
  if (flight.kind == Flight::kRead) return read(flight, target);
  if (flight.kind == Flight::kWrite) return write(flight, target);
  if (target.receives.empty()) return -1;
  PostedReceive receive = target.receives.front();
  target.receives.pop_front();
  size_t bytes = std::min(flight.bytes, receive.bytes);
  std::memcpy(receive.data, flight.data, bytes);
  target.cq->complete(receive.context, FI_MSG | FI_RECV, bytes,
                      flight.bytes > receive.bytes ? FI_ETRUNC : 0);
  return 0;
}

void advance(size_t index) {
  constexpr uint64_t kFlags[] = {FI_MSG | FI_SEND, FI_RMA | FI_WRITE, FI_RMA | FI_READ};
  Flight& flight = flights[index];
  if (flight.kind == Flight::kWrite && !flight.delivered && !flight.acknowledged) {
    // Completes before it arrives. Its memory is the sender's again.
    auto data = static_cast<const std::byte*>(flight.data);
    flight.copy.assign(data, data + flight.bytes);
    flight.data = flight.copy.data();
    flight.acknowledged = true;
    return flight.from->cq->complete(flight.context, kFlags[flight.kind], 0, 0);
  }
  int error = land(flight);
  if (error < 0) return;
  state().overtaken += flight.sequence < last_arrived;
  last_arrived = std::max(last_arrived, flight.sequence);
  if (!flight.acknowledged)
    flight.from->cq->complete(flight.context, kFlags[flight.kind], 0, error);
  flights.erase(flights.begin() + static_cast<ptrdiff_t>(index));
}

void write_from_outside() {
  for (auto& [name, ep] : endpoints) {
    if (state().foreign_writes == 0) return;
    void* context = nullptr;
    if (state().settings.consumes_receives) {
      if (ep->receives.empty()) continue;
      context = ep->receives.front().context;
      ep->receives.pop_front();
    }
    ep->cq->complete(context, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, 8, 0);
    --state().foreign_writes;
  }
}

// ---- completion queues

ssize_t read_queue(fid_cq* raw, void* buffer, size_t count) {
  auto& ready = static_cast<Cq*>(raw)->ready;
  write_from_outside();
  for (size_t turns = chance(8); turns > 0 && !flights.empty(); --turns)
    advance(chance(flights.size()));
  if (ready.empty()) return -FI_EAGAIN;
  if (ready.front().err != 0) return -FI_EAVAIL;
  auto* entries = static_cast<fi_cq_data_entry*>(buffer);
  size_t n = 0;
  for (; n < count && !ready.empty() && ready.front().err == 0; ++n, ready.pop_front())
    entries[n] = {ready.front().op_context, ready.front().flags, ready.front().len, nullptr, 0};
  return static_cast<ssize_t>(n);
}

ssize_t read_error(fid_cq* raw, fi_cq_err_entry* entry, uint64_t) {
  auto& ready = static_cast<Cq*>(raw)->ready;
  if (entry->err_data != nullptr || entry->err_data_size != 0 || entry->err != 0)
    violation("fi_cq_readerr with an entry that is not zeroed");
  if (ready.empty() || ready.front().err == 0) return -FI_EAGAIN;
  *entry = ready.front();
  ready.pop_front();
  return 1;
}

const char* error_detail(fid_cq*, int, const void*, char*, size_t) {
  return "the stub's own reason";
}

// ---- operations of endpoints

void check_descriptor(const Ep& ep, const void* data, size_t bytes, void* descriptor,
                      uint64_t access) {
  auto found = std::find_if(registrations.begin(), registrations.end(),
                            [=](const auto& each) { return each.second == descriptor; });
  if (found == registrations.end()) return violation("memory without a descriptor");
  const Registered& mr = *found->second;
  if (mr.domain != ep.domain) violation("a descriptor of another domain");
  if (!mr.holds(reinterpret_cast<uintptr_t>(data), bytes))
    violation("a descriptor of other memory");
  if ((mr.access & access) != access) violation("a descriptor without the access");
}

ssize_t start(fid_ep* raw, Flight flight, fi_addr_t to, void* descriptor) {
  constexpr uint64_t kAccess[] = {FI_SEND, FI_WRITE, FI_READ};
  Ep* ep = static_cast<Ep*>(raw);
  if (!ep->enabled) violation("an operation before fi_enable");
  if (to >= ep->av->names.size()) {
    violation("an address that is not in the address vector");
    return -FI_EINVAL;
  }
  check_descriptor(*ep, flight.data, flight.bytes, descriptor, kAccess[flight.kind]);
  if (busy()) return -FI_EAGAIN;
  flight.from = ep;
  flight.to = ep->av->names[to];
  flight.sequence = next_sequence++;
  state().bytes_of_domain[ep->domain->index] += flight.bytes;
  flights.push_back(std::move(flight));
  return 0;
}

ssize_t start_send(fid_ep* ep, const void* data, size_t bytes, void* descriptor, fi_addr_t to,
                   void* context) {
  return start(ep, {Flight::kSend, data, bytes, context}, to, descriptor);
}

ssize_t start_write(fid_ep* ep, const void* data, size_t bytes, void* descriptor, fi_addr_t to,
                    uint64_t address, uint64_t key, void* context) {
  return start(ep, {Flight::kWrite, data, bytes, context, address, key}, to, descriptor);
}

ssize_t start_message(fid_ep* ep, const fi_msg_rma* message, uint64_t flags) {
  if (message->iov_count != 1 || message->rma_iov_count != 1) violation("a write in parts");
  if ((flags & FI_COMPLETION) == 0) violation("a write without a completion");
  const iovec& local = *message->msg_iov;
  const fi_rma_iov& remote = *message->rma_iov;
  if (local.iov_len != remote.len) violation("a write of two lengths");
  return start(ep,
               {Flight::kWrite, local.iov_base, local.iov_len, message->context, remote.addr,
                remote.key, (flags & FI_DELIVERY_COMPLETE) != 0},
               message->addr, message->desc[0]);
}

ssize_t start_read(fid_ep* ep, void* to, size_t bytes, void* descriptor, fi_addr_t from,
                   uint64_t address, uint64_t key, void* context) {
  return start(ep, {Flight::kRead, to, bytes, context, address, key}, from, descriptor);
}

ssize_t receive(fid_ep* raw, void* data, size_t bytes, void* descriptor, fi_addr_t, void* context) {
  Ep* ep = static_cast<Ep*>(raw);
  if (!ep->enabled) violation("a receive before fi_enable");
  check_descriptor(*ep, data, bytes, descriptor, FI_RECV);
  if (busy()) return -FI_EAGAIN;
  ep->receives.push_back({data, bytes, context});
  return 0;
}

ssize_t cancel(fid* object, void* context) {
  Ep* ep = Ep::of(object);
  auto canceled = [=](const PostedReceive& receive) { return receive.context == context; };
  if (std::erase_if(ep->receives, canceled) == 0) return -FI_ENOENT;
  ep->cq->complete(context, FI_RECV, 0, FI_ECANCELED);
  return 0;
}

int set_option(fid* object, int, int option, const void* value, size_t size) {
  constexpr int kCudaPermitted = FI_OPT_XPU_TRIGGER + 1;
  Ep* ep = Ep::of(object);
  if (ep->enabled) violation("fi_setopt after fi_enable");
  if (ep->cq == nullptr || ep->av == nullptr) violation("fi_setopt before fi_ep_bind");
  if (option == FI_OPT_EFA_RNR_RETRY && size == sizeof(size_t)) {
    called("fi_setopt FI_OPT_EFA_RNR_RETRY " + std::to_string(*static_cast<const size_t*>(value)));
    return 0;
  }
  if (option == kCudaPermitted && size == sizeof(bool) && !*static_cast<const bool*>(value))
    return state().settings.needs_cuda ? -FI_EOPNOTSUPP : 0;
  return -FI_ENOPROTOOPT;
}

int get_option(fid*, int, int option, void* value, size_t* size) {
  constexpr int kEmulatedWrite = FI_OPT_EFA_RNR_RETRY + 2;
  if (option != kEmulatedWrite || !state().settings.knows_efa_options) return -FI_ENOPROTOOPT;
  if (*size < sizeof(bool)) return -FI_ETOOSMALL;
  *static_cast<bool*>(value) = state().settings.emulates_writes;
  *size = sizeof(bool);
  called("fi_getopt FI_OPT_EFA_EMULATED_WRITE");
  return 0;
}

int get_name(fid* object, void* address, size_t* size) {
  constexpr size_t kBytes = 32;  // as long as efa's
  if (std::exchange(*size, kBytes) < kBytes) return -FI_ETOOSMALL;
  std::memset(address, 0, kBytes);
  std::memcpy(address, &Ep::of(object)->name, sizeof(uint64_t));
  return 0;
}

// ---- what domains and fabrics make

int open_endpoint(fid_domain* domain, fi_info*, fid_ep** out, void*) {
  static fi_ops_ep ops = {
      .size = sizeof ops, .cancel = cancel, .getopt = get_option, .setopt = set_option};
  static fi_ops_cm cm = {.size = sizeof cm, .getname = get_name};
  static fi_ops_msg msg = {.size = sizeof msg, .recv = receive, .send = start_send};
  static fi_ops_rma rma = {
      .size = sizeof rma, .read = start_read, .write = start_write, .writemsg = start_message};
  Ep* ep = new Ep();
  ep->ops = &ops;
  ep->cm = &cm;
  ep->msg = &msg;
  ep->rma = &rma;
  ep->domain = static_cast<Domain*>(domain);
  endpoints[ep->name] = ep;
  called("fi_endpoint " + state().settings.domains[ep->domain->index]);
  *out = ep;
  return 0;
}

int insert(fid_av* raw, const void* address, size_t count, fi_addr_t* out, uint64_t, void*) {
  Av* av = static_cast<Av*>(raw);
  if (count != 1) violation("fi_av_insert of more than one");
  *out = av->names.size();
  std::memcpy(&av->names.emplace_back(), address, sizeof(uint64_t));
  return 1;
}

int open_av(fid_domain*, fi_av_attr*, fid_av** out, void*) {
  static fi_ops_av ops = {.size = sizeof ops, .insert = insert};
  *out = new Av();
  (*out)->ops = &ops;
  return 0;
}

int open_cq(fid_domain*, fi_cq_attr* attr, fid_cq** out, void*) {
  if (attr->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
  if (attr->format != FI_CQ_FORMAT_DATA) violation("a queue without room for immediate data");
  static fi_ops_cq ops = {
      .size = sizeof ops, .read = read_queue, .readerr = read_error, .strerror = error_detail};
  *out = new Cq();
  (*out)->ops = &ops;
  return 0;
}

int register_memory(fid* domain, const void* data, size_t bytes, uint64_t access, uint64_t,
                    uint64_t wanted_key, uint64_t, fid_mr** out, void*) {
  if (state().registrations >= state().settings.pinned_limit) return -FI_ENOMEM;
  bool chosen = !state().settings.provider_keys;
  if (chosen && wanted_key == 0) violation("a key that can be guessed");
  if (chosen && registrations.count(wanted_key) > 0) return -FI_ENOKEY;
  auto* mr = new Registered();
  mr->mem_desc = mr;
  mr->domain = Domain::of(domain);
  mr->base = reinterpret_cast<uintptr_t>(data);
  mr->bytes = bytes;
  mr->access = access;
  mr->key = chosen ? wanted_key : next_key++;
  registrations[mr->key] = mr;
  ++state().registrations;
  *out = mr;
  return 0;
}

int register_attributes(fid* domain, const fi_mr_attr* attr, uint64_t flags, fid_mr** out) {
  if (attr->iov_count != 1) violation("a registration of several pieces");
  bool gpu = attr->iface == FI_HMEM_CUDA;
  if (gpu && !state().settings.device_memory) return -FI_ENOSYS;
  int rc = register_memory(domain, attr->mr_iov->iov_base, attr->mr_iov->iov_len, attr->access, 0,
                           attr->requested_key, flags, out, nullptr);
  if (rc != 0 || !gpu) return rc;
  static_cast<Registered*>(*out)->gpu = true;
  state().gpus.push_back(attr->device.cuda);
  return 0;
}

int open_domain(fid_fabric*, fi_info* info, fid_domain** out, void*) {
  const auto& all = state().settings.domains;
  static fi_ops_domain ops = {
      .size = sizeof ops, .av_open = open_av, .cq_open = open_cq, .endpoint = open_endpoint};
  static fi_ops_mr mr = {.size = sizeof mr, .reg = register_memory, .regattr = register_attributes};
  auto* domain = new Domain();
  domain->ops = &ops;
  domain->mr = &mr;
  auto named = std::find(all.begin(), all.end(), info->domain_attr->name);
  domain->index = static_cast<size_t>(named - all.begin());
  state().bytes_of_domain.resize(all.size());
  *out = domain;
  return 0;
}

}  // namespace

STUB_SYMBOL int fi_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  static fi_ops_fabric ops = {.size = sizeof ops, .domain = open_domain};
  *out = new Fabric();
  (*out)->ops = &ops;
  return 0;
}

STUB_SYMBOL const char* fi_strerror(int error) { return std::strerror(error); }
STUB_SYMBOL uint32_t fi_version() { return FI_VERSION(1, 22); }

}  // namespace stub
