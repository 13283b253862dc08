#include "intranode/copy_engine.h"

#include <algorithm>
#include <cstring>

namespace smddp::intranode {

Result<std::unique_ptr<CopyEngine>> CopyEngine::create(device::Device& device, Imports& imports,
                                                       device::Stream main, int index, int ranks) {
  std::unique_ptr<CopyEngine> engine(new CopyEngine(device, imports, main, index, ranks));
  if (Status opened = engine->open(); !opened) return opened;
  return engine;
}

Status CopyEngine::open() {
  if (static_cast<size_t>(ranks_) > kernels::kMostSources) {
    return {Code::kUnavailable, std::to_string(ranks_) +
                                    " ranks on one host; GPU collectives take up to " +
                                    std::to_string(kernels::kMostSources)};
  }
  auto shared = create_shared("smddp-flags", kPageBytes);
  if (!shared) return shared.status();
  own_ = std::move(shared.value());
  auto here = device_.map_host(own_.mapping.address(), kPageBytes);
  if (!here) return here.status();
  own_flags_ = static_cast<Flags*>(here.value());
  mappings_.resize(static_cast<size_t>(ranks_));
  peers_.resize(static_cast<size_t>(ranks_));
  auto event = device_.create_event();
  if (!event) return event.status();
  begin_ = event.value();
  for (size_t i = 0; i < std::min(kLanes, static_cast<size_t>(ranks_) - 1); ++i) {
    Lane& lane = lanes_.emplace_back();
    auto stream = device_.create_stream();
    if (!stream) return stream.status();
    lane.stream = stream.value();
    auto end = device_.create_event();
    if (!end) return end.status();
    lane.end = end.value();
  }
  return {};
}

CopyEngine::~CopyEngine() {
  for (Lane& lane : lanes_) {
    if (lane.stream != nullptr) device_.destroy_stream(lane.stream);
    if (lane.end != nullptr) device_.destroy_event(lane.end);
  }
  if (begin_ != nullptr) device_.destroy_event(begin_);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i] != nullptr) device_.unmap_host(mappings_[i].address());
  }
  if (own_flags_ != nullptr) device_.unmap_host(own_.mapping.address());
}

Status CopyEngine::join(int index, int pid, int flags_descriptor) {
  auto mapping = map_shared(pid, flags_descriptor, "a rank on this host");
  if (!mapping) return mapping.status();
  if (mapping.value().size() != kPageBytes) {
    return {Code::kInternal, "the flag page of a peer has a different size"};
  }
  auto i = static_cast<size_t>(index);
  auto here = device_.map_host(mapping.value().address(), kPageBytes);
  if (!here) return here.status();
  mappings_[i] = std::move(mapping.value());
  peers_[i] = static_cast<Flags*>(here.value());
  return {};
}

Status CopyEngine::signal(device::Stream stream, Phase phase, int peer) {
  Flags& theirs = *peers_[static_cast<size_t>(peer)];
  return device_.write_flag(stream, &theirs.word[phase][index_].value, 1);
}

Status CopyEngine::await(device::Stream stream, Phase phase, int peer) {
  uint32_t* flag = &own_flags_->word[phase][peer].value;
  Status s = device_.wait_flag(stream, flag, 1);
  return s ? device_.write_flag(stream, flag, 0) : s;
}

Status CopyEngine::submit(const Work& work, const std::function<Status()>& between) {
  bool sums = work.sums_, moves = work.moves_;
  if (between && !sums && !moves) return between();  // does not involve the peers
  bool prepares = sums || between;                   // this rank writes data that peers then move
  Status s;
  auto with_all = [&](auto&& action) {
    for (int step = 1; step < ranks_ && s; ++step) s = action((index_ + step) % ranks_);
  };
  // This rank's memory can be read.
  if (sums || !between) with_all([&](int peer) { return signal(main_, kReady, peer); });
  if (sums) {
    with_all([&](int peer) { return await(main_, kReady, peer); });
    if (s) s = sum(work);
    if (!moves) with_all([&](int peer) { return signal(main_, kDone, peer); });
  }
  if (s && between) s = between();
  if (moves || !sums) {
    // Peers can read the data that this rank has prepared. This rank has also read the peers'
    // memory for its sums, so the peers can overwrite it.
    if (prepares) with_all([&](int peer) { return signal(main_, kPrepared, peer); });
    if (s && !lanes_.empty()) s = device_.record(begin_, main_);
    for (Lane& lane : lanes_) {
      if (s) s = device_.wait(lane.stream, begin_);
    }
    with_all([&](int peer) {
      size_t turn = static_cast<size_t>((peer - index_ + ranks_) % ranks_ - 1);
      device::Stream stream = lanes_[turn % lanes_.size()].stream;
      Status done = await(stream, prepares ? kPrepared : kReady, peer);
      if (done) done = move(stream, work, peer);
      return done ? signal(stream, kDone, peer) : done;
    });
    if (s) s = move(main_, work, index_);
    for (Lane& lane : lanes_) {
      if (s) s = device_.record(lane.end, lane.stream);
      if (s) s = device_.wait(main_, lane.end);
    }
  }
  // No peer reads this rank's memory any more.
  with_all([&](int peer) { return await(main_, kDone, peer); });
  // After an error, `main` still waits for everything that was submitted to the lanes.
  for (size_t i = 0; !s && i < lanes_.size(); ++i) {
    if (device_.record(lanes_[i].end, lanes_[i].stream)) (void)device_.wait(main_, lanes_[i].end);
  }
  return s;
}

Status CopyEngine::move(device::Stream stream, const Work& work, int from) {
  Status s;
  for (const Work::Copy& copy : work.copies_[static_cast<size_t>(from)]) {
    if (s) s = device_.copy(stream, copy.to, copy.from, copy.bytes);
  }
  return s;
}

Status CopyEngine::sum(const Work& work) {
  Status s;
  for (const kernels::Reduction& reduction : work.reductions_) {
    if (s) s = device_.reduce(main_, reduction);
  }
  return s;
}

Result<CopyEngine::Work> CopyEngine::resolve(const Plan& plan, const std::vector<Offer>& offers) {
  Work work;
  work.sums_ = !plan.sums.empty();
  work.moves_ = !plan.moves.empty();
  work.copies_.resize(offers.size());
  for (const Offer& offer : offers) offer.forget_gone(imports_);
  Status s = resolve_sums(plan, offers, work);
  if (s) s = resolve_moves(plan, offers, work);
  return s ? Result<Work>(std::move(work)) : Result<Work>(s);
}

Status CopyEngine::resolve_moves(const Plan& plan, const std::vector<Offer>& offers, Work& work) {
  for (const Move& m : plan.moves) {
    auto from = static_cast<size_t>(m.from);
    std::byte* to = m.destination;
    Status located = offers[from].pieces(imports_, m.extent, m.offset, m.bytes,
                                         [&](std::byte* at, size_t bytes) {
                                           if (at != to)
                                             work.copies_[from].push_back({to, at, bytes});
                                           to += bytes;
                                         });
    if (!located) return located;
  }
  return {};
}

// The memory of a rank may consist of several pieces, and the pieces end at different offsets in
// different ranks. One kernel sums one range in which no rank's piece ends.
Status CopyEngine::resolve_sums(const Plan& plan, const std::vector<Offer>& offers, Work& work) {
  size_t element = size_of(plan.dtype);
  for (const Sum& whole : plan.sums) {
    for (size_t done = 0; done < whole.bytes;) {
      kernels::Reduction r;
      size_t bytes = whole.bytes - done;
      for (size_t i = 0; i < offers.size(); ++i) {
        auto piece = offers[i].locate(imports_, whole.extent, whole.offset + done, bytes);
        if (!piece) return piece.status();
        bytes = std::min(bytes, piece.value().bytes);
        r.sources[i] = piece.value().address;
      }
      r.sources_count = offers.size();
      r.destination = whole.destination + done;
      r.count = bytes / element;
      r.dtype = plan.dtype;
      r.op = plan.op;
      r.divisor = plan.divisor;
      r.blocks = plan.blocks;
      if (r.count == 0) return {Code::kInternal, "an element lies in two pieces of memory"};
      work.reductions_.push_back(r);
      done += r.count * element;
    }
  }
  return {};
}

Status CopyEngine::mark(uint32_t number) {
  return device_.write_flag(main_, &own_flags_->reached.value, number);
}

bool CopyEngine::reached(uint32_t number) const {
  auto* flags = static_cast<Flags*>(own_.mapping.address());
  uint32_t now = std::atomic_ref(flags->reached.value).load(std::memory_order_acquire);
  return static_cast<int32_t>(now - number) >= 0;
}

void CopyEngine::release() {
  auto* flags = static_cast<Flags*>(own_.mapping.address());
  for (auto& phase : flags->word) {
    for (int peer = 0; peer < ranks_; ++peer)
      std::atomic_ref(phase[peer].value).store(1, std::memory_order_release);
  }
}

void CopyEngine::give_up(const std::string& reason) {
  auto* flags = static_cast<Flags*>(own_.mapping.address());
  if (flags->given_up != 0) return;
  std::strncpy(flags->reason, reason.c_str(), sizeof flags->reason - 1);
  std::atomic_ref(flags->given_up).store(1, std::memory_order_release);
}

std::optional<std::string> CopyEngine::gave_up(int index) const {
  auto* flags = static_cast<Flags*>(mappings_[static_cast<size_t>(index)].address());
  if (flags == nullptr || std::atomic_ref(flags->given_up).load(std::memory_order_acquire) == 0)
    return std::nullopt;
  return std::string(flags->reason, ::strnlen(flags->reason, sizeof flags->reason));
}

}  // namespace smddp::intranode
