// HostArray: a dense row-major array in host memory; used between readers, initialisers, files and devices. Copies
// share the bytes; writers make a fresh one. Thread safe for reading.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "maxdiffusion/base/shape.h"

namespace md {

class HostArray {
 public:
  HostArray() = default;
  /// Allocated, 64-byte aligned, contents undefined.
  explicit HostArray(Shape shape);
  /// Borrows `data` and keeps `owner` alive (a memory-mapped file, say). `data` must hold shape.bytes().
  HostArray(Shape shape, std::shared_ptr<const void> owner, const void* data);

  template <class T>
  static HostArray of(Shape shape, std::span<const T> values);  // T must have the element's size

  explicit operator bool() const { return data_ != nullptr; }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return shape_.dtype; }
  const Dims& dims() const { return shape_.dims; }
  size_t bytes() const { return static_cast<size_t>(shape_.bytes()); }
  const std::byte* data() const { return data_; }
  /// Throws internal if the bytes are borrowed.
  std::byte* mutable_data();
  /// Whether this object is the only owner of bytes that a HostArray allocated (not borrowed).
  bool sole() const { return owned_ && owner_.use_count() == 1; }
  /// Keeps the bytes alive; for asynchronous transfers.
  const std::shared_ptr<const void>& owner() const { return owner_; }

  /// Typed view; throws internal when sizeof(T) differs from the element's size.
  template <class T>
  std::span<const T> view() const {
    require_size(sizeof(T));
    return {reinterpret_cast<const T*>(data_), static_cast<size_t>(shape_.elements())};
  }
  template <class T>
  std::span<T> mutable_view() {
    require_size(sizeof(T));
    return {reinterpret_cast<T*>(mutable_data()), static_cast<size_t>(shape_.elements())};
  }
  /// Same bytes, other sizes; element counts must agree.
  HostArray reshaped(Dims dims) const;
  /// Every element as double, row-major (pred as 0/1).
  std::vector<double> to_doubles() const;
  /// Rounded to nearest even on narrowing floats.
  HostArray cast(DType to) const;

 private:
  void require_size(size_t element) const;
  Shape shape_;
  std::shared_ptr<const void> owner_;
  const std::byte* data_ = nullptr;
  bool owned_ = false;
};

template <class T>
HostArray HostArray::of(Shape shape, std::span<const T> values) {
  HostArray a(std::move(shape));
  auto out = a.mutable_view<T>();
  if (out.size() != values.size()) a.require_size(0);
  std::copy(values.begin(), values.end(), out.begin());
  return a;
}

/// A deep copy.
HostArray copy_of(const HostArray& a);
/// An s32 array without axes.
HostArray scalar_s32(int64_t value);

/// Arrays by name.
using HostArrays = std::map<std::string, HostArray>;

}  // namespace md
