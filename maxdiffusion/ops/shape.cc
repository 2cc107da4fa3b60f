// Operations that move elements without arithmetic. Functions normalize axes and create no node if it would change
// nothing; records have complete, non-negative attributes.
#include "maxdiffusion/ops/shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"

namespace md {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

Axes normalized(Axes axes, int64_t rank) {
  for (int64_t& a : axes) a = normalize_axis(a, rank);
  return axes;
}

Axes counting(int64_t n) {
  Axes a(at(n));
  std::iota(a.begin(), a.end(), 0);
  return a;
}

void require_distinct(const InferCtx& c, Axes axes) {
  std::sort(axes.begin(), axes.end());
  check(std::adjacent_find(axes.begin(), axes.end()) == axes.end(), Code::invalid_graph,
        "{}: axes {} name one axis twice, for {}", c.op.name, to_string(axes), to_string(c.in[0]));
}

// ---- reshape, transpose, broadcast, reverse

constexpr OpDef kReshape = {
    .name = "reshape",
    .infer =
        [](const InferCtx& c) {
          Shape out{c.in[0].dtype, c.attrs<Dims>()};
          check(out.elements() == c.in[0].elements(), Code::invalid_graph,
                "reshape: {} has {} elements, {} would have {}", to_string(c.in[0]), c.in[0].elements(),
                to_string(out.dims), out.elements());
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          c.simple("stablehlo.reshape");
          if (const Value& wide = c.unrounded(); wide.shape.dtype != c.out().dtype)
            c.set_unrounded(c.emit("stablehlo.reshape", {wide}, {wide.shape.dtype, c.out().dims}));
        },
    .vjp = [](const VjpCtx& c) -> Grads { return {reshape(c.dy(), c.in().dims())}; },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 3, 4})}, Dims{6, 4}}, {{f64({1, 1})}, Dims{}}};
    },
    .cheap = true,
};

constexpr OpDef kTranspose = {
    .name = "transpose",
    .infer =
        [](const InferCtx& c) {
          const auto& p = c.attrs<Axes>();
          check(p.size() == c.in[0].dims.size(), Code::invalid_graph, "transpose: {} axes given for {}", p.size(),
                to_string(c.in[0]));
          require_distinct(c, p);
          Shape out{c.in[0].dtype, {}};
          for (int64_t a : p) out.dims.push_back(c.in[0].dim(a));
          return std::vector<Shape>{out};
        },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.transpose", "permutation = " + mlir_array(c.attrs<Axes>())); },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& p = c.attrs<Axes>();
      Axes inverse(p.size());
      for (size_t i = 0; i < p.size(); ++i) inverse[at(p[i])] = static_cast<int64_t>(i);
      return {transpose(c.dy(), inverse)};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 3, 4})}, Axes{2, 0, 1}}};
    },
};

struct MeanAndStd {
  Dims to;
  Axes dims;  // axis i of the operand becomes axis dims[i]
};

constexpr OpDef kBroadcast = {
    .name = "broadcast_in_dim",
    .infer =
        [](const InferCtx& c) {
          const auto& s = c.attrs<MeanAndStd>();
          bool ok = s.dims.size() == c.in[0].dims.size();
          for (size_t i = 0; ok && i < s.dims.size(); ++i)
            ok = s.dims[i] >= 0 && s.dims[i] < static_cast<int64_t>(s.to.size()) &&
                 (c.in[0].dims[i] == 1 || c.in[0].dims[i] == s.to[at(s.dims[i])]);
          check(ok, Code::invalid_graph, "broadcast: {} with axes {} does not fit into {}", to_string(c.in[0]),
                to_string(s.dims), to_string(s.to));
          require_distinct(c, s.dims);
          return std::vector<Shape>{{c.in[0].dtype, s.to}};
        },
    .emit = [](EmitCtx& c) { c.set_out(c.broadcast(c.in(), c.out().dims, c.attrs<MeanAndStd>().dims)); },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& s = c.attrs<MeanAndStd>();
      Tensor x = c.in();
      Axes summed, whole_axes;  // of the result
      for (int64_t a = 0; a < static_cast<int64_t>(s.to.size()); ++a) {
        auto it = std::find(s.dims.begin(), s.dims.end(), a);
        bool whole = it != s.dims.end() && x.dim(it - s.dims.begin()) == s.to[at(a)];
        (whole ? whole_axes : summed).push_back(a);
      }
      Tensor g = summed.empty() ? c.dy() : sum(c.dy(), summed);
      // g's axes are `whole_axes` in ascending order; x may order them differently.
      Axes order;
      for (int64_t a : s.dims)
        if (auto it = std::find(whole_axes.begin(), whole_axes.end(), a); it != whole_axes.end())
          order.push_back(it - whole_axes.begin());
      return {reshape(transpose(g, order), x.dims())};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({3})}, MeanAndStd{{2, 3}, {1}}},
              {{f64({2, 1})}, MeanAndStd{{2, 4, 3}, {0, 2}}},
              {{f64({})}, MeanAndStd{{2, 2}, {}}},
              {{f64({2, 3})}, MeanAndStd{{3, 4, 2}, {2, 0}}}};
    },
    .cheap = true,
};

constexpr OpDef kReverse = {
    .name = "reverse",
    .infer =
        [](const InferCtx& c) {
          require_distinct(c, c.attrs<Axes>());
          return std::vector<Shape>{c.in[0]};
        },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.reverse", "dimensions = " + mlir_array(c.attrs<Axes>())); },
    .vjp = [](const VjpCtx& c) -> Grads { return {reverse(c.dy(), c.attrs<Axes>())}; },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 3, 4})}, Axes{0, 2}}};
    },
};

// ---- parts: slice, pad, concatenate

struct Range {
  Dims start, limit, stride;
};

constexpr OpDef kSlice = {
    .name = "slice",
    .infer =
        [](const InferCtx& c) {
          const auto& r = c.attrs<Range>();
          size_t n = c.in[0].dims.size();
          bool ok = r.start.size() == n && r.limit.size() == n && r.stride.size() == n;
          Shape out{c.in[0].dtype, {}};
          for (size_t i = 0; ok && i < n; ++i) {
            ok = r.start[i] >= 0 && r.start[i] <= r.limit[i] && r.limit[i] <= c.in[0].dims[i] && r.stride[i] > 0;
            if (ok) out.dims.push_back((r.limit[i] - r.start[i] + r.stride[i] - 1) / r.stride[i]);
          }
          check(ok, Code::invalid_graph, "slice: {} to {} by {} is not inside {}", to_string(r.start),
                to_string(r.limit), to_string(r.stride), to_string(c.in[0]));
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          const auto& r = c.attrs<Range>();
          c.simple("stablehlo.slice", fmt::format("start_indices = {}, limit_indices = {}, strides = {}",
                                                  mlir_array(r.start), mlir_array(r.limit), mlir_array(r.stride)));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& r = c.attrs<Range>();
      Dims high, interior;
      for (size_t i = 0; i < r.start.size(); ++i) {
        int64_t n = c.dy().dims()[i];
        interior.push_back(r.stride[i] - 1);
        high.push_back(c.in().dims()[i] - r.start[i] - (n > 0 ? (n - 1) * r.stride[i] + 1 : 0));
      }
      return {pad(c.dy(), 0, r.start, high, interior)};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({4, 7})}, Range{{1, 0}, {3, 6}, {1, 1}}}, {{f64({4, 7})}, Range{{0, 1}, {4, 7}, {2, 4}}}};
    },
};

struct Padding {
  double value;
  Dims low, high, interior;
};

/// The padding is constant, so the cotangent is a crop: negative padding, then every (interior + 1)-th element.
constexpr OpDef kPad = {
    .name = "pad",
    .infer =
        [](const InferCtx& c) {
          const auto& p = c.attrs<Padding>();
          size_t n = c.in[0].dims.size();
          bool ok = p.low.size() == n && p.high.size() == n && p.interior.size() == n;
          Shape out{c.in[0].dtype, {}};
          for (size_t i = 0; ok && i < n; ++i) {
            int64_t d = c.in[0].dims[i];
            out.dims.push_back(d + p.low[i] + p.high[i] + std::max<int64_t>(d - 1, 0) * p.interior[i]);
            ok = out.dims.back() >= 0 && p.interior[i] >= 0;
          }
          check(ok, Code::invalid_graph, "pad: {} cannot take low {}, high {}, interior {}", to_string(c.in[0]),
                to_string(p.low), to_string(p.high), to_string(p.interior));
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          const auto& p = c.attrs<Padding>();
          c.set_out(c.emit("stablehlo.pad", {c.in(), c.constant(p.value, {c.out().dtype, {}})}, c.out(),
                           fmt::format("edge_padding_low = {}, edge_padding_high = {}, interior_padding = {}",
                                       mlir_array(p.low), mlir_array(p.high), mlir_array(p.interior))));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& p = c.attrs<Padding>();
      Dims low = p.low, high = p.high, stride = p.interior;
      for (size_t i = 0; i < low.size(); ++i) low[i] = -low[i], high[i] = -high[i], ++stride[i];
      Tensor g = pad(c.dy(), 0, low, high);
      return {slice(g, Dims(low.size(), 0), g.dims(), stride)};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 3})}, Padding{0.5, {1, 0}, {0, 2}, {0, 0}}},
              {{f64({4, 5})}, Padding{0, {-1, 2}, {1, -2}, {1, 2}}},
              {{f64({5})}, Padding{1, {-2}, {-1}, {0}}}};
    },
};

constexpr OpDef kConcatenate = {
    .name = "concatenate",
    .infer =
        [](const InferCtx& c) {
          int64_t axis = c.attrs<int64_t>();
          Shape out = c.in[0];
          out.dims[at(axis)] = 0;
          for (const Shape& s : c.in) {
            Shape rest = s;
            check(s.rank() == out.rank(), Code::invalid_graph, "concatenate: ranks differ: {} and {}",
                  to_string(c.in[0]), to_string(s));
            rest.dims[at(axis)] = out.dims[at(axis)];
            check(rest == out, Code::invalid_graph, "concatenate: {} and {} differ in more than axis {}",
                  to_string(c.in[0]), to_string(s), axis);
            out.dims[at(axis)] += s.dims[at(axis)];
          }
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          constexpr int64_t kSmall = 4096;  // elements
          const int64_t axis = c.attrs<int64_t>();
          std::vector<Value> parts;
          bool of_call = false;  // else the compiler may write operands directly to their place in the result
          for (int i = 0; i < c.in_count(); ++i) {
            parts.push_back(c.in(i));
            of_call = of_call || c.is_call_result(i);
          }
          if (of_call && c.out().elements() >= kSmall && kernels_support(c.node().inputs))
            return c.set_out(emit_custom_call(c, parts,
                                              {.target = kConcatenateKernel,
                                               .results = {c.out()},
                                               .backend_config = fmt::format("axis = {} : i64", axis)})[0]);
          c.simple("stablehlo.concatenate", fmt::format("dimension = {} : i64", axis));
        },
    .vjp =
        [](const VjpCtx& c) {
          int64_t axis = c.attrs<int64_t>(), start = 0;
          Grads g;
          for (size_t i = 0; i < c.in_count(); ++i) {
            int64_t n = c.in(static_cast<int>(i)).dim(axis);
            g.push_back(c.needs(static_cast<int>(i)) ? slice_axis(c.dy(), axis, start, start + n) : Tensor());
            start += n;
          }
          return g;
        },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({2, 3}), f64({2, 1}), f64({2, 2})}, int64_t{1}}, {{f64({2}), f64({3})}, int64_t{0}}};
    },
};

// ---- parts at positions that are computed

void require_starts(const InferCtx& c, size_t first) {
  check(c.in.size() - first == c.in[0].dims.size(), Code::invalid_graph, "{}: {} start indices for {}", c.op.name,
        c.in.size() - first, to_string(c.in[0]));
  for (const Shape& s : c.in.subspan(first))
    check(s.rank() == 0 && is_integer(s.dtype) && s.dtype == c.in[first].dtype, Code::invalid_graph,
          "{}: start indices must be integer scalars of one type, found {} and {}", c.op.name, to_string(s),
          to_string(c.in[first]));
}

std::vector<Tensor> inputs_from(const VjpCtx& c, size_t first) {
  std::vector<Tensor> v;
  for (size_t i = first; i < c.in_count(); ++i) v.push_back(c.in(static_cast<int>(i)));
  return v;
}

constexpr OpDef kDynamicSlice = {
    .name = "dynamic_slice",
    .infer =
        [](const InferCtx& c) {
          const auto& sizes = c.attrs<Dims>();
          require_starts(c, 1);
          bool ok = sizes.size() == c.in[0].dims.size();
          for (size_t i = 0; ok && i < sizes.size(); ++i) ok = sizes[i] >= 0 && sizes[i] <= c.in[0].dims[i];
          check(ok, Code::invalid_graph, "dynamic_slice: sizes {} do not fit into {}", to_string(sizes),
                to_string(c.in[0]));
          return std::vector<Shape>{{c.in[0].dtype, sizes}};
        },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.dynamic_slice", "slice_sizes = " + mlir_array(c.out().dims)); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Grads g(c.in_count());
      g[0] = dynamic_update_slice(zeros_like(c.in()), c.dy(), inputs_from(c, 1));
      return g;
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({4, 5}), s32({}), s32({})}, Dims{2, 5}},
              {.inputs = {f64({6}), s32({})}, .attributes = Dims{2}, .low = 1, .high = 3}};
    },
};

constexpr OpDef kDynamicUpdateSlice = {
    .name = "dynamic_update_slice",
    .infer =
        [](const InferCtx& c) {
          check(c.in.size() >= 2 && c.in[0].dtype == c.in[1].dtype && c.in[0].rank() == c.in[1].rank(),
                Code::invalid_graph, "dynamic_update_slice: {} cannot take {}", to_string(c.in[0]), to_string(c.in[1]));
          for (int64_t i = 0; i < c.in[0].rank(); ++i)
            check(c.in[1].dim(i) <= c.in[0].dim(i), Code::invalid_graph,
                  "dynamic_update_slice: update {} does not fit into {}", to_string(c.in[1]), to_string(c.in[0]));
          require_starts(c, 2);
          return std::vector<Shape>{c.in[0]};
        },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.dynamic_update_slice"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Grads g(c.in_count());
      auto start = inputs_from(c, 2);
      if (c.needs(0)) g[0] = dynamic_update_slice(c.dy(), zeros_like(c.in(1)), start);
      if (c.needs(1)) g[1] = dynamic_slice(c.dy(), start, c.in(1).dims());
      return g;
    },
    .samples = []() -> std::vector<OpSample> {
      return {{.inputs = {f64({4, 5}), f64({2, 1}), s32({}), s32({})}, .low = 0, .high = 4}};
    },
};

}  // namespace

Tensor reshape(Tensor x, Dims dims) {
  int64_t known = 1, *unknown = nullptr;
  for (int64_t& d : dims) {
    if (d >= 0)
      known *= d;
    else
      unknown = &d;
  }
  if (unknown && known > 0) *unknown = x.shape().elements() / known;
  if (dims == x.dims()) return x;
  if (auto value = splat_value(x)) return full(x.graph(), *value, {x.dtype(), dims});
  return apply(kReshape, {x}, std::move(dims));
}

bool is_reshape(Tensor x) { return x.node()->op == &kReshape; }

Tensor flatten(Tensor x, int64_t from, int64_t to) {
  from = normalize_axis(from, x.rank());
  to = normalize_axis(to, x.rank());
  check(from <= to, Code::invalid_graph, "flatten: axes {} to {} of {}", from, to, to_string(x.shape()));
  Dims dims(x.dims().begin(), x.dims().begin() + from);
  int64_t n = 1;
  for (int64_t a = from; a <= to; ++a) n *= x.dim(a);
  dims.push_back(n);
  dims.insert(dims.end(), x.dims().begin() + to + 1, x.dims().end());
  return reshape(x, std::move(dims));
}

Tensor transpose(Tensor x, Axes permutation) {
  permutation = normalized(std::move(permutation), x.rank());
  if (permutation == counting(x.rank())) return x;
  return apply(kTranspose, {x}, std::move(permutation));
}

Tensor broadcast_to(Tensor x, Dims dims) {
  if (dims == x.dims()) return x;
  int64_t missing = static_cast<int64_t>(dims.size()) - x.rank();
  check(missing >= 0, Code::invalid_graph, "broadcast: {} has more axes than {}", to_string(x.shape()),
        to_string(dims));
  Axes axes = counting(x.rank());
  for (int64_t& a : axes) a += missing;
  return broadcast_in_dim(x, std::move(dims), std::move(axes));
}

Tensor broadcast_in_dim(Tensor x, Dims to, Axes dims) {
  dims = normalized(std::move(dims), static_cast<int64_t>(to.size()));
  if (to == x.dims() && dims == counting(x.rank())) return x;
  if (auto value = splat_value(x); value && x.rank() == 0) return full(x.graph(), *value, {x.dtype(), to});
  return apply(kBroadcast, {x}, MeanAndStd{std::move(to), std::move(dims)});
}

Tensor expand_dims(Tensor x, int64_t axis) {
  Dims dims = x.dims();
  dims.insert(dims.begin() + normalize_axis(axis, x.rank() + 1), 1);
  return reshape(x, std::move(dims));
}

Tensor squeeze(Tensor x, int64_t axis) {
  check(x.dim(axis) == 1, Code::invalid_graph, "squeeze: axis {} of {} is not 1", axis, to_string(x.shape()));
  Dims dims = x.dims();
  dims.erase(dims.begin() + normalize_axis(axis, x.rank()));
  return reshape(x, std::move(dims));
}

Tensor slice(Tensor x, Dims start, Dims limit, Dims stride) {
  if (stride.empty()) stride.assign(at(x.rank()), 1);
  bool all = limit == x.dims();
  for (size_t i = 0; all && i < start.size(); ++i) all = start[i] == 0 && stride[i] == 1;
  if (all) return x;
  return apply(kSlice, {x}, Range{std::move(start), std::move(limit), std::move(stride)});
}

Tensor slice_axis(Tensor x, int64_t axis, int64_t start, int64_t limit) {
  axis = normalize_axis(axis, x.rank());
  int64_t n = x.dim(axis);
  Dims low(at(x.rank()), 0), high = x.dims();
  low[at(axis)] = start < 0 ? start + n : start;
  high[at(axis)] = limit == std::numeric_limits<int64_t>::max() ? n : limit < 0 ? limit + n : limit;
  return slice(x, std::move(low), std::move(high));
}

std::vector<Tensor> split(Tensor x, int64_t parts, int64_t axis) {
  int64_t n = x.dim(axis);
  check(parts > 0 && n % parts == 0, Code::invalid_graph, "split: axis {} of {} does not divide into {} parts", axis,
        to_string(x.shape()), parts);
  std::vector<Tensor> out;
  for (int64_t i = 0; i < parts; ++i) out.push_back(slice_axis(x, axis, i * (n / parts), (i + 1) * (n / parts)));
  return out;
}

Tensor concatenate(const std::vector<Tensor>& xs, int64_t axis) {
  check(!xs.empty(), Code::invalid_graph, "concatenate: nothing given");
  if (xs.size() == 1) return xs[0];
  return apply(kConcatenate, xs, normalize_axis(axis, xs[0].rank()));
}

Tensor stack(const std::vector<Tensor>& xs, int64_t axis) {
  std::vector<Tensor> rows;
  for (Tensor x : xs) rows.push_back(expand_dims(x, axis));
  return concatenate(rows, normalize_axis(axis, xs.at(0).rank() + 1));
}

Tensor pad(Tensor x, double value, Dims low, Dims high, Dims interior) {
  if (interior.empty()) interior.assign(at(x.rank()), 0);
  bool none = true;
  for (const Dims* d : {&low, &high, &interior})
    none = none && std::all_of(d->begin(), d->end(), [](int64_t v) { return v == 0; });
  if (none) return x;
  return apply(kPad, {x}, Padding{value, std::move(low), std::move(high), std::move(interior)});
}

Tensor pad_end(Tensor x, int64_t axis, int64_t length) {
  Dims none(x.dims().size(), 0), high = none;
  high[at(normalize_axis(axis, x.rank()))] = length - x.dim(axis);
  return pad(x, 0, std::move(none), std::move(high));
}

Tensor reverse(Tensor x, Axes axes) {
  if (axes.empty()) return x;
  return apply(kReverse, {x}, normalized(std::move(axes), x.rank()));
}

Tensor dynamic_slice(Tensor x, const std::vector<Tensor>& start, Dims sizes) {
  std::vector<Tensor> in = {x};
  in.insert(in.end(), start.begin(), start.end());
  return apply(kDynamicSlice, in, std::move(sizes));
}

Tensor dynamic_update_slice(Tensor x, Tensor update, const std::vector<Tensor>& start) {
  std::vector<Tensor> in = {x, update};
  in.insert(in.end(), start.begin(), start.end());
  return md::apply(kDynamicUpdateSlice, in);
}

Tensor dynamic_index(Tensor x, Tensor i) {
  std::vector<Tensor> start(at(x.rank()), constant(i.graph(), 0, i.dtype()));
  Dims sizes = x.dims();
  start.at(0) = i;
  sizes[0] = 1;
  return squeeze(dynamic_slice(x, start, sizes), 0);
}

OpList shape_ops() {
  return {&kReshape, &kTranspose,   &kBroadcast,    &kReverse,           &kSlice,
          &kPad,     &kConcatenate, &kDynamicSlice, &kDynamicUpdateSlice};
}

}  // namespace md
