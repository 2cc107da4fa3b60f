// Group norm on the CPU, channels last, optionally followed by SiLU: XLA spends half of a UNet's compile time on norms.
// Threads process parts of whole rows; sums over parts are added in order between two loops over all parts.

#include <algorithm>
#include <cmath>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/parallel.h"
#include "maxdiffusion/kernels/vector_math.h"

namespace md {
namespace {

struct Sizes {
  int64_t batch, space, channels, groups;
  int64_t group_width() const { return channels / groups; }
  /// The parts do not depend on the number of threads; one of x and one of dy fit in a second-level cache.
  int64_t part_rows() const { return std::max<int64_t>(1, (int64_t{1} << 15) / channels); }
  int64_t parts_per_image() const { return (space + part_rows() - 1) / part_rows(); }
};

/// Rows of one image.
struct Part {
  int64_t image, rows, offset;  // offset: elements before this part
};
std::vector<Part> parts_of(const Sizes& s) {
  std::vector<Part> parts;
  for (int64_t image = 0; image < s.batch; ++image)
    for (int64_t row = 0; row < s.space; row += s.part_rows())
      parts.push_back({image, std::min(s.part_rows(), s.space - row), (image * s.space + row) * s.channels});
  return parts;
}

template <class F>
void for_each(ffi::ThreadPool& pool, const std::vector<Part>& parts, const F& f) {
  parallel_for(pool, static_cast<int64_t>(parts.size()), [&](int64_t i) { f(i, parts[static_cast<size_t>(i)]); });
}

/// Two sums per channel over rows, in float over a few rows, whose sums are added in double. Result: all first sums,
/// then all second. add(row, rows, first, second) adds a few rows.
template <class Add>
void sum_rows(int64_t rows, int64_t channels, double* totals, const Add& add) {
  constexpr int64_t kBlock = 32;
  std::vector<float> block(static_cast<size_t>(2 * channels));
  std::fill_n(totals, block.size(), 0.0);
  for (int64_t row = 0; row < rows; row += kBlock) {
    std::fill(block.begin(), block.end(), 0.0f);
    add(row, std::min(kBlock, rows - row), block.data(), block.data() + channels);
    for (size_t i = 0; i < block.size(); ++i) totals[i] += static_cast<double>(block[i]);
  }
}

/// Sums of x − center and of its square.
template <class T>
MD_VECTORIZED void add_moments(const T* x, int64_t rows, int64_t channels, const float* center, float* sums,
                               float* squares) {
  for (int64_t i = 0; i < rows; ++i, x += channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float d = load(x[c]) - center[c];
      sums[c] += d;
      squares[c] += d * d;
    }
  }
}

/// Number, mean, and sum of squared deviations of some values.
struct Moments {
  double count = 0, mean = 0, squares = 0;
  /// Source: Chan, Golub and LeVeque 1979.
  void add(const Moments& m) {
    const double d = m.mean - mean, both = count + m.count;
    mean += d * m.count / both;
    squares += m.squares + d * d * count * m.count / both;
    count = both;
  }
};

/// Moments of each group over the rows of a part, in two passes.
template <class T>
void part_moments(const Sizes& s, const T* x, int64_t rows, Moments* moments) {
  const int64_t width = s.group_width();
  const auto count = static_cast<double>(rows * width);
  std::vector<float> center(static_cast<size_t>(s.channels));
  std::vector<double> totals(2 * center.size());
  for (int pass = 0; pass < 2; ++pass) {
    sum_rows(rows, s.channels, totals.data(), [&](int64_t row, int64_t n, float* sums, float* squares) {
      add_moments(x + row * s.channels, n, s.channels, center.data(), sums, squares);
    });
    for (int64_t g = 0; g < s.groups; ++g) {
      double sum = 0, squares = 0;
      for (int64_t c = g * width; c < (g + 1) * width; ++c) {
        sum += totals[static_cast<size_t>(c)];
        squares += totals[static_cast<size_t>(s.channels + c)];
      }
      float* const centers = &center[static_cast<size_t>(g * width)];
      const double mean = static_cast<double>(*centers) + sum / count;
      moments[g] = {count, mean, std::max(squares - sum * sum / count, 0.0)};
      std::fill_n(centers, width, static_cast<float>(mean));
    }
  }
}

template <class T, bool silu>
MD_VECTORIZED void write_y(const T* x, T* y, int64_t rows, int64_t channels, const float* mean, const float* scale,
                           const float* bias) {
  for (int64_t i = 0; i < rows; ++i, x += channels, y += channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const float z = (load(x[c]) - mean[c]) * scale[c] + bias[c];
      store(y[c], silu ? z * vector_sigmoid(z) : z);
    }
  }
}

template <class T, bool silu>
void forward(ffi::ThreadPool& pool, const Sizes& s, double eps, const void* x, const float* w, const float* b, void* y,
             float* mean, float* rstd) {
  const T* in = static_cast<const T*>(x);
  T* out = static_cast<T*>(y);
  const auto parts = parts_of(s);
  const auto groups = static_cast<size_t>(s.groups), channels = static_cast<size_t>(s.channels);
  std::vector<Moments> moments(parts.size() * groups);
  for_each(pool, parts, [&](int64_t i, const Part& p) {
    part_moments(s, in + p.offset, p.rows, &moments[static_cast<size_t>(i) * groups]);
  });
  std::vector<Moments> totals(static_cast<size_t>(s.batch) * groups);
  for (size_t i = 0; i < moments.size(); ++i)
    totals[static_cast<size_t>(parts[i / groups].image) * groups + i % groups].add(moments[i]);
  for (size_t i = 0; i < totals.size(); ++i) {
    mean[i] = static_cast<float>(totals[i].mean);
    rstd[i] = static_cast<float>(1 / std::sqrt(totals[i].squares / totals[i].count + eps));
  }
  std::vector<float> means(static_cast<size_t>(s.batch) * channels), scales(means.size());
  for (size_t i = 0; i < means.size(); ++i) {
    const size_t group = i / static_cast<size_t>(s.group_width());
    means[i] = mean[group];
    scales[i] = rstd[group] * w[i % channels];
  }
  for_each(pool, parts, [&](int64_t, const Part& p) {
    const size_t at = static_cast<size_t>(p.image) * channels;
    write_y<T, silu>(in + p.offset, out + p.offset, p.rows, s.channels, &means[at], &scales[at], b);
  });
}

/// Inputs of the backward pass for each channel of an image.
struct Channels {
  const float *mean, *rstd, *w, *b;
};
struct Gradient {
  float n, dz;  // normalized x, cotangent of n·w + b
};
template <class T, bool silu>
[[gnu::always_inline]] inline Gradient gradient_at(const Channels& p, const T* x, const T* dy, int64_t c) {
  const float n = (load(x[c]) - p.mean[c]) * p.rstd[c], d = load(dy[c]);
  if (!silu) return {n, d};
  const float z = n * p.w[c] + p.b[c], sigmoid = vector_sigmoid(z);
  return {n, d * sigmoid * (1.0f + z * (1.0f - sigmoid))};
}

/// Sums of dz and of dz·n.
template <class T, bool silu>
MD_VECTORIZED void add_gradients(const Channels p, const T* x, const T* dy, int64_t rows, int64_t channels, float* sums,
                                 float* products) {
  for (int64_t i = 0; i < rows; ++i, x += channels, dy += channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const Gradient g = gradient_at<T, silu>(p, x, dy, c);
      sums[c] += g.dz;
      products[c] += g.dz * g.n;
    }
  }
}

/// dx = dz·rstd·w − level − n·slope.
template <class T, bool silu>
MD_VECTORIZED void write_dx(const Channels p, const float* level, const float* slope, const T* x, const T* dy, T* dx,
                            int64_t rows, int64_t channels) {
  for (int64_t i = 0; i < rows; ++i, x += channels, dy += channels, dx += channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const Gradient g = gradient_at<T, silu>(p, x, dy, c);
      store(dx[c], g.dz * p.rstd[c] * p.w[c] - level[c] - g.n * slope[c]);
    }
  }
}

template <class T, bool silu>
void backward(ffi::ThreadPool& pool, const Sizes& s, const void* x, const void* dy, const float* w, const float* b,
              const float* mean, const float* rstd, void* dx, float* dw, float* db) {
  const T *in = static_cast<const T*>(x), *cotangent = static_cast<const T*>(dy);
  T* out = static_cast<T*>(dx);
  const auto parts = parts_of(s);
  const auto channels = static_cast<size_t>(s.channels), width = static_cast<size_t>(s.group_width());
  std::vector<float> means(static_cast<size_t>(s.batch) * channels), rstds(means.size()), levels(means.size()),
      slopes(means.size());
  for (size_t i = 0; i < means.size(); ++i) {
    means[i] = mean[i / width];
    rstds[i] = rstd[i / width];
  }
  auto known = [&](const Part& p) {
    const size_t at = static_cast<size_t>(p.image) * channels;
    return Channels{&means[at], &rstds[at], w, b};
  };
  std::vector<double> sums(parts.size() * 2 * channels);  // of dz, then of dz·n
  for_each(pool, parts, [&](int64_t i, const Part& p) {
    sum_rows(p.rows, s.channels, &sums[static_cast<size_t>(i) * 2 * channels],
             [&](int64_t row, int64_t rows, float* first, float* second) {
               const int64_t at = p.offset + row * s.channels;
               add_gradients<T, silu>(known(p), in + at, cotangent + at, rows, s.channels, first, second);
             });
  });
  std::vector<double> all(2 * channels);
  for (size_t image = 0, part = 0; image < static_cast<size_t>(s.batch); ++image) {
    std::vector<double> totals(2 * channels);
    for (int64_t k = 0; k < s.parts_per_image(); ++k, ++part)
      for (size_t c = 0; c < 2 * channels; ++c) totals[c] += sums[part * 2 * channels + c];
    for (size_t c = 0; c < 2 * channels; ++c) all[c] += totals[c];
    for (size_t from = 0; from < channels; from += width) {
      double level = 0, slope = 0;
      for (size_t c = from; c < from + width; ++c) {
        level += totals[c] * static_cast<double>(w[c]);
        slope += totals[channels + c] * static_cast<double>(w[c]);
      }
      const size_t at = image * channels + from;
      const double r = static_cast<double>(rstds[at]) / static_cast<double>(s.space * s.group_width());
      std::fill_n(&levels[at], width, static_cast<float>(level * r));
      std::fill_n(&slopes[at], width, static_cast<float>(slope * r));
    }
  }
  for (size_t c = 0; c < channels; ++c) {
    db[c] = static_cast<float>(all[c]);
    dw[c] = static_cast<float>(all[channels + c]);
  }
  for_each(pool, parts, [&](int64_t, const Part& p) {
    const size_t at = static_cast<size_t>(p.image) * channels;
    write_dx<T, silu>(known(p), &levels[at], &slopes[at], in + p.offset, cotangent + p.offset, out + p.offset, p.rows,
                      s.channels);
  });
}

ffi::ErrorOr<Sizes> sizes_of(const ffi::AnyBuffer& x, int64_t groups) {
  const auto dims = x.dimensions();
  if (dims.size() < 2 || groups < 1 || dims.back() % groups != 0)
    return ffi::Unexpected(ffi::Error::InvalidArgument("md_group_norm: x is not [B, space…, C] with whole groups"));
  Sizes s{dims.front(), 1, dims.back(), groups};
  for (size_t i = 1; i + 1 < dims.size(); ++i) s.space *= dims[i];
  return s;
}

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error forward_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, F32 w, F32 b, ffi::Result<ffi::AnyBuffer> y,
                          ffi::Result<F32> mean, ffi::Result<F32> rstd, int64_t groups, double eps, bool silu) {
  Span span("group norm");
  const auto s = sizes_of(x, groups);
  if (s.has_error()) return s.error();
  const auto run = x.element_type() == ffi::BF16 ? (silu ? forward<uint16_t, true> : forward<uint16_t, false>)
                                                 : (silu ? forward<float, true> : forward<float, false>);
  run(pool, *s, eps, x.untyped_data(), w.typed_data(), b.typed_data(), y->untyped_data(), mean->typed_data(),
      rstd->typed_data());
  return ffi::Error::Success();
}

ffi::Error backward_kernel(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, F32 w, F32 b, F32 mean, F32 rstd,
                           ffi::Result<ffi::AnyBuffer> dx, ffi::Result<F32> dw, ffi::Result<F32> db, int64_t groups,
                           bool silu) {
  Span span("group norm gradient");
  const auto s = sizes_of(x, groups);
  if (s.has_error()) return s.error();
  const auto run = x.element_type() == ffi::BF16 ? (silu ? backward<uint16_t, true> : backward<uint16_t, false>)
                                                 : (silu ? backward<float, true> : backward<float, false>);
  run(pool, *s, x.untyped_data(), dy.untyped_data(), w.typed_data(), b.typed_data(), mean.typed_data(),
      rstd.typed_data(), dx->untyped_data(), dw->typed_data(), db->typed_data());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kForward, forward_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<F32>()
                           .Ret<F32>()
                           .Attr<int64_t>("groups")
                           .Attr<double>("eps")
                           .Attr<bool>("silu"));

XLA_FFI_DEFINE_HANDLER(kBackward, backward_kernel,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Arg<F32>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<F32>()
                           .Ret<F32>()
                           .Attr<int64_t>("groups")
                           .Attr<bool>("silu"));

}  // namespace

void* group_norm_handler() { return reinterpret_cast<void*>(kForward); }
void* group_norm_grad_handler() { return reinterpret_cast<void*>(kBackward); }

}  // namespace md
