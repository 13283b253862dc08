#include "group/measured_host.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "common/align.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/processor.h"

namespace smddp {
namespace {

// Blocks that are timed, one after another as long as reads pay, and how large blocks are read if they do. Of slots' time reads
// took 0.55, 0.55, 0.75, 0.7, 1.1 with blocks of 128 KiB, 512 KiB, 2, 8, 32 MiB on an Intel Xeon (2026-11-29-intel-xeon), 1.4 to
// 1.6 on an AMD EPYC. With 128 KiB the first calls would tell how slots grow warm. Each takes a fraction of a scheduler's
// tick: where the ranks are disturbed, most turns still are not.
struct Tried {
  size_t bytes, up_to;
};
constexpr Tried kTried[] = {{512 << 10, 1 << 20}, {2 << 20, 16 << 20}};
// Of all ranks' blocks together, so that the answer takes no longer on a host of many ranks.
constexpr size_t kTogether = 16 << 20;
// Beside a busy loop per core two ranks found the same in 10 of 10 starts (2026-11-29-intel-xeon).
constexpr int kTurns = 4;
// The ranks of a host that take so long share cores: what they would find is who had one.
constexpr double kTooLongNs = 10e6;
// Less is what two turns of the same differ by.
constexpr double kWins = 0.95;

// Whether reads take less time.
Result<bool> pays(size_t bytes, const TimeGather& time) {
  std::array<double, 2> best;
  best.fill(std::numeric_limits<double>::max());
  for (int turn = 0; turn <= kTurns; ++turn) {
    // Of two calls the second counts, which finds in the caches what calls of its own way left there. Of calls in turns
    // reads of 2 MiB took 0.9 of slots' time, one way for long 0.75 (2026-11-29-intel-xeon).
    for (int call = 0; call < 4; ++call) {
      bool by_reads = call > 1;
      auto took = time(bytes, by_reads);
      if (!took) return took.status();
      if (turn == 0 && took.value() > kTooLongNs) return false;
      // The first turn also pays for new memory.
      if (turn > 0 && call % 2 == 1) best[by_reads] = std::min(best[by_reads], took.value());
    }
  }
  return best[1] < kWins * best[0];
}

// Copies between addresses that are not those of cache lines take up to 1.4 times as long, and tensors lie at such addresses.
struct alignas(kCacheLine) Line {
  std::byte bytes[kCacheLine];
};
using Memory = std::shared_ptr<std::vector<Line>>;

Memory memory_of(size_t bytes) {
  return std::make_shared<std::vector<Line>>(align_up(bytes, kCacheLine) / kCacheLine);
}

// Of blocks of so many bytes of each rank. Keeps its memory, which peers may read until a broken group is closed.
class Timed final : public Operation {
 public:
  Timed(size_t bytes, int ranks, Memory memory) : memory_(std::move(memory)) {
    collective = Collective::kAllGather;
    digest = bytes;
    std::byte* own = memory_->data()->bytes;
    gather(own, bytes, own + bytes, ranks);
  }

 private:
  const Memory memory_;
};

}  // namespace

Result<size_t> measure_reads(int ranks, const TimeGather& time) {
  size_t up_to = 0;
  for (const Tried& tried : kTried) {
    if (tried.bytes * static_cast<size_t>(ranks) > kTogether) break;
    bool found = false;
    if (Status s = pays(tried.bytes, time).into(found); !s) return s;
    if (!found) break;
    up_to = tried.up_to;
  }
  return up_to;
}

Result<size_t> measure_host(Engine& engine, Group& group, const std::function<void(size_t)>& use) {
  const uint64_t began = now_ns();
  const int ranks = group.ranks();
  const auto blocks = static_cast<size_t>(ranks) + 1;
  Memory memory, times = memory_of(blocks * sizeof(double));
  auto run = [&](size_t bytes, const Memory& in) {
    auto operation = std::make_shared<Timed>(bytes, ranks, in);
    group.submit(operation, {}, false);
    return engine.await(*operation);
  };
  auto time = [&](size_t bytes, bool by_reads) -> Result<double> {
    if (memory == nullptr || memory->size() * kCacheLine < blocks * bytes)
      memory = memory_of(blocks * bytes);
    use(by_reads ? SIZE_MAX : 0);
    const uint64_t from = now_ns();
    Status done = run(bytes, memory);
    const auto mine = static_cast<double>(now_ns() - from);
    std::memcpy(times->data(), &mine, sizeof mine);
    if (done) done = run(sizeof mine, times);
    if (!done) return done;
    std::vector<double> all(blocks);
    std::memcpy(all.data(), times->data(), blocks * sizeof mine);
    return *std::max_element(all.begin(), all.end());
  };
  auto found = measure_reads(ranks, time);
  if (found && log_enabled(LogLevel::kInfo))
    log(LogLevel::kInfo, "inside this host: " + text_of_reads(found.value()) + ", measured in " +
                             std::to_string((now_ns() - began) / 1'000) + " us");
  return found;
}

// The number is 0, a power of two, or SIZE_MAX.
uint64_t word_of_reads(size_t up_to) { return 1 + static_cast<uint64_t>(std::bit_width(up_to)); }

size_t reads_of(uint64_t word) {
  if (word <= 1) return 0;
  return word > 64 ? SIZE_MAX : size_t{1} << (word - 2);
}

std::string text_of_reads(size_t up_to) {
  if (up_to == 0) return "gathers through slots";
  std::string limit = up_to == SIZE_MAX ? "" : " of up to " + std::to_string(up_to >> 10) + " KiB";
  return "gathers of blocks" + limit + " by reads";
}

}  // namespace smddp
