// The symbols of libfabric, and all objects but endpoints.
#include "stub_fabric/stub.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "stub_fabric/objects.h"

namespace stub {
namespace {

using smddp::own_libfabric::copy;
using smddp::own_libfabric::new_info;

fi_info* info_of(const std::string& domain, bool device_memory) {
  const Settings& settings = state().settings;
  fi_info* info = new_info();
  info->caps = FI_MSG | FI_SEND | FI_RECV;
  if (!settings.messages_only) {
    info->caps |= FI_RMA | FI_WRITE | FI_REMOTE_WRITE | FI_READ | FI_REMOTE_READ;
  }
  if (device_memory) info->caps |= FI_HMEM;
  info->mode = settings.consumes_receives ? FI_RX_CQ_DATA : 0;
  info->addr_format = FI_ADDR_EFA;
  info->rx_attr->size = info->tx_attr->size = 512;
  if (settings.orders_messages) info->rx_attr->msg_order = info->tx_attr->msg_order = FI_ORDER_SAW;
  info->ep_attr->type = FI_EP_RDM;
  info->ep_attr->protocol = FI_PROTO_EFA;
  info->ep_attr->max_msg_size = settings.longest_message;
  info->domain_attr->name = copy(domain.c_str());
  info->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED;
  if (settings.provider_keys) info->domain_attr->mr_mode |= FI_MR_PROV_KEY;
  if (device_memory) info->domain_attr->mr_mode |= FI_MR_HMEM;
  info->domain_attr->mr_key_size = 4;
  info->domain_attr->cq_data_size = 4;
  info->domain_attr->av_type = FI_AV_TABLE;
  info->fabric_attr->name = copy(settings.provider.c_str());
  info->fabric_attr->prov_name = copy(settings.provider.c_str());
  return info;
}

size_t index_of(const char* domain) {
  const std::vector<std::string>& all = state().settings.domains;
  return static_cast<size_t>(std::find(all.begin(), all.end(), domain) - all.begin());
}

// ---- completion queues

ssize_t read_queue(fid_cq* raw, void* buffer, size_t count) {
  if (state().fail_queues) return -FI_EIO;
  Cq* cq = static_cast<Cq*>(raw);
  pump();
  if (cq->ready.empty()) return -FI_EAGAIN;
  if (cq->ready.front().error) return -FI_EAVAIL;
  fi_cq_data_entry* entries = static_cast<fi_cq_data_entry*>(buffer);
  size_t n = 0;
  for (; n < count && !cq->ready.empty() && !cq->ready.front().error; ++n) {
    const fi_cq_err_entry& entry = cq->ready.front().entry;
    entries[n] = {entry.op_context, entry.flags, entry.len, nullptr, entry.data};
    cq->ready.pop_front();
  }
  return static_cast<ssize_t>(n);
}

ssize_t read_error(fid_cq* raw, fi_cq_err_entry* entry, uint64_t) {
  Cq* cq = static_cast<Cq*>(raw);
  if (entry->err_data != nullptr || entry->err_data_size != 0 || entry->err != 0) {
    violation("fi_cq_readerr with an entry that is not zeroed");
  }
  if (cq->ready.empty() || !cq->ready.front().error) return -FI_EAGAIN;
  *entry = cq->ready.front().entry;
  cq->ready.pop_front();
  return 1;
}

const char* error_detail(fid_cq*, int, const void*, char*, size_t) {
  return "the stub's own reason";
}

// ---- address vectors

int insert(fid_av* raw, const void* address, size_t count, fi_addr_t* out, uint64_t, void*) {
  Av* av = static_cast<Av*>(raw);
  if (count != 1) violation("fi_av_insert of more than one");
  uint64_t name = 0;
  std::memcpy(&name, address, sizeof name);
  *out = av->names.size();
  av->names.push_back(name);
  return 1;
}

// ---- registrations

int register_memory(fid* domain, const void* data, size_t bytes, uint64_t access, uint64_t,
                    uint64_t wanted_key, uint64_t, fid_mr** out, void*) {
  if (state().registrations >= state().settings.pinned_limit) return -FI_ENOMEM;
  bool chosen = !state().settings.provider_keys;
  if (chosen && wanted_key == 0) violation("a key that can be guessed");
  if (chosen && world().registrations.count(wanted_key) > 0) return -FI_ENOKEY;
  Registered* mr = new Registered();
  mr->fid = {FI_CLASS_MR, nullptr, &fid_ops};
  mr->mem_desc = static_cast<fid_mr*>(mr);
  mr->domain = static_cast<Domain*>(reinterpret_cast<fid_domain*>(domain));
  mr->base = reinterpret_cast<uintptr_t>(data);
  mr->bytes = bytes;
  mr->access = access;
  mr->key = chosen ? wanted_key : world().next_key++;
  mr->mem_desc = mr;
  world().registrations[mr->key] = mr;
  ++state().registrations;
  ++state().objects;
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

// ---- domains and fabrics

int open_av(fid_domain*, fi_av_attr*, fid_av** out, void*) {
  static fi_ops_av ops = {sizeof ops, insert};
  Av* av = new Av();
  av->fid = {FI_CLASS_AV, nullptr, &fid_ops};
  av->ops = &ops;
  ++state().objects;
  *out = av;
  return 0;
}

int open_cq(fid_domain*, fi_cq_attr* attr, fid_cq** out, void*) {
  static auto ops = table<fi_ops_cq>([](fi_ops_cq& cq) {
    cq.read = read_queue;
    cq.readerr = read_error;
    cq.strerror = error_detail;
  });
  if (attr->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
  if (attr->format != FI_CQ_FORMAT_DATA) violation("a queue without room for immediate data");
  Cq* cq = new Cq();
  cq->fid = {FI_CLASS_CQ, nullptr, &fid_ops};
  cq->ops = &ops;
  ++state().objects;
  *out = cq;
  return 0;
}

int open_domain(fid_fabric*, fi_info* info, fid_domain** out, void*) {
  static auto ops = table<fi_ops_domain>([](fi_ops_domain& domain) {
    domain.av_open = open_av;
    domain.cq_open = open_cq;
    domain.endpoint = endpoint;
  });
  static auto registration = table<fi_ops_mr>([](fi_ops_mr& mr) {
    mr.reg = register_memory;
    mr.regattr = register_attributes;
  });
  Domain* domain = new Domain();
  domain->fid = {FI_CLASS_DOMAIN, nullptr, &fid_ops};
  domain->ops = &ops;
  domain->mr = &registration;
  domain->index = index_of(info->domain_attr->name);
  state().bytes_of_domain.resize(state().settings.domains.size());
  ++state().objects;
  *out = domain;
  return 0;
}

}  // namespace

State& state() {
  static State only;
  return only;
}
World& world() {
  static World only;
  return only;
}
std::mt19937& chance() {
  static std::mt19937 only(20240607);
  return only;
}
void violation(const std::string& what) { state().violations.push_back(what); }
void called(const std::string& what) { state().calls.push_back(what); }

int close_fid(fid* object) {
  --state().objects;
  switch (object->fclass) {
    case FI_CLASS_FABRIC:
      delete static_cast<Fabric*>(reinterpret_cast<fid_fabric*>(object));
      break;
    case FI_CLASS_DOMAIN: {
      Domain* domain = static_cast<Domain*>(reinterpret_cast<fid_domain*>(object));
      for (auto& [key, mr] : world().registrations) {
        if (mr->domain == domain) violation("a domain closed before its registrations");
      }
      delete domain;
      break;
    }
    case FI_CLASS_AV:
      delete static_cast<Av*>(reinterpret_cast<fid_av*>(object));
      break;
    case FI_CLASS_CQ:
      delete static_cast<Cq*>(reinterpret_cast<fid_cq*>(object));
      break;
    case FI_CLASS_MR: {
      Registered* mr = static_cast<Registered*>(reinterpret_cast<fid_mr*>(object));
      world().registrations.erase(mr->key);
      --state().registrations;
      delete mr;
      break;
    }
    case FI_CLASS_EP: {
      Ep* ep = static_cast<Ep*>(reinterpret_cast<fid_ep*>(object));
      world().endpoints.erase(ep->name);
      std::erase_if(world().flights, [&](const Flight& flight) { return flight.from == ep; });
      delete ep;
      break;
    }
  }
  return 0;
}

int bind_fid(fid* object, fid* other, uint64_t) {
  Ep* ep = static_cast<Ep*>(reinterpret_cast<fid_ep*>(object));
  if (ep->enabled) violation("fi_ep_bind after fi_enable");
  if (other->fclass == FI_CLASS_CQ) ep->cq = static_cast<Cq*>(reinterpret_cast<fid_cq*>(other));
  if (other->fclass == FI_CLASS_AV) ep->av = static_cast<Av*>(reinterpret_cast<fid_av*>(other));
  called(other->fclass == FI_CLASS_CQ ? "fi_ep_bind cq" : "fi_ep_bind av");
  return 0;
}

int control_fid(fid* object, int command, void*) {
  if (command != FI_ENABLE) return -FI_ENOSYS;
  Ep* ep = static_cast<Ep*>(reinterpret_cast<fid_ep*>(object));
  if (ep->cq == nullptr || ep->av == nullptr) violation("fi_enable before fi_ep_bind");
  ep->enabled = true;
  called("fi_enable");
  return 0;
}

}  // namespace stub

using namespace stub;

extern "C" {

#define STUB_SYMBOL __attribute__((visibility("default")))

STUB_SYMBOL State* stub::stub_state() { return &state(); }

STUB_SYMBOL void fi_freeinfo(fi_info* info) { smddp::own_libfabric::free_info(info); }

STUB_SYMBOL fi_info* fi_dupinfo(const fi_info* info) {
  return smddp::own_libfabric::duplicate_info(info);
}

STUB_SYMBOL int fi_getinfo(uint32_t, const char*, const char*, uint64_t, const fi_info* hints,
                           fi_info** out) {
  const Settings& settings = state().settings;
  *out = nullptr;
  bool wants_more = (hints->caps & FI_RMA) != 0;
  bool device_memory = (hints->caps & FI_HMEM) != 0;
  if (device_memory && !settings.device_memory) return -FI_ENODATA;
  if (device_memory && (hints->domain_attr->mr_mode & FI_MR_HMEM) == 0) {
    violation("FI_HMEM without FI_MR_HMEM");
  }
  const char* wanted = hints->fabric_attr->prov_name;
  if ((settings.messages_only && wants_more) ||
      (wanted != nullptr && settings.provider != wanted)) {
    return -FI_ENODATA;
  }
  if (settings.consumes_receives && (hints->mode & FI_RX_CQ_DATA) == 0) return -FI_ENODATA;
  fi_info** at = out;
  for (const std::string& domain : settings.domains) {
    *at = info_of(domain, device_memory);
    // What a caller must do for the provider it has to offer.
    if (((*at)->domain_attr->mr_mode & ~hints->domain_attr->mr_mode) != 0) {
      fi_freeinfo(std::exchange(*out, nullptr));
      return -FI_ENODATA;
    }
    at = &(*at)->next;
  }
  return 0;
}

STUB_SYMBOL int fi_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  static auto ops =
      table<fi_ops_fabric>([](fi_ops_fabric& fabric) { fabric.domain = open_domain; });
  Fabric* fabric = new Fabric();
  fabric->fid = {FI_CLASS_FABRIC, nullptr, &fid_ops};
  fabric->ops = &ops;
  ++state().objects;
  *out = fabric;
  return 0;
}

STUB_SYMBOL const char* fi_strerror(int error) { return std::strerror(error); }
STUB_SYMBOL uint32_t fi_version() { return FI_VERSION(1, 22); }
}
