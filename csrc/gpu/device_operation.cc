#include "gpu/device_operation.h"

#include <utility>

#include "gpu/device_group.h"

namespace smddp {

DeviceOperation::~DeviceOperation() {
  if (!group_) return;
  for (device::Event event : {ready_, end_}) group_->device().destroy_event(event);
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

Status DeviceOperation::launch(device::Device& device, device::Stream main, DeviceLinks& links,
                               PinnedPipeline* pipeline, const DeviceOperation* before) {
  auto all = offers_.offers(links.peers);
  if (!all) return all.status();
  return device.together([&]() -> Status {
    auto between = [&](const intranode::CopyEngine::Stages& stages) -> Status {
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
