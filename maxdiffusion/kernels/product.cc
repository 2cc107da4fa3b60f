// Products of matrices on the CPU through oneDNN, rows shared out among the plugin's threads. XLA's own code widens
// arrays of bf16 to f32 as a whole, multiplies those, and rounds the result in a pass of its own.
#include <algorithm>
#include <atomic>

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
  bool bf16_result = false;
  auto operator<=>(const Problem&) const = default;
};

struct Code {
  dnnl::matmul run;
  memory::desc a, c, y, scratch;
};

/// Of bf16.
Code compile(const Problem& p) {
  constexpr auto kBf16 = memory::data_type::bf16;
  const memory::desc a({p.m, p.k}, kBf16, memory::dims{p.a_m, p.a_k}), c({p.k, p.n}, kBf16, memory::dims{p.c_k, p.c_n}),
      y({p.m, p.n}, p.bf16_result ? kBf16 : memory::data_type::f32, memory::dims{p.n, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::matmul::primitive_desc d({a, c, y}, attributes, onednn_engine());
  return {dnnl::matmul(d), a, c, y, d.scratchpad_desc()};
}

void multiply(const Code& code, const uint16_t* a, const uint16_t* c, void* y) {
  use_one_thread();
  thread_local Scratch work;
  dnnl::stream stream(onednn_engine());
  auto at = [](const memory::desc& d, const void* data) { return memory(d, onednn_engine(), const_cast<void*>(data)); };
  code.run.execute(stream, {{DNNL_ARG_SRC, at(code.a, a)},
                            {DNNL_ARG_WEIGHTS, at(code.c, c)},
                            {DNNL_ARG_DST, at(code.y, y)},
                            {DNNL_ARG_SCRATCHPAD, at(code.scratch, work.floats(floats_in(code.scratch)))}});
  stream.wait();
}

MD_VECTORIZED void widen(const uint16_t* from, int64_t rows, int64_t cols, int64_t stride, float* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += cols)
    for (int64_t i = 0; i < cols; ++i) to[i] = load(from[i]);
}
MD_VECTORIZED void narrow(const float* from, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(from[i]);
}

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

/// sums [m, n] = a · c, both f32; `c` has lines of its own length.
bool multiply(const Problem& p, const float* a, int64_t a_stride, bool a_transposed, const float* c, int64_t c_stride,
              bool c_transposed, float* sums) {
  use_one_thread();
  return dnnl_sgemm(a_transposed ? 'T' : 'N', c_transposed ? 'T' : 'N', p.m, p.n, p.k, 1, a, a_stride, c, c_stride, 0,
                    sums, p.n) == dnnl_success;
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

void run_bf16(ffi::ThreadPool& pool, const Batch& b, const uint16_t* a, const uint16_t* c, char* y) {
  const std::vector<Part> parts = split(b, std::max<int64_t>(pool.num_threads(), 1), b.problem.m);
  auto problem = [&](const Part& part) {
    Problem own = b.problem;
    own.m = part.last - part.first;
    return own;
  };
  for (const Part& part : parts) compiled(problem(part), compile);  // here, where it may throw
  const int64_t size = b.problem.bf16_result ? 2 : 4;
  parallel_for(pool, std::ssize(parts), [&](int64_t i) {
    const Part& part = parts[static_cast<size_t>(i)];
    const Problem own = problem(part);
    multiply(compiled(own, compile), a + part.which * b.a + part.first * own.a_m, c + part.which * b.c,
             y + (part.which * b.problem.m + part.first) * own.n * size);
  });
}

/// T: of the operands.
template <class T>
bool run_f32(ffi::ThreadPool& pool, const Batch& b, const T* a, const T* c, char* y) {
  const Problem& p = b.problem;
  constexpr bool kWiden = std::is_same_v<T, uint16_t>;
  const Lines c_lines = lines_of(p.k, p.n, p.c_k, p.c_n);
  const float* wide_c = nullptr;
  if constexpr (kWiden) {
    thread_local Scratch of_c;
    float* to = of_c.floats(b.count * p.k * p.n);
    wide_c = to;
    const int64_t lines = std::max<int64_t>((1 << 16) / c_lines.length, 1),
                  pieces = (c_lines.lines + lines - 1) / lines;
    parallel_for(pool, b.count * pieces, [&](int64_t i) {
      const int64_t which = i / pieces, first = i % pieces * lines, n = std::min(lines, c_lines.lines - first);
      widen(c + which * b.c + first * c_lines.stride, n, c_lines.length, c_lines.stride,
            to + which * p.k * p.n + first * c_lines.length);
    });
  }
  const std::vector<Part> parts = split(b, std::max<int64_t>(pool.num_threads(), 1), kRows);
  std::atomic<bool> good = true;
  parallel_for(pool, std::ssize(parts), [&](int64_t i) {
    thread_local Scratch of_a, of_y;
    const Part& part = parts[static_cast<size_t>(i)];
    Problem own = p;
    own.m = part.last - part.first;
    const Lines a_lines = lines_of(own.m, p.k, p.a_m, p.a_k);
    const T* own_a = a + part.which * b.a + part.first * p.a_m;
    const int64_t at = (part.which * p.m + part.first) * p.n;
    float* sums = p.bf16_result ? of_y.floats(own.m * p.n) : reinterpret_cast<float*>(y) + at;
    bool done = false;
    if constexpr (kWiden) {
      float* wide_a = of_a.floats(own.m * p.k);
      widen(own_a, a_lines.lines, a_lines.length, a_lines.stride, wide_a);
      done = multiply(own, wide_a, a_lines.length, a_lines.transposed, wide_c + part.which * p.k * p.n, c_lines.length,
                      c_lines.transposed, sums);
    } else {
      done = multiply(own, own_a, a_lines.stride, a_lines.transposed, c + part.which * b.c, c_lines.stride,
                      c_lines.transposed, sums);
    }
    if (!done) good = false;
    if (p.bf16_result) narrow(sums, own.m * p.n, reinterpret_cast<uint16_t*>(y) + at);
  });
  return good;
}

ffi::Error product_kernel(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer c, ffi::Result<ffi::AnyBuffer> y,
                          ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> strides, bool in_bf16) {
  Span span("product");
  const auto type = a.element_type(), result = y->element_type();
  if (sizes.size() != 4 || strides.size() != 6 || type != c.element_type() || (type != ffi::F32 && type != ffi::BF16) ||
      (result != ffi::F32 && (result != ffi::BF16 || type != ffi::BF16)))
    return ffi::Error::InvalidArgument("md_product: operands are not two arrays of f32 or of bf16");
  const Batch b{{sizes[1], sizes[2], sizes[3], strides[1], strides[2], strides[4], strides[5], result == ffi::BF16},
                sizes[0],
                strides[0],
                strides[3]};
  const Problem& p = b.problem;
  auto fits = [&](const ffi::AnyBuffer& x, int64_t elements) {
    return static_cast<int64_t>(x.element_count()) == elements;
  };
  if (!fits(a, b.count * p.m * p.k) || !fits(c, b.count * p.k * p.n) || !fits(*y, b.count * p.m * p.n))
    return ffi::Error::InvalidArgument("md_product: the arrays are not of these sizes");
  auto* to = static_cast<char*>(y->untyped_data());
  auto run = [&]<class T>(T*) {
    return run_f32(pool, b, static_cast<const T*>(a.untyped_data()), static_cast<const T*>(c.untyped_data()), to);
  };
  bool good = true;
  try {
    if (type == ffi::F32)
      good = run(static_cast<float*>(nullptr));
    else if (!in_bf16)
      good = run(static_cast<uint16_t*>(nullptr));
    else
      run_bf16(pool, b, static_cast<const uint16_t*>(a.untyped_data()), static_cast<const uint16_t*>(c.untyped_data()),
               to);
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
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("sizes")
                           .Attr<ffi::Span<const int64_t>>("strides")
                           .Attr<bool>("in_bf16"));

}  // namespace

void* product_handler() { return reinterpret_cast<void*>(kProduct); }

}  // namespace md
