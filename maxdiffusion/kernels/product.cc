// Matrix products on the CPU through oneDNN; rows are divided among the plugin's threads. XLA's own code widens whole
// bf16 arrays to f32, multiplies these, and rounds the result in a separate pass.
#include <algorithm>
#include <atomic>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/bf16_product.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/onednn.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/rows.h"

namespace md {
namespace {

/// Largest number of rows of y that a thread widens at once.
constexpr int64_t kRows = 1024;

/// Number of columns of k weights that a thread widens at once, for products of few rows.
int64_t columns_at_once(int64_t k) {
  constexpr int64_t kFloats = 1 << 19;  // 2 MiB
  return std::clamp<int64_t>(kFloats / k / 16 * 16, 64, 512);
}

/// One product: sizes, and which axis of each operand is dense.
struct Problem {
  int64_t m, n, k;
  int64_t a_m, a_k, c_k, c_n;  // strides
  bool bf16_result = false, bias = false;
};

/// An array, f32 or bf16.
struct Operand {
  const void* data;
  bool bf16;
  const float* floats() const { return static_cast<const float*>(data); }
  const uint16_t* halves() const { return static_cast<const uint16_t*>(data); }
};

/// A matrix in memory: `lines` lines of `length` adjacent elements, with `stride` between lines; and whether lines run
/// along the second axis of the matrix in the product.
struct Lines {
  int64_t lines, length, stride;
  bool transposed;
};
Lines lines_of(int64_t first, int64_t second, int64_t first_stride, int64_t second_stride) {
  // The stride of an axis with one element is arbitrary.
  if (second_stride == 1 || second == 1) return {first, second, first == 1 ? second : first_stride, false};
  return {second, first, second_stride, true};
}

/// Stride of widened lines of this length: lines at multiples of some KiB map to the same cache sets, and with AVX2
/// oneDNN reads smaller operands in place.
int64_t spread(int64_t length) { return length % 512 == 0 ? length + 32 : length; }

/// sums [m, n] = a · c + bias, all f32; `stride` between the rows of the sums.
bool multiply_f32(const Problem& p, const float* a, const Lines& a_lines, const float* c, const Lines& c_lines,
                  const float* bias, float* sums, int64_t stride) {
  use_one_thread();
  for (int64_t i = 0; bias && i < p.m; ++i) std::copy_n(bias, p.n, sums + i * stride);
  return dnnl_sgemm(a_lines.transposed ? 'T' : 'N', c_lines.transposed ? 'T' : 'N', p.m, p.n, p.k, 1, a, a_lines.stride,
                    c, c_lines.stride, bias ? 1 : 0, sums, stride) == dnnl_success;
}

struct Batch {
  Problem problem;
  int64_t count, a, c;  // number, and strides between consecutive products
};

/// Rows [first, last) of one product of the batch.
struct Part {
  int64_t which, first, last;
};
std::vector<Part> split(const Batch& b, int64_t threads, int64_t most) {
  const int64_t m = b.problem.m;
  int64_t chunks = std::max((m + most - 1) / most, (threads + b.count - 1) / b.count);
  if (b.count < threads) chunks = (chunks + threads - 1) / threads * threads;
  chunks = std::clamp<int64_t>(chunks, 1, (m + 15) / 16);
  std::vector<Part> parts;
  for (int64_t i = 0; i < b.count; ++i)
    for (int64_t j = 0; j < chunks; ++j) parts.push_back({i, m * j / chunks, m * (j + 1) / chunks});
  return parts;
}

/// Copies `count` matrices with these lines, `step` apart, to consecutive matrices whose lines are `to_stride` apart.
template <class From, class To, class Convert>
void convert_all(ffi::ThreadPool& pool, const From* from, int64_t count, int64_t step, const Lines& lines, To* to,
                 int64_t to_stride, const Convert& convert) {
  const int64_t most = std::max<int64_t>((1 << 16) / lines.length, 1), chunks = (lines.lines + most - 1) / most;
  parallel_for(pool, count * chunks, [&](int64_t i) {
    const int64_t which = i / chunks, first = i % chunks * most, n = std::min(most, lines.lines - first);
    convert(from + which * step + first * lines.stride, n, lines.length, lines.stride,
            to + (which * lines.lines + first) * to_stride, to_stride);
  });
}

/// Each thread copies its rows of `a` unless that is dense bf16; all threads read the same `c`.
bool run_bf16(ffi::ThreadPool& pool, const Batch& b, const Operand& a, const Operand& c, const float* bias, char* y) {
  const Problem& p = b.problem;
  const Lines c_lines = lines_of(p.k, p.n, p.c_k, p.c_n);
  int64_t c_step = b.c;
  const uint16_t* narrow_c = c.halves();
  Scratch of_c;
  if (!c.bf16 || c_lines.stride != c_lines.length) {
    auto* to = reinterpret_cast<uint16_t*>(of_c.floats((b.count * p.k * p.n + 1) / 2));
    if (c.bf16)
      convert_all(pool, c.halves(), b.count, b.c, c_lines, to, c_lines.length, copy_rows<uint16_t>);
    else
      convert_all(pool, c.floats(), b.count, b.c, c_lines, to, c_lines.length, narrow);
    narrow_c = to;
    c_step = p.k * p.n;
  }
  const std::vector<Part> parts = split(b, std::max<int64_t>(pool.num_threads(), 1), p.m);
  const int64_t size = p.bf16_result ? 2 : 4;
  std::atomic<bool> good = true;
  parallel_for(pool, std::ssize(parts), [&](int64_t i) {
    Scratch of_a;
    const Part& part = parts[static_cast<size_t>(i)];
    const int64_t m = part.last - part.first, from = part.which * b.a + part.first * p.a_m;
    const Lines lines = lines_of(m, p.k, p.a_m, p.a_k);
    const uint16_t* rows_of_a = a.bf16 ? a.halves() + from : nullptr;
    if (!a.bf16 || lines.stride != lines.length) {
      auto* dense = reinterpret_cast<uint16_t*>(of_a.floats((m * p.k + 1) / 2));
      if (a.bf16)
        copy_rows(rows_of_a, lines.lines, lines.length, lines.stride, dense, lines.length);
      else
        narrow(a.floats() + from, lines.lines, lines.length, lines.stride, dense, lines.length);
      rows_of_a = dense;
    }
    if (!multiply({.m = m,
                   .n = p.n,
                   .k = p.k,
                   .a_transposed = lines.transposed,
                   .b_transposed = c_lines.transposed,
                   .bf16_result = p.bf16_result,
                   .bias = p.bias},
                  rows_of_a, narrow_c + part.which * c_step, bias, y + (part.which * p.m + part.first) * p.n * size))
      good = false;
  });
  return good;
}

/// A product of few rows with bf16 weights: each thread widens some columns of them, which stay in its cache. All
/// threads read the same `a`, widened once.
bool run_few_rows(ffi::ThreadPool& pool, const Problem& p, const Operand& a, const Operand& c, const float* bias,
                  char* y) {
  Lines a_lines = lines_of(p.m, p.k, p.a_m, p.a_k);
  const Lines c_lines = lines_of(p.k, p.n, p.c_k, p.c_n);
  const float* wide_a = a.floats();
  Scratch of_a;
  if (a.bf16) {
    const int64_t stride = spread(a_lines.length);
    float* to = of_a.floats(a_lines.lines * stride);
    convert_all(pool, a.halves(), 1, 0, a_lines, to, stride, widen);
    wide_a = to;
    a_lines.stride = stride;
  }
  const int64_t columns = columns_at_once(p.k), chunks = (p.n + columns - 1) / columns;
  std::atomic<bool> good = true;
  parallel_for(pool, chunks, [&](int64_t i) {
    thread_local Scratch of_c, of_y;
    Problem part = p;
    const int64_t first = i * columns;
    part.n = std::min(columns, p.n - first);
    Lines some = c_lines;
    (some.transposed ? some.lines : some.length) = part.n;
    const int64_t stride = spread(some.length);
    float* wide_c = of_c.floats(some.lines * stride);
    widen(c.halves() + first * (some.transposed ? some.stride : 1), some.lines, some.length, some.stride, wide_c,
          stride);
    some.stride = stride;
    float* sums = p.bf16_result ? of_y.floats(p.m * part.n) : reinterpret_cast<float*>(y) + first;
    if (!multiply_f32(part, wide_a, a_lines, wide_c, some, bias ? bias + first : nullptr, sums,
                      p.bf16_result ? part.n : p.n))
      good = false;
    if (p.bf16_result) narrow(sums, p.m, part.n, part.n, reinterpret_cast<uint16_t*>(y) + first, p.n);
  });
  return good;
}

bool run_f32(ffi::ThreadPool& pool, const Batch& b, const Operand& a, const Operand& c, const float* bias, char* y) {
  const Problem& p = b.problem;
  if (c.bf16 && b.count == 1 && p.m <= kRows && p.n >= 2 * columns_at_once(p.k))
    return run_few_rows(pool, p, a, c, bias, y);
  Lines c_lines = lines_of(p.k, p.n, p.c_k, p.c_n);
  int64_t c_step = b.c;
  const float* wide_c = c.floats();
  Scratch of_c;
  if (c.bf16) {
    const int64_t stride = spread(c_lines.length);
    c_step = c_lines.lines * stride;
    float* to = of_c.floats(b.count * c_step);
    convert_all(pool, c.halves(), b.count, b.c, c_lines, to, stride, widen);
    wide_c = to;
    c_lines.stride = stride;
  }
  const std::vector<Part> parts = split(b, std::max<int64_t>(pool.num_threads(), 1), kRows);
  std::atomic<bool> good = true;
  parallel_for(pool, std::ssize(parts), [&](int64_t i) {
    Scratch of_a, of_y;
    const Part& part = parts[static_cast<size_t>(i)];
    Problem rows_problem = p;
    rows_problem.m = part.last - part.first;
    Lines a_lines = lines_of(rows_problem.m, p.k, p.a_m, p.a_k);
    const int64_t from = part.which * b.a + part.first * p.a_m, at = (part.which * p.m + part.first) * p.n;
    float* sums = p.bf16_result ? of_y.floats(rows_problem.m * p.n) : reinterpret_cast<float*>(y) + at;
    const float* rows_of_a = a.floats() + from;
    if (a.bf16) {
      const int64_t stride = spread(a_lines.length);
      float* wide_a = of_a.floats(a_lines.lines * stride);
      widen(a.halves() + from, a_lines.lines, a_lines.length, a_lines.stride, wide_a, stride);
      rows_of_a = wide_a;
      a_lines.stride = stride;
    }
    if (!multiply_f32(rows_problem, rows_of_a, a_lines, wide_c + part.which * c_step, c_lines, bias, sums, p.n))
      good = false;
    if (p.bf16_result) narrow(sums, rows_problem.m, p.n, p.n, reinterpret_cast<uint16_t*>(y) + at, p.n);
  });
  return good;
}

ffi::Error product_kernel(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer c, ffi::RemainingArgs optional_inputs,
                          ffi::Result<ffi::AnyBuffer> y, ffi::Span<const int64_t> sizes,
                          ffi::Span<const int64_t> strides, bool in_bf16) {
  Span span("product");
  auto known = [](ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; };
  if (sizes.size() != 4 || strides.size() != 6 || !known(a.element_type()) || !known(c.element_type()) ||
      !known(y->element_type()) || optional_inputs.size() > 1)
    return ffi::Error::InvalidArgument("md_product: the arrays are not of f32 or bf16");
  const Operand left{a.untyped_data(), a.element_type() == ffi::BF16},
      right{c.untyped_data(), c.element_type() == ffi::BF16};
  const Batch b{{sizes[1], sizes[2], sizes[3], strides[1], strides[2], strides[4], strides[5],
                 y->element_type() == ffi::BF16, optional_inputs.size() == 1},
                sizes[0],
                strides[0],
                strides[3]};
  const Problem& p = b.problem;
  auto fits = [&](const ffi::AnyBuffer& x, int64_t elements) {
    return static_cast<int64_t>(x.element_count()) == elements;
  };
  if (!fits(a, b.count * p.m * p.k) || !fits(c, b.count * p.k * p.n) || !fits(*y, b.count * p.m * p.n))
    return ffi::Error::InvalidArgument("md_product: the arrays are not of these sizes");
  const float* bias = nullptr;
  if (p.bias) {
    const auto bias_input = optional_inputs.get<ffi::Buffer<ffi::F32>>(0);
    if (bias_input.has_error()) return bias_input.error();
    if (static_cast<int64_t>(bias_input->element_count()) != p.n)
      return ffi::Error::InvalidArgument("md_product: the bias is not of n elements");
    bias = bias_input->typed_data();
  }
  auto* to = static_cast<char*>(y->untyped_data());
  const bool good = in_bf16 ? run_bf16(pool, b, left, right, bias, to) : run_f32(pool, b, left, right, bias, to);
  return good ? ffi::Error::Success() : ffi::Error::Internal("md_product: oneDNN failed");
}

XLA_FFI_DEFINE_HANDLER(kProduct, product_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("sizes")
                           .Attr<ffi::Span<const int64_t>>("strides")
                           .Attr<bool>("in_bf16"));

}  // namespace

void* product_handler() { return reinterpret_cast<void*>(kProduct); }

}  // namespace md
