#include "simulator/cluster.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "common/clock.h"
#include "group/group_builder.h"
#include "joining/rank_info.h"
#include "simulator/engine.h"

namespace smddp::simulator {
namespace {

// As long as the engine's longest sleep: if nothing is on its way, ranks look for others that are late.
constexpr uint64_t kLookNs = 100'000'000;
// Nothing has moved for so long: it never will.
constexpr uint64_t kStuckNs = 60'000'000'000;

// No rank of a simulation asks it for anything.
class NoStore final : public Store {
 public:
  Status set(const std::string&, const std::vector<uint8_t>&) override { return kNone; }
  Result<std::vector<std::vector<uint8_t>>> get(const std::vector<std::string>&,
                                                const std::string&) override {
    return kNone;
  }
  bool has(const std::string&) override { return false; }
  void remove(const std::string&) override {}

 private:
  const Status kNone{Code::kInternal, "a simulation has no store"};
};

uint64_t bytes_of(const Taken& taken) { return taken.slots + taken.in_place + taken.single_copy; }

}  // namespace

Result<std::unique_ptr<Cluster>> Cluster::create(const Model& model, const Layout& layout,
                                                 const HostModel& host) {
  std::unique_ptr<Cluster> cluster(new Cluster(layout, host));
  if (Status made = cluster->set_up(model); !made) return made;
  return cluster;
}

Status Cluster::set_up(const Model& model) {
  network_ = std::make_unique<VirtualNetwork>(model, layout_.hosts, layout_.ranks_per_host);
  simulated_clock = network_->clock();
  auto open = [this]() -> Result<std::unique_ptr<transport::Transport>> {
    return std::unique_ptr<transport::Transport>(
        std::make_unique<SimulatedTransport>(*network_, transports_));
  };
  NoStore store;
  std::vector<std::unique_ptr<GroupBuilder>> builders;
  std::vector<RankInfo> infos;
  for (Rank rank = 0; rank < layout_.ranks(); ++rank) {
    network_->enter(static_cast<ProcessNumber>(rank));
    auto process = SimulatedEngine::create(open);
    if (!process) return process.status();
    if (auto opened = process.value()->fabric(); !opened) return opened.status();
    Group::Options group;
    group.name = "simulated";
    group.host = "host-" + std::to_string(rank / layout_.ranks_per_host);
    group.single_copy = false;
    group.several_hosts = layout_.hosts > 1;
    builders.push_back(
        std::make_unique<GroupBuilder>(*process.value(), store, rank, layout_.ranks(), group));
    Status described = builders.back()->describe_itself(&infos.emplace_back());
    if (!described) return described;
    rank_info_bytes_ += encode(infos.back()).size();
    ranks_.emplace_back().process = std::move(process.value());
  }
  rank_info_ = infos[0];
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    network_->enter(static_cast<ProcessNumber>(rank));
    if (Status joined = builders[rank]->join(infos); !joined) return joined;
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    network_->enter(static_cast<ProcessNumber>(rank));
    auto group = builders[rank]->finish();
    if (!group) return group.status();
    ranks_[rank].group = std::move(group.value());
    builders[rank].reset();
  }
  return {};
}

Cluster::~Cluster() {
  // An engine waits for its messages under way, for which time has to pass.
  settle();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    network_->enter(static_cast<ProcessNumber>(rank));
    SimulatedEngine::end(ranks_[rank].process->engine());
    ranks_[rank].group.reset();
    ranks_[rank].process.reset();
  }
  simulated_clock = nullptr;  // the network's
}

void Cluster::settle() {
  ProcessNumber process = 0;
  while (network_ && network_->next(&process)) {
    network_->enter(process);
    while (SimulatedEngine::turn(ranks_[process].process->engine(), false)) {
    }
  }
}

void Cluster::turn(ProcessNumber process, Operation& operation, bool watches, bool called) {
  SimulatedRank& rank = ranks_[process];
  network_->enter(process);
  bool moved = SimulatedEngine::turn(rank.process->engine(), watches);
  if (moved) {
    while (SimulatedEngine::turn(rank.process->engine(), false)) {
    }
  }
  uint64_t taken = bytes_of(operation.taken);
  if (taken > rank.taken) {
    network_->charge(static_cast<double>(taken - rank.taken) / host_.copy_bytes_per_ns);
    rank.taken = taken;
  }
  if ((!moved && !called) || layout_.ranks_per_host == 1) return;
  auto first = process - process % static_cast<ProcessNumber>(layout_.ranks_per_host);
  uint64_t seen = network_->now() + static_cast<uint64_t>(host_.wake_ns);
  for (int i = 0; i < layout_.ranks_per_host; ++i) {
    ProcessNumber other = first + static_cast<ProcessNumber>(i);
    if (other != process) network_->wake(other, seen);
  }
}

// Compares the counters at the end of an operation with those at its beginning.
class Cluster::Count {
 public:
  explicit Count(Cluster& cluster) : cluster_(cluster), before_(cluster.network_->counters()) {
    for_each_nic([&](double out, double in) {
      out_.push_back(out);
      in_.push_back(in);
    });
    for (const SimulatedRank& rank : cluster.ranks_)
      passes_.push_back(SimulatedEngine::passes(rank.process->engine()));
  }
  void into(Outcome& outcome) const {
    outcome.network = cluster_.network_->counters();
    outcome.network -= before_;
    size_t nic = 0;
    for_each_nic([&](double out, double in) {
      outcome.most_bytes_out = std::max(outcome.most_bytes_out, out - out_[nic]);
      outcome.most_bytes_in = std::max(outcome.most_bytes_in, in - in_[nic]);
      ++nic;
    });
    for (size_t rank = 0; rank < passes_.size(); ++rank) {
      uint64_t took =
          SimulatedEngine::passes(cluster_.ranks_[rank].process->engine()) - passes_[rank];
      outcome.passes += took;
      outcome.most_passes = std::max(outcome.most_passes, took);
    }
    outcome.real_seconds = std::chrono::duration<double>(Clock::now() - began_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  template <class F>
  void for_each_nic(F&& f) const {
    const VirtualNetwork& network = *cluster_.network_;
    for (int host = 0; host < network.hosts(); ++host) {
      for (size_t nic = 0; nic < static_cast<size_t>(network.model().nics); ++nic)
        f(network.sent(host, nic), network.received(host, nic));
    }
  }

  const Cluster& cluster_;
  const NetworkCounters before_;
  const Clock::time_point began_ = Clock::now();
  std::vector<double> out_, in_;
  std::vector<uint32_t> passes_;
};

Result<Outcome> Cluster::run(const std::vector<std::shared_ptr<Operation>>& operations,
                             const Tuning& tuning) {
  settle();
  Count count(*this);
  // All call when the last of them has ended what it did before.
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    network_->enter(static_cast<ProcessNumber>(rank));
  uint64_t began = network_->now(), moved_at = began;
  Outcome outcome;
  Status failed;
  size_t open = ranks_.size();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].taken = 0;
    ranks_[rank].called = ranks_[rank].over = false;
    network_->wake(static_cast<ProcessNumber>(rank), began);
  }
  auto let_run = [&](ProcessNumber process, bool watches) {
    SimulatedRank& rank = ranks_[process];
    Operation& operation = *operations[process];
    network_->enter(process);
    bool calls = !std::exchange(rank.called, true);  // and pushes, within the call
    if (calls) {
      operation.called_ns = network_->now();
      rank.group->submit(operations[process], tuning, true);
    }
    turn(process, operation, watches, calls);
    if (rank.over || !operation.complete()) return;
    rank.over = true;
    --open;
    if (failed.ok()) failed = operation.status();
    outcome.seconds =
        std::max(outcome.seconds, static_cast<double>(network_->now() - began) * 1e-9);
    if (open + 1 == ranks_.size()) outcome.first_seconds = outcome.seconds;
  };
  while (open > 0) {
    ProcessNumber process = 0;
    if (network_->next(&process)) {
      moved_at = network_->now();
      let_run(process, false);
      continue;
    }
    // Nothing is under way: as before a sleep, every rank looks for others that are late.
    network_->pass_to(network_->now() + kLookNs);
    ++outcome.idle_looks;
    if (network_->now() - moved_at > kStuckNs)
      return Status(Code::kTimeout, "nothing moves any more");
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      let_run(static_cast<ProcessNumber>(rank), true);
  }
  if (!failed) return failed;
  count.into(outcome);
  return outcome;
}

}  // namespace smddp::simulator
