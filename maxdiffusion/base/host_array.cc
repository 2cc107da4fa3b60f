#include "maxdiffusion/base/host_array.h"

#include <cstdlib>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/half.h"

namespace md {

HostArray::HostArray(Shape shape) : shape_(std::move(shape)), owned_(true) {
  size_t size = std::max<size_t>(bytes(), 1);
  void* p = std::aligned_alloc(64, (size + 63) / 64 * 64);
  check(p != nullptr, Code::out_of_memory, "array {}: no memory for {} bytes on the host", to_string(shape_), size);
  owner_ = std::shared_ptr<const void>(p, [](const void* q) { std::free(const_cast<void*>(q)); });
  data_ = static_cast<const std::byte*>(p);
}

HostArray::HostArray(Shape shape, std::shared_ptr<const void> owner, const void* data)
    : shape_(std::move(shape)), owner_(std::move(owner)), data_(static_cast<const std::byte*>(data)) {}

std::byte* HostArray::mutable_data() {
  check(owned_, Code::internal, "array {}: borrowed bytes are read only", to_string(shape_));
  return const_cast<std::byte*>(data_);
}

void HostArray::require_size(size_t element) const {
  check(element == size_of(shape_.dtype), Code::internal, "array {}: viewed with elements of {} bytes",
        to_string(shape_), element);
}

HostArray HostArray::reshaped(Dims dims) const {
  HostArray a = *this;
  a.shape_.dims = std::move(dims);
  check(a.shape_.elements() == shape_.elements(), Code::internal, "array {}: cannot be reshaped to {}",
        to_string(shape_), to_string(a.shape_));
  return a;
}

std::vector<double> HostArray::to_doubles() const {
  std::vector<double> out(static_cast<size_t>(shape_.elements()));
  const size_t step = size_of(shape_.dtype);
  for (size_t i = 0; i < out.size(); ++i) out[i] = load_element(shape_.dtype, data_ + i * step);
  return out;
}

HostArray HostArray::cast(DType to) const {
  if (to == dtype()) return *this;
  HostArray a(Shape{to, shape_.dims});
  convert_elements(dtype(), data_, to, a.mutable_data(), static_cast<size_t>(shape_.elements()));
  return a;
}

HostArray copy_of(const HostArray& a) {
  HostArray out(a.shape());
  if (a.bytes() > 0) std::memcpy(out.mutable_data(), a.data(), a.bytes());
  return out;
}

HostArray scalar_s32(int64_t value) {
  const auto v = static_cast<int32_t>(value);
  return HostArray::of<int32_t>({DType::s32, {}}, {&v, 1});
}

}  // namespace md
