#include "transport/ofi/loader.h"

#include <dlfcn.h>
#include <glob.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "transport/ofi/open.h"
#include "transport/ofi/types.h"

namespace smddp::ofi {
namespace {

constexpr const char* kSoname = "libfabric.so.1";
constexpr const char* kEfaPattern = "/opt/amazon/efa/lib*/libfabric.so.1";
constexpr uint32_t kOldest = FI_VERSION(1, 11);
// efa leaves device RDMA off for callers of an API older than 1.18.
constexpr uint32_t kApi = FI_VERSION(1, 18);

std::mutex packaged_mutex;
std::string packaged_library;  // under packaged_mutex

std::string number(uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

std::vector<std::string> glob_paths(const char* pattern) {
  std::vector<std::string> paths;
  glob_t found = {};
  if (::glob(pattern, 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  ::globfree(&found);
  return paths;
}

// fi_info has grown at its end only. The default (newest) version of each symbol is the right one
// for headers of any age as long as every fi_info is allocated by dupinfo: the library then sees
// its own layout, and this code a prefix of it.
template <class F>
bool find(void* handle, const char* name, F& out) {
  out = reinterpret_cast<F>(::dlsym(handle, name));
  return out != nullptr;
}

bool has_rdma_device() { return !glob_paths("/sys/class/infiniband/*").empty(); }

// Providers over TCP reserve pools of buffers per endpoint, and touch them when it opens or first
// connects. ofi_rxm 1.17: two pools of 1024 bounce buffers (98 MiB resident with its defaults, 7
// MiB with these values). tcp 2.5: one pool of receive buffers for unexpected messages (17 MiB, and
// 0.8 MiB with these values). Messages up to the eager limit stay as fast as before, because over
// TCP they are received directly into their destination. Over verbs ofi_rxm would get slower: it
// has no eager limit but the size of its buffers, so with an RDMA device the buffers have the
// limit's size. The limit is one header more than the default, so that a flow whose size is a round
// number needs no further message for its last bytes. These settings exist as environment variables
// only. A variable that the user has set keeps its value.
std::vector<env::Default> provider_buffers() {
  std::vector<env::Default> sizes{{"FI_OFI_RXM_MSG_RX_SIZE", "64"}, {"FI_TCP_MAX_RX_SIZE", "256"}};
  if (std::getenv("FI_OFI_RXM_BUFFER_SIZE") != nullptr) return sizes;
  std::string limit = std::to_string(kEagerMessage);
  sizes.push_back({"FI_OFI_RXM_BUFFER_SIZE", has_rdma_device() ? limit : "2048"});
  sizes.push_back({"FI_OFI_RXM_EAGER_LIMIT", limit});
  return sizes;
}

// efa and verbs read these when the library opens: registered pages must survive fork(). Without the
// last one libibverbs takes all pages for 4 KiB, and the kernel refuses to protect a part of a huge page:
// a registration in the shared memory of the arena would fail.
std::vector<env::Default> fork_safety() {
  return {{"FI_EFA_FORK_SAFE", "1"},
          {"RDMAV_FORK_SAFE", "1"},
          {"IBV_FORK_SAFE", "1"},
          {"RDMAV_HUGEPAGES_SAFE", "1"}};
}

Result<Library> open_one(const std::string& path) {
  env::set_defaults(provider_buffers());
  env::set_defaults(fork_safety());
  env::set_defaults(provider_filter(has_rdma_device(), env::get("FABRIC_PROVIDER")));
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return Status(Code::kUnavailable, why != nullptr ? why : path + ": unknown error");
  }
  Library library;
  library.path = path;
  decltype(&::fi_version) version = nullptr;
  if (!find(handle, "fi_getinfo", library.getinfo) ||
      !find(handle, "fi_freeinfo", library.freeinfo) ||
      !find(handle, "fi_dupinfo", library.dupinfo) || !find(handle, "fi_fabric", library.fabric) ||
      !find(handle, "fi_strerror", library.strerror) || !find(handle, "fi_version", version)) {
    ::dlclose(handle);
    return Status(Code::kUnavailable, path + ": not a libfabric (symbols are missing)");
  }
  library.version = version();
  if (library.version < kOldest) {
    return Status(Code::kUnavailable, path + ": is libfabric " + number(library.version) + ", " +
                                          number(kOldest) + " or newer is needed");
  }
  library.api = std::min(library.version, kApi);
  return library;
}

Status named_failure(const std::string& source, const std::string& path, const Status& why) {
  return Status(
      Code::kUnavailable,
      "libfabric could not be opened: " + source + " names " + path + " (" + why.message() +
          "); correct it, or leave it unset and install one: `apt install libfabric1`, or "
          "`pip install 'deepspeed-smddp[fabric]'`");
}

std::string packaged() {
  std::lock_guard lock(packaged_mutex);
  return packaged_library;
}

}  // namespace

std::string Library::version_text() const { return number(version); }

std::string Library::error_text(int rc) const {
  const char* text = strerror(std::abs(rc));
  return text != nullptr ? text : "error " + std::to_string(rc);
}

void set_packaged_library(const std::string& path) {
  std::lock_guard lock(packaged_mutex);
  packaged_library = path;
}

std::vector<std::string> library_candidates(const std::vector<std::string>& efa,
                                            const std::string& packaged, bool rdma_device) {
  std::vector<std::string> candidates = efa;
  candidates.push_back(kSoname);
  if (!packaged.empty()) candidates.insert(candidates.end() - (rdma_device ? 0 : 1), packaged);
  return candidates;
}

std::vector<env::Default> provider_filter(bool rdma_device, const std::string& wanted) {
  if (rdma_device || wanted.find("verbs") != std::string::npos) return {};
  return {{"FI_PROVIDER", "^verbs"}};
}

Result<Library> load_library(const std::string& path) {
  if (!path.empty()) {
    Result<Library> library = open_one(path);
    return library ? library : named_failure("the library option", path, library.status());
  }
  if (std::string named = env::get("LIBFABRIC"); !named.empty()) {
    Result<Library> library = open_one(named);
    return library ? library : named_failure("SMDDP_LIBFABRIC", named, library.status());
  }
  std::string tried;
  for (const std::string& candidate :
       library_candidates(glob_paths(kEfaPattern), packaged(), has_rdma_device())) {
    Result<Library> library = open_one(candidate);
    if (library) return library;
    tried += (tried.empty() ? "" : "; ") + library.status().message();
  }
  return Status(Code::kUnavailable,
                "libfabric could not be opened: tried " + std::string(kEfaPattern) + " and " +
                    kSoname + " (" + tried +
                    "); `apt install libfabric1`, or `pip install 'deepspeed-smddp[fabric]'`, or "
                    "name its path in SMDDP_LIBFABRIC");
}

}  // namespace smddp::ofi
