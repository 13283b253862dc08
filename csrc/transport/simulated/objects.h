// The provider's objects, and the transfers between them. Only the provider's sources include it.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transport/simulated/network.h"
#include "transport/simulated/own_libfabric.h"

namespace smddp::fabric::simulated {

struct Fabric : fid_fabric {};
struct Domain : fid_domain {
  size_t nic = 0;
};
struct Av : fid_av {
  std::vector<uint64_t> names;  // by fi_addr_t
};
struct Cq : fid_cq {
  std::deque<fi_cq_err_entry> ready;
};
struct Registered : fid_mr {
  uintptr_t base;
  size_t bytes;
  uint64_t access;
};
struct PostedReceive {
  void* data;
  size_t bytes;
  void* context;
};
// A message that has arrived before a receive was posted for it.
struct Waiting {
  std::vector<std::byte> data;
};
struct Ep : fid_ep {
  Process process = 0;
  size_t nic = 0;
  uint64_t name = 0;
  Cq* cq = nullptr;
  Av* av = nullptr;
  std::deque<PostedReceive> receives;
  std::deque<Waiting> waiting;
};

// All that the provider knows, beside the network.
struct World {
  Network* network = nullptr;
  std::unordered_map<uint64_t, Ep*> endpoints;              // by name
  std::unordered_map<uint64_t, Registered*> registrations;  // by key
  uint64_t next_name = 1, next_key = 77;
};
World& world();

void complete(Ep& ep, void* context, uint64_t flags, size_t bytes, int error);
// Gives a message to a receive of `ep`, or keeps it until one is posted.
void take(Ep& ep, const std::byte* data, size_t bytes);
int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** out, void*);
extern fi_ops fid_ops;

}  // namespace smddp::fabric::simulated
