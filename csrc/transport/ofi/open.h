// Opens a transport over libfabric. The only header of this folder for the rest of the core: called by the
// process's Network, and by the module.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace smddp::ofi {

struct Options {
  std::string library;   // path of libfabric; empty: SMDDP_LIBFABRIC, /opt/amazon/efa, the loader
  std::string provider;  // empty: the best that fi_getinfo offers
  // Domain name, interface or source IP address, or the beginning of one, or several with commas between. Empty: all
  // NICs of the provider if they are real (efa, verbs), otherwise the first that is not loopback. "^docker0,lo": the
  // same without these.
  std::string interface;
  std::string transfer = {};   // of chunks: "writes", "messages"; empty: the provider's faster one
  bool device_memory = false;  // NICs are to read and write GPUs' memory (FI_HMEM) if they can
};

// The values of SMDDP_FABRIC_PROVIDER, SMDDP_FABRIC_INTERFACE, and of transfer and hmem in SMDDP_DEBUG. The
// loader reads SMDDP_LIBFABRIC.
Options options_from_env();

// Names a libfabric that a Python package brought; empty: there is none. loader.h says when it is taken.
// Called before the first library is opened.
void set_packaged_library(const std::string& path);

// kUnavailable with a sentence that names the library, provider or interface and the remedy.
Result<std::unique_ptr<transport::Transport>> open(const Options& options = options_from_env());

}  // namespace smddp::ofi
