// Matrix products: one record, stablehlo.dot_general. Its gradient is two more of them, with an operand order for which
// the result usually needs no transpose.
#include "maxdiffusion/ops/dot.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/kernel_table.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

bool contains(const Axes& axes, int64_t a) { return std::find(axes.begin(), axes.end(), a) != axes.end(); }

/// Axes of a tensor of this rank that are neither contracted nor batch, ascending.
Axes free_axes(int64_t rank, const Axes& contract, const Axes& batch) {
  Axes free;
  for (int64_t a = 0; a < rank; ++a)
    if (!contains(contract, a) && !contains(batch, a)) free.push_back(a);
  return free;
}

std::vector<Shape> infer_dot(const InferCtx& c) {
  const auto& d = c.attrs<DotDims>();
  const Shape &a = c.in[0], &b = c.in[1];
  check(a.dtype == b.dtype, Code::invalid_graph, "dot: element types differ: {} and {}; cast one of them", to_string(a),
        to_string(b));
  auto pair = [&](const Axes& left, const Axes& right, const char* what) {
    check(left.size() == right.size(), Code::invalid_graph, "dot: {} {} axes of {} but {} of {}", left.size(), what,
          to_string(a), right.size(), to_string(b));
    for (size_t i = 0; i < left.size(); ++i)
      check(a.dim(left[i]) == b.dim(right[i]), Code::invalid_graph,
            "dot: {} sizes differ: lhs {} axis {} = {}, rhs {} axis {} = {}", what, to_string(a), left[i],
            a.dim(left[i]), to_string(b), right[i], b.dim(right[i]));
  };
  pair(d.lhs_contract, d.rhs_contract, "contracted");
  pair(d.lhs_batch, d.rhs_batch, "batch");
  auto distinct = [&](Axes axes, const Axes& extra, const Shape& s) {
    axes.insert(axes.end(), extra.begin(), extra.end());
    std::sort(axes.begin(), axes.end());
    check(std::adjacent_find(axes.begin(), axes.end()) == axes.end(), Code::invalid_graph,
          "dot: an axis of {} is named twice", to_string(s));
  };
  distinct(d.lhs_contract, d.lhs_batch, a);
  distinct(d.rhs_contract, d.rhs_batch, b);
  Shape out{d.out, {}};
  for (int64_t i : d.lhs_batch) out.dims.push_back(a.dim(i));
  for (int64_t i : free_axes(a.rank(), d.lhs_contract, d.lhs_batch)) out.dims.push_back(a.dim(i));
  for (int64_t i : free_axes(b.rank(), d.rhs_contract, d.rhs_batch)) out.dims.push_back(b.dim(i));
  return {out};
}

// ---- the table of implementations of the record

/// Several axes as one: their total size, and the stride of the last axis with more than one element. None if the
/// elements are not evenly spaced in a dense array of these sizes.
struct Joined {
  int64_t size = 1, stride = 1;
};
std::optional<Joined> joined(const Dims& dims, const Axes& axes) {
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * dims[i + 1];
  Joined all;
  for (size_t i = axes.size(); i-- > 0;) {
    const auto axis = static_cast<size_t>(axes[i]);
    if (dims[axis] == 1) continue;
    if (all.size > 1 && strides[axis] != all.stride * all.size) return {};
    if (all.size == 1) all.stride = strides[axis];
    all.size *= dims[axis];
  }
  return all;
}

/// A product in the CPU kernel's form.
struct Product {
  Dims sizes, strides;
};
std::optional<Product> as_product(const Dims& a, const Dims& b, const DotDims& d) {
  if (a.empty() || b.empty()) return {};
  const auto rank = [](const Dims& dims) { return static_cast<int64_t>(dims.size()); };
  const auto ab = joined(a, d.lhs_batch), am = joined(a, free_axes(rank(a), d.lhs_contract, d.lhs_batch)),
             ak = joined(a, d.lhs_contract), bb = joined(b, d.rhs_batch), bk = joined(b, d.rhs_contract),
             bn = joined(b, free_axes(rank(b), d.rhs_contract, d.rhs_batch));
  if (!ab || !am || !ak || !bb || !bk || !bn) return {};
  auto dense = [](const Joined& x) { return x.size == 1 || x.stride == 1; };
  if ((!dense(*am) && !dense(*ak)) || (!dense(*bk) && !dense(*bn))) return {};
  return Product{{ab->size, am->size, bn->size, ak->size},
                 {ab->stride, am->stride, ak->stride, bb->stride, bk->stride, bn->stride}};
}

/// The product `n`: the node of `c`, or one that it fuses.
struct PrintCall {
  EmitCtx& c;
  const Node& n;
  std::optional<Product> product = as_product(n.inputs[0].dims(), n.inputs[1].dims(), n.attrs<DotDims>());
};

/// Number of multiplications below which a call is slower.
constexpr double kSmall = 1 << 14;

const char* cpu_kernel_refuses(const PrintCall& call) {
  const GraphOptions& o = call.c.options();
  const DType type = call.n.inputs[0].dtype(), result = call.n.outputs[0].dtype;
  if (!o.calls_cpu_kernels() || (type != DType::f32 && type != DType::bf16) || (result != type && result != DType::f32))
    return kNotForCpuKernels;
  if (!call.product) return "rows or columns are not evenly spaced";
  double multiplications = 1;
  for (int64_t size : call.product->sizes) multiplications *= static_cast<double>(size);
  return product_kernel_pays(o, type, multiplications) ? nullptr : "the compiler's own code is faster";
}

/// Calls the kernel, which rounds operands as it reads them.
Value call_cpu_kernel(const PrintCall& call, DType result, const std::vector<Value>& bias) {
  EmitCtx& c = call.c;
  std::vector<Value> operands = {c.unrounded(call.n.inputs[0]), c.unrounded(call.n.inputs[1])};
  operands.insert(operands.end(), bias.begin(), bias.end());
  return emit_custom_call(
      c, operands,
      {.target = kProductKernel,
       .results = {Shape{result, call.n.outputs[0].dims}},
       .backend_config = fmt::format(
           "sizes = {}, strides = {}, in_bf16 = {}", mlir_array(call.product->sizes), mlir_array(call.product->strides),
           call.n.inputs[0].dtype() == DType::bf16 && c.options().cpu_kernels.bf16_products)})[0];
}

/// Whether all axes but one of each operand are contracted: the gradient of a weight.
bool sums_over_rows(const Node& n) {
  const auto& d = n.attrs<DotDims>();
  return d.lhs_batch.empty() && static_cast<int64_t>(d.lhs_contract.size()) == n.inputs[0].rank() - 1 &&
         static_cast<int64_t>(d.rhs_contract.size()) == n.inputs[1].rank() - 1;
}

/// Gradients of weights keep the type of the sum, which the optimizer reads.
Value print_cpu_kernel(const PrintCall& call) {
  EmitCtx& c = call.c;
  if (c.out().dtype != DType::bf16 || !c.node().backward || !sums_over_rows(c.node()))
    return call_cpu_kernel(call, c.out().dtype, {});
  const Value sums = call_cpu_kernel(call, DType::f32, {});
  c.set_unrounded(sums);
  return c.emit("stablehlo.convert", {sums}, c.out());
}

Value print_dot_general(const PrintCall& call) {
  EmitCtx& c = call.c;
  const auto& d = c.attrs<DotDims>();
  auto list = [](const Axes& axes) { return fmt::format("{}", fmt::join(axes, ", ")); };
  constexpr const char* kPrecision[] = {"DEFAULT", "HIGH", "HIGHEST"};
  const char* p = kPrecision[static_cast<int>(d.precision)];
  return c.emit("stablehlo.dot_general", {c.in(0), c.in(1)}, c.out(),
                fmt::format("dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = [{}], "
                            "rhs_batching_dimensions = [{}], lhs_contracting_dimensions = [{}], "
                            "rhs_contracting_dimensions = [{}]>, "
                            "precision_config = [#stablehlo<precision {}>, #stablehlo<precision {}>]",
                            list(d.lhs_batch), list(d.rhs_batch), list(d.lhs_contract), list(d.rhs_contract), p, p));
}

constexpr KernelRow<PrintCall, Value> kPrinters[] = {
    {"CPU kernel", cpu_kernel_refuses, print_cpu_kernel},
    {"stablehlo.dot_general", never, print_dot_general},
};

/// Cotangent of one operand. `mine` and `other` name its axes and its partner's; `dy_mine` and `dy_other` are the
/// positions of their free axes in dy, whose first axes are the batch.
Tensor operand_grad(const VjpCtx& c, int operand, const DotDims& d) {
  const bool left = operand == 0;
  Tensor x = c.in(operand), partner = c.in(1 - operand);
  const Axes &contract = left ? d.lhs_contract : d.rhs_contract, &batch = left ? d.lhs_batch : d.rhs_batch;
  const Axes& partner_contract = left ? d.rhs_contract : d.lhs_contract;
  const Axes& partner_batch = left ? d.rhs_batch : d.lhs_batch;
  const Axes free = free_axes(x.rank(), contract, batch);
  const Axes partner_free = free_axes(partner.rank(), partner_contract, partner_batch);
  const int64_t nb = static_cast<int64_t>(batch.size());

  Axes dy_batch, dy_partner;
  for (int64_t i = 0; i < nb; ++i) dy_batch.push_back(i);
  int64_t first = nb + (left ? static_cast<int64_t>(free.size()) : 0);
  for (size_t i = 0; i < partner_free.size(); ++i) dy_partner.push_back(first + static_cast<int64_t>(i));

  // Contracting dy with the partner gives batch axes, then my free axes and my contracted ones, in operand order. The
  // contracted axes are in ascending order of the partner's.
  Axes by_partner(partner_contract.size());
  for (size_t i = 0; i < by_partner.size(); ++i) by_partner[i] = static_cast<int64_t>(i);
  std::sort(by_partner.begin(), by_partner.end(), [&](int64_t i, int64_t j) {
    return partner_contract[static_cast<size_t>(i)] < partner_contract[static_cast<size_t>(j)];
  });
  Axes contracted;
  for (int64_t i : by_partner) contracted.push_back(contract[static_cast<size_t>(i)]);

  auto order = [&](bool dy_first) {  // the axis of x for each axis of the result
    Axes o = batch;
    const Axes &second = dy_first ? contracted : free, &third = dy_first ? free : contracted;
    o.insert(o.end(), third.begin(), third.end());
    o.insert(o.end(), second.begin(), second.end());
    return o;
  };
  const Axes partner_first = order(false);
  const bool dy_first = !std::is_sorted(partner_first.begin(), partner_first.end());
  Axes axes = order(dy_first), permutation(axes.size());
  for (size_t i = 0; i < axes.size(); ++i) permutation[static_cast<size_t>(axes[i])] = static_cast<int64_t>(i);

  Tensor dy = cast(c.dy(), partner.dtype());
  Tensor g = dy_first ? dot(dy, partner, {dy_partner, partner_free, dy_batch, partner_batch, d.precision})
                      : dot(partner, dy, {partner_free, dy_partner, partner_batch, dy_batch, d.precision});
  return transpose(g, permutation);
}

constexpr OpDef kDot = {
    .name = "dot_general",
    .infer = infer_dot,
    .emit =
        [](EmitCtx& c) {
          const PrintCall call{c, c.node()};
          c.set_out(kernel_for(kPrinters, call).build(call));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& d = c.attrs<DotDims>();
      return {c.needs(0) ? operand_grad(c, 0, d) : Tensor(), c.needs(1) ? operand_grad(c, 1, d) : Tensor()};
    },
    .samples = []() -> std::vector<OpSample> {
      DotDims plain{.lhs_contract = {1}, .rhs_contract = {0}, .out = DType::f64};
      DotDims linear{.lhs_contract = {2}, .rhs_contract = {1}, .precision = Precision::highest, .out = DType::f64};
      DotDims batched{{3}, {0}, {1, 0}, {3, 2}, Precision::high, DType::f64};
      DotDims many{{2, 0}, {1, 3}, {1}, {0}, Precision::default_, DType::f64};
      DotDims outer{{}, {}, {}, {}, Precision::default_, DType::f64};
      DotDims integers{.lhs_contract = {1}, .rhs_contract = {0}, .out = DType::s32};
      return {{{f64({2, 3}), f64({3, 4})}, plain},
              {{f64({2, 3, 4}), f64({5, 4})}, linear},
              {{f64({2, 3, 5, 4}), f64({4, 6, 2, 3})}, batched},
              {{f64({2, 3, 4, 5}), f64({3, 4, 6, 2})}, many},
              {{f64({2}), f64({3})}, outer},
              {.inputs = {s8({2, 3}), s8({3, 4})}, .attributes = integers, .low = -100, .high = 100}};
    },
    .flops =
        [](const Node& n) {
          double terms = 2;
          for (int64_t axis : n.attrs<DotDims>().lhs_contract) terms *= static_cast<double>(n.inputs[0].dim(axis));
          return terms * static_cast<double>(n.outputs[0].elements());
        },
    .is_dot = true,
};

// ---- a bias after a product

/// y + b over the last axis. If y is a product without other uses, the kernel adds b to its sums.
constexpr OpDef kAddBias = {
    .name = "add_bias",
    .infer =
        [](const InferCtx& c) {
          const Shape &y = c.in[0], &b = c.in[1];
          check(y.rank() > 0 &&
                    (b.dims == Dims{y.dims.back()} || (y.rank() > 2 && b.dims == Dims{y.dims[0], y.dims.back()})),
                Code::invalid_graph, "add_bias: {} for {}", to_string(b), to_string(y));
          return std::vector<Shape>{y};
        },
    .emit =
        [](EmitCtx& c) {
          const Tensor y = c.node().inputs[0], b = c.node().inputs[1];
          if (b.rank() == 1 && b.dtype() == DType::f32 && c.uses(y) == 1 && y.node()->op == &kDot) {
            const PrintCall product{c, *y.node()};
            if (!cpu_kernel_refuses(product) && product.product->sizes[2] == b.dim(0))
              return c.set_out(call_cpu_kernel(product, c.out().dtype, {c.in(1)}));
          }
          if (c.is_call_result(0) && kernels_support({y}) && (b.dtype() == DType::f32 || b.dtype() == DType::bf16))
            return c.set_out(emit_custom_call(c, {c.in(0), c.unrounded(1)},
                                              {.target = kAddKernel, .results = {c.out()}, .backend_config = {}})[0]);
          const Value bias =
              b.dtype() == y.dtype() ? c.in(1) : c.emit("stablehlo.convert", {c.in(1)}, {y.dtype(), b.dims()});
          const Axes dims = b.rank() == 1 ? Axes{y.rank() - 1} : Axes{0, y.rank() - 1};
          c.set_out(c.emit("stablehlo.add", {c.in(0), c.broadcast(bias, y.dims(), dims)}, c.out()));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      Axes rows;
      for (int64_t i = c.in(1).rank() - 1; i + 1 < c.dy().rank(); ++i) rows.push_back(i);
      if (!c.needs(1)) return {c.dy(), Tensor()};
      return {c.dy(), cast(rows.empty() ? c.dy() : sum(c.dy(), rows), c.in(1).dtype())};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{.inputs = {f64({2, 3, 4}), f64({4})}},
              {.inputs = {f64({4}), f64({4})}},
              {.inputs = {f64({2, 3, 5, 4}), f64({2, 4})}}};
    },
};

}  // namespace

Tensor add_bias(Tensor y, Tensor b) { return apply(kAddBias, {y, b}); }

DType sum_type(DType t) {
  if (size_of(t) > 1 || t == DType::pred) return t;
  return is_integer(t) ? DType::s32 : DType::f32;
}

bool product_kernel_pays(const GraphOptions& o, DType type, double multiplications) {
  return multiplications >= kSmall && (type != DType::f32 || o.cpu_kernels.f32_products);
}

Tensor dot(Tensor a, Tensor b, DotDims dims) { return dot(a, b, std::move(dims), sum_type(a.dtype())); }

Tensor dot(Tensor a, Tensor b, DotDims d, DType accumulate) {
  for (Axes* axes : {&d.lhs_contract, &d.lhs_batch})
    for (int64_t& x : *axes) x = normalize_axis(x, a.rank());
  for (Axes* axes : {&d.rhs_contract, &d.rhs_batch})
    for (int64_t& x : *axes) x = normalize_axis(x, b.rank());
  d.out = accumulate;
  return apply(kDot, {a, b}, std::move(d));
}

Tensor matmul(Tensor a, Tensor b, Precision p) {
  check(a.rank() >= 2 && a.rank() == b.rank(), Code::invalid_graph, "matmul: ranks of {} and {} must agree and be ≥ 2",
        to_string(a.shape()), to_string(b.shape()));
  Axes batch;
  for (int64_t i = 0; i + 2 < a.rank(); ++i) batch.push_back(i);
  return dot(a, b,
             {.lhs_contract = {-1}, .rhs_contract = {-2}, .lhs_batch = batch, .rhs_batch = batch, .precision = p});
}

OpList dot_ops() { return {&kDot, &kAddBias}; }

}  // namespace md
