// Attention on the CPU in blocks of logits that stay in the cache. q, k and v are copied one head at a time. XLA's own
// code transposes them and writes all logits. Source: Dao 2023 (FlashAttention-2).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "maxdiffusion/base/round_up.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/bf16_product.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/onednn.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/rows.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

/// Loops over logits use whole vectors: padding is −∞, whose exponential is 0.
constexpr int64_t kVector = 16;
/// Largest number of keys per block, and of queries for the products' operand type E: the logits fit in the
/// second-level cache, and oneDNN is fastest for products of these sizes.
constexpr int64_t kKeys = 128;
template <class E>
constexpr int64_t kQueries = std::is_same_v<E, float> ? 128 : 256;
/// Number of chunks of a head's gradient, if there are enough keys.
constexpr int64_t kChunks = 8;

struct Problem {
  int64_t batch, heads, lq, lk, d;
  float scale;
  bool causal;
  const int32_t* lengths;                       // number of keys of each sample; null: all keys are attended to
  int64_t stride() const { return heads * d; }  // from one row of a head to the next
};

/// Splits [0, length) into blocks of about equal size, at most `most`.
struct Blocks {
  Blocks(int64_t n, int64_t most)
      : length(n), count((n + most - 1) / most), size(round_up((n + count - 1) / count, kVector)) {}
  int64_t begin(int64_t i) const { return std::min(i * size, length); }
  int64_t rows(int64_t i) const { return begin(i + 1) - begin(i); }
  int64_t length, count, size;
};

/// E: float, or uint16_t for bf16.
template <class E>
struct Rows {
  const E* data;
  int64_t stride;
  Rows from(int64_t row) const { return {data + row * stride, stride}; }
};

/// `n` rows of a head as f32: in place, or widened copies.
inline Rows<float> floats_of(const Problem& p, const float* head, int64_t first, int64_t, Scratch&) {
  return {head + first * p.stride(), p.stride()};
}
inline Rows<float> floats_of(const Problem& p, const uint16_t* head, int64_t first, int64_t n, Scratch& scratch) {
  float* to = scratch.floats(n * p.d);
  widen(head + first * p.stride(), n, p.d, p.stride(), to, p.d);
  return {to, p.d};
}

/// All rows of a head as dense operands of products: rows that are far apart map to the same cache sets and slow
/// products down. Copies have zeros after the last row, up to whole vectors of keys.
template <class E, class T>
Rows<E> head_rows(const Problem& p, const T* head, int64_t length, Scratch& scratch) {
  if constexpr (std::is_same_v<T, float>)
    if (p.heads == 1) return {head, p.d};
  const int64_t rows = round_up(length, kVector);
  auto* to = reinterpret_cast<E*>(scratch.floats((rows * p.d * static_cast<int64_t>(sizeof(E)) + 3) / 4));
  if constexpr (std::is_same_v<T, E>)
    copy_rows(head, length, p.d, p.stride(), to, p.d);
  else
    widen(head, length, p.d, p.stride(), to, p.d);
  std::fill_n(to + length * p.d, (rows - length) * p.d, E{0});
  return {to, p.d};
}

/// Number of keys of a block in products; dense bf16 operands are zero-padded to whole vectors.
template <class E>
int64_t keys_in_products(int64_t cols) {
  return std::is_same_v<E, float> ? cols : round_up(cols, kVector);
}

/// A block of `rows` lines of `width` floats as E.
template <class E>
Rows<E> block_of(const float* s, int64_t rows, int64_t width, Scratch& scratch) {
  if constexpr (std::is_same_v<E, float>) {
    return {s, width};
  } else {
    auto* to = reinterpret_cast<uint16_t*>(scratch.floats(kQueries<E> * kKeys / 2));
    narrow(s, 1, rows * width, 0, to, 0);
    return {to, width};
  }
}

inline void write_rows(const Problem& p, const float* from, float* head, int64_t first, int64_t n) {
  copy_rows(from, n, p.d, p.d, head + first * p.stride(), p.stride());
}
inline void write_rows(const Problem& p, const float* from, uint16_t* head, int64_t first, int64_t n) {
  narrow(from, n, p.d, p.d, head + first * p.stride(), p.stride());
}

template <class T>
T* head_of(const Problem& p, T* x, int64_t length, int64_t b, int64_t h) {
  return x + (b * length * p.heads + h) * p.d;
}

/// Matrix products of one thread; remembers whether any failed.
class Products {
 public:
  /// c = alpha·a·b + beta·c with beta 0 or 1. a [m, k], b [k, n]; `order`: 'T' for an operand that is transposed in
  /// memory.
  void operator()(const char* order, int64_t m, int64_t n, int64_t k, float alpha, Rows<float> a, Rows<float> b,
                  float beta, float* c, int64_t stride) {
    if (dnnl_sgemm(order[0], order[1], m, n, k, alpha, a.data, a.stride, b.data, b.stride, beta, c, stride) !=
        dnnl_success)
      failed_ = true;
  }
  /// Like the above, for dense arrays.
  void operator()(const char* order, int64_t m, int64_t n, int64_t k, float alpha, Rows<uint16_t> a, Rows<uint16_t> b,
                  float beta, float* c, int64_t) {
    if (!multiply({.m = m,
                   .n = n,
                   .k = k,
                   .a_transposed = order[0] == 'T',
                   .b_transposed = order[1] == 'T',
                   .adds = beta != 0,
                   .alpha = alpha},
                  a.data, b.data, nullptr, c))
      failed_ = true;
  }
  ffi::Error result() const {
    return failed_ ? ffi::Error::Internal("attention: oneDNN failed") : ffi::Error::Success();
  }

 private:
  std::atomic<bool> failed_{false};
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// How many of `cols` keys from `first_key` on a query of sample b may attend to.
inline int64_t visible(const Problem& p, int64_t b, int64_t query, int64_t first_key, int64_t cols) {
  const int64_t n = p.causal ? std::clamp<int64_t>(query + 1 - first_key, 0, cols) : cols;
  return p.lengths ? std::min(n, std::clamp<int64_t>(p.lengths[b] - first_key, 0, cols)) : n;
}
/// Stand-in for the logarithm of an empty sum.
constexpr float kNothing = -1e30f;

/// Running softmax: logits s [rows, cols], in rows of whole vectors, become exp(s − max). If the maximum changes,
/// rescales earlier sums: `sum` and y [rows, d].
template <class E>
MD_VECTORIZED void exp_of_logits(const Problem& p, int64_t b, int64_t first_query, int64_t first_key, int64_t rows,
                                 int64_t cols, float* s, float* max, float* sum, float* y) {
  const int64_t width = round_up(cols, kVector);
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict row = s + r * width;
    const int64_t n = visible(p, b, first_query + r, first_key, cols), end = round_up(n, kVector);
    for (int64_t j = n; j < end; ++j) row[j] = -kInfinity;
    float top = max[r];
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < end; ++j) top = row[j] > top ? row[j] : top;
    const float shift = top * kLog2E;
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < end; ++j) {
      row[j] = vector_exp2<E>(row[j] * kLog2E - shift);
      total += row[j];
    }
    for (int64_t j = end; j < width; ++j) row[j] = 0;
    if (first_key > 0 && top != max[r]) {
      const float factor = vector_exp2<E>(max[r] * kLog2E - shift);
      sum[r] *= factor;
      for (int64_t i = 0; i < p.d; ++i) y[r * p.d + i] *= factor;
    }
    sum[r] += total;
    max[r] = top;
  }
}

MD_VECTORIZED void divide_rows(int64_t rows, int64_t d, const float* sum, float* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = sum[r] > 0 ? 1.0f / sum[r] : 0.0f;
    for (int64_t i = 0; i < d; ++i) y[r * d + i] *= factor;
  }
}

/// T: type of the arrays; E: type of the products' operands. A chunk is a head, or part of its queries if there are
/// fewer heads than threads; then each chunk makes its own copies of keys and values.
template <class T, class E>
ffi::Error attention(ffi::ThreadPool& pool, const Problem& p, const T* q, const T* k, const T* v, T* y, float* lse) {
  const Blocks queries(p.lq, kQueries<E>), keys(p.lk, kKeys);
  const int64_t heads = p.batch * p.heads, target_runs = 4 * std::max<int64_t>(pool.num_threads(), 1);
  const int64_t runs = std::min((target_runs + heads - 1) / heads, queries.count);
  Products products;
  parallel_for(pool, heads * runs, [&](int64_t i) {
    thread_local Scratch of_q, of_k, of_v, of_s, of_p, of_y, of_rows;
    use_one_thread();
    const int64_t run = i % runs, h = i / runs % p.heads, b = i / runs / p.heads;
    const int64_t begin = queries.count * run / runs, end = queries.count * (run + 1) / runs;
    const Rows<E> ks = head_rows<E>(p, head_of(p, k, p.lk, b, h), p.lk, of_k),
                  vs = head_rows<E>(p, head_of(p, v, p.lk, b, h), p.lk, of_v),
                  qs = head_rows<E>(p, head_of(p, q, p.lq, b, h) + queries.begin(begin) * p.stride(),
                                    queries.begin(end) - queries.begin(begin), of_q);
    float* s = of_s.floats(kQueries<E> * kKeys);
    float* sums = of_y.floats(kQueries<E> * p.d);
    float* max = of_rows.floats(2 * kQueries<E>);
    float* sum = max + kQueries<E>;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = queries.begin(block), rows = queries.rows(block);
      std::fill_n(max, rows, -kInfinity);
      std::fill_n(sum, rows, 0.0f);
      for (int64_t j = 0; j < keys.count; ++j) {
        const int64_t first_key = keys.begin(j), cols = keys.rows(j), n = keys_in_products<E>(cols);
        if (visible(p, b, first + rows - 1, first_key, cols) == 0) {
          if (j == 0) std::fill_n(sums, rows * p.d, 0.0f);
          break;
        }
        const int64_t width = round_up(cols, kVector);
        products("NT", rows, n, p.d, p.scale, qs.from(first - queries.begin(begin)), ks.from(first_key), 0, s, width);
        exp_of_logits<E>(p, b, first, first_key, rows, cols, s, max, sum, sums);
        products("NN", rows, p.d, n, 1, block_of<E>(s, rows, width, of_p), vs.from(first_key), j == 0 ? 0.0f : 1.0f,
                 sums, p.d);
      }
      divide_rows(rows, p.d, sum, sums);
      write_rows(p, sums, head_of(p, y, p.lq, b, h), first, rows);
      for (int64_t r = 0; r < rows; ++r)
        lse[(b * p.heads + h) * p.lq + first + r] = sum[r] > 0 ? max[r] + std::log(sum[r]) : kNothing;
    }
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

/// Logits s become probabilities; cotangents dp of the probabilities become those of the logits.
template <class E>
MD_VECTORIZED void logit_gradients(const Problem& p, int64_t b, int64_t first_query, int64_t first_key, int64_t rows,
                                   int64_t cols, const float* lse, const float* delta, float* s, float* dp) {
  const int64_t width = round_up(cols, kVector);
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict row = s + r * width;
    float* __restrict grad = dp + r * width;
    const int64_t n = visible(p, b, first_query + r, first_key, cols), end = round_up(n, kVector);
    for (int64_t j = n; j < end; ++j) row[j] = -kInfinity, grad[j] = 0;
    const float shift = lse[r] * kLog2E, mean = delta[r];
#pragma omp simd
    for (int64_t j = 0; j < end; ++j) {
      row[j] = vector_exp2<E>(row[j] * kLog2E - shift);
      grad[j] = row[j] * (grad[j] - mean);
    }
    for (int64_t j = end; j < width; ++j) row[j] = grad[j] = 0;
  }
}

template <class T>
struct Gradient {
  const T *q, *k, *v, *y;
  const float* lse;
  const T* dy;
  T *dq, *dk, *dv;
};

/// A chunk is a head, or part of its keys if there are few heads; then each chunk has a separate dq, and these are
/// summed in order. The number of chunks depends only on the shapes, so the result does not depend on the number of
/// threads.
template <class T, class E>
ffi::Error attention_grad(ffi::ThreadPool& pool, const Problem& p, const Gradient<T>& g) {
  const Blocks queries(p.lq, kQueries<E>), keys(p.lk, kKeys);
  const int64_t heads = p.batch * p.heads;
  const int64_t runs = std::clamp<int64_t>((kChunks + heads - 1) / heads, 1, (keys.count + 3) / 4);
  const std::unique_ptr<float[]> partial(runs == 1 ? nullptr
                                                   : new float[static_cast<size_t>(heads * runs * p.lq * p.d)]);
  Products products;
  parallel_for(pool, heads * runs, [&](int64_t i) {
    thread_local Scratch of_q, of_k, of_v, of_y, of_dy, of_dq, of_dk, of_dv, of_s, of_dp, of_delta, of_p, of_ds;
    use_one_thread();
    const int64_t run = i % runs, h = i / runs % p.heads, b = i / runs / p.heads;
    const T *y = head_of(p, g.y, p.lq, b, h), *dy = head_of(p, g.dy, p.lq, b, h);
    const float* lse = g.lse + (b * p.heads + h) * p.lq;
    float* delta = of_delta.floats(p.lq);
    for (int64_t j = 0; j < queries.count; ++j) {
      const int64_t first = queries.begin(j), rows = queries.rows(j);
      row_products(floats_of(p, dy, first, rows, of_dy), floats_of(p, y, first, rows, of_y), rows, p.d, delta + first);
    }
    float* dq = runs == 1 ? of_dq.floats(p.lq * p.d) : partial.get() + i * p.lq * p.d;
    std::fill_n(dq, p.lq * p.d, 0.0f);

    const Rows<E> qs = head_rows<E>(p, head_of(p, g.q, p.lq, b, h), p.lq, of_q), dys = head_rows<E>(p, dy, p.lq, of_dy),
                  ks = head_rows<E>(p, head_of(p, g.k, p.lk, b, h), p.lk, of_k),
                  vs = head_rows<E>(p, head_of(p, g.v, p.lk, b, h), p.lk, of_v);
    float *s = of_s.floats(kQueries<E> * kKeys), *dp = of_dp.floats(kQueries<E> * kKeys);
    float *dk = of_dk.floats(kKeys * p.d), *dv = of_dv.floats(kKeys * p.d);
    for (int64_t j = keys.count * run / runs; j < keys.count * (run + 1) / runs; ++j) {
      const int64_t first_key = keys.begin(j), cols = keys.rows(j), n = keys_in_products<E>(cols);
      const int64_t width = round_up(cols, kVector);
      const Rows<E> block_k = ks.from(first_key), block_v = vs.from(first_key);
      std::fill_n(dk, n * p.d, 0.0f);
      std::fill_n(dv, n * p.d, 0.0f);
      for (int64_t block = 0; block < queries.count; ++block) {
        const int64_t first = queries.begin(block), rows = queries.rows(block);
        if (visible(p, b, first + rows - 1, first_key, cols) == 0) continue;
        const Rows<E> block_q = qs.from(first), block_dy = dys.from(first);
        products("NT", rows, n, p.d, p.scale, block_q, block_k, 0, s, width);
        products("NT", rows, n, p.d, 1, block_dy, block_v, 0, dp, width);
        logit_gradients<E>(p, b, first, first_key, rows, cols, lse + first, delta + first, s, dp);
        const Rows<E> ps = block_of<E>(s, rows, width, of_p), ds = block_of<E>(dp, rows, width, of_ds);
        products("TN", n, p.d, rows, 1, ps, block_dy, 1, dv, p.d);
        products("TN", n, p.d, rows, p.scale, ds, block_q, 1, dk, p.d);
        products("NN", rows, p.d, n, p.scale, ds, block_k, 1, dq + first * p.d, p.d);
      }
      write_rows(p, dk, head_of(p, g.dk, p.lk, b, h), first_key, cols);
      write_rows(p, dv, head_of(p, g.dv, p.lk, b, h), first_key, cols);
    }
    if (runs == 1) write_rows(p, dq, head_of(p, g.dq, p.lq, b, h), 0, p.lq);
  });
  if (runs > 1)
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

/// `optional_inputs`: lengths s32 [B], or none.
ffi::ErrorOr<Problem> problem(ffi::AnyBuffer q, ffi::AnyBuffer k, const ffi::RemainingArgs& optional_inputs,
                              double scale, bool causal) {
  const auto a = q.dimensions(), b = k.dimensions();
  const auto type = q.element_type();
  if (a.size() != 4 || b.size() != 4 || a[0] != b[0] || a[2] != b[2] || a[3] != b[3] || type != k.element_type() ||
      (type != ffi::F32 && type != ffi::BF16))
    return ffi::Unexpected(ffi::Error::InvalidArgument("attention: q and k are not [B, L, H, D] of f32 or bf16"));
  const int32_t* lengths = nullptr;
  if (!optional_inputs.empty()) {
    const auto lengths_input = optional_inputs.get<ffi::Buffer<ffi::S32>>(0);
    if (lengths_input.has_error()) return ffi::Unexpected(lengths_input.error());
    if (lengths_input->dimensions().size() != 1 || lengths_input->dimensions()[0] != a[0])
      return ffi::Unexpected(ffi::Error::InvalidArgument("attention: lengths are not s32 [B]"));
    lengths = lengths_input->typed_data();
  }
  return Problem{a[0], a[2], a[1], b[1], a[3], static_cast<float>(scale), causal, lengths};
}

/// Calls f with null pointers to the element types of the arrays and of the products' operands.
template <class F>
ffi::Error with_types(bool bf16, bool in_bf16, const F& f) {
  float* wide = nullptr;
  uint16_t* narrow = nullptr;
  if (!bf16) return f(wide, wide);
  return in_bf16 ? f(narrow, narrow) : f(narrow, wide);
}

ffi::Error attention_kernel(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::RemainingArgs optional_inputs, ffi::Result<ffi::AnyBuffer> y,
                            ffi::ResultBuffer<ffi::F32> lse, double scale, bool causal, bool in_bf16) {
  Span span("attention");
  const auto p = problem(q, k, optional_inputs, scale, causal);
  if (p.has_error()) return p.error();
  auto of = [&]<class T, class E>(T*, E*) {
    auto at = [](auto& x) { return static_cast<T*>(x.untyped_data()); };
    return attention<T, E>(pool, *p, at(q), at(k), at(v), at(*y), lse->typed_data());
  };
  return with_types(q.element_type() == ffi::BF16, in_bf16, of);
}

ffi::Error attention_grad_kernel(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                 ffi::AnyBuffer y, ffi::Buffer<ffi::F32> lse, ffi::AnyBuffer dy,
                                 ffi::RemainingArgs optional_inputs, ffi::Result<ffi::AnyBuffer> dq,
                                 ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv, double scale,
                                 bool causal, bool in_bf16) {
  Span span("attention gradient");
  const auto p = problem(q, k, optional_inputs, scale, causal);
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
                           .RemainingArgs()
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
                           .RemainingArgs()
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
