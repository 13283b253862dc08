// A vector whose first elements need no allocation: most lists here are short. Used on the data
// path.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace smddp {

// Up to N elements are inside the object. Elements are copied bytewise, and move to the heap once
// there are more.
template <class T, size_t N>
class SmallVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  SmallVector() = default;
  SmallVector(const SmallVector& other) { *this = other; }
  SmallVector(SmallVector&& other) noexcept { *this = std::move(other); }
  SmallVector& operator=(const SmallVector& other) {
    if (this == &other) return *this;
    reserve(other.size_);
    size_ = other.size_;
    std::copy(other.begin(), other.end(), begin());
    return *this;
  }
  SmallVector& operator=(SmallVector&& other) noexcept {
    if (this == &other) return *this;
    if (other.heap_ == nullptr) return *this = std::as_const(other);  // fits what is here
    delete[] heap_;
    heap_ = std::exchange(other.heap_, nullptr);
    room_ = std::exchange(other.room_, N);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  ~SmallVector() { delete[] heap_; }

  // `element` may be an element of this vector.
  void push_back(const T& element) {
    T copy = element;
    if (size_ == room_) reserve(2 * room_);
    data()[size_++] = copy;
  }
  void assign(size_t count, const T& element) {
    T copy = element;
    reserve(count);
    size_ = count;
    std::fill(begin(), end(), copy);
  }
  void reserve(size_t room) {
    if (room <= room_) return;
    T* larger = new T[room];
    std::copy(begin(), end(), larger);
    delete[] heap_;
    heap_ = larger;
    room_ = room;
  }
  void clear() { size_ = 0; }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return heap_ != nullptr ? heap_ : inside_; }
  const T* data() const { return heap_ != nullptr ? heap_ : inside_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  T& front() { return data()[0]; }
  const T& front() const { return data()[0]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }

 private:
  T* heap_ = nullptr;
  size_t size_ = 0;
  size_t room_ = N;
  T inside_[N];
};

}  // namespace smddp
