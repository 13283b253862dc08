// How a group on devices comes to be: its ranks agree that all of them can, those of each host map one
// another's flags, and the ways between hosts are opened.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/env.h"
#include "common/log.h"
#include "gpu_collectives/device_group.h"
#include "patterns/pattern.h"

namespace smddp {

// What a rank says when the group is made.
struct Joining {
  int32_t usable;
  int32_t pid;
  int32_t flags;
  int32_t by_nic;  // the network reaches its device
  char reason[500];
};

namespace {

using intranode::CopyEngine;

// A rank that misses one of its own host says so before those that miss it from elsewhere.
constexpr uint64_t kGraceNs = 1'000'000'000;
constexpr long kPidfdOpen = 434;  // SYS_pidfd_open, on all architectures

// An AllGather of a few bytes of each rank, on the host.
Result<std::vector<std::byte>> gather(Engine& engine, Group& group, const void* mine,
                                      size_t bytes) {
  auto op = std::make_shared<Operation>();
  std::vector<std::byte> all(bytes * static_cast<size_t>(group.ranks()));
  op->collective = Collective::kAllGather;
  op->digest = bytes;
  op->input.add(const_cast<void*>(mine), bytes);
  op->input.end_block();
  for (int r = 0; r < group.ranks(); ++r) {
    op->output.add(all.data() + static_cast<size_t>(r) * bytes, bytes);
    op->output.end_block();
  }
  group.submit(op, {}, false);
  engine.wait(*op);
  if (!op->status()) return op->status();
  return all;
}

Joining joining(const Status& usable, int flags) {
  Joining card{};
  card.usable = usable.ok() ? 1 : 0;
  card.pid = getpid();
  card.flags = flags;
  std::strncpy(card.reason, usable.message().c_str(), sizeof card.reason - 1);
  return card;
}

// What all ranks say, or the first one's why where there is one that can't: the same on all ranks.
Result<std::vector<Joining>> agree(Engine& engine, Group& group, const Joining& mine) {
  auto bytes = gather(engine, group, &mine, sizeof mine);
  if (!bytes) return bytes.status();
  std::vector<Joining> cards(static_cast<size_t>(group.ranks()));
  std::memcpy(cards.data(), bytes.value().data(), bytes.value().size());
  for (int r = 0; r < group.ranks(); ++r) {
    const Joining& card = cards[static_cast<size_t>(r)];
    if (card.usable == 0)
      return Status(Code::kUnavailable, group.describe(r) + ": " + std::string(card.reason));
  }
  return cards;
}

Status agree(Engine& engine, Group& group, const Status& mine) {
  return agree(engine, group, joining(mine, -1)).status();
}

// Whether this rank's NICs are wanted to read and write its device's memory, and can.
bool reached_by_nic(Engine& engine, const device::Device& device) {
  if (env::get("FABRIC_HMEM") != "1") return false;
  Status reaches = engine.reaches(owner_of(device));
  if (!reaches) log(LogLevel::kInfo, "chunks go through pinned memory: " + reaches.message());
  return reaches.ok();
}

}  // namespace

Result<std::shared_ptr<DeviceGroup>> DeviceGroup::create(Engine& engine, Group& cpu_group,
                                                         Store& store, Status usable,
                                                         device::Device* device,
                                                         intranode::Imports* imports,
                                                         device::Stream main, uint64_t limit_ns) {
  bool several = cpu_group.topology().nodes() > 1;
  Joining card = joining(usable, -1);
  card.by_nic = several && usable && reached_by_nic(engine, *device) ? 1 : 0;
  auto cards = agree(engine, cpu_group, card);
  if (!cards) return cards.status();
  std::shared_ptr<DeviceGroup> group(
      new DeviceGroup(engine, cpu_group, *device, *imports, main, limit_ns));
  group->by_nic_ = std::all_of(cards.value().begin(), cards.value().end(),
                               [](const Joining& each) { return each.by_nic != 0; });
  Status opened = several ? group->open_hosts(cpu_group, store) : Status();
  if (opened || group->node_) opened = group->join_node(std::move(opened));
  // One host's ranks have agreed on that already.
  if (several) opened = agree(engine, cpu_group, opened);
  if (!opened) return opened;
  group->watch_ = std::thread([raw = group.get()] { raw->watch(); });
  return group;
}

DeviceGroup::DeviceGroup(Engine& engine, Group& cpu_group, device::Device& device,
                         intranode::Imports& imports, device::Stream main, uint64_t limit_ns)
    : engine_(engine),
      device_(device),
      imports_(imports),
      main_(main),
      topology_(cpu_group.topology()),
      rank_(cpu_group.rank()),
      index_(topology_.local_index(rank_)),
      ranks_(static_cast<int>(topology_.node(topology_.node_of(rank_)).size())),
      limit_ns_(limit_ns),
      gone_since_ns_(static_cast<size_t>(ranks_)),
      cpu_group_(&cpu_group) {
  for (Rank r : topology_.node(topology_.node_of(rank_))) names_.push_back(cpu_group.describe(r));
}

// A cpu_group for the ranks of this host, and a way to the others: along the rails where all hosts
// have as many ranks.
Status DeviceGroup::open_hosts(Group& cpu_group, Store& store) {
  int node = topology_.node_of(rank_);
  auto local =
      cpu_group.subgroup(store, "device/node" + std::to_string(node), topology_.node(node));
  cpu_group_ = nullptr;
  if (!local) return local.status();
  node_ = std::move(local.value());
  cpu_group_ = node_.get();
  if (!pattern::equal_nodes(topology_)) return open_for_all(cpu_group, store);
  std::vector<Rank> rail;
  for (int n = 0; n < topology_.nodes(); ++n)
    rail.push_back(topology_.node(n)[static_cast<size_t>(index_)]);
  auto ranks = cpu_group.subgroup(store, "device/rail" + std::to_string(index_), rail);
  if (!ranks) return ranks.status();
  auto made = PinnedPipeline::create(engine_, std::move(ranks.value()), device_, limit_ns_,
                                     ranks_ > 1 ? kGraceNs : 0, by_nic_);
  if (!made) return made.status();
  rail_ = std::move(made.value());
  piped_ = true;
  return {};
}

Status DeviceGroup::open_for_all(Group& cpu_group, Store& store) {
  std::lock_guard calls(calls_);
  if (all_) return {};
  std::vector<Rank> everyone;
  for (Rank r = 0; r < topology_.ranks(); ++r) everyone.push_back(r);
  auto ranks = cpu_group.subgroup(store, "device/all", everyone);
  if (!ranks) return ranks.status();
  auto made = PinnedPipeline::create(engine_, std::move(ranks.value()), device_, limit_ns_,
                                     ranks_ > 1 ? kGraceNs : 0, false);
  if (!made) return made.status();
  std::lock_guard lock(mutex_);
  all_ = std::move(made.value());
  piped_ = true;
  return {};
}

Status DeviceGroup::join_node(Status usable) {
  auto made = CopyEngine::create(device_, imports_, main_, index_, ranks_);
  if (usable) usable = made.status();
  if (made) copy_engine_ = std::move(made.value());
  auto cards =
      agree(engine_, *cpu_group_, joining(usable, made ? copy_engine_->flags_descriptor() : -1));
  if (!cards) return cards.status();
  return agree(engine_, *cpu_group_, join(cards.value()));
}

Status DeviceGroup::join(const std::vector<Joining>& joined) {
  for (int r = 0; r < ranks_; ++r) {
    const Joining& card = joined[static_cast<size_t>(r)];
    pids_.push_back(card.pid);
    alive_.emplace_back();
    if (r == index_) continue;
    if (card.pid != getpid())
      alive_.back() = FileDescriptor(static_cast<int>(syscall(kPidfdOpen, card.pid, 0)));
    if (Status s = copy_engine_->join(r, card.pid, card.flags); !s) return s;
  }
  return {};
}

}  // namespace smddp
