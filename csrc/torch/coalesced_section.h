// What torch calls coalescing: operations between startCoalescing() and endCoalescing() end together.
// Used by ProcessGroupSMDDP alone; knows Works, not what they carry out.
//
// torch opens a section only to batch point-to-point operations on GPUs. There, operations outside a
// section can deadlock, so NCCL must be told where the section begins and ends: from the first operation
// on that goes to it. A section without such an operation is none of NCCL's.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace smddp {

class CoalescedSection {
 public:
  void open();
  bool is_open() const { return open_; }
  // Notes the work if the section is open; hands it on.
  c10::intrusive_ptr<c10d::Work> note(c10::intrusive_ptr<c10d::Work> work);
  // Opens a section of `backend`, which carries out the next operation, unless that has been done.
  void enter(c10d::Backend& backend);
  // Closes the section. The Work that it returns is done when all works of the section are done.
  c10::intrusive_ptr<c10d::Work> close();

 private:
  bool open_ = false;
  c10d::Backend* entered_ = nullptr;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace smddp
