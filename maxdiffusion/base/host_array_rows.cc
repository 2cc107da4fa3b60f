#include "maxdiffusion/base/host_array_rows.h"

#include <algorithm>
#include <cstring>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

/// [N, A, B] → [N, B, A] of f32, in the shape `dims`.
HostArray swapped(const HostArray& in, Dims dims, int64_t a, int64_t b) {
  HostArray out(Shape{DType::f32, std::move(dims)});
  auto from = in.view<float>();
  auto to = out.mutable_view<float>();
  for (int64_t n = 0; n < in.dims()[0]; ++n)
    for (int64_t i = 0; i < a; ++i)
      for (int64_t k = 0; k < b; ++k)
        to[static_cast<size_t>((n * b + k) * a + i)] = from[static_cast<size_t>((n * a + i) * b + k)];
  return out;
}

int64_t product(const Dims& dims, size_t from, size_t to) {
  int64_t n = 1;
  for (size_t i = from; i < to; ++i) n *= dims[i];
  return n;
}

}  // namespace

HostArray rows(const HostArray& a, int64_t from, int64_t count) {
  Dims dims = a.dims();
  const int64_t n = dims[0];
  dims[0] = count;
  HostArray out(Shape{a.dtype(), dims});
  const size_t row = a.bytes() / static_cast<size_t>(n);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(out.mutable_data() + static_cast<size_t>(i) * row,
                a.data() + static_cast<size_t>(std::min(from + i, n - 1)) * row, row);
  return out;
}

HostArray row_of(const HostArray& a, int64_t i) {
  Dims dims(a.dims().begin() + 1, a.dims().end());
  const size_t row = a.bytes() / static_cast<size_t>(a.dims()[0]);
  return HostArray(Shape{a.dtype(), std::move(dims)}, a.owner(), a.data() + static_cast<size_t>(i) * row);
}

void set_rows(HostArray& whole, int64_t from, const HostArray& part) {
  const int64_t n = std::min(part.dims()[0], whole.dims()[0] - from);
  const size_t row = part.bytes() / static_cast<size_t>(part.dims()[0]);
  std::memcpy(whole.mutable_data() + static_cast<size_t>(from) * row, part.data(), static_cast<size_t>(n) * row);
}

HostArray select_parts(const HostArray& a, const std::vector<int64_t>& which, int64_t parts) {
  if (parts == 1) return a;
  Dims dims = a.dims();
  check(!dims.empty() && dims[0] % parts == 0, Code::internal, "select_parts: {} has no {} equal parts",
        to_string(a.shape()), parts);
  dims[0] = dims[0] / parts * std::ssize(which);
  const Shape shape{a.dtype(), dims};
  const size_t part = a.bytes() / static_cast<size_t>(parts);
  bool in_succession = true;
  for (size_t i = 1; i < which.size(); ++i) in_succession &= which[i] == which[i - 1] + 1;
  if (in_succession) return {shape, a.owner(), a.data() + static_cast<size_t>(which.at(0)) * part};
  HostArray out(shape);
  for (size_t i = 0; i < which.size(); ++i)
    std::memcpy(out.mutable_data() + i * part, a.data() + static_cast<size_t>(which[i]) * part, part);
  return out;
}

void set_parts(HostArray& whole, const std::vector<int64_t>& which, int64_t parts, const HostArray& some) {
  const size_t part = whole.bytes() / static_cast<size_t>(parts);
  check(some.bytes() == part * which.size(), Code::internal, "set_parts: {} is not {} of {} parts of {}",
        to_string(some.shape()), which.size(), parts, to_string(whole.shape()));
  for (size_t i = 0; i < which.size(); ++i)
    std::memcpy(whole.mutable_data() + static_cast<size_t>(which[i]) * part, some.data() + i * part, part);
}

HostArray block(const HostArray& a, int64_t row, int64_t rows, int64_t from, int64_t count) {
  Dims dims = a.dims();
  const int64_t n = dims[0], length = dims[1];
  dims[0] = rows, dims[1] = count;
  HostArray out(Shape{a.dtype(), dims});
  const size_t element = a.bytes() / static_cast<size_t>(n * length);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < count; ++k)
      std::memcpy(
          out.mutable_data() + static_cast<size_t>(i * count + k) * element,
          a.data() + static_cast<size_t>(std::min(row + i, n - 1) * length + std::min(from + k, length - 1)) * element,
          element);
  return out;
}

void set_block(HostArray& whole, int64_t row, int64_t from, const HostArray& part) {
  const int64_t length = whole.dims()[1], count = part.dims()[1];
  const int64_t rows = std::min(part.dims()[0], whole.dims()[0] - row), columns = std::min(count, length - from);
  const size_t element = part.bytes() / static_cast<size_t>(part.dims()[0] * count);
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(whole.mutable_data() + static_cast<size_t>((row + i) * length + from) * element,
                part.data() + static_cast<size_t>(i * count) * element, static_cast<size_t>(columns) * element);
}

HostArray repeat_rows(const HostArray& a, int64_t times) {
  Dims dims = a.dims();
  const int64_t n = dims[0];
  dims[0] = n * times;
  HostArray out(Shape{a.dtype(), dims});
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < times; ++k) set_rows(out, i * times + k, rows(a, i, 1));
  return out;
}

Shape batched(int64_t n, Shape row) {
  row.dims.insert(row.dims.begin(), n);
  return row;
}

HostArray without_batch(const HostArray& a) { return a.reshaped(Dims(a.dims().begin() + 1, a.dims().end())); }

HostArray zeros_like(const HostArray& a) {
  HostArray out(a.shape());
  std::fill_n(out.mutable_data(), out.bytes(), std::byte{0});
  return out;
}

void add_rows(HostArray& whole, int64_t n, int64_t from, const HostArray& part) {
  if (!whole) {
    Dims dims = part.dims();
    dims[0] = n;
    whole = HostArray(Shape{part.dtype(), dims});
  }
  set_rows(whole, from, part);
}

HostArray channels_last(const HostArray& x) {
  Dims dims = x.dims();
  std::rotate(dims.begin() + 1, dims.begin() + 2, dims.end());
  return swapped(x, dims, x.dims()[1], product(x.dims(), 2, x.dims().size()));
}

HostArray channels_first(const HostArray& x) {
  Dims dims = x.dims();
  std::rotate(dims.begin() + 1, dims.end() - 1, dims.end());
  return swapped(x, dims, product(x.dims(), 1, x.dims().size() - 1), x.dims().back());
}

HostArray with_axes(const HostArray& a, const Axes& order) {
  const Dims& from = a.dims();
  if (from.size() < 2) return a;
  HostArray out(Shape{a.shape().dtype, in_order(from, order)});
  if (out.bytes() == 0) return out;
  const size_t size = size_of(a.shape().dtype);
  Dims strides(from.size(), 1);  // of axes of `a`, in elements
  for (size_t i = from.size(); i-- > 1;) strides[i - 1] = strides[i] * from[i];
  strides = in_order(strides, order);
  const Dims& to = out.dims();
  Dims at(to.size(), 0);
  const auto step = static_cast<ptrdiff_t>(size) * strides.back();
  const int64_t row = to.back();
  std::byte* next = out.mutable_data();
  for (int64_t rows = out.shape().elements() / row; rows > 0; --rows) {
    ptrdiff_t start = 0;
    for (size_t i = 0; i + 1 < to.size(); ++i) start += at[i] * strides[i];
    const std::byte* element = a.data() + start * static_cast<ptrdiff_t>(size);
    for (int64_t i = 0; i < row; ++i, element += step, next += size) std::memcpy(next, element, size);
    for (size_t i = to.size() - 1; i-- > 0 && ++at[i] == to[i];) at[i] = 0;
  }
  return out;
}

HostArray transposed(const HostArray& matrix) {
  check(matrix.dims().size() == 2, Code::internal, "transposed: {} is not a matrix", to_string(matrix.shape()));
  return with_axes(matrix, {1, 0});
}

}  // namespace md
