#include "group/network_measurement.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "joining/exchange.h"
#include "joining/pause.h"
#include "joining/prefix_store.h"
#include "common/clock.h"
#include "common/log.h"
#include "group/fragment_queue.h"

namespace smddp {
namespace {

constexpr std::chrono::seconds kPartnerTimeout(2);
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

// The store of a pair's group. A rank that waits for the other one stops waiting soon, and if the group that
// the pair is of can't be made.
class PairStore final : public Store {
 public:
  PairStore(Store& store, const std::string& prefix)
      : whole_(store), part_(store, prefix), until_(now_ns() + kTimeoutNs) {}
  Status set(const std::string& key, const std::vector<uint8_t>& value) override {
    return part_.set(key, value);
  }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>& keys,
                                                const std::string& stop) override {
    Pause pause(std::chrono::milliseconds(8));
    for (const std::string& key : keys) {
      while (!part_.has(key)) {
        if (part_.has(stop)) return Status(Code::kAborted, stop + " is in the store");
        if (Status failure = published_failure(whole_); !failure) return failure;
        if (now_ns() >= until_) return Status(Code::kTimeout, key + " is not in the store");
        pause.sleep();
      }
    }
    return part_.get(keys, stop);
  }
  bool has(const std::string& key) override { return part_.has(key); }
  void remove(const std::string& key) override { part_.remove(key); }

 private:
  static constexpr uint64_t kTimeoutNs = std::chrono::nanoseconds(kPartnerTimeout).count();
  Store& whole_;
  PrefixStore part_;
  const uint64_t until_;
};

// An AllGather of two ranks. Keeps its memory, which the network may use until the end of a broken group.
class Transfer final : public Operation {
 public:
  Transfer(std::shared_ptr<std::vector<std::byte>> memory, int rank, size_t bytes)
      : memory_(std::move(memory)) {
    collective = Collective::kAllGather;
    digest = bytes;
    for (size_t r = 0; r < 2; ++r) {
      output.add(memory_->data() + r * bytes, bytes);
      output.end_block();
    }
    input.add(memory_->data() + static_cast<size_t>(rank) * bytes, bytes);
    input.end_block();
  }

 private:
  const std::shared_ptr<std::vector<std::byte>> memory_;
};

// Times exchanges of a group of two ranks. Both make the same exchanges, as their choices follow from times
// that they have exchanged.
class PairTimer {
 public:
  PairTimer(Engine& engine, Group& group)
      : engine_(engine),
        group_(group),
        memory_(std::make_shared<std::vector<std::byte>>(2 * kLargestTransfer)),
        until_(now_ns() + kMeasureNs) {}

  Result<Timings> measure() {
    Timings timings;
    for (int i = 0; i < kWarmUps; ++i) time(1);
    timings.one_ns = usual_time(kSingles, 1, {});
    const uint64_t messages = count_messages();
    // An operation that is cut into fragments of a byte.
    timings.each_ns = usual_time(kBatches, kTogether, {.allgather_bucket_bytes = 2}) / kTogether;
    timings.messages = static_cast<double>(count_messages() - messages) / (kBatches * kTogether);
    time(kSmallestTransfer);  // chunks may have a connection of their own, which is made now
    measure_rate(&timings);
    return ok() ? Result<Timings>(timings) : Result<Timings>(status_);
  }

 private:
  bool ok() const { return status_.ok(); }

  // That this process has sent and received.
  uint64_t count_messages() {
    Engine::Lock lock = engine_.lock();
    const fabric::Endpoint* endpoint = engine_.network().endpoint();
    if (endpoint == nullptr) return 0;
    return endpoint->counters().messages_sent + endpoint->counters().messages_received;
  }

  // The lower quartile: what else runs on the two hosts makes an exchange longer, never shorter.
  double usual_time(int times, size_t bytes, const Tuning& tuning) {
    std::vector<double> all;
    for (int i = 0; i < times; ++i) all.push_back(time(bytes, tuning));
    std::sort(all.begin(), all.end());
    return all[all.size() / 4];
  }

  void measure_rate(Timings* timings) {
    for (size_t bytes = kSmallestTransfer; ok(); bytes = std::min(4 * bytes, kLargestTransfer)) {
      double ns = slower(time(bytes));
      bool last = bytes == kLargestTransfer;
      // Long enough perhaps only because something has disturbed it.
      if (ns >= kLongEnoughNs && ns < 2 * kLongEnoughNs) ns = std::min(ns, slower(time(bytes)));
      for (int i = 0; last && i < kRepeats && ns < kLongEnoughNs && ok(); ++i)
        ns = std::min(ns, slower(time(bytes)));
      timings->bytes = static_cast<double>(bytes);
      timings->bytes_ns = ns;
      if (last || ns >= kLongEnoughNs) return;
    }
  }

  // Nanoseconds that an exchange of so many bytes of each rank takes.
  double time(size_t bytes, const Tuning& tuning = {}) {
    auto transfer = std::make_shared<Transfer>(memory_, group_.rank(), bytes);
    const uint64_t began = transfer->called_ns;
    run(transfer, tuning);
    return static_cast<double>(now_ns() - began);
  }

  void run(const std::shared_ptr<Transfer>& transfer, const Tuning& tuning) {
    const uint64_t left = until_ - std::min(until_, transfer->called_ns);
    if (ok() && left == 0) status_ = {Code::kTimeout, "the network was too slow, or disturbed"};
    if (!ok()) return;
    transfer->timeout_ns = left;
    group_.submit(transfer, tuning, false);
    engine_.wait(*transfer);
    status_ = copy_of(transfer->status());
  }

  // The larger of both ranks' times.
  double slower(double mine) {
    auto values = std::make_shared<std::vector<std::byte>>(2 * sizeof mine);
    auto shared = std::make_shared<Transfer>(values, group_.rank(), sizeof mine);
    std::memcpy(values->data() + static_cast<size_t>(group_.rank()) * sizeof mine, &mine,
                sizeof mine);
    run(shared, {});
    double times[2];
    std::memcpy(times, values->data(), sizeof times);
    return std::max(times[0], times[1]);
  }

  Engine& engine_;
  Group& group_;
  const std::shared_ptr<std::vector<std::byte>> memory_;
  const uint64_t until_;
  Status status_;
};

Result<Timings> measure_pair(Engine& engine, Store& store, std::pair<Rank, Rank> pair, Rank rank,
                             const Group::Options& options) {
  Group::Options its = options;
  auto called = [&](Rank of) {
    return options.called.empty() ? of : options.called[static_cast<size_t>(of)];
  };
  its.called = {called(pair.first), called(pair.second)};
  its.part += "/network";
  its.timeout_ns = std::min<uint64_t>(options.timeout_ns, 4 * kMeasureNs);
  its.several_hosts = true;
  its.network = NetworkModel{};
  its.recorded = false;
  PairStore part(store, "network/" + std::to_string(pair.first) + "/");
  auto group = Group::create(engine, part, rank == pair.first ? 0 : 1, 2, std::move(its));
  if (!group) return group.status();
  return PairTimer(engine, *group.value()).measure();
}

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

std::string measure_network(Engine& engine, Store& store, const Topology& topology, Rank rank,
                            const Group::Options& options) {
  auto pair = measuring_pair(topology, rank);
  if (!pair) return {};
  const uint64_t began = now_ns();
  auto timings = measure_pair(engine, store, *pair, rank, options);
  std::string found = timings ? text_of(model_of(timings.value())) : std::string();
  if (log_enabled(LogLevel::kInfo))
    log(LogLevel::kInfo, "group '" + options.name + "': the network between ranks " +
                             std::to_string(pair->first) + " and " + std::to_string(pair->second) +
                             (timings ? " is " + found : ": " + timings.status().message()) +
                             ", measured in " + std::to_string((now_ns() - began) / 1'000'000) +
                             " ms");
  return found;
}

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
  if (timings.each_ns * kFragmentsInFlight < 1.5 * timings.one_ns)
    overhead = std::min(overhead, usual.overhead_ns);
  overhead = std::clamp(std::min(overhead, timings.one_ns / 2), 100.0, 50e3);
  double latency = std::clamp(timings.one_ns - 2 * overhead, 1e3, 10e6);
  double transfer = std::max(timings.bytes_ns - timings.one_ns, timings.bytes_ns / 2);
  double rate = timings.bytes / std::max(1.0, transfer);
  return {latency, overhead, std::clamp(rate, 1e-3, 1e3)};
}

}  // namespace smddp
