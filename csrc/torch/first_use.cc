#include "torch/first_use.h"

#include <algorithm>
#include <array>
#include <set>

#include "common/exceptions.h"
#include "common/log.h"
#include "gpu/device_links.h"
#include "torch/runtime.h"

namespace smddp {
namespace {

using c10d::OpType;

// Elements of all ranks together: a few chunks of what goes between hosts, and a moment of a device's time. Fewer
// where memory is short.
constexpr int64_t kElements = 1 << 20, kFewestElements = 1 << 8;
// Results are never negative.
constexpr int kNoResult = -1;
// Each with other values, so that what is left of the first, or of another group's, is no result of the second.
constexpr size_t kTurns = 2;

// One collective with values whose results are known to the bit in every type, in any order of the sums.
struct Comparison {
  at::Tensor input, output;  // of all turns; one tensor if the collective is in place
  std::array<at::Tensor, kTurns> given, expected;
};

at::Tensor indices(const TorchDevice& device, int64_t first, int64_t count) {
  return at::arange(first, first + count, at::device(device.place()).dtype(at::kLong));
}

// Different at each place of the whole tensor.
at::Tensor numbers(const TorchDevice& device, int64_t first, int64_t count) {
  return indices(device, first, count).mul_(7919).remainder_(INT32_MAX).to(at::kInt);
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

Comparison prepare(const DeviceCollectives& by, Collective collective, at::ScalarType type,
                   int64_t elements) {
  const TorchDevice& device = by.device();
  int64_t ranks = by.ranks(), rank = by.rank();
  int64_t each = std::max<int64_t>(elements / ranks, 256) + 1;  // no power of two
  int64_t all = ranks * each, mine = rank * each;
  bool gathers = collective == Collective::kAllGather;
  bool scatters = collective == Collective::kReduceScatter;
  Ones ones(ranks);
  Comparison c;
  for (size_t turn = 0; turn < kTurns; ++turn) {
    int64_t first = static_cast<int64_t>(turn) * all;
    if (gathers) {
      c.given[turn] = numbers(device, first + mine, each);
      c.expected[turn] = numbers(device, first, all);
      continue;
    }
    c.given[turn] = ones.of(indices(device, first, all), rank).to(type);
    at::Tensor results =
        scatters ? indices(device, first + mine, each) : indices(device, first, all);
    c.expected[turn] = ones.sums(results).to(type);
  }
  c.input = device.copy_of(c.given[0]);
  c.output = gathers ? room(device, all, at::kInt) : scatters ? room(device, each, type) : c.input;
  return c;
}

// An error is what this rank has against the path. Throws where the collective fails.
Status carry_out(DeviceCollectives& by, Collective collective, const Comparison& c, size_t turn) {
  const auto limit = c10d::kUnsetTimeout;
  c.input.copy_(c.given[turn]);
  if (!c.output.is_same(c.input)) c.output.fill_(kNoResult);
  c10::intrusive_ptr<c10d::Work> work;
  if (collective == Collective::kAllGather)
    work = by.gather(&c.output, &c.input, false, limit, OpType::_ALLGATHER_BASE, true);
  else if (collective == Collective::kReduceScatter)
    work = by.scatter(&c.output, &c.input, false, ReduceOp::kSum, limit,
                      OpType::_REDUCE_SCATTER_BASE, true);
  else
    work = by.reduce(&c.output, ReduceOp::kSum, limit, OpType::ALLREDUCE, true);
  work->wait();
  return without_exceptions([&]() -> Status {  // it takes memory
    if (at::equal(c.output, c.expected[turn])) return {};
    return {Code::kUnavailable, "its first result is wrong"};
  });
}

// The first error of all ranks. Throws if the ranks could not be asked.
Status agreed(Engine& engine, Group& group, const Status& mine) {
  Status all = agree(engine, group, mine);
  if (!all && all.code() != Code::kUnavailable) throw_status(all);
  return all;
}

Result<Comparison> prepare_on_all(const DeviceCollectives& by, Collective collective,
                                  at::ScalarType type, Engine& engine, Group& group) {
  for (int64_t elements = kElements;; elements /= 16) {
    Comparison made;
    Status mine = without_exceptions([&] {
      made = prepare(by, collective, type, elements);
      return Status();
    });
    Status all = agreed(engine, group, mine);
    if (all) return made;
    if (elements <= kFewestElements)
      return Status(all.code(), "its first result can't be compared: " + all.message());
  }
}

// What a rank has against the path, the same on all ranks; empty: none has anything.
std::string compare(DeviceCollectives& by, Collective collective, Engine& engine, Group& group,
                    const CollectivePath& path) {
  at::NoGradGuard no_grad;
  Uncounted uncounted;
  Status mine;
  for (at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    if (type != at::kFloat && collective == Collective::kAllGather) continue;  // int in any case
    auto comparison = prepare_on_all(by, collective, type, engine, group);
    if (!comparison) return comparison.status().message();
    for (size_t turn = 0; turn < kTurns; ++turn) {
      Status carried = carry_out(by, collective, comparison.value(), turn);
      if (mine) mine = std::move(carried);
    }
  }
  // The paths that gave wrong results in any group of this process: no group of it uses them again.
  static auto* wrong = new std::set<CollectivePath>();
  static std::mutex mutex;
  std::unique_lock lock(mutex);
  if (mine && wrong->contains(path))
    mine = {Code::kUnavailable, "a first result was wrong in another group"};
  lock.unlock();
  Status all = agreed(engine, group, mine);
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
      why = "the fallback carries " + std::string(name_of(collective)) + " in place of " +
            std::string(path.second) + " from now on: " + why;
      log(LogLevel::kError, why + "; `make gpu-check` finds out more");
    }
    known = known_.emplace(path, std::move(why)).first;
  }
  return known->second.empty() ? nullptr : known->second.c_str();
}

}  // namespace smddp
