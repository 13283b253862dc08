// The functions that Library names, and all of the provider's objects but endpoints.
#include "transport/simulated/provider.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "transport/simulated/objects.h"

namespace smddp::fabric::simulated {
namespace {

// As EFA with device RDMA, but for what the model says. Nothing of it depends on EFA's real NIC.
fi_info* info_of(int nic) {
  const Model& model = world().network->model();
  fi_info* info = own::new_info();
  info->caps = FI_MSG | FI_SEND | FI_RECV | FI_RMA | FI_TAGGED | FI_WRITE | FI_REMOTE_WRITE |
               FI_READ | FI_REMOTE_READ;
  info->addr_format = FI_ADDR_EFA;
  info->rx_attr->size = info->tx_attr->size = 512;
  if (model.ordered) info->rx_attr->msg_order = info->tx_attr->msg_order = FI_ORDER_SAW;
  info->ep_attr->type = FI_EP_RDM;
  info->ep_attr->protocol = FI_PROTO_EFA;
  info->ep_attr->max_msg_size = SIZE_MAX;
  info->domain_attr->name = own::copy(("nic" + std::to_string(nic)).c_str());
  info->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (model.registers) info->domain_attr->mr_mode |= FI_MR_LOCAL;
  info->domain_attr->mr_key_size = 8;
  info->domain_attr->cq_data_size = 4;
  info->domain_attr->av_type = FI_AV_TABLE;
  info->fabric_attr->name = own::copy("simulated");
  info->fabric_attr->prov_name = own::copy("efa");
  return info;
}

// ---- completion queues

ssize_t read_queue(fid_cq* raw, void* buffer, size_t count) {
  Cq* cq = static_cast<Cq*>(raw);
  if (cq->ready.empty()) return -FI_EAGAIN;
  if (cq->ready.front().err != 0) return -FI_EAVAIL;
  auto* entries = static_cast<fi_cq_data_entry*>(buffer);
  size_t n = 0;
  for (; n < count && !cq->ready.empty() && cq->ready.front().err == 0; ++n) {
    const fi_cq_err_entry& entry = cq->ready.front();
    entries[n] = {entry.op_context, entry.flags, entry.len, nullptr, entry.data};
    if ((entry.flags & FI_RECV) != 0) world().network->charge(world().network->model().message_ns);
    cq->ready.pop_front();
  }
  return static_cast<ssize_t>(n);
}

ssize_t read_error(fid_cq* raw, fi_cq_err_entry* entry, uint64_t) {
  Cq* cq = static_cast<Cq*>(raw);
  if (cq->ready.empty() || cq->ready.front().err == 0) return -FI_EAGAIN;
  *entry = cq->ready.front();
  cq->ready.pop_front();
  return 1;
}

const char* error_detail(fid_cq*, int, const void*, char*, size_t) { return "simulated"; }

// ---- address vectors and registrations

int insert(fid_av* raw, const void* address, size_t, fi_addr_t* out, uint64_t, void*) {
  Av* av = static_cast<Av*>(raw);
  uint64_t name = 0;
  std::memcpy(&name, address, sizeof name);
  *out = av->names.size();
  av->names.push_back(name);
  return 1;
}

int register_memory(fid*, const void* data, size_t bytes, uint64_t access, uint64_t, uint64_t,
                    uint64_t, fid_mr** out, void*) {
  auto* mr = new Registered();
  mr->fid = {FI_CLASS_MR, nullptr, &fid_ops};
  mr->base = reinterpret_cast<uintptr_t>(data);
  mr->bytes = bytes;
  mr->access = access;
  mr->key = world().next_key++;
  mr->mem_desc = mr;
  world().registrations[mr->key] = mr;
  Counters& counters = world().network->counters();
  ++counters.registrations;
  if (++counters.open_registrations > counters.most_registrations)
    counters.most_registrations = counters.open_registrations;
  world().network->charge(world().network->model().registration_ns);
  *out = mr;
  return 0;
}

int register_attributes(fid* domain, const fi_mr_attr* attr, uint64_t flags, fid_mr** out) {
  return register_memory(domain, attr->mr_iov->iov_base, attr->mr_iov->iov_len, attr->access, 0,
                         attr->requested_key, flags, out, nullptr);
}

// ---- domains and fabrics

int open_av(fid_domain*, fi_av_attr*, fid_av** out, void*) {
  static fi_ops_av ops = {sizeof ops, insert};
  auto* av = new Av();
  av->fid = {FI_CLASS_AV, nullptr, &fid_ops};
  av->ops = &ops;
  *out = av;
  return 0;
}

int open_cq(fid_domain*, fi_cq_attr* attr, fid_cq** out, void*) {
  static auto ops = own::table<fi_ops_cq>([](fi_ops_cq& cq) {
    cq.read = read_queue;
    cq.readerr = read_error;
    cq.strerror = error_detail;
  });
  if (attr->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
  auto* cq = new Cq();
  cq->fid = {FI_CLASS_CQ, nullptr, &fid_ops};
  cq->ops = &ops;
  *out = cq;
  return 0;
}

int open_domain(fid_fabric*, fi_info* info, fid_domain** out, void*) {
  static auto ops = own::table<fi_ops_domain>([](fi_ops_domain& domain) {
    domain.av_open = open_av;
    domain.cq_open = open_cq;
    domain.endpoint = open_endpoint;
  });
  static auto registration = own::table<fi_ops_mr>([](fi_ops_mr& mr) {
    mr.reg = register_memory;
    mr.regattr = register_attributes;
  });
  auto* domain = new Domain();
  domain->fid = {FI_CLASS_DOMAIN, nullptr, &fid_ops};
  domain->ops = &ops;
  domain->mr = &registration;
  domain->nic = static_cast<size_t>(std::atoi(info->domain_attr->name + std::strlen("nic")));
  *out = domain;
  return 0;
}

int open_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  static auto ops =
      own::table<fi_ops_fabric>([](fi_ops_fabric& fabric) { fabric.domain = open_domain; });
  auto* fabric = new Fabric();
  fabric->fid = {FI_CLASS_FABRIC, nullptr, &fid_ops};
  fabric->ops = &ops;
  *out = fabric;
  return 0;
}

int close_fid(fid* object) {
  switch (object->fclass) {
    case FI_CLASS_FABRIC:
      delete static_cast<Fabric*>(reinterpret_cast<fid_fabric*>(object));
      break;
    case FI_CLASS_DOMAIN:
      delete static_cast<Domain*>(reinterpret_cast<fid_domain*>(object));
      break;
    case FI_CLASS_AV:
      delete static_cast<Av*>(reinterpret_cast<fid_av*>(object));
      break;
    case FI_CLASS_CQ:
      delete static_cast<Cq*>(reinterpret_cast<fid_cq*>(object));
      break;
    case FI_CLASS_MR: {
      auto* mr = static_cast<Registered*>(reinterpret_cast<fid_mr*>(object));
      world().registrations.erase(mr->key);
      --world().network->counters().open_registrations;
      delete mr;
      break;
    }
    case FI_CLASS_EP: {
      auto* ep = static_cast<Ep*>(reinterpret_cast<fid_ep*>(object));
      world().endpoints.erase(ep->name);
      delete ep;
      break;
    }
    default:
      break;
  }
  return 0;
}

int bind_fid(fid* object, fid* other, uint64_t) {
  if (object->fclass != FI_CLASS_EP) return 0;
  auto* ep = static_cast<Ep*>(reinterpret_cast<fid_ep*>(object));
  if (other->fclass == FI_CLASS_CQ) ep->cq = static_cast<Cq*>(reinterpret_cast<fid_cq*>(other));
  if (other->fclass == FI_CLASS_AV) ep->av = static_cast<Av*>(reinterpret_cast<fid_av*>(other));
  return 0;
}

int control_fid(fid*, int command, void*) { return command == FI_ENABLE ? 0 : -FI_ENOSYS; }

// ---- descriptions of what there is

int get_info(uint32_t, const char*, const char*, uint64_t, const fi_info* hints, fi_info** out) {
  *out = nullptr;
  const char* wanted = hints->fabric_attr->prov_name;
  bool offered = wanted == nullptr || std::strcmp(wanted, "efa") == 0;
  if (!offered || (hints->caps & FI_HMEM) != 0) return -FI_ENODATA;
  fi_info** at = out;
  for (int nic = 0; nic < world().network->model().nics; ++nic) {
    *at = info_of(nic);
    at = &(*at)->next;
  }
  return 0;
}

const char* error_text(int error) { return std::strerror(error); }

}  // namespace

fi_ops fid_ops = {sizeof(fi_ops), close_fid, bind_fid, control_fid, nullptr};

World& world() {
  static World only;
  return only;
}

Library provider_of(Network& network) {
  world().network = &network;
  return {"simulated",    FI_VERSION(1, 22),   FI_VERSION(1, 18), get_info,
          own::free_info, own::duplicate_info, open_fabric,       error_text};
}

}  // namespace smddp::fabric::simulated
