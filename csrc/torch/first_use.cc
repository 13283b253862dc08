#include "torch/first_use.h"

#include <algorithm>
#include <set>

#include "common/log.h"
#include "gpu/device_links.h"

namespace smddp {
namespace {

using c10d::OpType;

// Elements of all ranks together: a few chunks of what goes between hosts, and a moment of a device's time.
constexpr int64_t kElements = 1 << 20;

// One collective with values whose results are known to the bit in every type, in any order of the sums.
struct Comparison {
  at::Tensor input, output, expected;
};

at::Tensor indices(const TorchDevice& device, int64_t first, int64_t count) {
  return at::arange(first, first + count, at::device(device.place()).dtype(at::kLong));
}

// Different at each place of the whole tensor.
at::Tensor numbers(const TorchDevice& device, int64_t first, int64_t count) {
  return indices(device, first, count).mul_(7919).to(at::kInt);
}

// Ones and zeros: at place k, a rank has a one if `apart` divides h(k) + rank. There are few enough ones at a
// place that a half type can count them, and their number depends on h(k).
struct Ones {
  int64_t ranks, apart;
  explicit Ones(int64_t of_ranks) : ranks(of_ranks), apart(std::max<int64_t>(3, of_ranks / 64)) {
    if (ranks % apart == 0) ++apart;
  }

  static at::Tensor h(const at::Tensor& places) {
    return places.mul(40503).floor_divide(128).remainder(65536);
  }
  at::Tensor of(const at::Tensor& places, int64_t rank) const {
    return h(places).add(rank).remainder(apart).eq(0);
  }
  at::Tensor sums(const at::Tensor& places) const {
    at::Tensor first = h(places);
    return first.add(ranks - 1).floor_divide(apart).sub(first.sub(1).floor_divide(apart));
  }
};

at::Tensor room(const TorchDevice& device, int64_t count, at::ScalarType type) {
  return device.empty(static_cast<size_t>(count) * c10::elementSize(type))
      .narrow(0, 0, count * static_cast<int64_t>(c10::elementSize(type)))
      .view(type);
}

Comparison prepare(const DeviceCollectives& by, Collective collective, at::ScalarType type) {
  const TorchDevice& device = by.device();
  int64_t ranks = by.ranks(), rank = by.rank();
  int64_t each = std::max<int64_t>(kElements / ranks, 256) + 1;  // no power of two
  if (collective == Collective::kAllGather) {
    return {device.copy_of(numbers(device, rank * each, each)),
            room(device, ranks * each, at::kInt), numbers(device, 0, ranks * each)};
  }
  Ones ones(ranks);
  bool scatters = collective == Collective::kReduceScatter;
  at::Tensor input = device.copy_of(ones.of(indices(device, 0, ranks * each), rank).to(type));
  at::Tensor results =
      scatters ? indices(device, rank * each, each) : indices(device, 0, ranks * each);
  return {input, scatters ? room(device, each, type) : input, ones.sums(results).to(type)};
}

bool right(DeviceCollectives& by, Collective collective, const Comparison& c) {
  const auto limit = c10d::kUnsetTimeout;
  c10::intrusive_ptr<c10d::Work> work;
  if (collective == Collective::kAllGather)
    work = by.gather(&c.output, &c.input, false, limit, OpType::_ALLGATHER_BASE, true);
  else if (collective == Collective::kReduceScatter)
    work = by.scatter(&c.output, &c.input, false, ReduceOp::kSum, limit,
                      OpType::_REDUCE_SCATTER_BASE, true);
  else
    work = by.reduce(&c.output, ReduceOp::kSum, limit, OpType::ALLREDUCE, true);
  work->wait();
  return at::equal(c.output, c.expected);
}

// The first error of all ranks; empty: there is none.
std::string compare(DeviceCollectives& by, Collective collective, Engine& engine, Group& group,
                    const CollectivePath& path) {
  at::NoGradGuard no_grad;
  Uncounted uncounted;
  std::vector<Comparison> comparisons;
  Status mine;
  try {
    for (at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      if (comparisons.empty() || collective != Collective::kAllGather)
        comparisons.push_back(prepare(by, collective, type));
    }
  } catch (const c10::Error& error) {
    mine = {Code::kUnavailable, error.what_without_backtrace()};
  }
  if (Status ready = agree(engine, group, mine); !ready) {
    log(LogLevel::kWarning, std::string(name_of(collective)) + " by " + std::string(path.second) +
                                " was not compared with its known result: " + ready.message());
    return {};
  }
  for (const Comparison& c : comparisons) {
    if (!right(by, collective, c)) mine = {Code::kUnavailable, "it differs from its known result"};
  }
  // The paths that gave wrong results in any group of this process: no group of it uses them again.
  static auto* wrong = new std::set<CollectivePath>();
  static std::mutex mutex;
  std::unique_lock lock(mutex);
  if (mine && wrong->contains(path))
    mine = {Code::kUnavailable, "it differed from its known result in another group"};
  lock.unlock();
  Status all = agree(engine, group, mine);
  lock.lock();
  if (!all) wrong->insert(path);
  return all.message();
}

}  // namespace

const char* FirstUse::objection(DeviceCollectives& by, Collective collective, Engine& engine,
                                Group& group) {
  if (by.ranks() == 1) return nullptr;
  CollectivePath path(collective, by.way(collective));
  std::lock_guard lock(mutex_);
  auto known = known_.find(path);
  if (known == known_.end()) {
    auto recording = by.device().device().capturing(by.device().current());
    if (!recording || recording.value()) return nullptr;
    std::string why = compare(by, collective, engine, group, path);
    if (!why.empty()) {
      why = "the result of " + std::string(name_of(collective)) + " by " +
            std::string(path.second) + " is wrong, as a first one showed: " + why;
      log(LogLevel::kError,
          why + "; from now on the fallback carries it. `make gpu-check` finds out more");
    }
    known = known_.emplace(path, std::move(why)).first;
  }
  return known->second.empty() ? nullptr : known->second.c_str();
}

}  // namespace smddp
