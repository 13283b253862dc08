// The stub's objects, and the operations in flight between them.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "stub_fabric/own_libfabric.h"
#include "stub_fabric/stub.h"

namespace stub {

State& state();
std::mt19937& chance();
using smddp::own_libfabric::table;
void violation(const std::string& what);
void called(const std::string& what);

// One op table for all kinds of fid.
int close_fid(fid*);
int bind_fid(fid*, fid*, uint64_t);
int control_fid(fid*, int, void*);
inline fi_ops fid_ops = {sizeof(fi_ops), close_fid, bind_fid, control_fid, nullptr};

struct Fabric : fid_fabric {};
struct Domain : fid_domain {
  size_t index = 0;  // in Settings::domains
};
struct Av : fid_av {
  std::vector<uint64_t> names;  // by fi_addr_t
};
struct Completion {
  fi_cq_err_entry entry;
  bool error;
};
struct Cq : fid_cq {
  std::deque<Completion> ready;
};
struct Registered : fid_mr {
  Domain* domain;
  uintptr_t base;
  size_t bytes;
  uint64_t access;
  bool gpu = false;
  // Writes into a GPU's memory that the GPU sees only after a read by this NIC.
  std::vector<std::pair<uintptr_t, std::vector<std::byte>>> late = {};
};
struct PostedReceive {
  void* data;
  size_t bytes;
  void* context;
};
struct Ep : fid_ep {
  Domain* domain = nullptr;
  uint64_t name = 0;
  Cq* cq = nullptr;
  Av* av = nullptr;
  bool enabled = false;
  std::deque<PostedReceive> receives;
};

// An operation between its post and its completion. The sender's memory is read on arrival.
struct Flight {
  enum Kind { kSend, kWrite, kRead } kind;
  Ep* from;  // nullptr: closed since; its memory has been copied
  uint64_t from_name;
  uint64_t to;       // endpoint's name
  const void* data;  // kRead: where it goes
  size_t bytes;
  uint64_t address, key;
  void* context;
  uint64_t sequence;
  // Of a write: its sender hears of it when it has arrived, and may before if it did not ask for that. Then
  // its memory has been copied.
  bool delivered = false, acknowledged = false;
  std::vector<std::byte> copy = {};
};

struct World {
  std::map<uint64_t, Ep*> endpoints;  // by name
  std::map<uint64_t, Registered*> registrations;
  std::deque<Flight> flights;
  uint64_t next_name = 1, next_key = 77, next_sequence = 0, last_arrived = 0;
};
World& world();

// Lets some of the operations in flight arrive, in random order.
void pump();
// A violation unless `descriptor` is that of a registration of that memory for `access`.
void check_descriptor(const Ep& ep, const void* data, size_t bytes, void* descriptor,
                      uint64_t access);
// Takes a receive back; false if there is none with that context.
bool cancel(Ep& ep, void* context);
int endpoint(fid_domain* domain, fi_info* info, fid_ep** out, void*);
bool busy();

}  // namespace stub
