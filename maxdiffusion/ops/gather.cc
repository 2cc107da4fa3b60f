// Rows by index, and rows added at an index: stablehlo gather and scatter in the one form that models need.
#include "maxdiffusion/ops/gather.h"

#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

void require_indices(const InferCtx& c, const Shape& indices) {
  check(is_integer(indices.dtype), Code::invalid_graph, "{}: indices are {}, expected integers", c.op.name,
        to_string(indices));
}

/// "1, 2, 3": the axes from to to − 1, as the list in an attribute.
std::string axes_text(int64_t from, int64_t to) {
  std::string s;
  for (int64_t a = from; a < to; ++a) s += fmt::format("{}{}", a > from ? ", " : "", a);
  return s;
}

/// Clamps indices: gather does so itself, but scatter drops indices out of range.
Value clamped(EmitCtx& c, const Value& indices, int64_t rows) {
  Shape scalar{indices.shape.dtype, {}};
  return c.emit("stablehlo.clamp", {c.constant_int(0, scalar), indices, c.constant_int(rows - 1, scalar)},
                indices.shape);
}

constexpr OpDef kTake = {
    .name = "take",
    .infer =
        [](const InferCtx& c) {
          require_indices(c, c.in[1]);
          check(c.in[0].rank() >= 1 && c.in[0].dim(0) > 0, Code::invalid_graph, "take: {} has no rows",
                to_string(c.in[0]));
          Shape out{c.in[0].dtype, c.in[1].dims};
          out.dims.insert(out.dims.end(), c.in[0].dims.begin() + 1, c.in[0].dims.end());
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          int64_t where = c.in(1).shape.rank(), rank = c.out().rank();
          Dims sizes = c.in(0).shape.dims;
          sizes[0] = 1;
          c.simple("stablehlo.gather",
                   fmt::format("dimension_numbers = #stablehlo.gather<offset_dims = [{}], collapsed_slice_dims = [0], "
                               "start_index_map = [0], index_vector_dim = {}>, slice_sizes = {}, "
                               "indices_are_sorted = false",
                               axes_text(where, rank), where, mlir_array(sizes)));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      return {scatter_add(c.dy(), c.in(1), c.in(0).dim(0)), Tensor()};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{.inputs = {f64({4, 3}), s32({2, 3})}, .low = -1, .high = 5},
              {.inputs = {f64({4}), s32({})}, .low = 0, .high = 3}};
    },
};

constexpr OpDef kScatterAdd = {
    .name = "scatter_add",
    .infer =
        [](const InferCtx& c) {
          const Shape &updates = c.in[0], &indices = c.in[1];
          int64_t rows = c.attrs<int64_t>();
          require_indices(c, indices);
          bool ok = rows > 0 && updates.rank() >= indices.rank();
          for (int64_t i = 0; ok && i < indices.rank(); ++i) ok = updates.dim(i) == indices.dim(i);
          check(ok, Code::invalid_graph,
                "scatter_add: updates {} do not begin with the shape of indices {}, or {} rows", to_string(updates),
                to_string(indices), rows);
          Shape out{updates.dtype, {rows}};
          out.dims.insert(out.dims.end(), updates.dims.begin() + indices.rank(), updates.dims.end());
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          int64_t where = c.in(1).shape.rank();
          Shape scalar{c.out().dtype, {}};
          Value places = clamped(c, c.in(1), c.out().dim(0));
          std::string region = c.region({scalar, scalar}, [&](EmitCtx& r, const std::vector<Value>& a) {
            return std::vector<Value>{r.emit("stablehlo.add", {a[0], a[1]}, scalar)};
          });
          auto out = c.emit_multi(
              "stablehlo.scatter", {c.constant(0, c.out()), places, c.in(0)}, {c.out()},
              fmt::format("scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [{}], "
                          "inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = {}>, "
                          "indices_are_sorted = false, unique_indices = false",
                          axes_text(where, c.in(0).shape.rank()), where),
              {region});
          c.set_out(out[0]);
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      return {take(c.dy(), c.in(1)), Tensor()};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{.inputs = {f64({2, 3, 2}), s32({2, 3})}, .attributes = int64_t{4}, .low = -1, .high = 5},
              {.inputs = {f64({3}), s32({3})}, .attributes = int64_t{2}, .low = 0, .high = 1}};
    },
};

/// The cotangent uses a mask instead of a scatter: B is small, and a mask can be sharded along any mesh axis.
constexpr OpDef kTakePerBatch = {
    .name = "take_per_batch",
    .infer =
        [](const InferCtx& c) {
          const Shape &x = c.in[0], &indices = c.in[1];
          require_indices(c, indices);
          check(x.rank() >= 2 && indices.rank() == 1 && indices.dim(0) == x.dim(0), Code::invalid_graph,
                "take_per_batch: x {} with indices {}, expected [B, N, …] and [B]", to_string(x), to_string(indices));
          Shape out{x.dtype, {x.dim(0)}};
          out.dims.insert(out.dims.end(), x.dims.begin() + 2, x.dims.end());
          return std::vector<Shape>{out};
        },
    .emit =
        [](EmitCtx& c) {
          Dims sizes = c.in(0).shape.dims;
          sizes[0] = sizes[1] = 1;
          c.simple("stablehlo.gather",
                   fmt::format("dimension_numbers = #stablehlo.gather<offset_dims = [{}], collapsed_slice_dims = [1], "
                               "operand_batching_dims = [0], start_indices_batching_dims = [0], "
                               "start_index_map = [1], index_vector_dim = 1>, slice_sizes = {}, "
                               "indices_are_sorted = false",
                               axes_text(1, c.out().rank()), mlir_array(sizes)));
        },
    .vjp = [](const VjpCtx& c) -> Grads {
      Tensor x = c.in(0), indices = clamp(c.in(1), 0, static_cast<double>(x.dim(1) - 1));
      Shape places{indices.dtype(), x.dims()};
      Tensor hit = eq(iota(x.graph(), places, 1), broadcast_in_dim(indices, x.dims(), {0}));
      return {where(hit, expand_dims(c.dy(), 1), zeros_like(x)), Tensor()};
    },
    .samples = []() -> std::vector<OpSample> {
      return {{.inputs = {f64({3, 4, 2}), s32({3})}, .low = -1, .high = 5},
              {.inputs = {f64({2, 3}), s32({2})}, .low = 0, .high = 2}};
    },
};

}  // namespace

Tensor take(Tensor x, Tensor indices) { return apply(kTake, {x, indices}); }

Tensor scatter_add(Tensor updates, Tensor indices, int64_t rows) {
  return apply(kScatterAdd, {updates, indices}, rows);
}

Tensor take_per_batch(Tensor x, Tensor indices) { return apply(kTakePerBatch, {x, indices}); }

OpList gather_ops() { return {&kTake, &kScatterAdd, &kTakePerBatch}; }

}  // namespace md
