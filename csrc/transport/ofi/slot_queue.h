// The free lists and FIFOs of slots.
#pragma once

#include <cstddef>

namespace smddp::fabric {

// Intrusive queue: a slot is in at most one.
template <class T>
class SlotQueue {
 public:
  bool empty() const { return head_ == nullptr; }
  size_t size() const { return size_; }
  void push(T* slot) {
    slot->next = nullptr;
    (head_ == nullptr ? head_ : tail_->next) = slot;
    tail_ = slot;
    ++size_;
  }
  void push_front(T* slot) {
    slot->next = head_;
    if (head_ == nullptr) tail_ = slot;
    head_ = slot;
    ++size_;
  }
  T* pop() {
    T* slot = head_;
    head_ = slot->next;
    --size_;
    return slot;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
  size_t size_ = 0;
};

}  // namespace smddp::fabric
