// Convolution as three bilinear records: y = conv(x, w) and its two gradients. Each gradient of a record is one of the
// other two records, so derivatives of any order need only these three and no transpose node.
#include "maxdiffusion/ops/conv.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/kernel_table.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

/// Sizes along one spatial axis.
struct Line {
  int64_t x, k, y;  // input, kernel, output
  int64_t stride, low, high, x_dilation, k_dilation;
  int64_t wide_x() const { return x > 0 ? (x - 1) * x_dilation + 1 : 0; }
  int64_t wide_k() const { return (k - 1) * k_dilation + 1; }
  int64_t wide_y() const { return (y - 1) * stride + 1; }
};

Line line(const ConvOptions& o, const Dims& x, const Dims& w, size_t i) {
  Line l{x[i + 1], w[i + 2], 0, o.stride[i], o.pad_low[i], o.pad_high[i], o.lhs_dilation[i], o.rhs_dilation[i]};
  l.y = (l.wide_x() + l.low + l.high - l.wide_k() + l.stride) / l.stride;
  return l;
}

std::vector<Line> lines(const ConvOptions& o, const Dims& x, const Dims& w) {
  std::vector<Line> all;
  for (size_t i = 0; i + 2 < x.size(); ++i) all.push_back(line(o, x, w, i));
  return all;
}

/// Attributes of gradient records: the options of the forward convolution and the sizes of the result.
struct ConvGrad {
  ConvOptions options;
  Dims dims;
};

// ---- shape rules

Shape infer_forward(const ConvOptions& o, const Shape& x, const Shape& w) {
  int64_t spatial = x.rank() - 2;
  check(spatial >= 1 && spatial <= 3 && w.rank() == x.rank(), Code::invalid_graph,
        "conv: x {} and w {} must both have 1 to 3 spatial axes", to_string(x), to_string(w));
  check(x.dtype == w.dtype, Code::invalid_graph, "conv: element types differ: x {} and w {}; cast one of them",
        to_string(x), to_string(w));
  for (const Dims* d : {&o.stride, &o.pad_low, &o.pad_high, &o.lhs_dilation, &o.rhs_dilation})
    check(static_cast<int64_t>(d->size()) == spatial, Code::invalid_graph,
          "conv: an option has {} numbers for {} spatial axes of x {}", d->size(), spatial, to_string(x));
  check(o.groups > 0 && w.dim(1) * o.groups == x.dim(-1) && w.dim(0) % o.groups == 0, Code::invalid_graph,
        "conv: x {} has {} channels; w {} in {} groups expects {}", to_string(x), x.dim(-1), to_string(w), o.groups,
        w.dim(1) * o.groups);
  Shape y{sum_type(x.dtype), {x.dim(0)}};
  for (const Line& l : lines(o, x.dims, w.dims)) {
    check(l.stride > 0 && l.x_dilation > 0 && l.k_dilation > 0 && l.y > 0, Code::invalid_graph,
          "conv: x {} with pads {} and {} is smaller than the kernel of w {}", to_string(x), to_string(o.pad_low),
          to_string(o.pad_high), to_string(w));
    y.dims.push_back(l.y);
  }
  y.dims.push_back(w.dim(0));
  return y;
}

// ---- printing

/// Attributes of one convolution, per spatial axis in order.
struct Window {
  Dims stride, low, high, lhs_dilation, rhs_dilation;
  int64_t feature_groups = 1, batch_groups = 1;
};

/// "b01f" → "[b, 0, 1, f]": S: the spatial axes.
std::string layout(const char* letters, size_t spatial) {
  std::string s = "[";
  for (const char* p = letters; *p; ++p) {
    if (*p != 'S') {
      s += s.size() > 1 ? ", " : "";
      s += *p;
      continue;
    }
    for (size_t i = 0; i < spatial; ++i) s += fmt::format("{}{}", s.size() > 1 ? ", " : "", i);
  }
  return s + "]";
}

Value print_conv(EmitCtx& c, const Value& lhs, const Value& rhs, const char* lhs_layout, const char* rhs_layout,
                 const char* out_layout, const Window& w, Precision precision) {
  // cuDNN does not add up products of 8-bit integers. They are exact in bf16, and so are their f32 sums up to 2²⁴.
  const bool in_bf16 = c.platform() == Platform::gpu && lhs.shape.dtype == DType::s8;
  std::vector<Value> operands = {lhs, rhs};
  if (in_bf16)
    for (Value& v : operands) v = c.emit("stablehlo.convert", {v}, {DType::bf16, v.shape.dims});
  constexpr const char* kPrecision[] = {"DEFAULT", "HIGH", "HIGHEST"};
  const char* p = kPrecision[static_cast<int>(precision)];
  size_t n = w.stride.size();
  std::string padding;
  for (size_t i = 0; i < n; ++i) padding += fmt::format("{}[{}, {}]", i ? ", " : "", w.low[i], w.high[i]);
  const Value y = c.emit(
      "stablehlo.convolution", operands, in_bf16 ? Shape{DType::f32, c.out().dims} : c.out(),
      fmt::format("dimension_numbers = #stablehlo.conv<{}x{}->{}>, window_strides = {}, "
                  "padding = dense<[{}]> : tensor<{}x2xi64>, lhs_dilation = {}, rhs_dilation = {}, "
                  "feature_group_count = {} : i64, batch_group_count = {} : i64, "
                  "precision_config = [#stablehlo<precision {}>, #stablehlo<precision {}>]",
                  layout(lhs_layout, n), layout(rhs_layout, n), layout(out_layout, n), mlir_array(w.stride), padding, n,
                  mlir_array(w.lhs_dilation), mlir_array(w.rhs_dilation), w.feature_groups, w.batch_groups, p, p));
  return in_bf16 ? c.emit("stablehlo.convert", {y}, c.out()) : y;
}

// ---- the table of implementations of the three records

struct PrintCall {
  EmitCtx& c;
  const ConvOptions& options;
  const Dims& w;                   // sizes of the kernel array
  const char* cpu_kernel;          // the kernel for this record
  Value (*by_compiler)(EmitCtx&);  // as stablehlo.convolution
};

/// Why the CPU kernel does not support a convolution. It supports two or three axes and one group, without dilation or
/// cropping, and with some input in every window.
const char* cpu_kernel_refuses(const ConvOptions& o, const Dims& w, DType in, DType out) {
  auto all = [](const Dims& d, auto holds) { return std::all_of(d.begin(), d.end(), holds); };
  auto is_one = [](int64_t d) { return d == 1; };
  auto not_negative = [](int64_t d) { return d >= 0; };
  if (out != DType::f32 && out != DType::bf16) return kNoPartsForCpuKernels;
  if (in != out) return "sums are wider than what is summed";
  if (o.stride.size() < 2 || o.groups != 1) return "there is one axis, or groups";
  if (!all(o.lhs_dilation, is_one) || !all(o.rhs_dilation, is_one)) return "something is dilated";
  if (!all(o.pad_low, not_negative) || !all(o.pad_high, not_negative)) return "something is cropped";
  for (size_t i = 0; i < o.stride.size(); ++i)
    if (o.pad_low[i] >= w[i + 2] || o.pad_high[i] >= w[i + 2]) return "a window covers only padding";
  return nullptr;
}

const char* cpu_kernel_refuses(const PrintCall& p) {
  if (!p.c.options().calls_cpu_kernels()) return kNotForCpuKernels;
  return cpu_kernel_refuses(p.options, p.w, p.c.in(0).shape.dtype, p.c.out().dtype);
}

/// The kernel reads weights in f32 if they were only rounded from it, and returns their gradients as unrounded sums.
Value print_cpu_kernel(const PrintCall& p) {
  EmitCtx& c = p.c;
  const Shape& out = c.out();
  const ConvOptions& o = p.options;
  Dims window = o.stride;
  for (size_t i = 0; i < o.stride.size(); ++i) window.insert(window.end(), {o.pad_low[i], o.pad_high[i]});
  const bool of_weights = std::string_view(p.cpu_kernel) == kConvolutionWeightGradKernel;
  const CustomCall call{
      .target = p.cpu_kernel,
      .results = {Shape{of_weights ? DType::f32 : out.dtype, out.dims}},
      .backend_config = fmt::format("window = {}, in_bf16 = {}", mlir_array(window),
                                    out.dtype == DType::bf16 && c.options().cpu_kernels.bf16_products)};
  Value y = emit_custom_call(c, {c.in(0), of_weights ? c.in(1) : c.unrounded(1)}, call)[0];
  if (y.shape.dtype == out.dtype) return y;
  c.set_unrounded(y);
  return c.emit("stablehlo.convert", {y}, out);
}

constexpr KernelRow<PrintCall, Value> kPrinters[] = {
    {"CPU kernel", cpu_kernel_refuses, print_cpu_kernel},
    {"stablehlo.convolution", never, [](const PrintCall& p) { return p.by_compiler(p.c); }},
};

void print(const PrintCall& p) { p.c.set_out(kernel_for(kPrinters, p).build(p)); }

Value forward_by_compiler(EmitCtx& c) {
  const auto& o = c.attrs<ConvOptions>();
  Window w{o.stride, o.pad_low, o.pad_high, o.lhs_dilation, o.rhs_dilation, o.groups, 1};
  return print_conv(c, c.in(0), c.in(1), "bSf", "oiS", "bSf", w, o.precision);
}

/// w [G·O, I, k…] as [O, G·I, k…]: the layout in which a grouped kernel is applied in reverse.
Value swap_groups(EmitCtx& c, const Value& w, int64_t groups) {
  if (groups == 1) return w;
  const Dims& d = w.shape.dims;
  DType t = w.shape.dtype;
  Dims split = {groups, d[0] / groups, d[1]}, swapped = {d[0] / groups, groups, d[1]},
       merged = {d[0] / groups, groups * d[1]}, order = {1, 0, 2};
  for (size_t i = 2; i < d.size(); ++i) {
    for (Dims* s : {&split, &swapped, &merged}) s->push_back(d[i]);
    order.push_back(static_cast<int64_t>(i) + 1);
  }
  Value v = c.emit("stablehlo.reshape", {w}, {t, split});
  v = c.emit("stablehlo.transpose", {v}, {t, swapped}, "permutation = " + mlir_array(order));
  return c.emit("stablehlo.reshape", {v}, {t, merged});
}

/// The reversed kernel, as a separate statement: window_reversal of a convolution makes XLA's CPU code two orders of
/// magnitude slower.
Value reversed(EmitCtx& c, const Value& w) {
  Axes spatial;
  bool any = false;
  for (int64_t a = 2; a < w.shape.rank(); ++a) {
    spatial.push_back(a);
    any |= w.shape.dim(a) > 1;
  }
  return any ? c.emit("stablehlo.reverse", {w}, w.shape, "dimensions = " + mlir_array(spatial)) : w;
}

/// dx: dy, with zeros between its elements, convolved with the reversed kernel. in(0): dy, in(1): w.
Value input_grad_by_compiler(EmitCtx& c) {
  const auto& a = c.attrs<ConvGrad>();
  const ConvOptions& o = a.options;
  Window w{
      .stride = o.lhs_dilation, .lhs_dilation = o.stride, .rhs_dilation = o.rhs_dilation, .feature_groups = o.groups};
  for (const Line& l : lines(o, a.dims, c.in(1).shape.dims)) {
    w.low.push_back(l.wide_k() - 1 - l.low);
    w.high.push_back(l.wide_x() - l.wide_y() + l.low);
  }
  return print_conv(c, c.in(0), swap_groups(c, reversed(c, c.in(1)), o.groups), "bSf", "ioS", "bSf", w, o.precision);
}

/// dw: a sum over the batch, with dy as the kernel. in(0): x, in(1): dy.
Value weight_grad_by_compiler(EmitCtx& c) {
  const auto& a = c.attrs<ConvGrad>();
  const ConvOptions& o = a.options;
  Window w{.stride = o.rhs_dilation,
           .low = o.pad_low,
           .lhs_dilation = o.lhs_dilation,
           .rhs_dilation = o.stride,
           .batch_groups = o.groups};
  for (const Line& l : lines(o, c.in(0).shape.dims, a.dims))
    w.high.push_back(l.wide_k() - 1 + l.wide_y() - l.wide_x() - l.low);
  return print_conv(c, c.in(0), c.in(1), "fSb", "iSo", "fbS", w, o.precision);
}

// ---- records

extern const OpDef kConvInputGrad, kConvWeightGrad;

Tensor input_grad(Tensor dy, Tensor w, const ConvOptions& o, Dims x) {
  return apply(kConvInputGrad, {dy, w}, ConvGrad{o, std::move(x)});
}
Tensor weight_grad(Tensor x, Tensor dy, const ConvOptions& o, Dims w) {
  return apply(kConvWeightGrad, {x, dy}, ConvGrad{o, std::move(w)});
}

/// FLOPs of a convolution or either gradient: every output element reads one group of input channels under the kernel.
double flops_of(const Shape& y, const Dims& w) {
  double terms = 2;
  for (size_t i = 1; i < w.size(); ++i) terms *= static_cast<double>(w[i]);
  return terms * static_cast<double>(y.elements());
}

/// Sizes and options of test samples: one to three spatial axes, uneven pads, strides, both dilations, groups, crops.
struct Case {
  Dims x, w;
  ConvOptions options;
};
std::vector<Case> cases() {
  ConvOptions line{{2}, {1}, {0}, {1}, {2}, 1, Precision::default_};
  ConvOptions plain{{1, 1}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, 1, Precision::highest};
  ConvOptions strided{{2, 3}, {0, 2}, {1, 0}, {1, 1}, {1, 1}, 1, Precision::default_};
  ConvOptions grouped{{2, 1}, {1, 0}, {1, 2}, {1, 2}, {1, 2}, 2, Precision::default_};
  ConvOptions cropped{{1, 2}, {-1, 1}, {1, -2}, {1, 1}, {2, 1}, 3, Precision::default_};
  ConvOptions volume{{1, 2, 1}, {0, 1, 2}, {1, 1, 0}, {1, 1, 1}, {1, 1, 2}, 1, Precision::default_};
  return {{{2, 7, 3}, {4, 3, 2}, line},          {{2, 4, 5, 3}, {2, 3, 3, 3}, plain},
          {{1, 5, 6, 2}, {3, 2, 2, 3}, strided}, {{2, 5, 4, 4}, {6, 2, 3, 2}, grouped},
          {{1, 6, 7, 3}, {3, 1, 2, 2}, cropped}, {{1, 3, 4, 4, 2}, {2, 2, 2, 3, 2}, volume}};
}

constexpr OpDef kConv = {
    .name = "convolution",
    .infer =
        [](const InferCtx& c) { return std::vector<Shape>{infer_forward(c.attrs<ConvOptions>(), c.in[0], c.in[1])}; },
    .emit =
        [](EmitCtx& c) {
          print({c, c.attrs<ConvOptions>(), c.in(1).shape.dims, kConvolutionKernel, forward_by_compiler});
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& o = c.attrs<ConvOptions>();
      return {c.needs(0) ? input_grad(c.dy(), c.in(1), o, c.in(0).dims()) : Tensor(),
              c.needs(1) ? weight_grad(c.in(0), c.dy(), o, c.in(1).dims()) : Tensor()};
    },
    .samples =
        [] {
          std::vector<OpSample> all;
          for (const Case& k : cases()) all.push_back({{f64(k.x), f64(k.w)}, k.options});
          const Case plain = cases()[1];
          all.push_back({.inputs = {s8(plain.x), s8(plain.w)}, .attributes = plain.options, .low = -100, .high = 100});
          return all;
        },
    .flops = [](const Node& n) { return flops_of(n.outputs[0], n.inputs[1].dims()); },
};

const OpDef kConvInputGrad = {
    .name = "convolution_input_grad",
    .infer =
        [](const InferCtx& c) {
          const auto& a = c.attrs<ConvGrad>();
          Shape x{c.in[0].dtype, a.dims}, y = infer_forward(a.options, x, c.in[1]);
          check(y == c.in[0], Code::invalid_graph, "conv gradient: cotangent {} for an output {}", to_string(c.in[0]),
                to_string(y));
          return std::vector<Shape>{x};
        },
    .emit =
        [](EmitCtx& c) {
          print({c, c.attrs<ConvGrad>().options, c.in(1).shape.dims, kConvolutionInputGradKernel,
                 input_grad_by_compiler});
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& o = c.attrs<ConvGrad>().options;
      return {c.needs(0) ? conv(c.dy(), c.in(1), o) : Tensor(),
              c.needs(1) ? weight_grad(c.dy(), c.in(0), o, c.in(1).dims()) : Tensor()};
    },
    .samples =
        [] {
          std::vector<OpSample> all;
          for (const Case& k : cases()) {
            Shape y = infer_forward(k.options, f64(k.x), f64(k.w));
            all.push_back({{y, f64(k.w)}, ConvGrad{k.options, k.x}});
          }
          return all;
        },
    .flops = [](const Node& n) { return flops_of(n.inputs[0].shape(), n.inputs[1].dims()); },
};

const OpDef kConvWeightGrad = {
    .name = "convolution_weight_grad",
    .infer =
        [](const InferCtx& c) {
          const auto& a = c.attrs<ConvGrad>();
          Shape w{c.in[0].dtype, a.dims}, y = infer_forward(a.options, c.in[0], w);
          check(y == c.in[1], Code::invalid_graph, "conv gradient: cotangent {} for an output {}", to_string(c.in[1]),
                to_string(y));
          return std::vector<Shape>{w};
        },
    .emit =
        [](EmitCtx& c) {
          const auto& a = c.attrs<ConvGrad>();
          print({c, a.options, a.dims, kConvolutionWeightGradKernel, weight_grad_by_compiler});
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& o = c.attrs<ConvGrad>().options;
      return {c.needs(0) ? input_grad(c.in(1), c.dy(), o, c.in(0).dims()) : Tensor(),
              c.needs(1) ? conv(c.in(0), c.dy(), o) : Tensor()};
    },
    .samples =
        [] {
          std::vector<OpSample> all;
          for (const Case& k : cases()) {
            Shape y = infer_forward(k.options, f64(k.x), f64(k.w));
            all.push_back({{f64(k.x), y}, ConvGrad{k.options, k.w}});
          }
          return all;
        },
    .flops = [](const Node& n) { return flops_of(n.inputs[1].shape(), n.outputs[0].dims); },
};

// ---- the table of conv()

struct ConvCall {
  Tensor x, w;
  const ConvOptions& options;
};

/// Why a convolution is not a matrix product over channels. It is one if every output element reads one input element.
const char* dot_refuses(const ConvCall& c) {
  const ConvOptions& o = c.options;
  if (o.groups != 1 || c.w.rank() != c.x.rank() || c.x.rank() < 3 || c.x.dim(-1) != c.w.dim(1))
    return "there are groups";
  auto all = [](auto first, auto last, int64_t value) {
    return std::all_of(first, last, [=](int64_t d) { return d == value; });
  };
  for (const Dims* d : {&o.pad_low, &o.pad_high})
    if (!all(d->begin(), d->end(), 0)) return "something is padded or cropped";
  for (const Dims* d : {&o.stride, &o.lhs_dilation})
    if (!all(d->begin(), d->end(), 1)) return "there are strides or dilation";
  return all(c.w.dims().begin() + 2, c.w.dims().end(), 1) ? nullptr : "a window is larger than one element";
}

const char* parts_refuse(const ConvCall& c) {
  if (c.x.graph().options().one_device()) return "there is one device";
  if (c.options.axes.empty()) return "the result has no logical axes";
  if (!kernels_support_shards({c.x, c.w})) return kNoPartsForCpuKernels;
  return cpu_kernel_refuses(c.options, c.w.dims(), c.x.dtype(), sum_type(c.x.dtype()));
}

/// Each device has all channels of its images, and computes the result's channels for its shard of w.
Tensor conv_by_parts(const ConvCall& c) {
  const ConvOptions o = c.options;
  DimAxes y(c.x.dims().size()), x = y;
  {
    const Dims dims = infer_forward(o, c.x.shape(), c.w.shape()).dims;
    const DimAxes requested = c.x.graph().options().resolve(o.axes, dims);
    y.front() = x.front() = requested.front();
    y.back() = requested.back();
  }
  const DimAxes w = {y.back()};
  auto forward = [=](const std::vector<Tensor>& in) {
    return per_device(in, {x, w}, {y}, [&](const std::vector<Tensor>& part) {
      return std::vector<Tensor>{apply(kConv, {part[0], part[1]}, o)};
    });
  };
  auto backward = [=](const std::vector<Tensor>& in, const std::vector<Tensor>&, const Grads& dys) -> Grads {
    return {per_device({dys[0], in[1]}, {y, w}, {x},
                       [&](const std::vector<Tensor>& part) {
                         Dims dims = in[0].dims();
                         dims[0] = part[0].dim(0);
                         return std::vector<Tensor>{input_grad(part[0], part[1], o, dims)};
                       })[0],
            per_device({in[0], dys[0]}, {x, y}, {w}, [&](const std::vector<Tensor>& part) {
              Dims dims = in[1].dims();
              dims[0] = part[1].dim(-1);
              return std::vector<Tensor>{weight_grad(part[0], part[1], o, dims)};
            })[0]};
  };
  return custom_vjp({c.x, c.w}, forward, backward)[0];
}

constexpr KernelRow<ConvCall, Tensor> kConvolutions[] = {
    {"dot", dot_refuses,  // its gradients are dots too, which are several times faster on XLA's CPU
     [](const ConvCall& c) {
       return dot(c.x, reshape(c.w, {c.w.dim(0), c.w.dim(1)}),
                  {.lhs_contract = {-1}, .rhs_contract = {1}, .precision = c.options.precision});
     }},
    {"convolution by device", parts_refuse, conv_by_parts},
    {"convolution", never,
     [](const ConvCall& c) {
       return apply(kConv, {c.x, c.w}, c.options);
     }},
};

}  // namespace

Tensor conv(Tensor x, Tensor w, ConvOptions o) {
  size_t spatial = at(std::max<int64_t>(x.rank() - 2, 0));
  for (Dims* d : {&o.stride, &o.lhs_dilation, &o.rhs_dilation})
    if (d->empty()) d->assign(spatial, 1);
  for (Dims* d : {&o.pad_low, &o.pad_high})
    if (d->empty()) d->assign(spatial, 0);
  const ConvCall call{x, w, o};
  return kernel_for(kConvolutions, call).build(call);
}

OpList conv_ops() { return {&kConv, &kConvInputGrad, &kConvWeightGrad}; }

}  // namespace md
