#include "torch/device_collectives.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdlib>

#include "common/clock.h"
#include "common/env.h"
#include "common/log.h"
#include "common/signature.h"
#include "torch/error_state.h"
#include "torch/future_threads.h"
#include "torch/interruptible.h"
#include "torch/operands.h"
#include "torch/runtime.h"
#include "torch/statistics.h"

namespace smddp {
namespace {

using c10d::OpType;
using c10d::Work;

void require_contiguous(const at::Tensor& t, const char* what) {
  require(is_plain(t), [&] {
    return std::string(what) + " on a GPU needs contiguous outputs; call contiguous() and copy_()";
  });
}

thread_local bool uncounted = false;

// As NCCL's watchdog.
void end_process(const Status& why) {
  ErrorState::process().tell(why);
  ErrorState::process().hold(false);
  log(LogLevel::kError, why.message() +
                            ": the process ends, as work on its GPU already counts on the result "
                            "(docs/gpu.md)");
  std::abort();
}

at::Tensor end_to_end(const TorchDevice& device, const at::Tensor& t) {
  return is_plain(t) ? t : device.copy_of(t);
}

}  // namespace

Uncounted::Uncounted() { uncounted = true; }
Uncounted::~Uncounted() { uncounted = false; }

// --- one operation ---------------------------------------------------------------------------------

DeviceTensorOperation::DeviceTensorOperation(TorchDevice& device)
    : device_(device), called_ns_(now_ns()), counted_(!uncounted) {}

void DeviceTensorOperation::drop_tensors() {
  std::vector<at::Tensor> dropped[2];  // destroyed without the lock
  std::lock_guard lock(mutex_);
  results.swap(dropped[0]);
  keep.swap(dropped[1]);
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceTensorOperation::future(
    const std::vector<at::Tensor>& values) {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  auto made = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), device_.future_devices());
  future_ = made;
  for_future_ = values;
  settle_future(std::move(lock));
  return made;
}

// On a device the future is complete once the work is submitted: the future's users wait on their streams.
void DeviceTensorOperation::settle_future(std::unique_lock<std::mutex> lock) {
  bool ready = complete_ && (closed_ || !device_.is_host());
  if (!future_ || future_taken_ || !(ready || (closed_ && !status_))) return;
  future_taken_ = true;  // here, as other threads may call this before the future is complete
  auto future = future_;
  auto values = std::exchange(for_future_, {});
  Status status = closed_ ? status_ : Status();
  lock.unlock();
  FutureThreads::process().run([self = shared_from_this(), future, values, status] {
    try {
      if (!status) return future->setErrorIfNeeded(exception_of(status));
      self->count_on();
      self->device_.complete(*future, values, self->end_event());
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  });
}

void DeviceTensorOperation::on_submitted() {
  std::unique_lock lock(mutex_);
  note_submission();
  complete_ = true;
  settle_future(std::move(lock));
}

// The device may be done, and another thread see it, before on_submitted() is called.
void DeviceTensorOperation::note_submission() {
  if (!std::exchange(noted_, true))
    on_device.start(now_ns(), recorder::FlightRecorder::process().text(way));
}

void DeviceTensorOperation::on_closed(const Status& status) {
  if (!status) ErrorState::process().tell(status);
  if (status && counted_) {
    uint64_t bytes = what.bytes;
    Statistics::process().update(name_of(what.collective), way, [&](StatisticsRow& row) {
      ++row.calls;
      row.bytes += bytes;
      ++row.fragments;
      row.largest_fragment = std::max(row.largest_fragment, bytes);
      row.sent += sent;
      row.seconds += in_seconds(now_ns() - called_ns_);
    });
  }
  std::unique_lock lock(mutex_);
  if (status) note_submission();
  noted_ = true;
  on_device.end_unseen(now_ns(), status.ok());
  closed_ = true;
  status_ = status;
  settle_future(std::move(lock));
}

std::exception_ptr DeviceTensorOperation::exception() {
  std::lock_guard lock(mutex_);
  return closed_ && !status_ ? exception_of(status_) : nullptr;
}

void DeviceTensorOperation::waited(double seconds) const {
  if (!counted_) return;
  Statistics::process().update(name_of(what.collective), way,
                               [&](StatisticsRow& row) { row.wait_seconds += seconds; });
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  uint64_t from = now_ns();
  operation_->on_device.enter_wait(from);
  operation_->note_wait(from);
  device::Stream stream = device_.current();
  bool called = wait_interruptibly(timeout, [&](std::chrono::nanoseconds turn) {
    return group_->await_ranks(*operation_, turn);
  });
  Status s = called ? group_->order(*operation_, stream)
                    : Status{Code::kTimeout,
                             std::string(name_of(operation_->what.collective)) +
                                 " was not called by all ranks within the time given to wait()"};
  if (s) {
    device_.settle(stream);
    // A stream that was released because the group failed has no valid results.
    s = group_->verdict(*operation_);
  }
  if (!s) {
    // The error is known here before on_closed() tells it.
    if (!group_->status()) {
      ErrorState::process().tell(s);
      ErrorState::process().hold();
    }
    throw_status(s);
  }
  operation_->drop_tensors();
  uint64_t until = now_ns();
  operation_->on_device.leave_wait(until);
  operation_->waited(in_seconds(until - from));
  return true;
}

// --- the group ---------------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceCollectives>> DeviceCollectives::create(
    Process& process, Group& group, Store& store, Result<TorchDevice*> device,
    std::chrono::milliseconds timeout) {
  std::unique_ptr<DeviceCollectives> made;
  Status usable = device.status();
  if (usable) {
    made.reset(new DeviceCollectives(*device.value(), group, store));
    auto stream = device.value()->device().create_stream();
    usable = stream.status();
    if (stream) made->stream_ = stream.value();
  }
  auto on_device = DeviceGroup::create(
      process, group, store, usable, usable ? &made->device_.device() : nullptr,
      usable ? &made->device_.imports() : nullptr, usable ? made->stream_ : nullptr,
      static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count()), !settings().reduce_on_cpu,
      env::debug("release_streams") == "1" ? DeviceGroup::EndProcess() : end_process);
  if (!on_device) return on_device.status();
  made->group_ = std::move(on_device.value());
  return made;
}

void (*without_gil)(void (*)(void*), void*) = [](void (*function)(void*), void* argument) {
  function(argument);
};

DeviceCollectives::~DeviceCollectives() {
  if (group_) without_gil([](void* group) { static_cast<DeviceGroup*>(group)->leave(); }, &*group_);
  // The stream is destroyed last. Operations that callers still hold refer to the group, not to the stream.
  device_.device().destroy_stream(stream_);
}

DevicePlace DeviceCollectives::place() const {
  const Settings& now = settings();
  return {group_->topology(), rank_,     now.reduce_on_cpu, group_->by_nic(),
          group_->kernels(),  now.tuning};
}

DeviceCollectives::OperationPtr DeviceCollectives::begin(Collective collective, ReduceOp reduce_op,
                                                         TensorRefs tensors,
                                                         std::chrono::milliseconds timeout) {
  auto op = std::make_shared<DeviceTensorOperation>(device_);
  op->what.collective = collective;
  op->what.segments = static_cast<uint32_t>(tensors.size());
  op->what.digest = digest_of(tensors);
  op->what.dtype = type_of(tensors);
  bool sums = reduce_op != ReduceOp::kNone;
  if (sums) {
    op->what.reduce_op = reduce_op;
    op->plan.how.op = reduce_op;
    op->plan.how.dtype = op->what.dtype;
    op->plan.how.divisor = reduce_op == ReduceOp::kAvg ? static_cast<int>(ranks_) : 1;
    op->plan.how.blocks = settings().max_sms;
    check_one_type(collective, tensors);
  }
  DevicePlace where = place();
  if (sums && where.sums_on_cpu) op->what.options |= kSumsOnCpu;
  op->way = name_of_way(where, sums);
  if (device_way(where, sums) == DeviceWay::kAll) {
    if (Status s = group_->open_for_all(ranks_of_, store_); !s) throw_status(s);
  }
  if (timeout != c10d::kUnsetTimeout && timeout.count() > 0)
    op->limit_ns = static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count());
  return op;
}

c10::intrusive_ptr<Work> DeviceCollectives::gather(TensorRefs outputs, TensorRefs inputs, bool list,
                                                   std::chrono::milliseconds timeout, OpType type,
                                                   bool async) {
  size_t each = list ? ranks_ : 1;
  OperationPtr op = begin(Collective::kAllGather, ReduceOp::kNone, inputs, timeout);
  std::vector<Extent> sources, blocks;
  for (size_t m = 0; m < inputs.size(); ++m) {
    at::Tensor input = end_to_end(device_, *inputs[m]);
    Extent source = extent_of(input);
    for (const at::Tensor* t : outputs.slice(m * each, each)) {
      check_gathered(*t, input, list, ranks_);
      require_contiguous(*t, "all_gather");
      op->results.push_back(*t);
      for (size_t r = 0; r < ranks_ / each; ++r) {
        blocks.push_back(
            {static_cast<std::byte*>(t->mutable_data_ptr()) + r * source.bytes, source.bytes});
      }
    }
    if (overlaps_blocks(source, &blocks[m * ranks_], ranks_, static_cast<size_t>(rank_))) {
      input = device_.copy_of(input);
      source = extent_of(input);
    }
    sources.push_back(source);
    op->what.bytes += source.bytes * ranks_;
    op->keep.push_back(std::move(input));
  }
  plan_gather(*op, place(), sources, blocks);
  return submit(std::move(op), type, async);
}

c10::intrusive_ptr<Work> DeviceCollectives::scatter(TensorRefs outputs, TensorRefs inputs,
                                                    bool list, ReduceOp reduce_op,
                                                    std::chrono::milliseconds timeout, OpType type,
                                                    bool async) {
  size_t each = list ? ranks_ : 1;
  auto mine = static_cast<size_t>(rank_);
  OperationPtr op = begin(Collective::kReduceScatter, reduce_op, outputs, timeout);
  std::vector<Extent> whole, targets;
  std::vector<DevicePart> blocks;
  for (size_t m = 0; m < outputs.size(); ++m) {
    const at::Tensor& output = *outputs[m];
    require_contiguous(output, "reduce_scatter");
    op->results.push_back(output);
    Extent target = extent_of(output);
    for (size_t i = 0; i < each; ++i) {
      const at::Tensor& given = *inputs[m * each + i];
      check_scattered(given, output, list, ranks_);
      at::Tensor input = end_to_end(device_, given);
      // The output may be this rank's block of the input, which no peer reads, and no other part of the input.
      Extent source = extent_of(input);
      Extent own = list ? source : Extent{source.address + mine * target.bytes, target.bytes};
      bool is_own = (!list || i == mine) && own.address == target.address;
      if (!is_own && overlap(target, source)) input = device_.copy_of(input);
      source = extent_of(input);
      for (size_t r = 0; r < ranks_ / each; ++r) {
        size_t offset = r * target.bytes;
        blocks.push_back({whole.size(), offset, target.bytes, source.address + offset});
      }
      whole.push_back(source);
      op->what.bytes += input.nbytes();
      op->keep.push_back(std::move(input));
    }
    targets.push_back(target);
  }
  auto temporary = [&](size_t bytes) {
    op->keep.push_back(device_.empty(bytes));
    return extent_of(op->keep.back()).address;
  };
  plan_scatter(*op, place(), std::move(whole), blocks, targets, temporary);
  return submit(std::move(op), type, async);
}

c10::intrusive_ptr<Work> DeviceCollectives::reduce(TensorRefs tensors, ReduceOp reduce_op,
                                                   std::chrono::milliseconds timeout, OpType type,
                                                   bool async) {
  OperationPtr op = begin(Collective::kAllReduce, reduce_op, tensors, timeout);
  std::vector<Extent> whole;
  for (size_t m = 0; m < tensors.size(); ++m) {
    const at::Tensor& t = *tensors[m];
    // The order of the elements in memory must be the same on all ranks; any such order is right.
    require(t.is_non_overlapping_and_dense() && !t.is_conj() && !t.is_neg(),
            "all_reduce on a GPU needs dense tensors; call contiguous()");
    for (int64_t d = 0; d < t.dim(); ++d)
      op->what.digest = extend_digest(op->what.digest, static_cast<uint64_t>(t.stride(d)));
    op->results.push_back(t);
    whole.push_back({static_cast<std::byte*>(t.mutable_data_ptr()), t.nbytes()});
    op->what.bytes += t.nbytes();
  }
  plan_reduce(*op, place(), whole);
  return submit(std::move(op), type, async);
}

c10::intrusive_ptr<Work> DeviceCollectives::submit(OperationPtr op, OpType type, bool async) {
  op->on_device = recorder_.begin(op->what.collective, op->what.dtype, ++called_, op->what.bytes,
                                  op->made_ns());
  if (Status s = group_->submit(op, device_.current()); !s) {
    op->on_device.end_unseen(now_ns(), false);
    throw_status(s);
  }
  auto work = c10::make_intrusive<DeviceWork>(rank_, type, device_, group_, std::move(op));
  if (!async && !c10d::allow_inflight_collective_as_graph_input()) {
    work->wait(kNoTimeout);
    return nullptr;
  }
  return work;
}

}  // namespace smddp
