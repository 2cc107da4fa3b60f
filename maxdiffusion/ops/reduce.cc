// Reductions and operations built from them: sums, extremes, softmax, running sums and sorting. bf16 and f16 are
// widened to f32 inside the printed statement, so a graph has a single node and rules need not handle accumulation
// types.
#include "maxdiffusion/ops/reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

DType accumulator(DType t) { return is_float(t) && size_of(t) < 4 ? DType::f32 : t; }

// ---- printing

Value convert(EmitCtx& c, const Value& v, DType to) {
  if (v.shape.dtype == to) return v;
  return c.emit("stablehlo.convert", {v}, Shape{to, v.shape.dims});
}

Dims without(const Dims& dims, const Axes& axes) {
  Dims out;
  for (size_t i = 0; i < dims.size(); ++i)
    if (std::find(axes.begin(), axes.end(), static_cast<int64_t>(i)) == axes.end()) out.push_back(dims[i]);
  return out;
}

Value print_reduce(EmitCtx& c, const Value& v, const Axes& axes, const char* op, const Value& start) {
  Shape scalar{v.shape.dtype, {}};
  std::string region = c.region({scalar, scalar}, [&](EmitCtx& r, const std::vector<Value>& a) {
    return std::vector<Value>{r.emit(op, {a[0], a[1]}, scalar)};
  });
  return c.emit_multi("stablehlo.reduce", {v, start}, {{v.shape.dtype, without(v.shape.dims, axes)}},
                      "dimensions = " + mlir_array(axes), {region})[0];
}

/// The value that loses every comparison in this type.
Value lowest(EmitCtx& c, DType t, bool largest_instead = false) {
  Shape scalar{t, {}};
  if (is_float(t)) {
    // f8e4m3fn has no infinity: uses its largest finite value.
    double bound = t == DType::f8e4m3fn ? 448 : kInfinity;
    return c.constant(largest_instead ? bound : -bound, scalar);
  }
  if (t == DType::pred) return c.constant_int(largest_instead, scalar);
  const int bits = static_cast<int>(size_of(t)) * 8;
  if (is_unsigned(t)) {
    int64_t top = bits == 64 ? -1 : static_cast<int64_t>((uint64_t{1} << bits) - 1);
    return c.constant_int(largest_instead ? top : 0, scalar);
  }
  int64_t bottom = std::numeric_limits<int64_t>::min() >> (64 - bits);
  return c.constant_int(largest_instead ? ~bottom : bottom, scalar);
}

// ---- reductions

std::vector<Shape> infer_reduce(const InferCtx& c) {
  const auto& axes = c.attrs<Axes>();
  check(std::is_sorted(axes.begin(), axes.end()) && std::adjacent_find(axes.begin(), axes.end()) == axes.end(),
        Code::invalid_graph, "{}: axes {} of {} must be distinct", c.op.name, to_string(axes), to_string(c.in[0]));
  for (int64_t a : axes) c.in[0].dim(a);
  return {{c.in[0].dtype, without(c.in[0].dims, axes)}};
}

std::vector<Shape> infer_truth(const InferCtx& c) {
  check(c.in[0].dtype == DType::pred, Code::invalid_graph, "{}: needs pred, found {}", c.op.name, to_string(c.in[0]));
  return infer_reduce(c);
}

/// y with the reduced axes as size 1, for broadcasting.
Tensor keep_axes(Tensor y, const Dims& dims, const Axes& axes) {
  Dims keep_dims = dims;
  for (int64_t a : axes) keep_dims[static_cast<size_t>(a)] = 1;
  return reshape(y, keep_dims);
}

/// y broadcast over the reduced axes.
Tensor spread(Tensor y, const Dims& dims, const Axes& axes) {
  Axes remaining;
  for (int64_t a = 0; a < static_cast<int64_t>(dims.size()); ++a)
    if (std::find(axes.begin(), axes.end(), a) == axes.end()) remaining.push_back(a);
  return broadcast_in_dim(y, dims, remaining);
}

std::vector<OpSample> reductions() {
  return {{{f64({2, 3, 4})}, Axes{1}}, {{f64({2, 3})}, Axes{0, 1}}, {{f64({2, 3, 2})}, Axes{0, 2}}};
}

/// Whether the CPU kernel computes a sum: over adjacent axes before the last, and not small.
bool cpu_kernel_sums(const EmitCtx& c) {
  constexpr int64_t kSmall = 1 << 12;
  const Shape& x = c.in().shape;
  const Axes& axes = c.attrs<Axes>();
  return c.options().calls_cpu_kernels() && (x.dtype == DType::f32 || x.dtype == DType::bf16) && !axes.empty() &&
         axes.back() == x.rank() - 2 && axes.back() - axes.front() + 1 == static_cast<int64_t>(axes.size()) &&
         x.elements() >= kSmall;
}

constexpr OpDef kSum = {
    .name = "sum",
    .infer = infer_reduce,
    .emit =
        [](EmitCtx& c) {
          if (cpu_kernel_sums(c)) {
            const Value sums = emit_custom_call(
                c, {c.in()},
                {.target = kColumnSumsKernel, .results = {{DType::f32, c.out().dims}}, .backend_config = {}})[0];
            if (c.out().dtype != DType::f32) c.set_unrounded(sums);
            return c.set_out(convert(c, sums, c.out().dtype));
          }
          DType wide = accumulator(c.out().dtype);
          Value v =
              print_reduce(c, convert(c, c.in(), wide), c.attrs<Axes>(), "stablehlo.add", c.constant(0, {wide, {}}));
          c.set_out(convert(c, v, c.out().dtype));
        },
    .vjp = [](const VjpCtx& c) -> Grads { return {spread(c.dy(), c.in().dims(), c.attrs<Axes>())}; },
    .samples = reductions,
};

Grads share_among_ties(const VjpCtx& c) {
  const auto& axes = c.attrs<Axes>();
  const Dims& dims = c.in().dims();
  Tensor tie = cast(eq(c.in(), spread(c.out(), dims, axes)), c.dy().dtype());
  return {tie * spread(c.dy() / sum(tie, axes), dims, axes)};
}

constexpr OpDef kMax = {
    .name = "reduce_max",
    .infer = infer_reduce,
    .emit =
        [](EmitCtx& c) {
          c.set_out(print_reduce(c, c.in(), c.attrs<Axes>(), "stablehlo.maximum", lowest(c, c.out().dtype)));
        },
    .vjp = share_among_ties,
    .samples = reductions,
};

constexpr OpDef kMin = {
    .name = "reduce_min",
    .infer = infer_reduce,
    .emit =
        [](EmitCtx& c) {
          c.set_out(print_reduce(c, c.in(), c.attrs<Axes>(), "stablehlo.minimum", lowest(c, c.out().dtype, true)));
        },
    .vjp = share_among_ties,
    .samples = reductions,
};

std::vector<OpSample> truths() { return {{{pred({2, 3})}, Axes{1}}}; }

constexpr OpDef kAll = {
    .name = "reduce_and",
    .infer = infer_truth,
    .emit =
        [](EmitCtx& c) {
          c.set_out(print_reduce(c, c.in(), c.attrs<Axes>(), "stablehlo.and", c.constant_int(1, {DType::pred, {}})));
        },
    .vjp = no_gradient,
    .samples = truths,
};

constexpr OpDef kAny = {
    .name = "reduce_or",
    .infer = infer_truth,
    .emit =
        [](EmitCtx& c) {
          c.set_out(print_reduce(c, c.in(), c.attrs<Axes>(), "stablehlo.or", c.constant_int(0, {DType::pred, {}})));
        },
    .vjp = no_gradient,
    .samples = truths,
};

/// A reduction over (value, index) pairs: the larger value wins, then the smaller index. NaN is larger than any number.
constexpr OpDef kArgmax = {
    .name = "argmax",
    .infer =
        [](const InferCtx& c) {
          return std::vector<Shape>{{DType::s32, without(c.in[0].dims, {c.attrs<int64_t>()})}};
        },
    .emit =
        [](EmitCtx& c) {
          const Value x = c.in();
          Shape value{x.shape.dtype, {}}, index{DType::s32, {}}, truth{DType::pred, {}};
          Value places = c.emit("stablehlo.iota", {}, Shape{DType::s32, x.shape.dims},
                                fmt::format("iota_dimension = {} : i64", c.attrs<int64_t>()));
          auto compare = [](EmitCtx& r, const Value& a, const Value& b, const char* direction) {
            return r.emit("stablehlo.compare", {a, b}, Shape{DType::pred, {}},
                          fmt::format("comparison_direction = #stablehlo<comparison_direction {}>", direction));
          };
          std::string region = c.region({value, index, value, index}, [&](EmitCtx& r, const std::vector<Value>& a) {
            Value larger = compare(r, a[0], a[2], "GT"), same = compare(r, a[0], a[2], "EQ");
            if (is_float(value.dtype)) {
              Value left = compare(r, a[0], a[0], "NE"), right = compare(r, a[2], a[2], "NE");
              larger = r.emit("stablehlo.or", {larger, left}, truth);
              same = r.emit("stablehlo.or", {same, r.emit("stablehlo.and", {left, right}, truth)}, truth);
            }
            Value earlier = compare(r, a[1], a[3], "LT");
            Value wins = r.emit("stablehlo.select", {same, earlier, larger}, truth);
            return std::vector<Value>{r.emit("stablehlo.select", {wins, a[0], a[2]}, value),
                                      r.emit("stablehlo.select", {wins, a[1], a[3]}, index)};
          });
          auto out = c.emit_multi(
              "stablehlo.reduce",
              {x, places, lowest(c, value.dtype), c.constant_int(std::numeric_limits<int32_t>::max(), index)},
              {{value.dtype, c.out().dims}, c.out()}, fmt::format("dimensions = array<i64: {}>", c.attrs<int64_t>()),
              {region});
          c.set_out(out[1]);
        },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 5})}, int64_t{1}}, {{s32({3, 2})}, int64_t{0}}};
    },
};

/// y_i = Σ_{j ≤ i} x_j: a window over the whole axis, padded at the start.
constexpr OpDef kCumsum = {
    .name = "cumsum",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit =
        [](EmitCtx& c) {
          size_t rank = c.out().dims.size(), axis = static_cast<size_t>(c.attrs<int64_t>());
          DType wide = accumulator(c.out().dtype);
          Shape scalar{wide, {}};
          Dims ones(rank, 1), window = ones;
          window[axis] = c.out().dims[axis];
          std::string padding;
          for (size_t i = 0; i < rank; ++i)
            padding += fmt::format("{}[{}, 0]", i ? ", " : "", i == axis ? window[axis] - 1 : 0);
          std::string region = c.region({scalar, scalar}, [&](EmitCtx& r, const std::vector<Value>& a) {
            return std::vector<Value>{r.emit("stablehlo.add", {a[0], a[1]}, scalar)};
          });
          Value v = c.emit_multi(
              "stablehlo.reduce_window", {convert(c, c.in(), wide), c.constant(0, scalar)}, {{wide, c.out().dims}},
              fmt::format("window_dimensions = {}, window_strides = {}, base_dilations = {}, window_dilations = {}, "
                          "padding = dense<[{}]> : tensor<{}x2xi64>",
                          mlir_array(window), mlir_array(ones), mlir_array(ones), mlir_array(ones), padding, rank),
              {region})[0];
          c.set_out(convert(c, v, c.out().dtype));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      int64_t axis = c.attrs<int64_t>();
      return {reverse(cumsum(reverse(c.dy(), {axis}), axis), {axis})};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 5})}, int64_t{1}}, {{f64({3, 2})}, int64_t{0}}};
    },
};

/// dx = y · (dy − Σ dy·y). Rows that are all −∞ give NaN, as the formula does.
constexpr OpDef kSoftmax = {
    .name = "softmax",
    .infer =
        [](const InferCtx& c) {
          check(is_float(c.in[0].dtype), Code::invalid_graph, "softmax: needs a floating tensor, found {}",
                to_string(c.in[0]));
          return std::vector<Shape>{c.in[0]};
        },
    .emit =
        [](EmitCtx& c) {
          Axes axes = {c.attrs<int64_t>()}, others;
          DType wide = accumulator(c.out().dtype);
          for (int64_t a = 0; a < c.out().rank(); ++a)
            if (a != axes[0]) others.push_back(a);
          Value x = convert(c, c.in(), wide);
          Value top = print_reduce(c, x, axes, "stablehlo.maximum", lowest(c, wide));
          Value shifted = c.emit("stablehlo.subtract", {x, c.broadcast(top, x.shape.dims, others)}, x.shape);
          Value e = c.emit("stablehlo.exponential", {shifted}, x.shape);
          Value total = print_reduce(c, e, axes, "stablehlo.add", c.constant(0, {wide, {}}));
          Value y = c.emit("stablehlo.divide", {e, c.broadcast(total, x.shape.dims, others)}, x.shape);
          c.set_out(convert(c, y, c.out().dtype));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      DType wide = accumulator(c.out().dtype());
      Tensor y = cast(c.out(), wide), dy = cast(c.dy(), wide);
      return {cast(y * (dy - sum(dy * y, {c.attrs<int64_t>()}, true)), c.in().dtype())};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 5})}, int64_t{1}}, {{f64({3, 2})}, int64_t{0}}};
    },
};

// ---- sorting

struct SortOptions {
  int64_t axis;
  bool descending;
};

/// The cotangent of a permutation is the inverse permutation, which is the sort by original positions: perm returns
/// every cotangent to its element.
Grads sort_grad(const VjpCtx& c) {
  const auto& o = c.attrs<SortOptions>();
  Tensor keys = c.in(0);
  Tensor places = iota(keys.graph(), {DType::s32, keys.dims()}, o.axis);
  Tensor came_from = sort(keys, {places}, o.axis, o.descending)[1];
  Grads g(c.in_count());
  std::vector<Tensor> dys;
  std::vector<size_t> which;
  for (size_t i = 0; i < c.in_count(); ++i) {
    int k = static_cast<int>(i);
    if (!c.needs(k) || !c.dy(k)) continue;
    dys.push_back(c.dy(k));
    which.push_back(i);
  }
  if (dys.empty()) return g;
  auto home = sort(came_from, dys, o.axis);
  for (size_t i = 0; i < which.size(); ++i) g[which[i]] = home[i + 1];
  return g;
}

/// Floats compare by total order: −NaN < −∞ < … < −0 < +0 < … < ∞ < NaN.
constexpr OpDef kSort = {
    .name = "sort",
    .infer =
        [](const InferCtx& c) {
          for (const Shape& s : c.in)
            check(s.dims == c.in[0].dims, Code::invalid_graph, "sort: values {} with keys {}", to_string(s),
                  to_string(c.in[0]));
          return std::vector<Shape>(c.in.begin(), c.in.end());
        },
    .emit =
        [](EmitCtx& c) {
          const auto& o = c.attrs<SortOptions>();
          std::vector<Value> in;
          std::vector<Shape> scalars;
          for (int i = 0; i < c.in_count(); ++i) {
            in.push_back(c.in(i));
            scalars.insert(scalars.end(), 2, Shape{c.in(i).shape.dtype, {}});
          }
          DType t = in[0].shape.dtype;
          const char* type = is_float(t) ? "TOTALORDER" : is_unsigned(t) || t == DType::pred ? "UNSIGNED" : "SIGNED";
          std::string region = c.region(scalars, [&](EmitCtx& r, const std::vector<Value>& a) {
            return std::vector<Value>{r.emit("stablehlo.compare", {a[0], a[1]}, Shape{DType::pred, {}},
                                             fmt::format("comparison_direction = #stablehlo<comparison_direction {}>, "
                                                         "compare_type = #stablehlo<comparison_type {}>",
                                                         o.descending ? "GT" : "LT", type))};
          });
          auto out = c.emit_multi("stablehlo.sort", in, c.node().outputs,
                                  fmt::format("dimension = {} : i64, is_stable = true", o.axis), {region});
          for (int i = 0; i < c.in_count(); ++i) c.set_out(out[static_cast<size_t>(i)], i);
        },
    .vjp = sort_grad,
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 5}), f64({2, 5})}, SortOptions{1, false}}, {{f64({4, 2})}, SortOptions{0, true}}};
    },
};

// ---- axes as passed by users

Axes all_or(Axes axes, int64_t rank) {
  if (axes.empty())
    for (int64_t a = 0; a < rank; ++a) axes.push_back(a);
  for (int64_t& a : axes) a = normalize_axis(a, rank);
  std::sort(axes.begin(), axes.end());
  return axes;
}

Tensor reduction(const OpDef& op, Tensor x, Axes axes, bool keep) {
  axes = all_or(std::move(axes), x.rank());
  if (axes.empty()) return x;  // a scalar
  Tensor y = apply(op, {x}, axes);
  return keep ? keep_axes(y, x.dims(), axes) : y;
}

}  // namespace

Tensor sum(Tensor x, Axes axes, bool keep) { return reduction(kSum, x, std::move(axes), keep); }
Tensor max(Tensor x, Axes axes, bool keep) { return reduction(kMax, x, std::move(axes), keep); }
Tensor min(Tensor x, Axes axes, bool keep) { return reduction(kMin, x, std::move(axes), keep); }
Tensor all(Tensor x, Axes axes, bool keep) { return reduction(kAll, x, std::move(axes), keep); }
Tensor any(Tensor x, Axes axes, bool keep) { return reduction(kAny, x, std::move(axes), keep); }

Tensor mean(Tensor x, Axes axes, bool keep) {
  axes = all_or(std::move(axes), x.rank());
  int64_t n = 1;
  for (int64_t a : axes) n *= x.dim(a);
  Tensor wide = cast(x, accumulator(x.dtype()));
  return cast(sum(wide, axes, keep) * (1.0 / static_cast<double>(n)), x.dtype());
}

Tensor argmax(Tensor x, int64_t axis) { return apply(kArgmax, {x}, normalize_axis(axis, x.rank())); }

Tensor cumsum(Tensor x, int64_t axis) { return apply(kCumsum, {x}, normalize_axis(axis, x.rank())); }

Tensor softmax(Tensor x, int64_t axis) { return apply(kSoftmax, {x}, normalize_axis(axis, x.rank())); }

Tensor logsumexp(Tensor x, int64_t axis, bool keep) {
  Tensor wide = cast(x, accumulator(x.dtype()));
  Tensor top = stop_gradient(max(wide, {axis}, true));
  top = where(is_finite(top), top, zeros_like(top));  // a row of −∞ gives −∞, not NaN
  Tensor y = cast(log(sum(exp(wide - top), {axis}, true)) + top, x.dtype());
  return keep ? y : squeeze(y, axis);
}

std::vector<Tensor> sort(Tensor keys, const std::vector<Tensor>& values, int64_t axis, bool descending) {
  std::vector<Tensor> in = {keys};
  in.insert(in.end(), values.begin(), values.end());
  return apply_multi(kSort, in, SortOptions{normalize_axis(axis, keys.rank()), descending});
}

Tensor sum_of_squares(const std::vector<Tensor>& xs) {
  check(!xs.empty(), Code::invalid_graph, "sum_of_squares: no tensors given");
  Tensor total;
  for (Tensor x : xs) {
    Tensor one = sum(square(cast(x, DType::f32)));
    total = total ? total + one : one;
  }
  return total;
}

OpList reduce_ops() { return {&kSum, &kMax, &kMin, &kAll, &kAny, &kArgmax, &kCumsum, &kSoftmax, &kSort}; }

}  // namespace md
