#include "gpu/peer_trial.h"

#include <chrono>
#include <thread>

#include "common/align.h"
#include "common/clock.h"
#include "common/kept.h"

namespace smddp {
namespace {

using device::FlagStep;
using intranode::CopyEngine;
using intranode::MemoryOffer;

constexpr size_t kCount = 1024;  // floats of a part
constexpr size_t kBytes = kCount * sizeof(float);
// What `main` sets the word to.
constexpr uint32_t kWaiting = 1, kWaited = 2, kCarriedOut = 3;
constexpr uint32_t kTrial = 0;  // before all operations' numbers

// Small integers, whose sums are exact; never zero, and no two ranks' are equal.
float value(size_t rank, size_t i) { return static_cast<float>((rank + 1) * (i % 61 + 1)); }

size_t room() { return MemoryOffer::encoded_bytes({kBytes}); }

Status fault(const std::string& what) { return {Code::kUnavailable, what}; }

// So that a refused call says what it was for.
Status because(const char* what, const Status& s) {
  return s ? Status() : Status(s.code(), what + s.message());
}

}  // namespace

PeerTrial::~PeerTrial() {
  device_.order().end(turn_);
  device_.destroy_event(end_);
  if (stuck_) {
    (void)host_.release();
    keep(std::shared_ptr(std::move(flags_)));
    return;
  }
  device_.free(memory_);
  if (host_on_device_ != nullptr) device_.unmap_host(host_.data());
}

uint32_t PeerTrial::word() const {
  auto* at = reinterpret_cast<uint32_t*>(host_.data() + parts() * kBytes);
  return std::atomic_ref(*at).load(std::memory_order_acquire);
}

uint32_t* PeerTrial::word_on_device() const {
  return reinterpret_cast<uint32_t*>(host_on_device_ + parts() * kBytes);
}

// False if the condition has not come true within the limit.
template <class Condition>
bool PeerTrial::soon(Condition&& condition) const {
  for (uint64_t until = now_ns() + limit_ns_; !condition();) {
    if (now_ns() > until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

// Waits until `main` is done, and calls `each` meanwhile.
template <class Each>
Status PeerTrial::drain(Each&& each) {
  Status s = device_.record(end_, main_);
  stuck_ = !s || !soon([&] {
    each();
    auto done = device_.done(end_);
    s = done.status();
    return !done || done.value();
  });
  return s && stuck_ ? fault("a stream of its GPU does not come to its end") : s;
}

Status PeerTrial::open() {
  size_t all = parts() * kBytes;
  static_assert(kBytes % kPage == 0);
  if (Status s = Mapping::map(all + kPage, MAP_SHARED).into(host_); !s) return s;
  if (Status s = device_.map_host(host_.data(), all + kPage).into(host_on_device_); !s) return s;
  if (Status s = device_.allocate(all).into(memory_); !s) return s;
  if (Status s = device_.create_flags().into(flags_); !s) return s;
  if (Status s = device_.create_event().into(end_); !s) return s;
  auto* own = reinterpret_cast<float*>(host_.data());
  for (size_t i = 0; i < kCount; ++i) own[i] = value(static_cast<size_t>(peers_.own()), i);
  Status s = device_.copy(main_, memory_, host_on_device_, all);
  if (s) s = device_.synchronize(main_);  // nothing there waits yet
  if (s) s = because("streams of its GPU take no events: ", device_.record(end_, main_));
  return s ? try_flags() : s;
}

// `main` sets the word, waits for the CPU, and sets the word again.
Status PeerTrial::try_flags() {
  using Kind = FlagStep::Kind;
  FlagStep steps[] = {{Kind::kWrite, word_on_device(), kWaiting},
                      {Kind::kWait, flags_->on_device(0), 1},
                      {Kind::kWrite, word_on_device(), kWaited}};
  Status s = because("streams of its GPU take no flags: ", device_.flags(main_, steps));
  if (!s) return s;
  bool seen = soon([this] { return word() != 0; });
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  bool waits = word() == kWaiting;
  flags_->set(0, 1);
  Status ended = drain([] {});
  if (!seen) return fault("the CPU does not see a flag that a stream of its GPU sets");
  if (!waits) return fault("a stream of its GPU does not wait for a flag");
  return because("waiting for a flag that the CPU sets: ", ended);
}

std::vector<std::byte> PeerTrial::offer(uint64_t turn, uint32_t number) {
  turn_ = turn;
  Status opened = open();
  std::vector<std::byte> bytes(room());
  MemoryOffer made = opened ? MemoryOffer::make(device_, {}, {{memory_, kBytes}})
                            : MemoryOffer::refuse(opened.message());
  made.encode(bytes.data(), bytes.size());
  engine_.call(number, bytes.data());
  return bytes;
}

Status PeerTrial::carry_out(const std::vector<std::byte>& offers, bool sums) {
  // Its mappings end before the peers free the memory.
  auto imports = std::make_unique<intranode::Imports>(device_);
  Status s = submit(offers, *imports, sums);
  auto ended = [this] { return word() == kCarriedOut; };
  if (s && !soon([&] { return ended() || engine_.gave_up().has_value(); })) {
    s = fault("an operation with its peers has not ended: a flag, an event or a copy is lost");
  }
  if (!s) engine_.give_up(s.message());
  if (s && ended()) return compare(sums);
  Status drained = drain([this] { engine_.release(); });
  if (stuck_) keep(std::shared_ptr(std::move(imports)));
  return s ? drained : s;
}

Status PeerTrial::import_all(const std::vector<MemoryOffer>& offers,
                             intranode::Imports& imports) const {
  for (size_t r = 0; r < ranks(); ++r) {
    const std::string& name = peers_.name(static_cast<int>(r));
    if (!offers[r].refusal().empty()) return fault(name + ": " + offers[r].refusal());
    auto at = offers[r].locate(imports, 0, 0, kBytes);
    if (!at)
      return fault("its GPU can't read the memory of " + name + ": " + at.status().message());
    if (at.value().bytes < kBytes)
      return {Code::kInternal, "a page of memory lies in two allocations"};
  }
  return {};
}

Status PeerTrial::submit(const std::vector<std::byte>& encoded, intranode::Imports& imports,
                         bool sums) {
  auto offers = MemoryOffer::decode_all(encoded.data(), room(), peers_.count(), peers_.own());
  if (!offers) return offers.status();
  if (Status s = import_all(offers.value(), imports); !s) return s;
  CopyEngine::Plan plan;
  plan.on_lanes = true;  // with all streams and events that larger operations use
  if (sums) plan.sums.push_back({0, 0, kBytes, memory_ + (ranks() + 1) * kBytes});
  for (size_t r = 0; r < ranks(); ++r)
    plan.moves.push_back({static_cast<int>(r), 0, 0, kBytes, memory_ + (r + 1) * kBytes});
  auto work = engine_.resolve(plan, offers.value(), imports);
  if (!work) return work.status();
  device_.order().set_last_call(turn_,
                                MemoryOffer::last_call(encoded.data(), room(), peers_.count()));
  device_.order().begin(turn_);
  Status s = engine_.submit(work.value(), kTrial);
  if (s) s = device_.copy(main_, host_on_device_, memory_, parts() * kBytes);
  if (s) s = device_.write_flag(main_, word_on_device(), kCarriedOut);
  device_.order().end(turn_);
  return because("an operation with its peers can't be submitted: ", s);
}

Status PeerTrial::compare(bool sums) const {
  auto* read = reinterpret_cast<const float*>(host_.data());
  for (size_t i = 0; i < kCount; ++i) {
    float sum = 0;
    for (size_t r = 0; r < ranks(); ++r) {
      sum += value(r, i);
      if (read[(r + 1) * kCount + i] != value(r, i)) {
        return fault("its GPU reads wrong bytes from the memory of " +
                     peers_.name(static_cast<int>(r)) +
                     "; switch off the IOMMU or PCIe ACS between the GPUs");
      }
    }
    if (sums && read[(ranks() + 1) * kCount + i] != sum)
      return fault("a kernel on its GPU sums the memory of its host wrongly");
  }
  return {};
}

}  // namespace smddp
