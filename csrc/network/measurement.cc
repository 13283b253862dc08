#include "network/measurement.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/clock.h"

namespace smddp {
namespace {

// Not measured by themselves: by the model that they give, collectives take 0.66 to 1.10 of the time by the usual one
// (2026-11-25-network-curve, AMD EPYC).
constexpr int kWarmUps = 3;
constexpr int kSingles = 21;
constexpr int kBatches = 9, kTogether = 32;
// Sizes of the timed transfers, each four times the one before, until one takes kLongEnoughNs. A link that was
// idle may let some tens of KiB pass at once: the transfer that counts has many times as much.
constexpr size_t kSmallestTransfer = 64 << 10, kLargestTransfer = 8 << 20;
constexpr double kLongEnoughNs = 25e6;
// Of the largest, if all are short: the first one of a size also pays for new memory and new connections.
constexpr int kRepeats = 3;

double median(std::vector<double> values) {
  auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Times exchanges of a pair. Both ranks make the same exchanges, as their choices follow from times that they have
// exchanged.
class PairTimer {
 public:
  explicit PairTimer(PairExchange& pair)
      : pair_(pair), memory_(std::make_shared<std::vector<std::byte>>(2 * kLargestTransfer)) {}

  Result<Timings> measure() {
    Timings timings;
    for (int i = 0; i < kWarmUps; ++i) time(1);
    timings.one_ns = usual_time(kSingles, 1, false);
    const uint64_t messages = pair_.count_messages();
    timings.each_ns = usual_time(kBatches, kTogether, true) / kTogether;
    timings.messages =
        static_cast<double>(pair_.count_messages() - messages) / (kBatches * kTogether);
    measure_rate(&timings);
    return ok() ? Result<Timings>(timings) : Result<Timings>(status_);
  }

 private:
  bool ok() const { return status_.ok(); }

  // The lower quartile: what else runs on the two hosts makes an exchange longer, never shorter.
  double usual_time(int times, size_t bytes, bool cut) {
    std::vector<double> all;
    for (int i = 0; i < times; ++i) all.push_back(time(bytes, cut));
    std::sort(all.begin(), all.end());
    return all[all.size() / 4];
  }

  void measure_rate(Timings* timings) {
    // Chunks may have a connection of their own, which is made now.
    double expected = slower(time(kSmallestTransfer));
    for (size_t bytes = kSmallestTransfer; ok(); bytes = std::min(4 * bytes, kLargestTransfer)) {
      double ns = slower(time(bytes));
      bool last = bytes == kLargestTransfer;
      // Long enough perhaps only because something has disturbed it.
      if (ns >= kLongEnoughNs && (ns < 2 * kLongEnoughNs || ns > 2 * expected))
        ns = std::min(ns, slower(time(bytes)));
      for (int i = 0; last && i < kRepeats && ns < kLongEnoughNs && ok(); ++i)
        ns = std::min(ns, slower(time(bytes)));
      timings->bytes = static_cast<double>(bytes);
      timings->bytes_ns = ns;
      if (last || ns >= kLongEnoughNs) return;
      expected = 4 * ns;
    }
  }

  // Nanoseconds that an exchange of so many bytes of each rank takes.
  double time(size_t bytes, bool cut = false) {
    const uint64_t began = now_ns();
    run(memory_, bytes, cut);
    return static_cast<double>(now_ns() - began);
  }

  void run(const std::shared_ptr<std::vector<std::byte>>& memory, size_t bytes, bool cut) {
    const uint64_t now = now_ns(), left = until_ - std::min(until_, now);
    if (ok() && left == 0) status_ = {Code::kTimeout, "the network was too slow, or disturbed"};
    if (ok()) status_ = pair_.exchange(memory, bytes, cut, left);
  }

  // The larger of both ranks' times.
  double slower(double mine) {
    auto values = std::make_shared<std::vector<std::byte>>(2 * sizeof mine);
    std::memcpy(values->data() + static_cast<size_t>(pair_.rank()) * sizeof mine, &mine,
                sizeof mine);
    run(values, sizeof mine, false);
    double times[2];
    std::memcpy(times, values->data(), sizeof times);
    return std::max(times[0], times[1]);
  }

  PairExchange& pair_;
  const std::shared_ptr<std::vector<std::byte>> memory_;
  const uint64_t until_ = now_ns() + kMeasureNs;
  Status status_;
};

double two_digits(double value) {
  double unit = std::pow(10.0, std::floor(std::log10(value)) - 1);
  return std::round(value / unit) * unit;
}

}  // namespace

std::optional<std::pair<Rank, Rank>> measuring_pair(const Topology& topology, Rank rank) {
  const int half = topology.nodes() / 2, node = topology.node_of(rank);
  if (topology.local_index(rank) != 0 || node >= 2 * half) return std::nullopt;
  const int pairs = std::min(half, kMeasuringPairs), first = node % half;
  for (int i = 0; i < pairs; ++i) {
    if (i * half / pairs != first) continue;
    Rank a = topology.node(first)[0], b = topology.node(first + half)[0];
    return std::pair(std::min(a, b), std::max(a, b));
  }
  return std::nullopt;
}

Result<Timings> measure(PairExchange& pair) { return PairTimer(pair).measure(); }

std::string agree_on_measurements(const std::vector<std::string>& measured) {
  std::vector<double> latencies, overheads, rates;
  for (const std::string& text : measured) {
    auto model = parse_network_model(text);
    if (!model) continue;
    latencies.push_back(model.value().latency_ns);
    overheads.push_back(model.value().overhead_ns);
    rates.push_back(model.value().bytes_per_ns);
  }
  if (rates.empty()) return {};
  return text_of({two_digits(median(std::move(latencies))),
                  two_digits(median(std::move(overheads))), two_digits(median(std::move(rates)))});
}

// A byte is sent and received, so it takes L + 2 o, as the selector counts, and o is at most half of its time: where
// other processes took a core from the many exchanges, theirs says more. Where the exchanges in flight wait for
// the latency, the time of each says only that a message costs no more.
NetworkModel model_of(const Timings& timings) {
  const NetworkModel usual;
  double overhead = timings.each_ns / std::max(1.0, timings.messages);
  if (timings.each_ns * kPairExchanges < 1.5 * timings.one_ns)
    overhead = std::min(overhead, usual.overhead_ns);
  auto bounded = [](double value, double NetworkModel::* number) {
    return std::clamp(value, kLeastMeasured.*number, kMostMeasured.*number);
  };
  overhead = bounded(std::min(overhead, timings.one_ns / 2), &NetworkModel::overhead_ns);
  double latency = bounded(timings.one_ns - 2 * overhead, &NetworkModel::latency_ns);
  double transfer = std::max(timings.bytes_ns - timings.one_ns, timings.bytes_ns / 2);
  double rate = timings.bytes / std::max(1.0, transfer);
  return {latency, overhead, bounded(rate, &NetworkModel::bytes_per_ns)};
}

}  // namespace smddp
