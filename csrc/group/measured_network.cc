#include "group/measured_network.h"

#include <chrono>
#include <memory>
#include <utility>

#include "common/clock.h"
#include "common/log.h"
#include "group/group.h"
#include "network/measurement.h"

namespace smddp {
namespace {

static_assert(kPairExchanges == kFragmentsInFlight);

constexpr uint64_t kPartnerTimeoutNs = 2'000'000'000;

// An AllGather of two ranks. Keeps its memory, which the network may use until a broken group is closed.
class GatherOfTwo final : public Operation {
 public:
  GatherOfTwo(std::shared_ptr<std::vector<std::byte>> memory, int rank, size_t bytes)
      : memory_(std::move(memory)) {
    collective = Collective::kAllGather;
    digest = bytes;
    gather(memory_->data() + static_cast<size_t>(rank) * bytes, bytes, memory_->data(), 2);
  }

 private:
  const std::shared_ptr<std::vector<std::byte>> memory_;
};

class GroupOfTwo final : public PairExchange {
 public:
  GroupOfTwo(Process& process, Group& group) : process_(process), group_(group) {}
  int rank() const override { return group_.rank(); }
  Status exchange(const std::shared_ptr<std::vector<std::byte>>& memory, size_t bytes, bool cut,
                  uint64_t timeout_ns) override {
    auto transfer = std::make_shared<GatherOfTwo>(memory, group_.rank(), bytes);
    transfer->timeout_ns = timeout_ns;
    Tuning tuning;
    if (cut) tuning.allgather_bucket_bytes = 2;  // fragments of a byte of each rank
    group_.submit(transfer, tuning, false);
    return process_.engine().await(*transfer);
  }
  uint64_t count_messages() override {
    Engine::Lock lock = process_.engine().lock();
    const transport::Transport* transport = process_.network().transport();
    if (transport == nullptr) return 0;
    return transport->counters().messages_sent + transport->counters().messages_received;
  }

 private:
  Process& process_;
  Group& group_;
};

Result<Timings> measure_pair(Process& process, Store& store, std::pair<Rank, Rank> pair, Rank rank,
                             const GroupOptions& options) {
  GroupOptions its = options;
  its.part += "/network";
  its.timeout_ns = std::min<uint64_t>(options.timeout_ns, 4 * kMeasureNs);
  its.several_hosts = true;
  its.network = NetworkModel{};
  its.recorded = false;
  its.whole_job = false;  // its two ranks are no directory of the job
  // A rank that waits for the other one stops waiting soon, and if the group that the pair is of can't be made.
  auto look = [&, until = now_ns() + kPartnerTimeoutNs]() -> Status {
    if (Status failure = published_failure(store); !failure) return failure;
    if (now_ns() < until) return {};
    return {Code::kTimeout, "the other rank of the pair does not come"};
  };
  WatchedStore part(store, "network/" + std::to_string(pair.first) + "/", {pair.first, pair.second},
                    std::chrono::milliseconds(8), look);
  auto group = Group::create(process, part, rank == pair.first ? 0 : 1, 2, std::move(its));
  if (!group) return group.status();
  GroupOfTwo two(process, *group.value());
  auto timings = measure(two);
  // Where this rank could not measure, nor can one that still waits for it.
  for (const std::string& key : group.value()->take_last_keys()) part.remove(key);
  return timings;
}

}  // namespace

std::string measure_network(Process& process, Store& store, const Topology& topology, Rank rank,
                            const GroupOptions& options) {
  auto pair = measuring_pair(topology, rank);
  if (!pair) return {};
  const uint64_t began = now_ns();
  auto timings = measure_pair(process, store, *pair, rank, options);
  std::string found = timings ? text_of(model_of(timings.value())) : std::string();
  if (log_enabled(LogLevel::kInfo))
    log(LogLevel::kInfo, "group '" + options.name + "': the network between ranks " +
                             std::to_string(pair->first) + " and " + std::to_string(pair->second) +
                             (timings ? " is " + found : ": " + timings.status().message()) +
                             ", measured in " + std::to_string((now_ns() - began) / 1'000'000) +
                             " ms");
  return found;
}

NetworkCache cache_of(const std::vector<std::string>& hosts, const transport::Facts& network) {
  return {hosts, network.description, network.links};
}

Result<std::string> stored_network(Process& process, const std::vector<std::string>& hosts) {
  auto transport = process.fabric();
  if (!transport) return transport.status();
  auto found = cache_of(hosts, transport.value()->facts()).load();
  if (!found) return std::string();
  return found->model + ", measured on " + date_of(found->measured);
}

}  // namespace smddp
