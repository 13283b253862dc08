#include "gpu/device_operation.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "gpu/device_group.h"

namespace smddp {
namespace {

using intranode::CopyEngine;
using intranode::MemoryOffer;

constexpr size_t kLeastRoom = 4096;

}  // namespace

DeviceOperation::~DeviceOperation() {
  if (!group_) return;
  for (device::Event event : {ready_, end_}) group_->device().destroy_event(event);
}

void DeviceOperation::on_complete() {
  Operation::on_complete();
  group_->exchanged(*this);
}

Status DeviceOperation::begin(device::Device& device, device::Stream callers) {
  callers_ = callers;
  return device.together([&] {
    for (device::Event* event : {&ready_, &end_}) {
      if (Status s = device.create_event().into(*event); !s) return s;
    }
    return device.record(ready_, callers);
  });
}

void DeviceOperation::make_offer(device::Device& device, DeviceLinks& links) {
  int ranks = links.peers.count();
  std::vector<size_t> sizes;
  for (const Extent& e : offered) sizes.push_back(e.bytes);
  // Rounded up, so that most calls that do not match exchange enough to say where they differ.
  size_t room = std::bit_ceil(std::max(MemoryOffer::encoded_bytes(sizes), kLeastRoom));
  sent_.resize(room);
  received_.resize(room * static_cast<size_t>(ranks));
  (void)device.together([&] {
    MemoryOffer::make(device, what, offered).encode(sent_.data(), room);
    return Status();
  });
  collective = Collective::kAllGather;
  dtype = Dtype::kBytes;
  timeout_ns = limit_ns;
  tensors = what.segments;
  gather(sent_.data(), room, received_.data(), ranks);
}

Result<std::vector<MemoryOffer>> DeviceOperation::offers(const HostPeers& peers) const {
  auto offers = MemoryOffer::decode_all(received_.data(), sent_.size(), peers.count(), peers.own());
  if (!offers) return offers;
  for (int r = 0; r < peers.count(); ++r) {
    const MemoryOffer& offer = offers.value()[static_cast<size_t>(r)];
    if (offer.signature() != what) {
      return Status(Code::kMismatch,
                    disagreement(peers.name(r), offer.signature(), peers.name(peers.own()), what));
    }
    // All ranks see the same refusal: the group stays usable.
    if (!offer.refusal().empty())
      return Status(Code::kInvalid, peers.name(r) + ": " + offer.refusal());
    bool same = offer.extents() == offered.size();
    for (size_t i = 0; same && i < offered.size(); ++i) same = offer.bytes(i) == offered[i].bytes;
    if (!same) return Status(Code::kMismatch, peers.name(r) + " offers other sizes");
  }
  return offers;
}

Status DeviceOperation::launch(device::Device& device, device::Stream main, DeviceLinks& links,
                               PinnedPipeline* pipeline, const DeviceOperation* before) {
  auto all = offers(links.peers);
  if (!all) return all.status();
  return device.together([&]() -> Status {
    auto between = [&](const CopyEngine::Stages& stages) -> Status {
      // It may use the memory of the one before.
      std::vector<device::Event> after{ready_};
      if (before != nullptr) after.push_back(before->end_);
      return pipeline->submit({main, after, stages.sum, stages.move}, exchanges)
          .into(exchange_outcome_);
    };
    // The peers' memory is mapped before anything is submitted: mapping may wait for what the streams hold.
    auto work = links.copy_engine->resolve(plan, all.value(), links.imports);
    if (!work) return work.status();
    Status s;
    if (captured_) {
      main = callers_;
      s = links.copy_engine->record(work.value(), main);
    } else {
      if (s = device.wait(main, ready_); !s) return s;
      s = exchanges.empty()
              ? links.copy_engine->submit(work.value(), number_on_device_)
              : links.copy_engine->submit_around(work.value(), number_on_device_, between);
    }
    // The end of what was submitted, so that it can be released. Streams that wait for the event come after the
    // word of its number.
    Status end = s || captured_ ? Status() : links.copy_engine->mark(number_on_device_);
    if (end) end = device.record(end_, main);
    in_part_ = !s && end;
    if (s) s = std::move(end);
    // kInvalid is for refusals that all ranks share; this one is not.
    if (!s && s.code() == Code::kInvalid) s = {Code::kInternal, s.message()};
    return s;
  });
}

}  // namespace smddp
