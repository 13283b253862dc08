#include "torch/diagnosis.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>

#include "coding/piece.h"
#include "common/clock.h"
#include "group/measured_network.h"
#include "recorder/flight_recorder.h"
#include "torch/error_state.h"
#include "torch/fallback.h"
#include "torch/live_groups.h"
#include "torch/operands.h"
#include "torch/runtime.h"
#include "torch/tensors.h"

namespace py = pybind11;

namespace smddp {
namespace {

const char* name_of(recorder::State state) {
  constexpr const char* kNames[] = {"queued", "running", "done", "failed"};
  return kNames[static_cast<size_t>(state)];
}

py::list flight_record() {
  auto& recorder = recorder::FlightRecorder::process();
  std::vector<recorder::Record> records;
  {
    py::gil_scoped_release no_gil;
    Fallback::look_at_works();
    records = recorder.records();
  }
  using std::chrono::system_clock, std::chrono::duration;
  const double offset =
      duration<double>(system_clock::now().time_since_epoch()).count() - in_seconds(now_ns());
  // Since 1970, of a time of now_ns().
  auto seconds = [=](uint64_t ns) {
    return ns == 0 ? py::object(py::none()) : py::float_(offset + in_seconds(ns));
  };
  py::list rows;
  for (const recorder::Record& r : records) {
    py::dict d;
    d["id"] = r.id;
    d["group"] = recorder.text(r.call.group);
    d["sequence"] = r.call.sequence;
    d["operation"] = recorder.text(r.call.operation);
    d["bytes"] = r.call.bytes;
    d["dtype"] = recorder.text(r.call.dtype);
    d["path"] = recorder.text(r.path);
    d["label"] = recorder.text(r.label);
    d["state"] = name_of(r.state);
    d["called"] = seconds(r.call.called_ns);
    d["started"] = seconds(r.started_ns);
    d["first_byte"] = seconds(r.first_byte_ns);
    d["last_byte"] = seconds(r.ended_ns);
    d["wait_entered"] = seconds(r.wait_entered_ns);
    d["wait_left"] = seconds(r.wait_left_ns);
    rows.append(d);
  }
  return rows;
}

py::object described(const GroupState& group) {
  if (!group.oldest) return py::none();
  auto called = [&](Rank rank) { return group.members[static_cast<size_t>(rank)]; };
  py::list awaited;
  for (const AwaitedRank& rank : group.oldest->awaited) {
    py::dict d;
    d["rank"] = called(rank.rank);
    d["expected"] = rank.expected;
    d["arrived"] = rank.arrived;
    d["seconds"] = in_seconds(rank.quiet_ns);
    awaited.append(d);
  }
  py::dict d;
  d["sequence"] = group.oldest->sequence;
  d["operation"] = smddp::name_of(group.oldest->collective);
  d["text"] = group.oldest->text;
  d["awaited"] = awaited;
  return d;
}

// Of those ranks that there is something to say of.
py::list tallies_of(const GroupState& group) {
  py::list rows;
  for (size_t rank = 0; rank < group.tallies.size(); ++rank) {
    const PeerTally& tally = group.tallies[rank];
    if (tally.late == 0 && tally.flow_ns == 0) continue;
    py::dict d;
    d["rank"] = group.members[rank];
    d["late"] = tally.late;
    d["late_seconds"] = in_seconds(tally.late_ns);
    d["flow_bytes"] = tally.flow_bytes;
    d["flow_seconds"] = in_seconds(tally.flow_ns);
    d["flow_waited_seconds"] = in_seconds(tally.flow_waited_ns);
    rows.append(d);
  }
  return rows;
}

const char* name_of(Connection::State state) {
  constexpr const char* kNames[] = {"not contacted", "no message yet", "connected", "silent",
                                    "stopped",       "left",           "lost",      "ended"};
  return kNames[static_cast<size_t>(state)];
}

py::list connections_of(const GroupState& group) {
  py::list rows;
  for (const Connection& connection : group.connections) {
    py::dict d;
    d["rank"] = group.members[static_cast<size_t>(connection.rank)];
    d["state"] = name_of(connection.state);
    d["why"] = connection.why;
    d["silent_seconds"] = in_seconds(connection.silent_ns);
    d["last_message_seconds"] =
        connection.last_message_ns ? py::object(py::float_(in_seconds(*connection.last_message_ns)))
                                   : py::none();
    d["path"] = connection.path;
    rows.append(d);
  }
  return rows;
}

// Rates in bytes per second.
py::dict described(const CodingAnswer& coding) {
  py::dict d;
  d["answers"] = coding.number;
  d["pays"] = coding.pays;
  d["ratio"] = coding.ratio;
  d["network"] = 1e9 * coding.network;
  d["code"] = 1e9 * coding.code;
  return d;
}

// Of the model of a group; "" of a group inside one host.
std::string source_of_network(const std::string& model) {
  auto process = existing_process();
  if (model.empty() || !process) return {};
  Engine::Lock lock = process->engine().lock();
  const Network::Known& known = process->network().known();
  if (known.model.empty()) return "given";
  // A later group may have measured again.
  if (known.model != model) return "measured now";
  return known.source + (known.doubted ? ", but large transfers have other rates" : "");
}

py::list group_states(bool with_connections) {
  std::vector<GroupState> states;
  std::vector<std::string> sources;
  {
    py::gil_scoped_release no_gil;
    states = LiveGroups::process().states(with_connections);
    for (const GroupState& group : states) sources.push_back(source_of_network(group.network));
  }
  py::list rows;
  for (size_t i = 0; i < states.size(); ++i) {
    const GroupState& group = states[i];
    py::dict d;
    d["name"] = group.name;
    d["rank"] = group.rank;
    d["members"] = group.members;
    d["hosts"] = group.hosts;
    d["peers"] = tallies_of(group);
    d["submitted"] = group.submitted;
    d["finished"] = group.complete;
    d["network"] = group.network;
    d["network_source"] = sources[i];
    d["inside_host"] = group.inside_host;
    d["coding"] = described(group.coding);
    d["error"] = group.status.message();
    d["oldest"] = described(group);
    if (with_connections) d["connections"] = connections_of(group);
    rows.append(d);
  }
  return rows;
}

std::string stored_network_of(const std::vector<std::string>& hosts) {
  auto process = this_process();
  if (!process) throw std::runtime_error(process.status().message());
  auto found = stored_network(*process.value(), hosts);
  if (!found) throw std::runtime_error(found.status().message());
  return found.value();
}

// Codes a tensor's values piece by piece, as they would cross the network, and decodes them.
py::dict measure_coding(const at::Tensor& tensor) {
  require(tensor.is_cpu() && tensor.is_contiguous(), "a contiguous tensor on the CPU is coded");
  std::vector<std::byte> code(coding::most_coded(coding::kPieceBytes)), back(coding::kPieceBytes);
  auto* from = static_cast<const std::byte*>(tensor.const_data_ptr());
  size_t sent = 0;
  uint64_t encode_ns = 0, decode_ns = 0;
  for (size_t at = 0; at < tensor.nbytes(); at += coding::kPieceBytes) {
    size_t bytes = std::min(coding::kPieceBytes, tensor.nbytes() - at);
    uint64_t began = now_ns();
    size_t coded =
        coding::encode_piece(code.data(), from + at, bytes, dtype_of(tensor.scalar_type()));
    uint64_t between = now_ns();
    coding::decode_piece(back.data(), bytes, code.data(), coded);
    decode_ns += now_ns() - between;
    encode_ns += between - began;
    sent += coded <= coding::most_worth(bytes) ? coded : bytes;
  }
  py::dict d;
  d["sent_bytes"] = sent;
  d["encode_seconds"] = in_seconds(encode_ns);
  d["decode_seconds"] = in_seconds(decode_ns);
  return d;
}

}  // namespace

void define_diagnosis(py::module_& m) {
  m.def("flight_record", &flight_record);
  m.def("stored_network", &stored_network_of, py::arg("hosts"),
        py::call_guard<py::gil_scoped_release>());
  m.def("group_states", &group_states, py::arg("with_connections") = false);
  m.def("measure_coding", &measure_coding, py::arg("tensor"));
  m.def(
      "label_number",
      [](const std::string& label) { return recorder::FlightRecorder::process().text(label); },
      py::arg("label"));
  m.def(
      "set_label",
      [](recorder::Text number, uint32_t parameters) {
        recorder::FlightRecorder::set_label(number);
        set_moved_parameters(parameters);
      },
      py::arg("number"), py::arg("parameters") = 0);
  m.def(
      "set_recording", [](bool on) { recorder::FlightRecorder::process().set_recording(on); },
      py::arg("on"));
  m.def("error_notification", [] { return ErrorState::process().notification(); });
  m.def(
      "take_error", [] { return ErrorState::process().take(); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "ask_for_report", [](const std::string& why) { ErrorState::process().ask(why); },
      py::arg("why"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "reported", [] { ErrorState::process().reported(); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "hold_errors",
      [](std::chrono::milliseconds limit) { ErrorState::process().set_reporter(limit); },
      py::arg("limit"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "report_at_signal", [](int number) { return ErrorState::process().watch_signal(number); },
      py::arg("number"));
}

}  // namespace smddp
