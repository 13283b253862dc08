#include "group/measured_host.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "common/clock.h"
#include "common/log.h"
#include "intranode/outbox.h"

namespace smddp {
namespace {

// Blocks that are timed, the largest first: where reads do not pay there, they pay nowhere. With each, from where
// on reads are taken if they pay with it: half way to the next smaller one, by factors. Up to two slots a copy in and a
// copy out cost less than the system call.
struct Tried {
  size_t bytes, from;
};
constexpr size_t kLargest = 2 << 20, kLeast = 128 << 10, kTwoSlots = 2 * intranode::kSlotBytes;
constexpr Tried kTried[] = {{kLargest, 512 << 10}, {kLeast, kTwoSlots}};
// Of all ranks' blocks together, so that the answer takes no longer on a host of many ranks.
constexpr size_t kTogether = 16 << 20;
// Not measured: fewer turns take less time, more of them find a quiet one for each way.
constexpr int kTurns = 3;
// The ranks of a host that take so long share cores: what they would find is who had one.
constexpr double kTooLongNs = 10e6;
// Where both take about as long, slots hold up no peer. Not measured.
constexpr double kWins = 0.95;

size_t largest(int ranks) {
  return std::min(kLargest, std::bit_floor(kTogether / static_cast<size_t>(ranks)));
}

// Whether reads take less time.
Result<bool> pays(Collective collective, size_t bytes, const TimeCollective& time) {
  std::array<double, 2> best;
  best.fill(std::numeric_limits<double>::max());
  for (int turn = 0; turn <= kTurns; ++turn) {
    for (bool by_reads : {false, true}) {
      auto took = time(collective, bytes, by_reads);
      if (!took) return took.status();
      if (turn == 0 && took.value() > kTooLongNs) return false;
      // The first turn also pays for new memory.
      if (turn > 0) best[by_reads] = std::min(best[by_reads], took.value());
    }
  }
  return best[1] < kWins * best[0];
}

Result<size_t> reads_from(Collective collective, int ranks, const TimeCollective& time) {
  size_t from = SIZE_MAX;
  for (const Tried& tried : kTried) {
    size_t bytes = std::min(tried.bytes, largest(ranks));
    if (bytes < kLeast) break;
    auto found = pays(collective, bytes, time);
    if (!found) return found.status();
    if (!found.value()) break;
    from = tried.from;
  }
  return from;
}

using Memory = std::shared_ptr<std::vector<std::byte>>;

// Of blocks of so many bytes of each rank. Keeps its memory, which peers may read until a broken group is closed.
class Timed final : public Operation {
 public:
  Timed(Collective of, size_t bytes, int ranks, Memory memory) : memory_(std::move(memory)) {
    collective = of;
    digest = bytes;
    std::byte *one = memory_->data(), *all = one + bytes;
    if (of == Collective::kAllGather) {
      gather(one, bytes, all, ranks);
      return;
    }
    dtype = Dtype::kFloat32;
    reduce_op = ReduceOp::kSum;
    element_size = sizeof(float);
    for (int r = 0; r < ranks; ++r) {
      input.add(all + static_cast<size_t>(r) * bytes, bytes);
      input.end_block();
    }
    output.add(one, bytes);
    output.end_block();
  }

 private:
  const Memory memory_;
};

std::string text_of(const char* what, size_t from) {
  if (from == SIZE_MAX) return std::string(what) + " through slots";
  return std::string(what) + " by reads from " + std::to_string(from >> 10) + " KiB on";
}

}  // namespace

Result<ReadsFrom> measure_reads(int ranks, const TimeCollective& time) {
  ReadsFrom reads;
  if (Status s = reads_from(Collective::kAllGather, ranks, time).into(reads.gathers); !s) return s;
  if (Status s = reads_from(Collective::kReduceScatter, ranks, time).into(reads.sums); !s) return s;
  return reads;
}

Result<ReadsFrom> measure_host(Engine& engine, Group& group,
                               const std::function<void(const ReadsFrom&)>& use) {
  const uint64_t began = now_ns();
  const int ranks = group.ranks();
  const auto blocks = static_cast<size_t>(ranks) + 1;
  auto memory = std::make_shared<std::vector<std::byte>>(blocks * largest(ranks));
  auto times = std::make_shared<std::vector<std::byte>>(blocks * sizeof(double));
  auto run = [&](Collective collective, size_t bytes, const Memory& in) {
    auto operation = std::make_shared<Timed>(collective, bytes, ranks, in);
    group.submit(operation, {}, false);
    return engine.await(*operation);
  };
  auto time = [&](Collective collective, size_t bytes, bool by_reads) -> Result<double> {
    use(by_reads ? ReadsFrom{0, 0} : ReadsFrom());
    const uint64_t from = now_ns();
    Status done = run(collective, bytes, memory);
    const auto mine = static_cast<double>(now_ns() - from);
    std::memcpy(times->data(), &mine, sizeof mine);
    if (done) done = run(Collective::kAllGather, sizeof mine, times);
    if (!done) return done;
    std::vector<double> all(blocks);
    std::memcpy(all.data(), times->data(), times->size());
    return *std::max_element(all.begin(), all.end());
  };
  auto found = measure_reads(group.ranks(), time);
  if (found && log_enabled(LogLevel::kInfo))
    log(LogLevel::kInfo, "inside this host: " + text_of(found.value()) + ", measured in " +
                             std::to_string((now_ns() - began) / 1'000'000) + " ms");
  return found;
}

ReadsFrom usual_reads() { return {kTwoSlots, kTwoSlots}; }

// The numbers are powers of two, or SIZE_MAX.
uint64_t word_of(const ReadsFrom& reads) {
  auto of = [](size_t from) { return static_cast<uint64_t>(std::bit_width(from)); };
  return of(reads.gathers) << 8 | of(reads.sums);
}

ReadsFrom reads_of(uint64_t word) {
  auto of = [](uint64_t width) {
    return width == 0 || width > 63 ? SIZE_MAX : size_t{1} << (width - 1);
  };
  return {of(word >> 8 & 0xff), of(word & 0xff)};
}

std::string text_of(const ReadsFrom& reads) {
  return text_of("gathers", reads.gathers) + ", " + text_of("sums", reads.sums);
}

}  // namespace smddp
