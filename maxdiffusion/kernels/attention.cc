// Attention on the CPU, block of logits by block, so that they stay in the cache; q, k and v are read where they lie.
// XLA's own code transposes them and writes all logits. Source: Dao 2023 (FlashAttention-2).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/onednn.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

/// Rows of queries and of keys per block at most: 64 KB of logits, with which oneDNN's product is fastest.
constexpr int64_t kBlock = 128;
/// Pieces of work, if the keys are long enough, that a gradient is split into.
constexpr int64_t kPieces = 8;

struct Problem {
  int64_t batch, heads, lq, lk, d;
  float scale;
  bool causal;
  int64_t stride() const { return heads * d; }  // from one row of a head to the next
};

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/// [0, length) in blocks about equal.
struct Blocks {
  explicit Blocks(int64_t n)
      : length(n), count((n + kBlock - 1) / kBlock), size(round_up((n + count - 1) / count, 8)) {}
  int64_t begin(int64_t i) const { return std::min(i * size, length); }
  int64_t rows(int64_t i) const { return begin(i + 1) - begin(i); }
  int64_t length, count, size;
};

/// E: float, or uint16_t for bf16.
template <class E>
struct Rows {
  const E* data;
  int64_t stride;
};

MD_VECTORIZED void widen(const uint16_t* from, int64_t rows, int64_t d, int64_t stride, float* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < d; ++i) to[r * d + i] = load(from[r * stride + i]);
}
MD_VECTORIZED void narrow(const float* from, int64_t rows, int64_t cols, int64_t from_stride, uint16_t* to,
                          int64_t stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < cols; ++i) to[r * stride + i] = float_to_bf16(from[r * from_stride + i]);
}

/// `n` rows of a head as E: where they are, or widened.
template <class E, class T>
Rows<E> rows_of(const Problem& p, const T* head, int64_t first, int64_t n, Scratch& scratch) {
  const T* from = head + first * p.stride();
  if constexpr (std::is_same_v<E, T>) {
    return {from, p.stride()};
  } else {
    float* to = scratch.floats(n * p.d);
    widen(from, n, p.d, p.stride(), to);
    return {to, p.d};
  }
}

/// A block [rows, cols] of floats, kBlock apart, as E.
template <class E>
Rows<E> block_of(const float* s, int64_t rows, int64_t cols, Scratch& scratch) {
  if constexpr (std::is_same_v<E, float>) {
    return {s, kBlock};
  } else {
    auto* to = reinterpret_cast<uint16_t*>(scratch.floats(kBlock * kBlock / 2));
    narrow(s, rows, cols, kBlock, to, kBlock);
    return {to, kBlock};
  }
}

inline void write_rows(const Problem& p, const float* from, float* head, int64_t first, int64_t n) {
  for (int64_t r = 0; r < n; ++r) std::copy_n(from + r * p.d, p.d, head + (first + r) * p.stride());
}
inline void write_rows(const Problem& p, const float* from, uint16_t* head, int64_t first, int64_t n) {
  narrow(from, n, p.d, p.d, head + first * p.stride(), p.stride());
}

template <class T>
T* head_of(const Problem& p, T* x, int64_t length, int64_t b, int64_t h) {
  return x + (b * length * p.heads + h) * p.d;
}

/// c = alpha·a·b, or added to what is in c: everything that compiled code depends on.
struct Product {
  char a_order, b_order;  // 'T': transposed in memory
  int64_t m, n, k, a_stride, b_stride, c_stride;
  float alpha;
  bool adds;
  auto operator<=>(const Product&) const = default;
};
struct Code {
  dnnl::matmul run;
  dnnl::memory::desc a, b, c, scratch;
};

/// Of bf16, with c in f32.
Code compile(const Product& p) {
  using dnnl::memory;
  auto matrix = [](memory::data_type type, int64_t rows, int64_t cols, int64_t stride, bool transposed) {
    return memory::desc({rows, cols}, type, transposed ? memory::dims{1, stride} : memory::dims{stride, 1});
  };
  const auto a = matrix(memory::data_type::bf16, p.m, p.k, p.a_stride, p.a_order == 'T'),
             b = matrix(memory::data_type::bf16, p.k, p.n, p.b_stride, p.b_order == 'T'),
             c = matrix(memory::data_type::f32, p.m, p.n, p.c_stride, false);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (p.alpha != 1) attributes.set_output_scales(0, {p.alpha});
  if (p.adds) {
    dnnl::post_ops sum;
    sum.append_sum(1);
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc d({a, b, c}, attributes, onednn_engine());
  return {dnnl::matmul(d), a, b, c, d.scratchpad_desc()};
}

/// Products of one thread; whether any failed.
class Products {
 public:
  /// c = alpha·a·b + beta·c, beta 0 or 1; a [m, k], b [k, n], either of them transposed in memory.
  void operator()(const char* order, int64_t m, int64_t n, int64_t k, float alpha, Rows<float> a, Rows<float> b,
                  float beta, float* c, int64_t stride) {
    if (dnnl_sgemm(order[0], order[1], m, n, k, alpha, a.data, a.stride, b.data, b.stride, beta, c, stride) !=
        dnnl_success)
      failed_ = true;
  }
  void operator()(const char* order, int64_t m, int64_t n, int64_t k, float alpha, Rows<uint16_t> a, Rows<uint16_t> b,
                  float beta, float* c, int64_t stride) {
    try {
      thread_local Scratch work;
      const Code& code =
          compiled(Product{order[0], order[1], m, n, k, a.stride, b.stride, stride, alpha, beta != 0}, compile);
      auto at = [](const dnnl::memory::desc& d, const void* data) {
        return dnnl::memory(d, onednn_engine(), const_cast<void*>(data));
      };
      dnnl::stream stream(onednn_engine());
      code.run.execute(stream, {{DNNL_ARG_SRC, at(code.a, a.data)},
                                {DNNL_ARG_WEIGHTS, at(code.b, b.data)},
                                {DNNL_ARG_DST, at(code.c, c)},
                                {DNNL_ARG_SCRATCHPAD, at(code.scratch, work.floats(floats_in(code.scratch)))}});
      stream.wait();
    } catch (const dnnl::error&) {
      failed_ = true;
    }
  }
  ffi::Error result() const {
    return failed_ ? ffi::Error::Internal("attention: oneDNN failed") : ffi::Error::Success();
  }

 private:
  std::atomic<bool> failed_{false};
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// Loops over logits take whole vectors: what is beyond the last is −∞, whose exponential is 0.
constexpr int64_t kVector = 16;

/// How many of the `cols` keys from `first_key` on a query may see.
inline int64_t visible(const Problem& p, int64_t query, int64_t first_key, int64_t cols) {
  return p.causal ? std::clamp<int64_t>(query + 1 - first_key, 0, cols) : cols;
}

/// Running softmax: logits s [rows, cols], kBlock apart, become exp(s − max); what was summed under an older max, `sum`
/// and y [rows, d], is scaled.
MD_VECTORIZED void exp_of_logits(const Problem& p, int64_t first_query, int64_t first_key, int64_t rows, int64_t cols,
                                 float* s, float* max, float* sum, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict row = s + r * kBlock;
    const int64_t n = visible(p, first_query + r, first_key, cols), end = round_up(n, kVector);
    for (int64_t j = n; j < end; ++j) row[j] = -kInfinity;
    float top = max[r];
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < end; ++j) top = row[j] > top ? row[j] : top;
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < end; ++j) {
      row[j] = vector_exp(row[j] - top);
      total += row[j];
    }
    for (int64_t j = end; j < cols; ++j) row[j] = 0;
    if (first_key > 0 && top != max[r]) {
      const float factor = vector_exp(max[r] - top);
      sum[r] *= factor;
      for (int64_t i = 0; i < p.d; ++i) y[r * p.d + i] *= factor;
    }
    sum[r] += total;
    max[r] = top;
  }
}

MD_VECTORIZED void divide_rows(int64_t rows, int64_t d, const float* sum, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = 1.0f / sum[r];
    for (int64_t i = 0; i < d; ++i) y[r * d + i] *= factor;
  }
}

/// T: of the arrays; E: of the products' operands.
template <class T, class E>
ffi::Error attention(ffi::ThreadPool& pool, const Problem& p, const T* q, const T* k, const T* v, T* y, float* lse) {
  const Blocks queries(p.lq), keys(p.lk);
  Products products;
  parallel_for(pool, p.batch * p.heads * queries.count, [&](int64_t i) {
    thread_local Scratch of_q, of_k, of_v, of_s, of_p, of_y, of_rows;
    use_one_thread();
    const int64_t block = i % queries.count, h = i / queries.count % p.heads, b = i / queries.count / p.heads;
    const int64_t first = queries.begin(block), rows = queries.rows(block);
    const Rows<E> qs = rows_of<E>(p, head_of(p, q, p.lq, b, h), first, rows, of_q);
    float* s = of_s.floats(kBlock * kBlock);
    float* sums = of_y.floats(rows * p.d);
    float* max = of_rows.floats(2 * kBlock);
    float* sum = max + kBlock;
    std::fill_n(max, rows, -kInfinity);
    std::fill_n(sum, rows, 0.0f);
    for (int64_t j = 0; j < keys.count; ++j) {
      const int64_t first_key = keys.begin(j), cols = keys.rows(j);
      if (visible(p, first + rows - 1, first_key, cols) == 0) break;
      const Rows<E> ks = rows_of<E>(p, head_of(p, k, p.lk, b, h), first_key, cols, of_k);
      const Rows<E> vs = rows_of<E>(p, head_of(p, v, p.lk, b, h), first_key, cols, of_v);
      products("NT", rows, cols, p.d, p.scale, qs, ks, 0, s, kBlock);
      exp_of_logits(p, first, first_key, rows, cols, s, max, sum, sums);
      products("NN", rows, p.d, cols, 1, block_of<E>(s, rows, cols, of_p), vs, j == 0 ? 0.0f : 1.0f, sums, p.d);
    }
    divide_rows(rows, p.d, sum, sums);
    write_rows(p, sums, head_of(p, y, p.lq, b, h), first, rows);
    for (int64_t r = 0; r < rows; ++r) lse[(b * p.heads + h) * p.lq + first + r] = max[r] + std::log(sum[r]);
  });
  return products.result();
}

/// delta = Σ dy·y per row.
MD_VECTORIZED void row_products(Rows<float> dy, Rows<float> y, int64_t rows, int64_t d, float* delta) {
  for (int64_t r = 0; r < rows; ++r) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < d; ++i) total += dy.data[r * dy.stride + i] * y.data[r * y.stride + i];
    delta[r] = total;
  }
}

/// Logits s become probabilities; their cotangents dp become those of the logits.
MD_VECTORIZED void logit_gradients(const Problem& p, int64_t first_query, int64_t first_key, int64_t rows, int64_t cols,
                                   const float* lse, const float* delta, float* s, float* dp) {
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict row = s + r * kBlock;
    float* __restrict grad = dp + r * kBlock;
    const int64_t n = visible(p, first_query + r, first_key, cols), end = round_up(n, kVector);
    for (int64_t j = n; j < end; ++j) row[j] = -kInfinity, grad[j] = 0;
    const float shift = lse[r], mean = delta[r];
#pragma omp simd
    for (int64_t j = 0; j < end; ++j) {
      row[j] = vector_exp(row[j] - shift);
      grad[j] = row[j] * (grad[j] - mean);
    }
    for (int64_t j = end; j < cols; ++j) row[j] = grad[j] = 0;
  }
}

template <class T>
struct Gradient {
  const T *q, *k, *v, *y;
  const float* lse;
  const T* dy;
  T *dq, *dk, *dv;
};

/// A piece is a head, or a run of its keys where heads are few: it adds to a dq of its own, and those are summed in
/// order. How many pieces there are depends on the shapes alone, so the result does not depend on the threads.
template <class T, class E>
ffi::Error attention_grad(ffi::ThreadPool& pool, const Problem& p, const Gradient<T>& g) {
  const Blocks queries(p.lq), keys(p.lk);
  const int64_t heads = p.batch * p.heads;
  const int64_t runs = std::clamp<int64_t>((kPieces + heads - 1) / heads, 1, (keys.count + 3) / 4);
  const bool in_place = runs == 1 && std::is_same_v<T, float>;
  const std::unique_ptr<float[]> partial(in_place ? nullptr
                                                  : new float[static_cast<size_t>(heads * runs * p.lq * p.d)]);
  Products products;
  parallel_for(pool, heads * runs, [&](int64_t i) {
    thread_local Scratch of_q, of_k, of_v, of_dy, of_dk, of_dv, of_s, of_dp, of_delta, of_p, of_ds;
    use_one_thread();
    const int64_t run = i % runs, h = i / runs % p.heads, b = i / runs / p.heads;
    const T *q = head_of(p, g.q, p.lq, b, h), *y = head_of(p, g.y, p.lq, b, h), *dy = head_of(p, g.dy, p.lq, b, h);
    const float* lse = g.lse + (b * p.heads + h) * p.lq;
    float* delta = of_delta.floats(p.lq);
    for (int64_t j = 0; j < queries.count; ++j) {
      const int64_t first = queries.begin(j), rows = queries.rows(j);
      row_products(rows_of<float>(p, dy, first, rows, of_dy), rows_of<float>(p, y, first, rows, of_q), rows, p.d,
                   delta + first);
    }
    float* dq = in_place ? reinterpret_cast<float*>(head_of(p, g.dq, p.lq, b, h)) : partial.get() + i * p.lq * p.d;
    const int64_t dq_stride = in_place ? p.stride() : p.d;
    for (int64_t r = 0; r < p.lq; ++r) std::fill_n(dq + r * dq_stride, p.d, 0.0f);

    float *s = of_s.floats(kBlock * kBlock), *dp = of_dp.floats(kBlock * kBlock);
    float *dk = of_dk.floats(kBlock * p.d), *dv = of_dv.floats(kBlock * p.d);
    for (int64_t j = keys.count * run / runs; j < keys.count * (run + 1) / runs; ++j) {
      const int64_t first_key = keys.begin(j), cols = keys.rows(j);
      const Rows<E> ks = rows_of<E>(p, head_of(p, g.k, p.lk, b, h), first_key, cols, of_k);
      const Rows<E> vs = rows_of<E>(p, head_of(p, g.v, p.lk, b, h), first_key, cols, of_v);
      std::fill_n(dk, cols * p.d, 0.0f);
      std::fill_n(dv, cols * p.d, 0.0f);
      for (int64_t block = 0; block < queries.count; ++block) {
        const int64_t first = queries.begin(block), rows = queries.rows(block);
        if (visible(p, first + rows - 1, first_key, cols) == 0) continue;
        const Rows<E> qs = rows_of<E>(p, q, first, rows, of_q), dys = rows_of<E>(p, dy, first, rows, of_dy);
        products("NT", rows, cols, p.d, p.scale, qs, ks, 0, s, kBlock);
        products("NT", rows, cols, p.d, 1, dys, vs, 0, dp, kBlock);
        logit_gradients(p, first, first_key, rows, cols, lse + first, delta + first, s, dp);
        const Rows<E> ps = block_of<E>(s, rows, cols, of_p), ds = block_of<E>(dp, rows, cols, of_ds);
        products("TN", cols, p.d, rows, 1, ps, dys, 1, dv, p.d);
        products("TN", cols, p.d, rows, p.scale, ds, qs, 1, dk, p.d);
        products("NN", rows, p.d, cols, p.scale, ds, ks, 1, dq + first * dq_stride, dq_stride);
      }
      write_rows(p, dk, head_of(p, g.dk, p.lk, b, h), first_key, cols);
      write_rows(p, dv, head_of(p, g.dv, p.lk, b, h), first_key, cols);
    }
  });
  if (!in_place)
    parallel_for(pool, heads * queries.count, [&](int64_t i) {
      const int64_t head = i / queries.count, block = i % queries.count;
      const int64_t first = queries.begin(block), rows = queries.rows(block);
      float* sum = partial.get() + (head * runs * p.lq + first) * p.d;
      for (int64_t run = 1; run < runs; ++run)
        for (int64_t j = 0; j < rows * p.d; ++j) sum[j] += sum[run * p.lq * p.d + j];
      write_rows(p, sum, head_of(p, g.dq, p.lq, head / p.heads, head % p.heads), first, rows);
    });
  return products.result();
}

ffi::ErrorOr<Problem> problem(ffi::AnyBuffer q, ffi::AnyBuffer k, double scale, bool causal) {
  const auto a = q.dimensions(), b = k.dimensions();
  const auto type = q.element_type();
  if (a.size() != 4 || b.size() != 4 || a[0] != b[0] || a[2] != b[2] || a[3] != b[3] || type != k.element_type() ||
      (type != ffi::F32 && type != ffi::BF16))
    return ffi::Unexpected(ffi::Error::InvalidArgument("attention: q and k are not [B, L, H, D] of f32 or bf16"));
  return Problem{a[0], a[2], a[1], b[1], a[3], static_cast<float>(scale), causal};
}

/// f of null pointers to the types of the arrays and of the products' operands.
template <class F>
ffi::Error with_types(bool bf16, bool in_bf16, const F& f) {
  float* wide = nullptr;
  uint16_t* narrow = nullptr;
  if (!bf16) return f(wide, wide);
  return in_bf16 ? f(narrow, narrow) : f(narrow, wide);
}

ffi::Error attention_kernel(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::Result<ffi::AnyBuffer> y, ffi::ResultBuffer<ffi::F32> lse, double scale, bool causal,
                            bool in_bf16) {
  Span span("attention");
  const auto p = problem(q, k, scale, causal);
  if (p.has_error()) return p.error();
  auto of = [&]<class T, class E>(T*, E*) {
    auto at = [](auto& x) { return static_cast<T*>(x.untyped_data()); };
    return attention<T, E>(pool, *p, at(q), at(k), at(v), at(*y), lse->typed_data());
  };
  return with_types(q.element_type() == ffi::BF16, in_bf16, of);
}

ffi::Error attention_grad_kernel(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                 ffi::AnyBuffer y, ffi::Buffer<ffi::F32> lse, ffi::AnyBuffer dy,
                                 ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                                 ffi::Result<ffi::AnyBuffer> dv, double scale, bool causal, bool in_bf16) {
  Span span("attention gradient");
  const auto p = problem(q, k, scale, causal);
  if (p.has_error()) return p.error();
  auto of = [&]<class T, class E>(T*, E*) {
    auto at = [](auto& x) { return static_cast<T*>(x.untyped_data()); };
    return attention_grad<T, E>(pool, *p,
                                {at(q), at(k), at(v), at(y), lse.typed_data(), at(dy), at(*dq), at(*dk), at(*dv)});
  };
  return with_types(q.element_type() == ffi::BF16, in_bf16, of);
}

XLA_FFI_DEFINE_HANDLER(kAttention, attention_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<double>("scale")
                           .Attr<bool>("causal")
                           .Attr<bool>("in_bf16"));

XLA_FFI_DEFINE_HANDLER(kAttentionGrad, attention_grad_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<double>("scale")
                           .Attr<bool>("causal")
                           .Attr<bool>("in_bf16"));

}  // namespace

void* attention_handler() { return reinterpret_cast<void*>(kAttention); }
void* attention_grad_handler() { return reinterpret_cast<void*>(kAttentionGrad); }

}  // namespace md
