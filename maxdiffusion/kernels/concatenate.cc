// Concatenation along an axis on the CPU. XLA does not concatenate bf16: it widens and rounds the copied values.

#include <algorithm>
#include <cstring>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"

namespace md {
namespace {

ffi::Error concatenate_kernel(ffi::ThreadPool pool, ffi::RemainingArgs xs, ffi::Result<ffi::AnyBuffer> y,
                              int64_t axis) {
  Span span("concatenate");
  const auto dims = y->dimensions();
  if (axis < 0 || axis >= static_cast<int64_t>(dims.size()))
    return ffi::Error::InvalidArgument("md_concatenate: the result has no such axis");
  // y consists of rows, each the concatenation of a row of every operand.
  int64_t rows = 1;
  for (int64_t i = 0; i < axis; ++i) rows *= dims[static_cast<size_t>(i)];
  struct Source {
    const char* data;
    size_t row;  // size of a row in bytes
  };
  std::vector<Source> sources;
  size_t row = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    const auto x = xs.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (x->element_type() != y->element_type())
      return ffi::Error::InvalidArgument("md_concatenate: operands and result are of different types");
    sources.push_back(
        {static_cast<const char*>(x->untyped_data()), rows > 0 ? x->size_bytes() / static_cast<size_t>(rows) : 0});
    row += sources.back().row;
  }
  if (row * static_cast<size_t>(rows) != y->size_bytes())
    return ffi::Error::InvalidArgument("md_concatenate: operands do not fill the result");
  auto* to = static_cast<char*>(y->untyped_data());
  const int64_t most = std::max<int64_t>((int64_t{1} << 18) / std::max<int64_t>(static_cast<int64_t>(row), 1), 1);
  parallel_for(pool, (rows + most - 1) / most, [&](int64_t i) {
    for (auto r = static_cast<size_t>(i * most), end = static_cast<size_t>(std::min(rows, (i + 1) * most)); r < end;
         ++r) {
      char* at = to + r * row;
      for (const Source& x : sources) {
        std::memcpy(at, x.data + r * x.row, x.row);
        at += x.row;
      }
    }
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kConcatenate, concatenate_kernel,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<int64_t>("axis"));

}  // namespace

void* concatenate_handler() { return reinterpret_cast<void*>(kConcatenate); }

}  // namespace md
