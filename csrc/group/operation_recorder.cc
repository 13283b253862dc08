#include "group/operation_recorder.h"

#include "common/clock.h"

namespace smddp {

OperationRecorder::OperationRecorder(const std::string& group_name)
    : recorder_(recorder::FlightRecorder::process()), group_(recorder_.text(group_name)) {
  for (size_t i = 0; i < kCollectives; ++i)
    collectives_[i] = recorder_.text(name_of(static_cast<Collective>(i)));
  for (size_t i = 1; i < kDtypes; ++i)  // kBytes says nothing
    dtypes_[i] = recorder_.text(name_of(static_cast<Dtype>(i)));
}

void OperationRecorder::begin(Operation& op) {
  called_ = &op;
  op.record = begin(op.collective, op.dtype, op.number(), op.signature().bytes, op.called_ns);
}

recorder::Mark OperationRecorder::begin(Collective collective, Dtype dtype, uint64_t number,
                                        uint64_t bytes, uint64_t called_ns) const {
  return recorder_.begin({group_, collectives_[static_cast<size_t>(collective)],
                          dtypes_[static_cast<size_t>(dtype)], number, bytes, called_ns});
}

void OperationRecorder::start(const Operation& op) {
  if (op.path != path_) {
    path_ = op.path;
    path_text_ = recorder_.text(path_);
  }
  // No clock is read for what starts at once.
  op.record.start(&op == called_ ? op.called_ns : now_ns(), path_text_);
}

}  // namespace smddp
