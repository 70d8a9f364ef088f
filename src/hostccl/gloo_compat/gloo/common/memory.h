// Debian's libgloo-dev ships headers that include this one, but not this one. It is searched last, so Gloo's own is
// preferred where it exists. Only the layout matters here (each class is one smart pointer); the behaviour that
// Gloo's code relies on is compiled into libgloo.
#pragma once

#include <memory>
#include <thread>

namespace gloo {

template <class T>
class WeakNonOwningPtr;

// A pointer that keeps its object from being destroyed while it is in use.
template <class T>
class NonOwningPtr final {
 public:
  NonOwningPtr() = default;
  explicit NonOwningPtr(const WeakNonOwningPtr<T>& weak) : pointer_(weak.pointer_.lock()) {}
  T* operator->() const noexcept { return pointer_.get(); }
  explicit operator bool() const noexcept { return pointer_ != nullptr; }

 private:
  std::shared_ptr<T> pointer_;
};

template <class T>
class ShareableNonOwningPtr;

// What a pending operation holds of its buffer: nothing, once the buffer is gone.
template <class T>
class WeakNonOwningPtr final {
 public:
  WeakNonOwningPtr() = default;
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>& root) : pointer_(root.pointer_) {}

 private:
  friend class NonOwningPtr<T>;
  std::weak_ptr<T> pointer_;
};

// Held by the object itself; its destruction waits for users.
template <class T>
class ShareableNonOwningPtr final {
 public:
  explicit ShareableNonOwningPtr(T* object) : pointer_(object, [](T*) {}) {}
  ShareableNonOwningPtr(const ShareableNonOwningPtr&) = delete;
  ShareableNonOwningPtr& operator=(const ShareableNonOwningPtr&) = delete;
  ~ShareableNonOwningPtr() {
    const std::weak_ptr<T> weak = pointer_;
    pointer_.reset();
    while (!weak.expired()) std::this_thread::yield();
  }

 private:
  friend class WeakNonOwningPtr<T>;
  std::shared_ptr<T> pointer_;
};

}  // namespace gloo
