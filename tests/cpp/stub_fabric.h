// What a test sets and sees of stub_fabric.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#define STUB_SYMBOL extern "C" __attribute__((visibility("default")))

namespace stub {

struct Settings {
  std::string provider = "efa";
  std::vector<std::string> domains = {"rdmap0s6-rdm", "rdmap0s7-rdm"};
  bool messages_only = false;      // has no FI_RMA
  bool consumes_receives = false;  // FI_RX_CQ_DATA: a write's immediate data takes a receive
  bool orders_messages = false;    // claims FI_ORDER_SAW; the stub itself orders nothing
  bool provider_keys = true;       // FI_MR_PROV_KEY; false: the caller chooses the keys
  bool emulates_writes = false;    // what FI_OPT_EFA_EMULATED_WRITE says
  bool knows_efa_options = true;   // false: a library older than that option
  bool device_memory = false;      // FI_HMEM
  bool needs_cuda = false;         // FI_HMEM only with copies by CUDA's driver
  size_t pinned_limit = SIZE_MAX;  // registrations that may be open at once
  unsigned busy_one_in = 5;        // answers -FI_EAGAIN to one in so many operations
};

struct State {
  Settings settings;
  std::vector<std::string> calls;         // of set-up, in order: "fi_endpoint rdmap0s6-rdm"
  std::vector<std::string> violations;    // of the rules
  uint64_t busy = 0;                      // -FI_EAGAIN answers
  uint64_t overtaken = 0;                 // operations that completed before an earlier one
  size_t registrations = 0;               // open now
  size_t objects = 0;                     // fids open now, of any kind
  std::vector<uint64_t> bytes_of_domain;  // sent by each
  int fail_operations = 0;                // the next so many complete with an error, this one
  int error = 5;                          // (EIO)
  size_t foreign_writes = 0;              // with immediate data, of a stranger: still to come
  std::vector<int> gpus;                  // of each registration of a GPU's memory, in order
};

// The state of the shared object, however many times it was opened.
STUB_SYMBOL State* stub_state();

// In the shared object.
inline State& state() { return *stub_state(); }
inline void violation(const std::string& what) { state().violations.push_back(what); }

}  // namespace stub
