#include "device/cuda_api.h"

#include <dlfcn.h>

#include "common/env.h"

namespace smddp::device::cuda {
namespace {

struct Remedy {
  CUresult error;
  const char* text;
};

constexpr char kOldDriver[] =
    "the driver is older than the nvcc that built the kernels: update it, or build with an older "
    "one";
constexpr Remedy kRemedies[] = {
    {1, "a bug of this library, or memory of an allocator that is not torch's native one"},
    {2, "the GPU's memory is full: free some, or make buckets smaller"},
    {100, "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"},
    {209, "the kernels were built for other GPUs: build again with this machine's nvcc"},
    {217,
     "the GPUs can't read each other's memory (`nvidia-smi topo -p2p r`): set SMDDP_DEVICE=off"},
    {218, kOldDriver},
    {222, kOldDriver},
    {304, "too many files are open (see `ulimit -n`), or the container forbids it"},
    {700,
     "an earlier kernel, possibly of the model, accessed an invalid address: run it under "
     "compute-sanitizer"},
    {712, "this host memory is pinned twice"},
    {719, "an earlier kernel, possibly of the model, failed: run it under compute-sanitizer"},
    {800,
     "the container or the driver does not permit it: IPC needs ranks with the same user and the "
     "same pid namespace"},
    {801, "this GPU or driver can't do it: update the driver"},
    {900, "not possible while a CUDA graph is recorded"},
};

}  // namespace

Status Api::check(CUresult result, const char* what) const {
  if (result == kSuccess) return {};
  const char *name = nullptr, *text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  std::string message = std::string(what) + " failed: " +
                        (name != nullptr ? name : "CUDA error " + std::to_string(result)) +
                        (text != nullptr ? std::string(" (") + text + ")" : "");
  for (const Remedy& remedy : kRemedies) {
    if (remedy.error == result) message += std::string("; ") + remedy.text;
  }
  return {Code::kUnavailable, message};
}

Result<Api> load_api(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Status(Code::kUnavailable, "could not open CUDA's driver (" +
                                          std::string(why != nullptr ? why : path) +
                                          "); install NVIDIA's driver, or make the GPUs "
                                          "available in the container");
  }
  // dlsym() would return the first version of a function that has several versions.
  using GetProcAddress = CUresult (*)(const char*, void**, int, uint64_t, int*);
  auto find = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (find == nullptr) {
    dlclose(library);
    return Status(Code::kUnavailable,
                  path + " has no cuGetProcAddress_v2: update NVIDIA's driver to 525 or newer");
  }
  Api api;
  const char* missing = nullptr;
  auto take = [&](const char* name, auto& function, int version) {
    void* address = nullptr;
    int found = 0;
    bool has = find(name, &address, version, 0, &found) == kSuccess && address != nullptr;
    if (!has && version == kVersion) missing = name;
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(has ? address : nullptr);
  };
#define SMDDP_TAKE(name, parameters) take(#name, api.name, kVersion);
  SMDDP_CUDA_FUNCTIONS(SMDDP_TAKE)
#undef SMDDP_TAKE
#define SMDDP_TAKE(name, parameters) take(#name, api.name, kNewerVersion);
  SMDDP_NEWER_CUDA_FUNCTIONS(SMDDP_TAKE)
#undef SMDDP_TAKE
  if (missing != nullptr) {
    dlclose(library);
    return Status(Code::kUnavailable,
                  path + " has no " + missing + ": update NVIDIA's driver to 525 or newer");
  }
  if (Status started = api.check(api.cuInit(0), "cuInit"); !started) return started;
  return api;
}

const Result<Api>& api() {
  // Never closed: the driver's threads live longer than the static objects of this library.
  static const auto* loaded = new Result<Api>(load_api(env::debug("libcuda")));
  return *loaded;
}

}  // namespace smddp::device::cuda
