// What torch calls coalescing: operations between startCoalescing() and endCoalescing() end together.
// Used by ProcessGroupSMDDP alone; knows Works, not what they carry out.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace smddp {

class CoalescedSection {
 public:
  void open();
  // Notes the work if the section is open; hands it on.
  c10::intrusive_ptr<c10d::Work> note(c10::intrusive_ptr<c10d::Work> work);
  // Closes the section. The Work that it returns is done when all works of the section and `last`, if
  // there is one, are done.
  c10::intrusive_ptr<c10d::Work> close(c10::intrusive_ptr<c10d::Work> last);

 private:
  bool open_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace smddp
