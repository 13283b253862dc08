#include "torch/coalesced_section.h"

#include <algorithm>
#include <utility>

namespace smddp {
namespace {

using c10::intrusive_ptr;
using c10d::Work;

class CoalescedWork final : public Work {
 public:
  explicit CoalescedWork(std::vector<intrusive_ptr<Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const auto& w) { return w->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& w) { return w->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }

 private:
  std::vector<intrusive_ptr<Work>> works_;
};

}  // namespace

void CoalescedSection::open() {
  open_ = true;
  entered_ = nullptr;
  works_.clear();
}

intrusive_ptr<Work> CoalescedSection::note(intrusive_ptr<Work> work) {
  if (open_ && work) works_.push_back(work);
  return work;
}

void CoalescedSection::enter(c10d::Backend& backend) {
  if (!open_ || entered_ != nullptr) return;
  backend.startCoalescing();
  entered_ = &backend;
}

intrusive_ptr<Work> CoalescedSection::close() {
  open_ = false;
  auto works = std::exchange(works_, {});
  c10d::Backend* entered = std::exchange(entered_, nullptr);
  if (auto last = entered != nullptr ? entered->endCoalescing() : intrusive_ptr<Work>()) {
    works.push_back(std::move(last));
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

}  // namespace smddp
