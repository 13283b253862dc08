// A libfabric that moves bytes between endpoints of one process, claims to be a provider that this
// host lacks, and is as awkward as the interface allows: completes in shuffled order, is busy now and
// then, and checks every call against the rules of the provider it plays. Opened like the real one,
// through Options::library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stub {

struct Settings {
  std::string provider = "efa";
  std::vector<std::string> domains = {"rdmap0s6-rdm", "rdmap0s7-rdm"};
  bool messages_only = false;         // has neither FI_RMA nor FI_TAGGED
  bool consumes_receives = false;     // FI_RX_CQ_DATA: a write's immediate data takes a receive
  bool binds_registrations = false;   // FI_MR_ENDPOINT
  bool emulates_writes = false;       // what FI_OPT_EFA_EMULATED_WRITE says
  bool knows_efa_options = true;      // false: a library older than that option
  bool device_memory = false;         // FI_HMEM
  bool needs_cuda = false;            // and copies by the driver for it
  size_t pinned_limit = SIZE_MAX;     // registrations that may be open at once
  unsigned busy_one_in = 5;           // answers -FI_EAGAIN to so many of the operations
  size_t longest_message = SIZE_MAX;  // max_msg_size
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
  int fail_operations = 0;                // so many of the next to complete do so with an error
  std::vector<int> gpus;                  // of each registration of a GPU's memory, in order
};

// Of the shared object, wherever it was opened.
extern "C" __attribute__((visibility("default"))) State* stub_state();

}  // namespace stub
