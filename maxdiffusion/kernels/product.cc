// Products of matrices on the CPU through oneDNN, rows shared out among the plugin's threads. XLA's own code widens
// arrays of bf16 to f32 as a whole, multiplies those, and rounds the result in a pass of its own.
#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/onednn.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

using dnnl::memory;

/// Rows of y at most that a thread widens at once.
constexpr int64_t kRows = 1024;

/// One product: sizes, and which axis of each operand is dense. Everything that compiled code depends on.
struct Problem {
  int64_t m, n, k;
  int64_t a_m, a_k, c_k, c_n;  // strides
  bool bf16_result = false, bias = false;
  auto operator<=>(const Problem&) const = default;
};

struct Code {
  dnnl::matmul run;
  memory::desc a, c, bias, y, scratch;
};

/// Of bf16.
Code compile(const Problem& p) {
  constexpr auto kBf16 = memory::data_type::bf16;
  const memory::desc a({p.m, p.k}, kBf16, memory::dims{p.a_m, p.a_k}), c({p.k, p.n}, kBf16, memory::dims{p.c_k, p.c_n}),
      y({p.m, p.n}, p.bf16_result ? kBf16 : memory::data_type::f32, memory::dims{p.n, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const memory::desc bias({1, p.n}, memory::data_type::f32, memory::dims{p.n, 1});
  const dnnl::matmul::primitive_desc d(p.bias ? dnnl::matmul::desc(a, c, bias, y) : dnnl::matmul::desc(a, c, y),
                                       attributes, onednn_engine());
  return {dnnl::matmul(d), a, c, bias, y, d.scratchpad_desc()};
}

void multiply(const Code& code, const uint16_t* a, const uint16_t* c, const float* bias, void* y) {
  use_one_thread();
  thread_local Scratch work;
  dnnl::stream stream(onednn_engine());
  auto at = [](const memory::desc& d, const void* data) { return memory(d, onednn_engine(), const_cast<void*>(data)); };
  std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SRC, at(code.a, a)},
      {DNNL_ARG_WEIGHTS, at(code.c, c)},
      {DNNL_ARG_DST, at(code.y, y)},
      {DNNL_ARG_SCRATCHPAD, at(code.scratch, work.floats(floats_in(code.scratch)))}};
  if (bias) arguments.emplace(DNNL_ARG_BIAS, at(code.bias, bias));
  code.run.execute(stream, arguments);
  stream.wait();
}

MD_VECTORIZED void widen(const uint16_t* from, int64_t rows, int64_t cols, int64_t stride, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += cols)
    for (int64_t i = 0; i < cols; ++i) to[i] = load(from[i]);
}
MD_VECTORIZED void narrow(const float* from, int64_t rows, int64_t cols, int64_t stride, uint16_t* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += cols)
    for (int64_t i = 0; i < cols; ++i) to[i] = float_to_bf16(from[i]);
}

/// An array, f32 or bf16.
struct Operand {
  const void* data;
  bool bf16;
  const float* floats() const { return static_cast<const float*>(data); }
  const uint16_t* halves() const { return static_cast<const uint16_t*>(data); }
};

/// A matrix in memory: `lines` lines of `length` elements side by side, `stride` from one line to the next; whether
/// lines are the second of the axes that the product gives it.
struct Lines {
  int64_t lines, length, stride;
  bool transposed;
};
Lines lines_of(int64_t first, int64_t second, int64_t first_stride, int64_t second_stride) {
  // With one element along an axis, that axis' stride says nothing.
  if (second_stride == 1 || second == 1) return {first, second, first == 1 ? second : first_stride, false};
  return {second, first, second_stride, true};
}

/// sums [m, n] = a · c + bias, all f32.
bool multiply(const Problem& p, const float* a, const Lines& a_lines, const float* c, const Lines& c_lines,
              const float* bias, float* sums) {
  use_one_thread();
  for (int64_t i = 0; bias && i < p.m; ++i) std::copy_n(bias, p.n, sums + i * p.n);
  return dnnl_sgemm(a_lines.transposed ? 'T' : 'N', c_lines.transposed ? 'T' : 'N', p.m, p.n, p.k, 1, a, a_lines.stride,
                    c, c_lines.stride, bias ? 1 : 0, sums, p.n) == dnnl_success;
}

struct Batch {
  Problem problem;
  int64_t count, a, c;  // how many, and strides from one to the next
};

/// Rows [first, last) of one product of the batch.
struct Part {
  int64_t which, first, last;
};
std::vector<Part> split(const Batch& b, int64_t threads, int64_t most) {
  const int64_t m = b.problem.m;
  int64_t pieces = std::max((m + most - 1) / most, (threads + b.count - 1) / b.count);
  if (b.count < threads) pieces = (pieces + threads - 1) / threads * threads;
  pieces = std::clamp<int64_t>(pieces, 1, (m + 15) / 16);
  std::vector<Part> parts;
  for (int64_t i = 0; i < b.count; ++i)
    for (int64_t j = 0; j < pieces; ++j) parts.push_back({i, m * j / pieces, m * (j + 1) / pieces});
  return parts;
}

/// Of each of the `count` matrices with these lines, `step` apart, a dense one: convert(first line's, rows, to).
template <class From, class To, class Convert>
void convert_all(ffi::ThreadPool& pool, const From* from, int64_t count, int64_t step, const Lines& lines, To* to,
                 const Convert& convert) {
  const int64_t most = std::max<int64_t>((1 << 16) / lines.length, 1), pieces = (lines.lines + most - 1) / most;
  parallel_for(pool, count * pieces, [&](int64_t i) {
    const int64_t which = i / pieces, first = i % pieces * most, n = std::min(most, lines.lines - first);
    convert(from + which * step + first * lines.stride, n, lines.length, lines.stride,
            to + (which * lines.lines + first) * lines.length);
  });
}

/// The operand in bf16, dense where it was f32: then `step` and the strides of its axes become those of the copy.
const uint16_t* narrowed(ffi::ThreadPool& pool, const Operand& x, const Lines& lines, int64_t count, Scratch& scratch,
                         int64_t& step, int64_t& first_stride, int64_t& second_stride) {
  if (x.bf16) return x.halves();
  const int64_t size = lines.lines * lines.length;
  auto* to = reinterpret_cast<uint16_t*>(scratch.floats((count * size + 1) / 2));
  convert_all(pool, x.floats(), count, step, lines, to, narrow);
  step = size;
  (lines.transposed ? second_stride : first_stride) = lines.length;
  return to;
}

void run_bf16(ffi::ThreadPool& pool, Batch b, const Operand& a, const Operand& c, const float* bias, char* y) {
  thread_local Scratch of_a, of_c;
  Problem& p = b.problem;
  const uint16_t* narrow_a = narrowed(pool, a, lines_of(p.m, p.k, p.a_m, p.a_k), b.count, of_a, b.a, p.a_m, p.a_k);
  const uint16_t* narrow_c = narrowed(pool, c, lines_of(p.k, p.n, p.c_k, p.c_n), b.count, of_c, b.c, p.c_k, p.c_n);
  const std::vector<Part> parts = split(b, std::max<int64_t>(pool.num_threads(), 1), p.m);
  auto problem = [&](const Part& part) {
    Problem own = p;
    own.m = part.last - part.first;
    return own;
  };
  for (const Part& part : parts) compiled(problem(part), compile);  // here, where it may throw
  const int64_t size = p.bf16_result ? 2 : 4;
  parallel_for(pool, std::ssize(parts), [&](int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    const Problem own = problem(part);
    multiply(compiled(own, compile), narrow_a + part.which * b.a + part.first * own.a_m, narrow_c + part.which * b.c,
             bias, y + (part.which * p.m + part.first) * own.n * size);
  });
}

bool run_f32(ffi::ThreadPool& pool, const Batch& b, const Operand& a, const Operand& c, const float* bias, char* y) {
  const Problem& p = b.problem;
  Lines c_lines = lines_of(p.k, p.n, p.c_k, p.c_n);
  int64_t c_step = b.c;
  const float* wide_c = c.floats();
  if (c.bf16) {
    thread_local Scratch of_c;
    float* to = of_c.floats(b.count * p.k * p.n);
    convert_all(pool, c.halves(), b.count, b.c, c_lines, to, widen);
    wide_c = to;
    c_lines.stride = c_lines.length;
    c_step = p.k * p.n;
  }
  const std::vector<Part> parts = split(b, std::max<int64_t>(pool.num_threads(), 1), kRows);
  std::atomic<bool> good = true;
  parallel_for(pool, std::ssize(parts), [&](int64_t i) {
    thread_local Scratch of_a, of_y;
    const Part& part = parts[static_cast<size_t>(i)];
    Problem own = p;
    own.m = part.last - part.first;
    Lines a_lines = lines_of(own.m, p.k, p.a_m, p.a_k);
    const int64_t from = part.which * b.a + part.first * p.a_m, at = (part.which * p.m + part.first) * p.n;
    float* sums = p.bf16_result ? of_y.floats(own.m * p.n) : reinterpret_cast<float*>(y) + at;
    const float* own_a = a.floats() + from;
    if (a.bf16) {
      float* wide_a = of_a.floats(own.m * p.k);
      widen(a.halves() + from, a_lines.lines, a_lines.length, a_lines.stride, wide_a);
      own_a = wide_a;
      a_lines.stride = a_lines.length;
    }
    if (!multiply(own, own_a, a_lines, wide_c + part.which * c_step, c_lines, bias, sums)) good = false;
    if (p.bf16_result) narrow(sums, own.m, p.n, p.n, reinterpret_cast<uint16_t*>(y) + at);
  });
  return good;
}

ffi::Error product_kernel(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer c, ffi::RemainingArgs more,
                          ffi::Result<ffi::AnyBuffer> y, ffi::Span<const int64_t> sizes,
                          ffi::Span<const int64_t> strides, bool in_bf16) {
  Span span("product");
  auto known = [](ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; };
  if (sizes.size() != 4 || strides.size() != 6 || !known(a.element_type()) || !known(c.element_type()) ||
      !known(y->element_type()) || more.size() > 1)
    return ffi::Error::InvalidArgument("md_product: the arrays are not of f32 or bf16");
  const Operand left{a.untyped_data(), a.element_type() == ffi::BF16},
      right{c.untyped_data(), c.element_type() == ffi::BF16};
  const Batch b{{sizes[1], sizes[2], sizes[3], strides[1], strides[2], strides[4], strides[5],
                 y->element_type() == ffi::BF16, more.size() == 1},
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
    const auto given = more.get<ffi::Buffer<ffi::F32>>(0);
    if (given.has_error()) return given.error();
    if (static_cast<int64_t>(given->element_count()) != p.n)
      return ffi::Error::InvalidArgument("md_product: the bias is not of n elements");
    bias = given->typed_data();
  }
  auto* to = static_cast<char*>(y->untyped_data());
  bool good = true;
  try {
    if (in_bf16 && (left.bf16 || right.bf16))
      run_bf16(pool, b, left, right, bias, to);
    else
      good = run_f32(pool, b, left, right, bias, to);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("md_product: ") + e.what());
  }
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
