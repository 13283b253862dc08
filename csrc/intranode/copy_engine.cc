#include "intranode/copy_engine.h"

#include <algorithm>
#include <cstring>

#include "common/clock.h"

namespace smddp::intranode {

using device::Device;

namespace {

// With no more bytes, copies on several streams at once do not pay for the events between them: a copy takes some
// microseconds of an H200's driver, and as long on the device up to 1 MiB (benchmarks/results/2026-11-27-gpu-h200).
constexpr size_t kFew = 1 << 20;

}  // namespace

Result<std::unique_ptr<CopyEngine>> CopyEngine::create(device::Device& device, device::Stream main,
                                                       int index, int ranks) {
  std::unique_ptr<CopyEngine> engine(new CopyEngine(device, main, index, ranks));
  if (Status opened = engine->open(); !opened) return opened;
  return engine;
}

Status CopyEngine::open() {
  if (static_cast<size_t>(ranks_) > kMostRanks) {
    return {Code::kUnavailable, std::to_string(ranks_) +
                                    " ranks on one host; GPU collectives take up to " +
                                    std::to_string(kMostRanks)};
  }
  if (Status s = create_shared("smddp-flags", kPageBytes).into(own_); !s) return s;
  if (Status s = device_.map_host(own_.mapping.data(), kPageBytes).into(own_flags_); !s) return s;
  mappings_.resize(static_cast<size_t>(ranks_));
  peers_.resize(static_cast<size_t>(ranks_));
  for (device::Event* event : {&begin_, &summed_}) {
    if (Status s = device_.create_event().into(*event); !s) return s;
  }
  return open_lanes(lanes_, false);
}

Status CopyEngine::open_lanes(std::vector<Lane>& lanes, bool own) {
  for (size_t i = lanes.size(); i < std::min(Device::kLanes, static_cast<size_t>(ranks_) - 1);
       ++i) {
    auto stream = own ? device_.create_stream() : device_.lane(i);
    if (!stream) return stream.status();
    Lane& lane = lanes.emplace_back();
    lane.stream = stream.value();
    if (Status s = device_.create_event().into(lane.end); !s) return s;
  }
  return {};
}

CopyEngine::~CopyEngine() {
  for (Lane& lane : recorded_lanes_) device_.destroy_stream(lane.stream);
  for (const std::vector<Lane>& lanes : {lanes_, recorded_lanes_}) {
    for (const Lane& lane : lanes) device_.destroy_event(lane.end);
  }
  for (device::Event event : {begin_, summed_}) device_.destroy_event(event);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i] != nullptr) device_.unmap_host(mappings_[i].data());
  }
  if (own_flags_ != nullptr) device_.unmap_host(own_.mapping.data());
}

Status CopyEngine::join(int index, int pid, int flags_descriptor) {
  auto mapping = map_shared(pid, flags_descriptor, "a rank on this host");
  if (!mapping) return mapping.status();
  if (mapping.value().size() != kPageBytes) {
    return {Code::kInternal, "the flag page of a peer has a different size"};
  }
  auto i = static_cast<size_t>(index);
  auto here = device_.map_host(mapping.value().data(), kPageBytes);
  if (!here) return here.status();
  mappings_[i] = std::move(mapping.value());
  peers_[i] = static_cast<Flags*>(here.value());
  return {};
}

void CopyEngine::signal(Steps& steps, size_t phase, int peer) const {
  Flags& theirs = *peers_[static_cast<size_t>(peer)];
  steps.push_back({device::FlagStep::Kind::kWrite, &theirs.word[phase][index_].value, 1});
}

void CopyEngine::signal_all(Steps& steps, size_t phase) const {
  for (int step = 1; step < ranks_; ++step) signal(steps, phase, (index_ + step) % ranks_);
}

void CopyEngine::await_all(Steps& steps, size_t phase) const {
  for (int step = 1; step < ranks_; ++step) {
    uint32_t* flag = &own_flags_->word[phase][(index_ + step) % ranks_].value;
    steps.push_back({device::FlagStep::Kind::kWait, flag, 1});
    steps.push_back({device::FlagStep::Kind::kWrite, flag, 0});
  }
}

Status CopyEngine::flush(device::Stream stream, Steps& steps) {
  Status s = steps.empty() ? Status() : device_.flags(stream, steps);
  steps.clear();
  return s;
}

Status CopyEngine::record(const Work& work, device::Stream stream) {
  if (Status opened = open_lanes(recorded_lanes_, true); !opened) return opened;
  return submit(work, stream, recorded_lanes_, std::nullopt);
}

// Only `main` waits for peers: other groups use the lanes too.
Status CopyEngine::submit(const Work& work, device::Stream main, const std::vector<Lane>& lanes,
                          std::optional<uint32_t> number) {
  bool sums = work.sums_, moves = work.moves_ || !sums;
  Status s;
  Steps steps;
  signal_all(steps, kReady);  // this rank's memory can be read
  await_all(steps, kReady);
  if (sums) {
    s = flush(main, steps);
    if (s) s = sum(work, 0, main);
    // Peers can read the sums. This rank has also read the peers' memory, so the peers can overwrite it.
    signal_all(steps, moves ? kPrepared : kDone);
    if (moves) await_all(steps, kPrepared);
  }
  if (s && moves) s = flush(main, steps);
  if (s && moves) {
    s = work.on_lanes_ ? move_all(work, 0, main, lanes)
                       : move_few(work, main, &lanes == &recorded_lanes_, steps);
  }
  await_all(steps, kDone);  // no peer reads this rank's memory any more
  if (number) steps.push_back(mark_of(*number));
  if (s) s = flush(main, steps);
  if (!s) await_lanes(main, lanes);
  return s;
}

Status CopyEngine::submit_around(const Work& work, uint32_t number, const Between& between) {
  Steps steps;
  device::Stream early = nullptr;
  size_t summed = 0, moved = 0;
  Stages stages;
  if (work.sums_) {
    stages.sum = [&](device::Stream stream) {
      early = stream;
      return sum_early(work, summed++, stream);
    };
  }
  if (work.moves_) {
    stages.move = [&] {
      signal_all(steps, kPrepared + moved);
      await_all(steps, kPrepared + moved);
      Status s = flush(main_, steps);
      return s ? move_all(work, moved++, main_, lanes_) : s;
    };
  }
  Status s = between(stages);
  // No peer reads this rank's memory any more.
  if (s && work.sums_) {
    await_all(steps, kSummed);
    s = flush(early, steps);
  }
  if (early != nullptr && device_.record(summed_, early)) (void)device_.wait(main_, summed_);
  if (work.moves_) await_all(steps, kDone);
  steps.push_back(mark_of(number));
  if (s) s = flush(main_, steps);
  if (!s) await_lanes(main_, lanes_);
  return s;
}

// The sums of one part, on a stream that does not wait for `main`.
Status CopyEngine::sum_early(const Work& work, size_t part, device::Stream stream) {
  Status s;
  Steps steps;
  if (part == 0) {
    signal_all(steps, kReady);
    await_all(steps, kReady);
    s = flush(stream, steps);
  }
  if (s) s = sum(work, part, stream);
  if (part + 1 == work.reductions_.size()) signal_all(steps, kSummed);
  return s ? flush(stream, steps) : s;
}

// After an error, `main` still waits for everything that was submitted to the lanes.
void CopyEngine::await_lanes(device::Stream main, const std::vector<Lane>& lanes) {
  for (const Lane& lane : lanes) {
    if (device_.record(lane.end, lane.stream)) (void)device_.wait(main, lane.end);
  }
}

// All copies by one command of `main`, where the device can; the peers are told by `steps`.
Status CopyEngine::move_few(const Work& work, device::Stream main, bool recorded, Steps& steps) {
  Copies copies;
  for (const Copies& more : work.copies_[0]) copies.insert(copies.end(), more.begin(), more.end());
  signal_all(steps, kDone);
  return move(main, copies, recorded);
}

// Each lane reads from some of the peers, and tells them at its end.
Status CopyEngine::move_all(const Work& work, size_t part, device::Stream main,
                            const std::vector<Lane>& lanes) {
  bool last = part + 1 == work.copies_.size(), recorded = &lanes == &recorded_lanes_;
  const std::vector<Copies>& by_rank = work.copies_[part];
  Status s = lanes.empty() ? Status() : device_.record(begin_, main);
  Steps steps;
  for (size_t lane = 0; lane < lanes.size() && s; ++lane) {
    device::Stream stream = lanes[lane].stream;
    s = device_.wait(stream, begin_);
    Copies copies;
    for (size_t step = lane; step + 1 < static_cast<size_t>(ranks_); step += lanes.size()) {
      int peer = (index_ + static_cast<int>(step) + 1) % ranks_;
      const Copies& more = by_rank[static_cast<size_t>(peer)];
      copies.insert(copies.end(), more.begin(), more.end());
      if (last) signal(steps, kDone, peer);
    }
    if (s) s = move(stream, copies, recorded);
    if (s) s = flush(stream, steps);
    if (s && last) s = device_.record(lanes[lane].end, stream);
  }
  if (s) s = move(main, by_rank[static_cast<size_t>(index_)], recorded);
  for (const Lane& lane : lanes) {
    if (s && last) s = device_.wait(main, lane.end);
  }
  return s;
}

Status CopyEngine::move(device::Stream stream, const Copies& copies, bool recorded) {
  return recorded ? device_.one_by_one(stream, copies) : device_.copies(stream, copies);
}

Status CopyEngine::sum(const Work& work, size_t part, device::Stream stream) {
  Status s;
  for (const kernels::Reduction& reduction : work.reductions_[part]) {
    if (s) s = device_.reduce(stream, reduction);
  }
  return s;
}

Result<CopyEngine::Work> CopyEngine::resolve(const Plan& plan,
                                             const std::vector<MemoryOffer>& offers,
                                             Imports& imports) {
  Work work;
  work.sums_ = !plan.sums.empty();
  work.moves_ = !plan.moves.empty();
  work.reductions_.resize(plan.parts);
  work.copies_.assign(plan.parts, std::vector<Copies>(offers.size()));
  Status s = resolve_sums(plan, offers, imports, work);
  if (s) s = resolve_moves(plan, offers, imports, work);
  size_t bytes = 0;
  for (const std::vector<Copies>& by_rank : work.copies_) {
    for (const Copies& copies : by_rank) {
      for (const Device::Copy& each : copies) bytes += each.bytes;
    }
  }
  work.on_lanes_ = plan.on_lanes || bytes > kFew;
  return s ? Result<Work>(std::move(work)) : Result<Work>(s);
}

Status CopyEngine::resolve_moves(const Plan& plan, const std::vector<MemoryOffer>& offers,
                                 Imports& imports, Work& work) {
  for (const Move& m : plan.moves) {
    auto from = static_cast<size_t>(m.from);
    std::byte* to = m.destination;
    Status located =
        offers[from].pieces(imports, m.extent, m.offset, m.bytes, [&](std::byte* at, size_t bytes) {
          if (at != to && bytes > 0) work.copies_[m.part][from].push_back({to, at, bytes});
          to += bytes;
        });
    if (!located) return located;
  }
  return {};
}

// The memory of a rank may consist of several pieces, and the pieces end at different offsets in
// different ranks. One kernel sums one range in which no rank's piece ends.
Status CopyEngine::resolve_sums(const Plan& plan, const std::vector<MemoryOffer>& offers,
                                Imports& imports, Work& work) {
  size_t element = size_of(plan.how.dtype);
  for (const Sum& whole : plan.sums) {
    for (size_t done = 0; done < whole.bytes;) {
      kernels::Reduction r = plan.how;
      size_t bytes = whole.bytes - done;
      for (size_t i = 0; i < offers.size(); ++i) {
        auto piece = offers[i].locate(imports, whole.extent, whole.offset + done, bytes);
        if (!piece) return piece.status();
        bytes = std::min(bytes, piece.value().bytes);
        r.sources[i] = piece.value().address;
      }
      r.sources_count = offers.size();
      r.destination = whole.destination + done;
      r.count = bytes / element;
      if (r.count == 0) return {Code::kInternal, "an element lies in two pieces of memory"};
      work.reductions_[whole.part].push_back(r);
      done += r.count * element;
    }
  }
  return {};
}

Status CopyEngine::mark(uint32_t number) {
  Steps steps{mark_of(number)};
  return flush(main_, steps);
}

bool CopyEngine::reached(uint32_t number) const {
  auto* flags = reinterpret_cast<Flags*>(own_.mapping.data());
  uint32_t now = std::atomic_ref(flags->reached.value).load(std::memory_order_acquire);
  return static_cast<int32_t>(now - number) >= 0;
}

void CopyEngine::call(uint32_t number, std::byte* offer) {
  auto* flags = reinterpret_cast<Flags*>(own_.mapping.data());
  std::atomic_ref(flags->called).exchange(number, std::memory_order_seq_cst);
  MemoryOffer::note_call(offer, now_ns());
}

bool CopyEngine::called(uint32_t number) const {
  for (const Mapping& theirs : mappings_) {
    if (theirs.data() == nullptr) continue;  // this rank
    auto* flags = reinterpret_cast<Flags*>(theirs.data());
    uint32_t now = std::atomic_ref(flags->called).load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(now - number) < 0) return false;
  }
  return true;
}

void CopyEngine::release() {
  auto* flags = reinterpret_cast<Flags*>(own_.mapping.data());
  for (auto& phase : flags->word) {
    for (int peer = 0; peer < ranks_; ++peer)
      std::atomic_ref(phase[peer].value).store(1, std::memory_order_release);
  }
}

void CopyEngine::give_up(const std::string& reason) {
  auto* flags = reinterpret_cast<Flags*>(own_.mapping.data());
  uint32_t none = 0;
  if (!std::atomic_ref(flags->given_up).compare_exchange_strong(none, kGivingUp)) return;
  std::strncpy(flags->reason, reason.c_str(), sizeof flags->reason - 1);
  std::atomic_ref(flags->given_up).store(kGivenUp, std::memory_order_release);
}

std::optional<std::string> CopyEngine::gave_up() const {
  for (const Mapping& theirs : mappings_) {
    if (theirs.data() == nullptr) continue;  // this rank
    auto* flags = reinterpret_cast<Flags*>(theirs.data());
    if (std::atomic_ref(flags->given_up).load(std::memory_order_acquire) == kGivenUp)
      return std::string(flags->reason, ::strnlen(flags->reason, sizeof flags->reason));
  }
  return std::nullopt;
}

}  // namespace smddp::intranode
