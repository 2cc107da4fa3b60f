#include "maxdiffusion/nn/quantization.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

/// The value to which a tensor's bound is scaled, and the limits of quantized values.
struct Range {
  DType type;
  double bound, low, high;
};
constexpr Range kRanges[] = {
    {DType::s8, 127.5, -127, 127},
    {DType::f8e4m3fn, 448, -448, 448},
    {DType::f8e5m2, 57344, -57344, 57344},
};

const Range& range_of(DType type) {
  for (const Range& r : kRanges)
    if (r.type == type) return r;
  fail(Code::internal, "quantize: to {}", to_string(type));
}

Tensor bound_of(Tensor x, const Axes& shared, const Calibration& c) {
  if (c.method == Calibration::Method::fixed) {
    Dims ones(x.dims().size(), 1);
    return full(x.graph(), c.factor, {DType::f32, ones});
  }
  Tensor size = c.method == Calibration::Method::rms ? sqrt(mean(square(x), shared, true)) : max(abs(x), shared, true);
  return c.factor == 1 ? size : size * c.factor;
}

/// Axes with separate ranges.
Axes channel_axes_of(Tensor x, bool per_channel, bool rows) {
  if (!per_channel) return {};
  Axes axes = {0};
  for (int64_t a = 1; rows && a + 1 < x.rank(); ++a) axes.push_back(a);
  return rows && x.rank() < 2 ? Axes{} : axes;
}

/// The quantized operands of one product; w is stored sharded, and its quantized form is gathered.
struct Operands {
  Quantized x, w;
  Operands(const Quantization& q, Tensor x_, Tensor w_, const LogicalAxes& axes)
      : x(quantize(x_, q.operands, channel_axes_of(x_, q.per_channel, w_.rank() == 2), q.activation)),
        w(quantize(w_, q.operands, channel_axes_of(w_, q.per_channel, false), q.weight)) {
    w.values = gather_weight(w.values, axes);
    DimAxes used = axes_in_use(w_, axes);
    for (int64_t a = 0; a < w.scale.rank(); ++a)
      if (w.scale.dim(a) == 1) used[static_cast<size_t>(a)].clear();
    w.scale = shard_axes(w.scale, used);
  }
};

Tensor multiplied(const Operands& o, const Product& f, DType to) {
  const Tensor sums = cast(f(o.x.values, o.w.values), DType::f32);
  return cast(sums * o.x.scale * reshape(o.w.scale, {-1}), to);
}

Tensor dequantized(const Quantized& q, DType to) { return cast(cast(q.values, DType::f32) * q.scale, to); }

/// Cotangents of x and w if only the forward product is quantized.
Grads wide_gradients(const Quantization& q, Tensor x, Tensor w, const LogicalAxes& axes, Tensor dy, const Product& f) {
  Tensor a = stop_gradient(x), b = stop_gradient(w);
  if (w.rank() != 2) {
    const Operands o(q, x, w, axes);
    a = dequantized(o.x, x.dtype()), b = dequantized(o.w, x.dtype());
  } else {
    b = gather_weight(b, axes);
  }
  const Grads d = vjp({f(a, b)}, {dy}, {a, b});
  return {d[0], shard_as_stored(d[1], axes)};
}

/// Cotangents with quantized dy: dy is scaled by the other operand's scale, then quantized, for each operand. Here
/// every operand has one scale. 8-bit floats are exact in every type that layers compute in; a compiler that supports
/// float8 products recognizes them behind the conversions.
Grads narrow_gradients(const Quantization& q, DType type, Tensor x, Tensor w, const LogicalAxes& axes, Tensor dy,
                       const Product& f) {
  const Operands o(q, x, w, axes);
  const DType wide = x.dtype();
  const Tensor a = cast(o.x.values, wide), b = cast(o.w.values, wide);
  auto product_gradient = [&](Tensor mine, const Quantized& other) {
    const Quantized g = quantize(cast(dy, DType::f32) * reshape(other.scale, {}), type, {}, q.gradient);
    const Tensor d = vjp({f(a, b)}, {cast(g.values, wide)}, {mine})[0];
    return cast(cast(d, DType::f32) * reshape(g.scale, {}), wide);
  };
  Grads grads = {product_gradient(a, o.w), shard_as_stored(product_gradient(b, o.x), axes)};
  if (w.rank() != 2) return grads;
  auto where_unclipped = [](Tensor d, Tensor operand, Tensor bound, const Calibration& c) {
    return c.clips() ? where(le(abs(cast(operand, DType::f32)), bound), d, zeros_like(d)) : d;
  };
  return {where_unclipped(grads[0], x, o.x.bound, q.activation), where_unclipped(grads[1], w, o.w.bound, q.weight)};
}

}  // namespace

Calibration parse_calibration(const std::string& key, const std::string& text) {
  std::vector<std::string> words(1);
  for (char c : text) {
    if (c == ',')
      words.emplace_back();
    else if (c != ' ')
      words.back() += static_cast<char>(std::tolower(c));
  }
  auto refused = [&](const char* why) {
    Error e(Code::invalid_config, fmt::format("{} '{}': {}", key, text, why));
    throw e.note("expected absmax, absmax,FACTOR, rms,FACTOR, fixed,BOUND or fixed,-BOUND,BOUND");
  };
  std::vector<double> numbers;
  for (size_t i = 1; i < words.size(); ++i) {
    double v = 0;
    const char* end = words[i].data() + words[i].size();
    const auto [stop, error] = std::from_chars(words[i].data(), end, v);
    if (error != std::errc() || stop != end || !std::isfinite(v)) refused("not a number");
    numbers.push_back(v);
  }
  Calibration c;
  if (words[0] == "minmax" || (words[0] == "fixed" && numbers.size() == 2 && numbers[0] != -numbers[1]))
    refused("8-bit floats have no zero point, so ranges are even");
  if (words[0] == "absmax" && numbers.size() <= 1) {
    c = {Calibration::Method::absmax, numbers.empty() ? 1 : numbers[0]};
  } else if (words[0] == "rms" && numbers.size() == 1) {
    c = {Calibration::Method::rms, numbers[0]};
  } else if (words[0] == "fixed" && (numbers.size() == 1 || numbers.size() == 2)) {
    c = {Calibration::Method::fixed, numbers.back()};
  } else {
    refused("not a way to find a range");
  }
  if (c.factor <= 0) refused("a range is positive");
  return c;
}

Quantized quantize(Tensor x, DType type, const Axes& channel_axes, const Calibration& calibration) {
  const Range& r = range_of(type);
  x = cast(x, DType::f32);
  Axes shared;
  for (int64_t a = 0; a < x.rank(); ++a)
    if (std::ranges::find(channel_axes, a) == channel_axes.end()) shared.push_back(a);
  const Tensor bound = bound_of(x, shared, calibration);
  Tensor scale = bound / r.bound;
  const double tiny = std::sqrt(static_cast<double>(std::numeric_limits<float>::min()));
  scale = where(lt(scale, full_like(scale, tiny)), full_like(scale, 1), scale);
  Tensor values = x / scale;
  if (is_integer(type)) values = round(values);
  return {cast(clamp(values, r.low, r.high), type), scale, bound};
}

bool Quantization::covers(const std::string& path) const {
  return std::regex_match(is_stacked(path) ? layer_path(path, 0) : path, modules);
}

bool is_float8(DType type) { return is_float(type) && size_of(type) == 1; }

Tensor quantized_product(std::shared_ptr<const Quantization> q, Tensor x, Tensor w, const LogicalAxes& axes,
                         const Product& f) {
  const std::optional<DType> gradient = w.rank() == 2 ? q->linear_gradient : q->convolution_gradient;
  check(!gradient || !q->per_channel, Code::internal, "quantized gradients need one range for a tensor");
  return custom_vjp(
      {x, w},
      [&](const std::vector<Tensor>& xs) {
        return std::vector{multiplied(Operands(*q, xs[0], xs[1], axes), f, xs[0].dtype())};
      },
      [q, f, gradient, axes](const std::vector<Tensor>& xs, const std::vector<Tensor>&, const Grads& dys) {
        return gradient ? narrow_gradients(*q, *gradient, xs[0], xs[1], axes, dys[0], f)
                        : wide_gradients(*q, xs[0], xs[1], axes, dys[0], f);
      })[0];
}

QuantizedCount count_quantized(const Quantization& q, const ParamTable& params) {
  const std::string ending = ".weight";
  QuantizedCount count;
  std::vector<std::string> names;
  for (const Param& p : params.params()) {
    const bool stacked = p.stacked > 0;
    if (!p.path.ends_with(ending) || p.shape.rank() < (stacked ? 3 : 2)) continue;
    const std::string module = p.path.substr(0, p.path.size() - ending.size());
    const int64_t layers = std::max<int64_t>(p.stacked, 1), before = count.quantized;
    for (int64_t i = 0; i < layers; ++i) count.quantized += q.covers(stacked ? layer_path(module, i) : module);
    const int64_t covered = count.quantized - before;
    check(covered == 0 || covered == layers, Code::invalid_config,
          "qwix_module_path '{}' matches {} of the {} blocks {}, which scan_layers makes one loop: match all or none, "
          "or set scan_layers to false",
          q.module_path, covered, layers, module);
    names.push_back(stacked ? layer_path(module, 0) : module);
    count.all += layers;
  }
  if (count.quantized > 0) return count;
  Error e(Code::invalid_config,
          fmt::format("qwix_module_path '{}' matches none of {} layers", q.module_path, count.all));
  std::vector<std::string> examples;
  for (size_t i = 0; i < names.size(); i += names.size() / 4 + 1) examples.push_back(names[i]);
  throw e.note(fmt::format("it is compared with whole names, such as {}", fmt::join(examples, ", ")));
}

}  // namespace md
