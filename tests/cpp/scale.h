// Shared by the tests at scale: layouts, the resources of a process, and collectives with known results.
#pragma once

#include <malloc.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "world.h"

namespace smddp::scale {

inline constexpr double kMiB = 1 << 20;

struct Layout {
  int hosts;
  int ranks_per_host;
  int ranks() const { return hosts * ranks_per_host; }
  // Ranks of one host are consecutive, as launchers place them.
  std::string host_of(int rank) const { return "host-" + std::to_string(rank / ranks_per_host); }
  std::vector<std::string> host_of_ranks() const {
    std::vector<std::string> hosts_of;
    for (int r = 0; r < ranks(); ++r) hosts_of.push_back(host_of(r));
    return hosts_of;
  }
  // Whether the ranks exchange their information by way of the first rank of each host.
  bool large() const { return ranks() > Group::Options().few_ranks; }
  // Requests of the store that make a group of few ranks: the exchange of the ranks' information; between hosts,
  // the first rank of each host then says that it has joined, and all wait for that.
  int sets(int rank) const { return hosts > 1 && rank % ranks_per_host == 0 ? 2 : 1; }
  int gets() const { return hosts > 1 ? 2 : 1; }
  // The most values of others that a rank of a large group reads: rank 0 one per rank and one per host; the others
  // what rank 0 is, what their host's first rank is, the table of ranks or its place, and that all have joined.
  int values(int rank) const { return rank == 0 ? ranks() - 1 + hosts - 1 : 4; }
  // Ranks of other hosts whose addresses a rank knows: all, or in a large group those of its rail.
  int peers() const {
    return ranks() <= pattern::kPairedRanks ? ranks() - ranks_per_host : hosts - 1;
  }
  std::string text() const {
    return std::to_string(hosts) + " hosts x " + std::to_string(ranks_per_host);
  }
  // An upper bound of what one rank may hold: the engine's own and the endpoint's; a doorbell and a
  // death handle per neighbour; a connection per rail peer, two for a moment where both began one; on a
  // slow machine, where ranks are late, a question of liveness to and from each of these as well.
  int descriptors() const { return 3 + 20 + 2 * (ranks_per_host - 1) + 4 * (hosts - 1); }
};

struct Footprint {
  double pss = 0, rss = 0;  // bytes; pss counts a page that several mappings show once
  int descriptors = 0;
};

inline Footprint footprint() {
  malloc_trim(0);
  Footprint held;
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;) {
    if (word == "Pss:") rollup >> held.pss;
    if (word == "Rss:") rollup >> held.rss;
  }
  held.pss *= 1024;
  held.rss *= 1024;
  for (auto it = std::filesystem::directory_iterator("/proc/self/fd");
       it != std::filesystem::directory_iterator(); ++it) {
    ++held.descriptors;
  }
  return held;
}

// As many descriptors as `wanted`, if the system lets this process have them.
inline bool allow_descriptors(rlim_t wanted) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= wanted) return true;
  limit.rlim_cur = wanted;
  limit.rlim_max = std::max(limit.rlim_max, wanted);
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

inline int64_t value(int rank, size_t i) {
  return static_cast<int64_t>((i * 31 + static_cast<size_t>(rank) * 17) % 1021) - 510;
}

inline Status wrong(const char* what, size_t at) {
  return {Code::kInternal, std::string(what) + " is wrong at " + std::to_string(at)};
}

inline Status check_all_gather(RankContext& c, size_t count) {
  std::vector<int64_t> in(count), out(count * static_cast<size_t>(c.ranks), -1);
  for (size_t i = 0; i < count; ++i) in[i] = value(c.rank, i);
  if (Status ran = c.run(gather_of(in, out, c.ranks)); !ran) return ran;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] != value(static_cast<int>(i / count), i % count)) return wrong("AllGather", i);
  }
  return {};
}

inline Status check_reduce_scatter(RankContext& c, size_t count) {
  std::vector<int64_t> in(count * static_cast<size_t>(c.ranks)), out(count, -1);
  for (size_t i = 0; i < in.size(); ++i) in[i] = value(c.rank, i);
  Status ran = c.run(scatter_of(in, out, c.ranks, Dtype::kInt64, ReduceOp::kSum));
  if (!ran) return ran;
  for (size_t i = 0; i < count; ++i) {
    int64_t sum = 0;
    for (int r = 0; r < c.ranks; ++r) sum += value(r, static_cast<size_t>(c.rank) * count + i);
    if (out[i] != sum) return wrong("ReduceScatter", i);
  }
  return {};
}

inline Status check_all_reduce(RankContext& c, size_t count) {
  std::vector<int64_t> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = value(c.rank, i);
  Status ran = c.run(all_reduce_of(data, c.ranks, Dtype::kInt64, ReduceOp::kSum));
  if (!ran) return ran;
  for (size_t i = 0; i < count; ++i) {
    int64_t sum = 0;
    for (int r = 0; r < c.ranks; ++r) sum += value(r, i);
    if (data[i] != sum) return wrong("AllReduce", i);
  }
  return {};
}

// Every collective with small payloads, then 64 KiB per rank.
inline Status exercise(RankContext& c) {
  for (size_t count : {1u, 77u}) {
    if (Status s = check_all_gather(c, count); !s) return s;
    if (Status s = check_reduce_scatter(c, count); !s) return s;
    if (Status s = check_all_reduce(c, count * 5); !s) return s;
  }
  return check_all_gather(c, 8192);
}

// Peers are numbered densely from 0: the number that a further one gets is how many there were.
inline int address_vector_entries(Process& process) {
  transport::Transport* transport = process.open_fabric();
  if (transport == nullptr) return 0;
  Engine::Lock lock = process.engine().lock();
  auto itself = transport->add_peer(transport->facts().address);
  return itself.ok() ? static_cast<int>(itself.value()) : -1;
}

}  // namespace smddp::scale
