// Elementwise arithmetic, comparison and selection. Inputs of records have equal shapes: the public functions broadcast
// first, so broadcast's gradient rule sums cotangents, not these records.
#include "maxdiffusion/ops/elementwise.h"

#include <fmt/format.h>

#include <algorithm>
#include <numbers>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

// ---- shape rules

std::vector<Shape> same_as_input(const InferCtx& c) { return {c.in[0]}; }

std::vector<Shape> floating(const InferCtx& c) {
  check(is_float(c.in[0].dtype), Code::invalid_graph, "{}: needs a floating tensor, found {}", c.op.name,
        to_string(c.in[0]));
  return {c.in[0]};
}

void require_equal(const InferCtx& c) {
  const Shape &a = c.in[0], &b = c.in[1];
  if (a.dtype != b.dtype)
    fail(Code::invalid_graph, "{}: element types differ: {} and {}; cast one of them", c.op.name, to_string(a),
         to_string(b));
  if (a.dims != b.dims)
    fail(Code::invalid_graph, "{}: shapes do not broadcast: {} and {}", c.op.name, to_string(a), to_string(b));
}

std::vector<Shape> numeric(const InferCtx& c) {
  require_equal(c);
  check(c.in[0].dtype != DType::pred, Code::invalid_graph, "{}: needs numbers, found {}", c.op.name,
        to_string(c.in[0]));
  return {c.in[0]};
}

std::vector<Shape> bits(const InferCtx& c) {
  if (c.in.size() == 2) require_equal(c);
  check(!is_float(c.in[0].dtype), Code::invalid_graph, "{}: needs integers or pred, found {}", c.op.name,
        to_string(c.in[0]));
  return {c.in[0]};
}

std::vector<Shape> truth(const InferCtx& c) {
  if (c.in.size() == 2) require_equal(c);
  return {{DType::pred, c.in[0].dims}};
}

// ---- samples

std::vector<OpSample> anywhere() { return {{{f64({2, 3})}}, {{f64({})}}}; }
std::vector<OpSample> positive() { return {{.inputs = {f64({2, 3})}, .low = 0.3, .high = 2}}; }
std::vector<OpSample> steps() { return {{.inputs = {f64({7})}, .low = 0.1, .high = 0.4}}; }  // without discontinuities
std::vector<OpSample> pairs() { return {{{f64({2, 3}), f64({2, 3})}}}; }
std::vector<OpSample> positive_pairs() { return {{.inputs = {f64({2, 3}), f64({2, 3})}, .low = 0.5, .high = 2}}; }
std::vector<OpSample> small_integers() { return {{.inputs = {s32({5}), s32({5})}, .low = 0, .high = 6}}; }

// ---- arithmetic

/// If a kernel computes one operand of a sum and the compiler need not materialize the other, the sum is a kernel call
/// too, so that it does not separate adjacent calls.
bool add_is_kernel(EmitCtx& c) {
  constexpr int64_t kSmall = 4096;
  const Node& n = c.node();
  if (!kernels_support(n.inputs) || c.out().elements() < kSmall) return false;
  auto written = [&](int i) { return c.is_call_result(i) || c.uses(n.inputs[static_cast<size_t>(i)]) > 1; };
  return (c.is_call_result(0) || c.is_call_result(1)) && written(0) && written(1);
}

constexpr OpDef kAdd = {
    .name = "add",
    .infer = numeric,
    .emit =
        [](EmitCtx& c) {
          if (!add_is_kernel(c)) return c.simple("stablehlo.add");
          c.set_out(emit_custom_call(c, {c.in(0), c.in(1)},
                                     {.target = kAddKernel, .results = {c.out()}, .backend_config = {}})[0]);
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      return {c.dy(), c.dy()};
    },
    .samples = pairs,
};

constexpr OpDef kSub = {
    .name = "subtract",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.subtract"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      return {c.dy(), c.needs(1) ? -c.dy() : Tensor()};
    },
    .samples = pairs,
};

constexpr OpDef kMul = {
    .name = "multiply",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.multiply"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      return {c.needs(0) ? c.dy() * c.in(1) : Tensor(), c.needs(1) ? c.dy() * c.in(0) : Tensor()};
    },
    .samples = pairs,
};

constexpr OpDef kDiv = {
    .name = "divide",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.divide"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor da = c.dy() / c.in(1);
      return {da, c.needs(1) ? -(da * c.out()) : Tensor()};
    },
    .samples = positive_pairs,
};

/// q = a/b truncated: d(a − b·q)/db = −q almost everywhere.
constexpr OpDef kRem = {
    .name = "remainder",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.remainder"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor q = c.in(0) / c.in(1);
      return {c.dy(), -(c.dy() * sign(q) * floor(abs(q)))};
    },
    .samples = positive_pairs,
};

/// The derivative with respect to the base is 0 if the exponent is 0, and with respect to the exponent 0 if the base is
/// 0, as in PyTorch.
constexpr OpDef kPow = {
    .name = "power",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.power"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor a = c.in(0), b = c.in(1), zero = zeros_like(a);
      return {c.needs(0) ? where(eq(b, zero), zero, c.dy() * b * pow(a, b - 1.0)) : Tensor(),
              c.needs(1) ? where(eq(a, zero), zero, c.dy() * c.out() * log(a)) : Tensor()};
    },
    .samples = positive_pairs,
};

/// Cotangents of an operation that returns one of its operands. `first`: pred, true where the result is a and not b. At
/// a tie each operand gets half.
Grads share_between(const VjpCtx& c, Tensor first) {
  Tensor zero = zeros_like(c.dy()), tie = where(eq(c.in(0), c.in(1)), c.dy() * 0.5, zero);
  return {c.needs(0) ? where(first, c.dy(), tie) : Tensor(),
          c.needs(1) ? where(bit_or(first, eq(c.in(0), c.in(1))), tie, c.dy()) : Tensor()};
}

constexpr OpDef kMaximum = {
    .name = "maximum",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.maximum"); },
    .vjp = [](const VjpCtx& c) { return share_between(c, gt(c.in(0), c.in(1))); },
    .samples = pairs,
};

constexpr OpDef kMinimum = {
    .name = "minimum",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.minimum"); },
    .vjp = [](const VjpCtx& c) { return share_between(c, lt(c.in(0), c.in(1))); },
    .samples = pairs,
};

constexpr OpDef kAtan2 = {
    .name = "atan2",
    .infer = numeric,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.atan2"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor y = c.in(0), x = c.in(1), g = c.dy() / (x * x + y * y);
      return {g * x, -(g * y)};
    },
    .samples = positive_pairs,
};

// ---- bits

constexpr OpDef kAnd = {
    .name = "and",
    .infer = bits,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.and"); },
    .vjp = no_gradient,
    .samples = small_integers,
};
constexpr OpDef kOr = {
    .name = "or",
    .infer = bits,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.or"); },
    .vjp = no_gradient,
    .samples = small_integers,
};
constexpr OpDef kXor = {
    .name = "xor",
    .infer = bits,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.xor"); },
    .vjp = no_gradient,
    .samples = small_integers,
};
constexpr OpDef kNot = {
    .name = "not",
    .infer = bits,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.not"); },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {{{s32({5})}}, {{pred({5})}}};
    },
};
constexpr OpDef kShiftLeft = {
    .name = "shift_left",
    .infer = bits,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.shift_left"); },
    .vjp = no_gradient,
    .samples = small_integers,
};
constexpr OpDef kShiftRightLogical = {
    .name = "shift_right_logical",
    .infer = bits,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.shift_right_logical"); },
    .vjp = no_gradient,
    .samples = small_integers,
};

// ---- functions of one tensor

constexpr OpDef kNeg = {
    .name = "negate",
    .infer = same_as_input,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.negate"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {-c.dy()}; },
    .samples = anywhere,
};
constexpr OpDef kAbs = {
    .name = "abs",
    .infer = same_as_input,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.abs"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * sign(c.in())}; },
    .samples = anywhere,
};
constexpr OpDef kSign = {
    .name = "sign",
    .infer = same_as_input,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.sign"); },
    .vjp = no_gradient,
    .samples = steps,
};
constexpr OpDef kExp = {
    .name = "exponential",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.exponential"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * c.out()}; },
    .samples = anywhere,
};
constexpr OpDef kExpm1 = {
    .name = "exponential_minus_one",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.exponential_minus_one"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * (c.out() + 1.0)}; },
    .samples = anywhere,
};
constexpr OpDef kLog = {
    .name = "log",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.log"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() / c.in()}; },
    .samples = positive,
};
constexpr OpDef kLog1p = {
    .name = "log_plus_one",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.log_plus_one"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() / (c.in() + 1.0)}; },
    .samples = positive,
};
constexpr OpDef kSqrt = {
    .name = "sqrt",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.sqrt"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * 0.5 / c.out()}; },
    .samples = positive,
};
constexpr OpDef kRsqrt = {
    .name = "rsqrt",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.rsqrt"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * (c.out() / c.in()) * -0.5}; },
    .samples = positive,
};
constexpr OpDef kSin = {
    .name = "sine",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.sine"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * cos(c.in())}; },
    .samples = anywhere,
};
constexpr OpDef kCos = {
    .name = "cosine",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.cosine"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {-(c.dy() * sin(c.in()))}; },
    .samples = anywhere,
};
constexpr OpDef kTanh = {
    .name = "tanh",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.tanh"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * (1.0 - c.out() * c.out())}; },
    .samples = anywhere,
};
constexpr OpDef kSigmoid = {
    .name = "logistic",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.logistic"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * (c.out() * (1.0 - c.out()))}; },
    .samples = anywhere,
};
constexpr OpDef kErf = {
    .name = "erf",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("chlo.erf"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * exp(-square(c.in())) * (2 * std::numbers::inv_sqrtpi)}; },
    .samples = anywhere,
};
constexpr OpDef kErfInv = {
    .name = "erf_inv",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("chlo.erf_inv"); },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy() * exp(square(c.out())) * (0.5 / std::numbers::inv_sqrtpi)}; },
    .samples = []() -> std::vector<OpSample> {
      return {{.inputs = {f64({2, 3})}, .low = -0.9, .high = 0.9}};
    },
};
constexpr OpDef kFloor = {
    .name = "floor",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.floor"); },
    .vjp = no_gradient,
    .samples = steps,
};
constexpr OpDef kCeil = {
    .name = "ceil",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.ceil"); },
    .vjp = no_gradient,
    .samples = steps,
};
constexpr OpDef kRound = {
    .name = "round_nearest_even",
    .infer = floating,
    .emit = [](EmitCtx& c) { c.simple("stablehlo.round_nearest_even"); },
    .vjp = no_gradient,
    .samples = steps,
};
constexpr OpDef kIsFinite = {
    .name = "is_finite",
    .infer = [](const InferCtx& c) { return truth((floating(c), c)); },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.is_finite"); },
    .vjp = no_gradient,
    .samples = anywhere,
};

/// max(x, 0), whose gradient at 0 is 0, as in PyTorch.
constexpr OpDef kRelu = {
    .name = "relu",
    .infer = floating,
    .emit =
        [](EmitCtx& c) {
          c.set_out(c.emit("stablehlo.maximum", {c.in(), c.constant(0, c.out())}, c.out()));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor zero = zeros_like(c.in());
      return {where(gt(c.in(), zero), c.dy(), zero)};
    },
    .samples = anywhere,
};

struct Bounds {
  double low, high;
};

/// The gradient passes at the bounds themselves, as in PyTorch.
constexpr OpDef kClamp = {
    .name = "clamp",
    .infer = same_as_input,
    .emit =
        [](EmitCtx& c) {
          const auto& b = c.attrs<Bounds>();
          Shape scalar{c.out().dtype, {}};
          c.set_out(
              c.emit("stablehlo.clamp", {c.constant(b.low, scalar), c.in(), c.constant(b.high, scalar)}, c.out()));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      const auto& b = c.attrs<Bounds>();
      Tensor x = c.in(), inside = bit_and(ge(x, full_like(x, b.low)), le(x, full_like(x, b.high)));
      return {where(inside, c.dy(), zeros_like(c.dy()))};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({9})}, Bounds{-0.5, 0.25}}};
    },
};

// ---- types

constexpr OpDef kCast = {
    .name = "convert",
    .infer =
        [](const InferCtx& c) {
          return std::vector<Shape>{{c.attrs<DType>(), c.in[0].dims}};
        },
    .emit =
        [](EmitCtx& c) {
          const DType from = c.in().shape.dtype, to = c.out().dtype;
          Tensor operand = c.node().inputs[0];
          while (is_reshape(operand)) operand = operand.node()->inputs[0];
          // A cast to a narrower type and back is a rounding and must not be removed.
          if (const Value& wide = c.unrounded(); !is_cast(operand) && to == wide.shape.dtype) return c.set_out(wide);
          c.simple("stablehlo.convert");
          if (from == DType::f32 && to == DType::bf16) c.set_unrounded(c.in());
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      if (!is_float(c.in().dtype())) return {Tensor()};
      return {cast(c.dy(), c.in().dtype())};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{s32({4})}, DType::f64}, {{f64({4})}, DType::f32, -1, 1, {false}}, {{pred({4})}, DType::f64}};
    },
};

constexpr OpDef kBitcast = {
    .name = "bitcast_convert",
    .infer =
        [](const InferCtx& c) {
          DType to = c.attrs<DType>();
          check(size_of(to) == size_of(c.in[0].dtype) && to != DType::pred && c.in[0].dtype != DType::pred,
                Code::invalid_graph, "bitcast: {} and {} differ in size", to_string(c.in[0]), to_string(to));
          return std::vector<Shape>{{to, c.in[0].dims}};
        },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.bitcast_convert"); },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {{{s32({4})}, DType::u32}};
    },
};

// ---- comparison and choice

enum class Direction { eq, ne, lt, le, gt, ge };

constexpr OpDef kCompare = {
    .name = "compare",
    .infer = truth,
    .emit =
        [](EmitCtx& c) {
          constexpr const char* kNames[] = {"EQ", "NE", "LT", "LE", "GT", "GE"};
          DType t = c.in().shape.dtype;
          const char* type = is_float(t) ? "FLOAT" : is_unsigned(t) || t == DType::pred ? "UNSIGNED" : "SIGNED";
          c.simple("stablehlo.compare", fmt::format("comparison_direction = #stablehlo<comparison_direction {}>, "
                                                    "compare_type = #stablehlo<comparison_type {}>",
                                                    kNames[static_cast<int>(c.attrs<Direction>())], type));
        },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({4}), f64({4})}, Direction::lt},
              {{s32({4}), s32({4})}, Direction::eq},
              {{pred({4}), pred({4})}, Direction::ne}};
    },
};

constexpr OpDef kSelect = {
    .name = "select",
    .infer =
        [](const InferCtx& c) {
          const Shape &p = c.in[0], &a = c.in[1], &b = c.in[2];
          check(p.dtype == DType::pred, Code::invalid_graph, "where: the condition is {}, expected pred", to_string(p));
          check(a == b && p.dims == a.dims, Code::invalid_graph, "where: {}, {} and {} do not broadcast", to_string(p),
                to_string(a), to_string(b));
          return std::vector<Shape>{a};
        },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.select"); },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor zero = zeros_like(c.dy());
      return {Tensor(), c.needs(1) ? where(c.in(0), c.dy(), zero) : Tensor(),
              c.needs(2) ? where(c.in(0), zero, c.dy()) : Tensor()};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{{pred({2, 3}), f64({2, 3}), f64({2, 3})}}};
    },
};

// ---- broadcasting

/// NumPy's broadcast shape; none if incompatible, which the shape rule then reports.
std::optional<Dims> common_dims(const Dims& a, const Dims& b) {
  const Dims &wide = a.size() >= b.size() ? a : b, &narrow = a.size() >= b.size() ? b : a;
  Dims out = wide;
  for (size_t i = 0; i < narrow.size(); ++i) {
    int64_t& d = out[wide.size() - narrow.size() + i];
    if (d == narrow[i] || narrow[i] == 1) continue;
    if (d != 1) return {};
    d = narrow[i];
  }
  return out;
}

Tensor binary(const OpDef& op, Tensor a, Tensor b, std::any attributes = {}) {
  if (a && b && a.dims() != b.dims()) {
    if (auto dims = common_dims(a.dims(), b.dims())) {
      a = broadcast_to(a, *dims);
      b = broadcast_to(b, *dims);
    }
  }
  return apply(op, {a, b}, std::move(attributes));
}

}  // namespace

Tensor add(Tensor a, Tensor b) { return binary(kAdd, a, b); }
Tensor sub(Tensor a, Tensor b) { return binary(kSub, a, b); }
Tensor mul(Tensor a, Tensor b) { return binary(kMul, a, b); }
Tensor div(Tensor a, Tensor b) { return binary(kDiv, a, b); }
Tensor rem(Tensor a, Tensor b) { return binary(kRem, a, b); }
Tensor pow(Tensor a, Tensor b) { return binary(kPow, a, b); }
Tensor maximum(Tensor a, Tensor b) { return binary(kMaximum, a, b); }
Tensor minimum(Tensor a, Tensor b) { return binary(kMinimum, a, b); }
Tensor atan2(Tensor y, Tensor x) { return binary(kAtan2, y, x); }
Tensor bit_and(Tensor a, Tensor b) { return binary(kAnd, a, b); }
Tensor bit_or(Tensor a, Tensor b) { return binary(kOr, a, b); }
Tensor bit_xor(Tensor a, Tensor b) { return binary(kXor, a, b); }
Tensor bit_not(Tensor a) { return apply(kNot, {a}); }
Tensor shift_left(Tensor a, Tensor b) { return binary(kShiftLeft, a, b); }
Tensor shift_right_logical(Tensor a, Tensor b) { return binary(kShiftRightLogical, a, b); }

Tensor neg(Tensor x) { return apply(kNeg, {x}); }
Tensor abs(Tensor x) { return apply(kAbs, {x}); }
Tensor sign(Tensor x) { return apply(kSign, {x}); }
Tensor exp(Tensor x) { return apply(kExp, {x}); }
Tensor expm1(Tensor x) { return apply(kExpm1, {x}); }
Tensor log(Tensor x) { return apply(kLog, {x}); }
Tensor log1p(Tensor x) { return apply(kLog1p, {x}); }
Tensor sqrt(Tensor x) { return apply(kSqrt, {x}); }
Tensor rsqrt(Tensor x) { return apply(kRsqrt, {x}); }
Tensor sin(Tensor x) { return apply(kSin, {x}); }
Tensor cos(Tensor x) { return apply(kCos, {x}); }
Tensor tanh(Tensor x) { return apply(kTanh, {x}); }
Tensor sigmoid(Tensor x) { return apply(kSigmoid, {x}); }
Tensor erf(Tensor x) { return apply(kErf, {x}); }
Tensor erf_inv(Tensor x) { return apply(kErfInv, {x}); }
Tensor floor(Tensor x) { return apply(kFloor, {x}); }
Tensor ceil(Tensor x) { return apply(kCeil, {x}); }
Tensor round(Tensor x) { return apply(kRound, {x}); }
Tensor is_finite(Tensor x) { return apply(kIsFinite, {x}); }
Tensor square(Tensor x) { return x * x; }
Tensor relu(Tensor x) { return apply(kRelu, {x}); }
Tensor clamp(Tensor x, double low, double high) { return apply(kClamp, {x}, Bounds{low, high}); }

Tensor cast(Tensor x, DType to) { return x.dtype() == to ? x : apply(kCast, {x}, to); }
bool is_cast(Tensor x) { return x.node()->op == &kCast; }
Tensor bitcast(Tensor x, DType to) { return x.dtype() == to ? x : apply(kBitcast, {x}, to); }

Tensor eq(Tensor a, Tensor b) { return binary(kCompare, a, b, Direction::eq); }
Tensor ne(Tensor a, Tensor b) { return binary(kCompare, a, b, Direction::ne); }
Tensor lt(Tensor a, Tensor b) { return binary(kCompare, a, b, Direction::lt); }
Tensor le(Tensor a, Tensor b) { return binary(kCompare, a, b, Direction::le); }
Tensor gt(Tensor a, Tensor b) { return binary(kCompare, a, b, Direction::gt); }
Tensor ge(Tensor a, Tensor b) { return binary(kCompare, a, b, Direction::ge); }

Tensor where(Tensor c, Tensor a, Tensor b) {
  if (auto ab = common_dims(a.dims(), b.dims())) {
    if (auto dims = common_dims(c.dims(), *ab)) {
      c = broadcast_to(c, *dims);
      a = broadcast_to(a, *dims);
      b = broadcast_to(b, *dims);
    }
  }
  return apply(kSelect, {c, a, b});
}

OpList elementwise_ops() {
  return {&kAdd,   &kSub,     &kMul,     &kDiv,       &kRem,
          &kPow,   &kMaximum, &kMinimum, &kAtan2,     &kAnd,
          &kOr,    &kXor,     &kNot,     &kShiftLeft, &kShiftRightLogical,
          &kNeg,   &kAbs,     &kSign,    &kExp,       &kExpm1,
          &kLog,   &kLog1p,   &kSqrt,    &kRsqrt,     &kSin,
          &kCos,   &kTanh,    &kSigmoid, &kErf,       &kErfInv,
          &kFloor, &kCeil,    &kRound,   &kIsFinite,  &kRelu,
          &kClamp, &kCast,    &kBitcast, &kCompare,   &kSelect};
}

}  // namespace md
