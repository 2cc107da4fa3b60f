#include "maxdiffusion/ops/random.h"

#include <cmath>
#include <limits>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/threefry.h"

namespace md {
namespace {

// Key u32[2] and counters of two equal shapes → the two words of the block, of that shape.
struct Printed {
  Value x0, x1;
};
Printed print_threefry(EmitCtx& c, const Value& k0, const Value& k1, Value x0, Value x1) {
  const Shape shape = x0.shape;
  auto op = [&](const char* name, const Value& a, const Value& b) { return c.emit(name, {a, b}, shape); };
  auto number = [&](int64_t v) { return c.constant_int(v, shape); };
  auto add = [&](const Value& a, const Value& b) { return op("stablehlo.add", a, b); };
  const Value k2 = op("stablehlo.xor", op("stablehlo.xor", k0, k1), number(kThreefryParity));
  const Value key[3] = {k0, k1, k2};
  x0 = add(x0, key[0]);
  x1 = add(x1, key[1]);
  for (int group = 0; group < 5; ++group) {
    for (int r : kThreefryRotation[group % 2]) {
      x0 = add(x0, x1);
      x1 = op("stablehlo.or", op("stablehlo.shift_left", x1, number(r)),
              op("stablehlo.shift_right_logical", x1, number(32 - r)));
      x1 = op("stablehlo.xor", x1, x0);
    }
    x0 = add(x0, key[(group + 1) % 3]);
    x1 = add(add(x1, key[(group + 2) % 3]), number(group + 1));
  }
  return {x0, x1};
}

Value key_word(EmitCtx& c, const Value& key, int word, const Dims& dims) {
  const Shape one{DType::u32, {1}}, scalar{DType::u32, {}};
  Value w = c.emit("stablehlo.slice", {key}, one,
                   "start_indices = " + mlir_array({word}) + ", limit_indices = " + mlir_array({word + 1}) +
                       ", strides = " + mlir_array({1}));
  w = c.emit("stablehlo.reshape", {w}, scalar);
  return dims.empty() ? w : c.broadcast(w, dims, {});
}

std::vector<Shape> infer_key(const InferCtx& c) {
  check(c.in[0] == Shape{DType::u32, {2}}, Code::invalid_graph, "{}: a key is u32[2], found {}", c.op.name,
        to_string(c.in[0]));
  return {c.in[0]};
}

// Key and datum u32[] → the key derived for that datum and use.
constexpr OpDef kDeriveKey = {
    .name = "derive_key",
    .infer = infer_key,
    .emit =
        [](EmitCtx& c) {
          const Shape scalar{DType::u32, {}}, one{DType::u32, {1}};
          const Value use = c.constant_int(c.attrs<Use>(), scalar);
          auto [x0, x1] = print_threefry(c, key_word(c, c.in(0), 0, {}), key_word(c, c.in(0), 1, {}), use, c.in(1));
          x0 = c.emit("stablehlo.reshape", {x0}, one);
          x1 = c.emit("stablehlo.reshape", {x1}, one);
          c.set_out(c.emit("stablehlo.concatenate", {x0, x1}, c.out(), "dimension = 0 : i64"));
        },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {{{{DType::u32, {2}}, {DType::u32, {}}}, kStep, 0, 9}};
    },
};

/// Whether element numbers need more than 32 bits. The counter's high word is then the row, on axis 0.
bool is_large(const Shape& shape) { return shape.elements() > int64_t{1} << 32; }

// One block per element, whose first word is used. The counter is a sum of iotas over the axes, which needs no
// communication under any sharding of the result. A second input replaces the iota of axis 0.
constexpr OpDef kRandomBits = {
    .name = "random_bits",
    .infer =
        [](const InferCtx& c) {
          infer_key(c);
          const Shape out{DType::u32, c.attrs<Dims>()};
          check(c.in.size() == 1 || (out.rank() > 0 && c.in[1] == Shape{DType::u32, {out.dim(0)}}), Code::invalid_graph,
                "random_bits: numbers of rows are {}, the result is {}",
                c.in.size() == 1 ? "absent" : to_string(c.in[1]), to_string(out));
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          const Shape& shape = c.out();
          auto index = [&](int64_t axis) {
            return axis == 0 && c.in_count() == 2
                       ? c.broadcast(c.in(1), shape.dims, {0})
                       : c.emit("stablehlo.iota", {}, shape, "iota_dimension = " + std::to_string(axis) + " : i64");
          };
          Value counter = c.constant_int(0, shape);
          int64_t stride = 1;
          for (int64_t axis = shape.rank(); axis-- > (is_large(shape) ? 1 : 0); stride *= shape.dim(axis)) {
            if (shape.dim(axis) == 1 && !(axis == 0 && c.in_count() == 2)) continue;
            Value i = index(axis);
            if (stride != 1) i = c.emit("stablehlo.multiply", {i, c.constant_int(stride, shape)}, shape);
            counter = stride == 1 ? i : c.emit("stablehlo.add", {counter, i}, shape);
          }
          const Value use = is_large(shape) ? index(0) : c.constant_int(kSample, shape);
          c.set_out(
              print_threefry(c, key_word(c, c.in(), 0, shape.dims), key_word(c, c.in(), 1, shape.dims), use, counter)
                  .x0);
        },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      const Shape key{DType::u32, {2}};
      return {{{key}, Dims{3, 4}, 0, 9}, {{key}, Dims{}, 0, 9}, {{key, {DType::u32, {3}}}, Dims{3, 4}, 0, 9}};
    },
};

Tensor derive(Tensor key, Use use, Tensor datum) { return apply(kDeriveKey, {key, cast(datum, DType::u32)}, use); }

Tensor unit_floats(Rng rng, Dims dims) {
  Tensor bits = random_bits(rng, std::move(dims));
  Tensor top = cast(shift_right_logical(bits, scalar_like(bits, 8)), DType::f32);
  return top * kUnit;
}

}  // namespace

Rng Rng::seed(Graph& g, uint64_t seed) {
  const ThreefryWords key = seed_key(seed);
  return Rng(constant(g, HostArray::of<uint32_t>({DType::u32, {2}}, key)));
}
Rng Rng::at_step(Tensor step) const {
  check(step.rank() == 0 && is_integer(step.dtype()), Code::invalid_graph,
        "Rng::at: the step must be an integer scalar, found {}", to_string(step.shape()));
  return Rng(derive(key_, kStep, step), rows_);
}
Rng Rng::for_(std::string_view purpose) const {
  return Rng(derive(key_, kPurpose, constant(key_.graph(), purpose_word(purpose), DType::u32)), rows_);
}
Rng Rng::fold(uint32_t i) const { return Rng(derive(key_, kFold, constant(key_.graph(), i, DType::u32)), rows_); }

Tensor random_bits(Rng rng, Dims dims) {
  const Shape shape{DType::u32, dims};
  check(!is_large(shape) || (shape.dim(0) <= int64_t{1} << 31 && shape.elements() / shape.dim(0) <= int64_t{1} << 32),
        Code::invalid_graph, "random_bits: a row of {} has more than 2^32 elements", to_string(dims));
  std::vector<Tensor> in = {rng.key()};
  if (rng.rows()) in.push_back(cast(rng.rows(), DType::u32));
  return apply(kRandomBits, in, std::move(dims));
}

Tensor random_uniform(Rng rng, const Shape& shape, double low, double high) {
  Tensor u = unit_floats(rng, shape.dims);
  if (low == 0 && high == 1) return cast(u, shape.dtype);
  // Rounding may give `high` itself; the largest float below it is as close.
  const float below = std::nextafter(static_cast<float>(high), -std::numeric_limits<float>::infinity());
  u = u * (high - low) + low;
  return cast(minimum(u, scalar_like(u, below)), shape.dtype);
}

Tensor random_normal(Rng rng, const Shape& shape) {
  // The midpoints of the 2^24 intervals of (−1, 1): symmetric, and never ±1, where erf⁻¹ is infinite.
  Tensor u = unit_floats(rng, shape.dims) * 2.0 + (kUnit - 1.0);
  return cast(erf_inv(u) * std::sqrt(2.0), shape.dtype);
}

Tensor random_integers(Rng rng, Dims dims, int64_t low, int64_t high) {
  check(low < high && high - low <= int64_t{1} << 32, Code::invalid_graph, "random_integers: no range [{}, {})", low,
        high);
  Tensor wide = cast(random_bits(rng, std::move(dims)), DType::u64) * static_cast<double>(high - low);
  Tensor offset = cast(shift_right_logical(wide, scalar_like(wide, 32)), DType::s32);
  return offset + static_cast<double>(low);
}

OpList random_ops() { return {&kDeriveKey, &kRandomBits}; }

}  // namespace md
