// The ranks agree that each of them has a usable device, the ranks of each host map one another's flags, and
// the pipelines between hosts are opened.
#include "gpu/device_links.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "common/env.h"
#include "common/kept.h"
#include "common/log.h"
#include "gpu/peer_trial.h"
#include "topology/pattern.h"

namespace smddp {
namespace {

// What a rank sends the others when the group is made.
struct Joining {
  int32_t usable;
  int32_t pid;
  int32_t flags;
  int32_t by_nic;   // NICs can read and write its device's memory
  int32_t kernels;  // its device can sum
  char reason[500];
};

using intranode::CopyEngine;

// Added to limits between hosts: a rank that lost a peer of its own host reports it before ranks of other
// hosts report a timeout.
constexpr uint64_t kGraceNs = 1'000'000'000;
// The longest that the trial waits for one thing: the driver may block it while another group's stream is full.
constexpr uint64_t kTrialNs = 20'000'000'000;

// An AllGather of a few bytes of each rank, on the CPU.
Result<std::vector<std::byte>> gather(Engine& engine, Group& group, const void* mine,
                                      size_t bytes) {
  auto op = std::make_shared<Operation>();
  std::vector<std::byte> all(bytes * static_cast<size_t>(group.ranks()));
  op->collective = Collective::kAllGather;
  op->digest = bytes;
  op->gather(const_cast<void*>(mine), bytes, all.data(), group.ranks());
  group.submit(op, {}, false);
  if (Status gathered = engine.await(*op); !gathered) return gathered;
  return all;
}

Joining joining(const Status& usable, int flags) {
  Joining mine{};
  mine.usable = usable.ok() ? 1 : 0;
  mine.pid = getpid();
  mine.flags = flags;
  std::strncpy(mine.reason, usable.message().c_str(), sizeof mine.reason - 1);
  return mine;
}

// What all ranks sent; if a rank has no usable device, the first such rank's reason. The same on all ranks.
Result<std::vector<Joining>> agree(Engine& engine, Group& group, const Joining& mine) {
  auto bytes = gather(engine, group, &mine, sizeof mine);
  if (!bytes) return bytes.status();
  std::vector<Joining> all(static_cast<size_t>(group.ranks()));
  std::memcpy(all.data(), bytes.value().data(), bytes.value().size());
  for (int r = 0; r < group.ranks(); ++r) {
    const Joining& rank = all[static_cast<size_t>(r)];
    if (rank.usable == 0)
      return Status(Code::kUnavailable, group.describe(r) + ": " + std::string(rank.reason));
  }
  return all;
}

// By local index.
std::vector<std::string> names_on_host(const Group& group) {
  const Topology& topology = group.topology();
  std::vector<std::string> names;
  for (Rank r : topology.node(topology.node_of(group.rank()))) names.push_back(group.describe(r));
  return names;
}

// The ranks with local index `index`, host by host.
std::vector<Rank> rail_of(const Topology& topology, int index) {
  std::vector<Rank> rail;
  for (int n = 0; n < topology.nodes(); ++n)
    rail.push_back(topology.node(n)[static_cast<size_t>(index)]);
  return rail;
}

// Maps the flags of the host's other ranks.
Status connect(CopyEngine& copy_engine, HostPeers& peers, const std::vector<Joining>& joined) {
  std::vector<int> pids;
  for (const Joining& rank : joined) pids.push_back(rank.pid);
  peers.join(pids);
  for (int r = 0; r < peers.count(); ++r) {
    const Joining& rank = joined[static_cast<size_t>(r)];
    if (r == peers.own()) continue;
    if (Status s = copy_engine.join(r, rank.pid, rank.flags); !s) return s;
  }
  return {};
}

// Whether the settings ask that this rank's NICs read and write its device's memory, and they can.
bool reached_by_nic(Process& process, const device::Device& device) {
  if (env::debug("hmem") != "1") return false;
  Engine::Lock lock = process.engine().lock();
  Status reaches = process.network().reaches(owner_of(device));
  if (!reaches) log(LogLevel::kInfo, "chunks go through pinned memory: " + reaches.message());
  return reaches.ok();
}

}  // namespace

Status agree(Engine& engine, Group& group, const Status& mine) {
  return agree(engine, group, joining(mine, -1)).status();
}

Result<std::unique_ptr<DeviceLinks>> DeviceLinks::open(
    Process& process, Group& cpu_group, Store& store, const Status& usable, device::Device* device,
    intranode::Imports* imports, device::Stream main, uint64_t limit_ns, bool sums) {
  bool several = cpu_group.topology().nodes() > 1;
  Joining mine = joining(usable, -1);
  mine.by_nic = several && usable && reached_by_nic(process, *device) ? 1 : 0;
  mine.kernels = usable && device->can_reduce() ? 1 : 0;
  auto all = agree(process.engine(), cpu_group, mine);
  if (!all) return all.status();
  std::unique_ptr<DeviceLinks> links(new DeviceLinks(process, cpu_group, *device, *imports));
  {
    Engine::Lock lock = process.engine().lock();
    device->order().set_by_last_call(process.on_one_host());
  }
  links->by_nic = links->kernels = true;
  for (const Joining& each : all.value()) {
    links->by_nic &= each.by_nic != 0;
    links->kernels &= each.kernels != 0;
  }
  Status opened = several ? links->open_hosts(cpu_group, store, limit_ns) : Status();
  if (opened || links->own_group)
    opened = links->join_host(main, limit_ns, sums, std::move(opened));
  // In a group of one host, join_host() has agreed on that already.
  if (several) opened = agree(process.engine(), cpu_group, opened);
  if (!opened) return opened;
  return links;
}

DeviceLinks::DeviceLinks(Process& process, Group& cpu_group, device::Device& device,
                         intranode::Imports& its_imports)
    : topology(cpu_group.topology()),
      imports(its_imports),
      peers(names_on_host(cpu_group), topology.local_index(cpu_group.rank())),
      host_group(&cpu_group),
      process_(process),
      device_(device),
      group_number_(std::hash<std::string>()(cpu_group.name())) {}

// A CPU group for the ranks of this host, and a pipeline to the other hosts: along the rails if all hosts
// have equally many ranks, else among all ranks.
Status DeviceLinks::open_hosts(Group& cpu_group, Store& store, uint64_t limit_ns) {
  int node = topology.node_of(cpu_group.rank());
  auto local = cpu_group.subgroup(store, "device/node" + std::to_string(node), topology.node(node));
  host_group = nullptr;
  if (!local) return local.status();
  own_group = std::move(local.value());
  host_group = own_group.get();
  if (!pattern::equal_nodes(topology)) {
    return open_for_all(cpu_group, store, limit_ns).into(pipelines.all);
  }
  return open_pipeline(cpu_group, store, "device/rail" + std::to_string(peers.own()),
                       rail_of(topology, peers.own()), limit_ns, by_nic)
      .into(pipelines.rail);
}

Result<std::unique_ptr<PinnedPipeline>> DeviceLinks::open_pipeline(Group& cpu_group, Store& store,
                                                                   const std::string& label,
                                                                   const std::vector<Rank>& ranks,
                                                                   uint64_t limit_ns, bool nics) {
  auto group = cpu_group.subgroup(store, label, ranks);
  if (!group) return group.status();
  auto made = PinnedPipeline::create(process_, std::move(group.value()), device_, limit_ns,
                                     peers.count() == 1 ? 0 : kGraceNs, nics);
  if (!made) return made;
  // A peer that reads what did not come finds this out as soon as its streams have gone on with it.
  made.value()->set_told([this](const std::string& why) {
    if (copy_engine) copy_engine->give_up(why);
  });
  return made;
}

Result<std::unique_ptr<PinnedPipeline>> DeviceLinks::open_for_all(Group& cpu_group, Store& store,
                                                                  uint64_t limit_ns) {
  return open_pipeline(cpu_group, store, "device/all", all_ranks(topology.ranks()), limit_ns,
                       false);
}

Status DeviceLinks::status() const {
  Status known = peers_gave_up();
  return known ? pipelines.status() : known;
}

Status DeviceLinks::peers_gave_up() const {
  auto reason = copy_engine->gave_up();
  return reason ? Status(Code::kAborted, std::move(*reason)) : Status();
}

Status DeviceLinks::join_host(device::Stream main, uint64_t limit_ns, bool sums, Status usable) {
  auto made = CopyEngine::create(device_, main, peers.own(), peers.count());
  if (usable) usable = made.status();
  if (made) copy_engine = std::move(made.value());
  auto all = agree(process_.engine(), *host_group,
                   joining(usable, made ? copy_engine->flags_descriptor() : -1));
  if (!all) return all.status();
  Status joined = agree(process_.engine(), *host_group, connect(*copy_engine, peers, all.value()));
  return joined ? try_peers(main, limit_ns, sums) : joined;
}

uint64_t DeviceLinks::enter_order(uint32_t number) const {
  return device_.order().enter(
      group_number_, [engine = copy_engine.get(), number] { return engine->called(number); });
}

Status DeviceLinks::try_peers(device::Stream main, uint64_t limit_ns, bool sums) {
  // The trial ends, and its end is told, before the ranks that wait for that time out.
  PeerTrial trial(device_, peers, main, *copy_engine, std::min(limit_ns / 8, kTrialNs));
  std::vector<std::byte> mine = trial.offer(enter_order(kTrialCall), kTrialCall);
  auto all = gather(process_.engine(), *host_group, mine.data(), mine.size());
  Status tried = all ? trial.carry_out(all.value(), sums && kernels) : all.status();
  if (trial.stuck()) keep(std::shared_ptr(std::move(copy_engine)));
  return all ? agree(process_.engine(), *host_group, tried) : tried;
}

Status PipelineSet::reserve(const DeviceOperation& op) const {
  if (op.exchanges.empty()) return {};
  PinnedPipeline* pipeline = of(op);
  if (pipeline == nullptr)
    return {Code::kInternal, "an operation needs a pipeline between ranks that was not opened"};
  for (const DeviceExchange& exchange : op.exchanges) {
    if (Status room = pipeline->reserve(exchange); !room) return room;
  }
  return {};
}

std::vector<PinnedPipeline*> PipelineSet::open() const {
  std::vector<PinnedPipeline*> open;
  for (PinnedPipeline* each : {rail.get(), all.get()}) {
    if (each != nullptr) open.push_back(each);
  }
  return open;
}

Status PipelineSet::status() const {
  for (const PinnedPipeline* each : open()) {
    if (Status known = each->status(); !known) return known;
  }
  return {};
}

}  // namespace smddp
