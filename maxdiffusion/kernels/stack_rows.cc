// Reads and writes one row of a stack on the CPU.

#include <algorithm>
#include <cstring>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"

namespace md {
namespace {

using Index = ffi::BufferR0<ffi::S32>;

/// Offset in bytes of a row of the stack; −1 if `row` is none.
int64_t offset_of(ffi::AnyBuffer stack, ffi::AnyBuffer row, Index index) {
  const auto dims = stack.dimensions();
  if (dims.size() == 0 || dims[0] < 1 || stack.element_type() != row.element_type() ||
      stack.size_bytes() != row.size_bytes() * static_cast<size_t>(dims[0]))
    return -1;
  return std::clamp<int64_t>(*index.typed_data(), 0, dims[0] - 1) * static_cast<int64_t>(row.size_bytes());
}

void copy(ffi::ThreadPool& pool, const void* from, void* to, size_t bytes) {
  constexpr size_t kMost = size_t{1} << 19;
  parallel_for(pool, static_cast<int64_t>((bytes + kMost - 1) / kMost), [&](int64_t i) {
    const size_t at = static_cast<size_t>(i) * kMost;
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, std::min(kMost, bytes - at));
  });
}

ffi::Error read_row(ffi::ThreadPool pool, ffi::AnyBuffer stack, Index index, ffi::Result<ffi::AnyBuffer> row) {
  Span span("read row");
  const int64_t offset = offset_of(stack, *row, index);
  if (offset < 0) return ffi::Error::InvalidArgument("md_read_row: the result is no row of the stack");
  copy(pool, static_cast<const char*>(stack.untyped_data()) + offset, row->untyped_data(), row->size_bytes());
  return ffi::Error::Success();
}

ffi::Error write_row(ffi::ThreadPool pool, ffi::AnyBuffer stack, ffi::AnyBuffer row, Index index,
                     ffi::Result<ffi::AnyBuffer> out) {
  Span span("write row");
  const int64_t offset = offset_of(*out, row, index);
  if (offset < 0) return ffi::Error::InvalidArgument("md_write_row: the operand is no row of the stack");
  if (out->untyped_data() != stack.untyped_data())
    return ffi::Error::InvalidArgument("md_write_row: the result is not in the stack's place");
  copy(pool, row.untyped_data(), static_cast<char*>(out->untyped_data()) + offset, row.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kReadRow, read_row,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<Index>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kWriteRow, write_row,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Index>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

void* read_row_handler() { return reinterpret_cast<void*>(kReadRow); }
void* write_row_handler() { return reinterpret_cast<void*>(kWriteRow); }

}  // namespace md
