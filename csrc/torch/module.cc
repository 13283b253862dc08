// The Python face of the backend; deepspeed_smddp/_C.pyi describes it.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "common/env.h"
#include "device/cuda_device.h"
#include "device/cuda_kernels.h"
#include "device/cuda_report.h"
#include "progress/network.h"
#include "torch/allocator.h"
#include "torch/diagnosis.h"
#include "torch/future_threads.h"
#include "torch/process_group.h"
#include "torch/runtime.h"
#include "torch/statistics.h"
#include "torch/torch_device.h"

namespace py = pybind11;

namespace smddp {
namespace {

// C++ holds a Python object: it is called and released under the GIL, and not released once the interpreter
// is gone.
std::shared_ptr<py::object> hold(py::object given) {
  return {new py::object(std::move(given)), [](py::object* object) {
            if (!Py_IsInitialized()) {
              object->release();
            } else {
              py::gil_scoped_acquire gil;
              *object = py::object();
            }
            delete object;
          }};
}

Fallback::Factory factory_of(py::object given) {
  return
      [held = hold(std::move(given))](const std::string& device_type, const std::string& rendezvous,
                                      const std::string& address) {
        py::gil_scoped_acquire gil;
        return (*held)(device_type, rendezvous, address).cast<c10::intrusive_ptr<c10d::Backend>>();
      };
}

RouteSteps steps_of(const std::vector<std::pair<uint64_t, std::string>>& given) {
  RouteSteps steps;
  for (const auto& [up_to, name] : given) {
    auto route = parse_route(name);
    if (!route) throw py::value_error(name + " is not a route");
    steps.push_back({up_to == 0 ? UINT64_MAX : up_to, *route});
  }
  return steps;
}

// Calls measure(group, collective, device_type), which returns steps as configure() takes them, or None. What
// the measurement moved is not counted.
MeasureRoutes measure_of(py::object given) {
  return [held = hold(std::move(given))](ProcessGroupSMDDP& group, Collective collective,
                                         c10::DeviceType device) -> std::optional<RouteSteps> {
    Statistics::Rows before = Statistics::process().rows();
    py::gil_scoped_acquire gil;
    auto counted = c10::intrusive_ptr<ProcessGroupSMDDP>::unsafe_reclaim_from_nonowning(&group);
    py::object steps = (*held)(counted, name_of(collective), device == c10::kCUDA ? "cuda" : "cpu");
    Statistics::process().restore(std::move(before));
    if (steps.is_none()) return std::nullopt;
    return steps_of(steps.cast<std::vector<std::pair<uint64_t, std::string>>>());
  };
}

// The one of three values whose name `given` is.
template <class T>
T one_of(const std::string& key, const std::string& given, const std::array<std::string, 3>& names,
         const std::array<T, 3>& values) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (given == names[i]) return values[i];
  }
  throw py::value_error(key + " is \"" + given + "\"; it may be \"" + names[0] + "\", \"" +
                        names[1] + "\" or \"" + names[2] + "\"");
}

void configure_from_python(
    size_t allgather_bucket_bytes, size_t allgather_bucket_elements,
    size_t reduce_scatter_bucket_bytes, bool reduce_precision_fp32, const std::string& coding,
    const std::string& fallback, int max_sms, bool reduce_on_cpu, bool check_first_use,
    double silence_seconds,
    const std::map<std::string, std::vector<std::pair<uint64_t, std::string>>>& routes) {
  auto mode =
      one_of<FallbackMode>("fallback", fallback, {"warn", "silent", "error"},
                           {FallbackMode::kWarn, FallbackMode::kSilent, FallbackMode::kError});
  auto coded = one_of<Coding>("coding", coding, {"auto", "on", "off"},
                              {Coding::kAuto, Coding::kOn, Coding::kOff});
  RouteTable table;
  for (size_t i = 0; i < table.size(); ++i) {
    auto given = routes.find(name_of(static_cast<Collective>(i)));
    if (given != routes.end()) table[i] = steps_of(given->second);
  }
  configure({{allgather_bucket_bytes, allgather_bucket_elements, reduce_scatter_bucket_bytes,
              reduce_precision_fp32, Algorithm::kAuto, coded},
             mode,
             max_sms,
             static_cast<uint64_t>(silence_seconds * 1e9),
             std::move(table),
             reduce_on_cpu,
             check_first_use});
}

// The engine's thread takes the GIL to free tensors: a thread that takes a lock of the core's releases it before.
template <class F>
auto without_the_gil(F&& f) {
  py::gil_scoped_release no_gil;
  return f();
}

void end_if_under_the_gil() {
  if (!Py_IsInitialized() || PyGILState_Check() == 0) return;
  std::fputs("smddp: a thread takes the engine's lock under the GIL\n", stderr);
  std::abort();
}

py::list statistics() {
  py::list rows;
  Statistics::Rows counted = without_the_gil([] {
    Statistics::Rows counted = Statistics::process().rows();
    if (uint64_t messages = refused()) counted[{"refused", "fabric"}].calls = messages;
    return counted;
  });
  for (const auto& [key, row] : counted) {
    py::dict d;
    d["collective"] = key.first;
    d["path"] = key.second;
    d["calls"] = row.calls;
    d["bytes"] = row.bytes;
    d["rounds"] = row.fragments;
    d["largest_round"] = row.largest_fragment;
    d["slot_bytes"] = row.taken.slots;
    d["in_place_bytes"] = row.taken.in_place;
    d["single_copy_bytes"] = row.taken.single_copy;
    d["sent_bytes"] = row.sent.sent;
    d["sent_raw_bytes"] = row.sent.raw;
    d["seconds"] = row.seconds;
    d["wait_seconds"] = row.wait_seconds;
    rows.append(d);
  }
  return rows;
}

py::dict memory_statistics() {
  auto s = without_the_gil([] { return intranode::Arena::process().statistics(); });
  py::dict d;
  d["in_use"] = s.in_use;
  d["peak"] = s.peak;
  d["blocks"] = s.blocks;
  d["segments"] = s.segments;
  d["reserved"] = s.reserved;
  d["kept"] = s.kept;
  d["huge"] = s.huge;
  d["refused"] = s.refused;
  return d;
}

py::dict device_statistics() {
  auto s = without_the_gil([] { return TorchDevice::statistics(); });
  py::dict d;
  d["hits"] = s.hits;
  d["misses"] = s.misses;
  d["replaced"] = s.replaced;
  d["mapped"] = s.mapped;
  d["freed_while_mapped"] =
      TorchDevice::is_simulated() ? TorchDevice::host_device().freed_while_mapped() : 0;
  d["kernels"] = device::cuda_kernels() != nullptr;
  return d;
}

py::dict cuda_report() {
  auto report = without_the_gil([] { return device::cuda_report(); });
  if (!report) throw std::runtime_error(report.status().message());
  py::dict d;
  d["version"] = report.value().version;
  d["devices"] = report.value().devices;
  d["apart"] = report.value().apart;
  return d;
}

std::string fabric_description() {
  auto description = describe_network();
  if (!description) throw std::runtime_error(description.status().message());
  return description.value();
}

// The one that ends the program; "": none does.
std::string uncaught_exception() {
  constexpr size_t kMost = 300;
  PyObject* value = PySys_GetObject("last_value");  // borrowed
  if (value == nullptr) return "";
  try {
    return std::string(py::repr(value)).substr(0, kMost);
  } catch (const py::error_already_set&) {
    return Py_TYPE(value)->tp_name;
  }
}

void reset_statistics() {
  Statistics::process().reset();
  reset_refused();
}

void define_group(py::module_& m) {
  py::class_<ProcessGroupSMDDP, c10d::Backend, c10::intrusive_ptr<ProcessGroupSMDDP>>(
      m, "ProcessGroupSMDDP")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, const std::string& group_name,
                       py::object factory, py::object measure, std::vector<int> ranks,
                       bool whole_job) {
             Fallback::Factory make = factory_of(std::move(factory));
             MeasureRoutes measured = measure_of(std::move(measure));
             py::gil_scoped_release no_gil;  // the call waits for the other ranks
             return c10::make_intrusive<ProcessGroupSMDDP>(store, rank, size, timeout, group_name,
                                                           std::move(make), measured,
                                                           std::move(ranks), whole_job);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("group_name"), py::arg("fallback_factory"), py::arg("measure_routes"),
           py::arg("ranks"), py::arg("whole_job") = false)
      .def("_force_route", [](ProcessGroupSMDDP& group,
                              const std::string& name) { group.routes().force(parse_route(name)); })
      .def(
          "at_end",
          [](ProcessGroupSMDDP& group, py::object end) {
            group.at_end([held = hold(std::move(end))] {
              if (!Py_IsInitialized()) return;
              py::gil_scoped_acquire gil;
              try {
                (*held)();
              } catch (py::error_already_set& error) {  // a destructor may call it
                error.discard_as_unraisable("the end of a group");
              }
            });
          },
          py::arg("end"))
      .def_property_readonly(
          "rendezvous", [](const ProcessGroupSMDDP& group) { return group.store().rendezvous(); });
}

// For tests.
void define_simulated_device(py::module_& m) {
  m.def("host_device_empty", &TorchDevice::host_empty, py::arg("bytes"));
  m.def(
      "host_device_reads_peers",
      [](const std::string& how) {
        using Peers = device::HostDevice::Peers;
        TorchDevice::host_device().set_peers(how == "wrong"   ? Peers::kWrong
                                             : how == "stale" ? Peers::kStale
                                                              : Peers::kReachable);
      },
      py::arg("how"));
  m.def(
      "host_device_loses_sums",
      [](bool loses) {
        using device::HostDevice;
        TorchDevice::host_device().set_fault(
            HostDevice::Command::kSum, loses ? HostDevice::Fault::kLost : HostDevice::Fault::kNone);
      },
      py::arg("loses"));
  m.def("host_device_records", &TorchDevice::record_host, py::arg("begins"));
  m.def(
      "host_device_memory",
      [](size_t largest, bool keeps_bytes) {
        TorchDevice::host_device().set_largest_allocation(largest);
        TorchDevice::host_device().set_keeps_bytes(keeps_bytes);
      },
      py::arg("largest"), py::arg("keeps_bytes"));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled collectives.";
  py::module_::import("torch.distributed");  // Backend and Store must be known to pybind11
  m.attr("BUILT_WITH_TORCH") = SMDDP_TORCH_VERSION;
  define_group(m);
  m.def("configure", &configure_from_python, py::kw_only(), py::arg("allgather_bucket_bytes") = 0,
        py::arg("allgather_bucket_elements") = 0, py::arg("reduce_scatter_bucket_bytes") = 0,
        py::arg("reduce_precision_fp32") = false, py::arg("coding") = "auto",
        py::arg("fallback") = "warn", py::arg("max_sms") = 9, py::arg("reduce_on_cpu") = false,
        py::arg("check_first_use") = true, py::arg("silence_seconds") = 30.0,
        py::arg("routes") = std::map<std::string, std::vector<std::pair<uint64_t, std::string>>>());
  m.def("statistics", &statistics);
  m.def("reset_statistics", &reset_statistics, py::call_guard<py::gil_scoped_release>());
  m.def(
      "shared_empty",
      [](const std::vector<int64_t>& size, at::ScalarType dtype) {
        return shared_empty(size, at::TensorOptions(dtype));
      },
      py::arg("size"), py::arg("dtype"));
  m.def("share_storage", &share_storage, py::arg("tensor"));
  m.def("is_shared", &is_shared, py::arg("tensor"));
  m.def("memory_statistics", &memory_statistics);
  m.def(
      "trim_memory", [] { intranode::Arena::process().trim(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("install_shared_allocator", &install_shared_allocator);
  m.def("shared_allocator_installed", &shared_allocator_installed);
  m.def("device_statistics", &device_statistics);
  m.def("cuda_report", &cuda_report);
  define_diagnosis(m);
  define_simulated_device(m);
  m.def("set_packaged_libfabric", &set_packaged_libfabric, py::arg("path"));
  m.def("fabric_description", &fabric_description, py::call_guard<py::gil_scoped_release>());
  check_interrupt = [] {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  without_gil = [](void (*function)(void*), void* argument) {
    if (!Py_IsInitialized() || PyGILState_Check() == 0) return function(argument);
    py::gil_scoped_release no_gil;
    function(argument);
  };
  if (env::debug("check_locks") == "1") check_before_lock = end_if_under_the_gil;
  // At interpreter exit the engine's thread must end before the modules are unloaded.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    std::string uncaught = uncaught_exception();
    py::gil_scoped_release no_gil;
    FutureThreads::process().settle();
    Fallback::settle();
    shut_down_process(uncaught);
  }));
}

}  // namespace smddp
