#include "maxdiffusion/tiles/stablehlo.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "maxdiffusion/base/error.h"

namespace md::tiles {
namespace {

using Values = std::vector<Value>;

const Shape kScalar{DType::s32, {}}, kTruth{DType::pred, {}};

Shape two_dims(const Memory& m) { return {m.array.dtype, {m.block.end() - 2, m.block.end()}}; }

/// Prints one body of statements. `memory`: the current contents of each memory, two-dimensional; for scalars the whole
/// array.
class Step {
 public:
  Step(const Program& program, Values coordinates, Values memory)
      : program_(program),
        coordinates_(std::move(coordinates)),
        memory_(std::move(memory)),
        values_(static_cast<size_t>(program.values())) {}

  void run(EmitCtx& c, const Body& body) {
    for (const Statement& s : body.statements) print(c, s);
  }
  const Values& memory() const { return memory_; }

 private:
  const Value& value(const Tile& t) const { return values_[static_cast<size_t>(t.id)]; }
  void bind(const Tile& t, Value v) { values_[static_cast<size_t>(t.id)] = std::move(v); }
  Value& memory(const Statement& s) { return memory_[static_cast<size_t>(s.ref)]; }

  /// Memories that a body may change; they are results of the enclosing statement.
  std::vector<size_t> changing() const {
    std::vector<size_t> of;
    for (size_t i = 0; i < memory_.size(); ++i)
      if (program_.memories()[i].space >= Space::output) of.push_back(i);
    return of;
  }
  Values selected(const std::vector<size_t>& which) const {
    Values out;
    for (size_t i : which) out.push_back(memory_[i]);
    return out;
  }

  Value reduced(EmitCtx& c, const Statement& s, const Value& x) {
    const bool most = s.op == Op::max_of;
    const Shape scalar{x.shape.dtype, {}};
    const std::string region = c.region({scalar, scalar}, [&](EmitCtx& r, const Values& a) {
      return Values{r.emit(most ? "stablehlo.maximum" : "stablehlo.add", {a[0], a[1]}, scalar)};
    });
    Dims reduced_dims = s.out[0].shape.dims;
    reduced_dims.erase(reduced_dims.begin() + s.axis);
    const Value start = c.constant(most ? -std::numeric_limits<double>::infinity() : 0, scalar);
    const Value sums = c.emit_multi("stablehlo.reduce", {x, start}, {{x.shape.dtype, reduced_dims}},
                                    fmt::format("dimensions = array<i64: {}>", s.axis), {region})[0];
    return c.emit("stablehlo.reshape", {sums}, s.out[0].shape);
  }

  void when(EmitCtx& c, const Statement& s) {
    const std::vector<size_t> which = changing();
    const Values before = memory_;
    std::vector<Shape> shapes;
    for (size_t i : which) shapes.push_back(memory_[i].shape);
    const std::string yes = c.region({}, [&](EmitCtx& r, const Values&) {
      run(r, *s.bodies[0]);
      return selected(which);
    });
    memory_ = before;
    const std::string no = c.region({}, [&](EmitCtx&, const Values&) { return selected(which); });
    const Values after = c.emit_multi("stablehlo.if", {value(s.in[0])}, shapes, "", {yes, no});
    for (size_t n = 0; n < which.size(); ++n) memory_[which[n]] = after[n];
  }

  void loop(EmitCtx& c, const Statement& s) {
    const std::vector<size_t> which = changing();
    const Body& body = *s.bodies[0];
    const size_t carried = s.in.size() - 1;
    Values start = {c.constant_int(0, kScalar)};
    for (size_t i = 0; i < carried; ++i) start.push_back(value(s.in[i + 1]));
    for (size_t i : which) start.push_back(memory_[i]);
    std::vector<Shape> shapes;
    for (const Value& v : start) shapes.push_back(v.shape);
    const std::string condition = c.region(shapes, [&](EmitCtx& r, const Values& a) {
      return Values{r.emit("stablehlo.compare", {a[0], value(s.in[0])}, kTruth,
                           "comparison_direction = #stablehlo<comparison_direction LT>")};
    });
    const std::string step = c.region(shapes, [&](EmitCtx& r, const Values& a) {
      for (size_t i = 0; i <= carried; ++i) bind(body.arguments[i], a[i]);
      for (size_t n = 0; n < which.size(); ++n) memory_[which[n]] = a[carried + 1 + n];
      run(r, body);
      Values next = {r.emit("stablehlo.add", {a[0], r.constant_int(1, kScalar)}, kScalar)};
      for (const Tile& t : body.results) next.push_back(value(t));
      for (size_t i : which) next.push_back(memory_[i]);
      return next;
    });
    const Values out = c.emit_multi("stablehlo.while", start, shapes, "", {condition, step});
    for (size_t i = 0; i < carried; ++i) bind(s.out[i], out[i + 1]);
    for (size_t n = 0; n < which.size(); ++n) memory_[which[n]] = out[carried + 1 + n];
  }

  Value of(EmitCtx& c, const Statement& s) {
    const Shape& out = s.out[0].shape;
    Values in;
    for (const Tile& t : s.in) in.push_back(value(t));
    auto plain = [&](const char* op) { return c.emit(op, in, out); };
    auto compare = [&](const char* how) {
      return c.emit("stablehlo.compare", in, out,
                    fmt::format("comparison_direction = #stablehlo<comparison_direction {}>", how));
    };
    switch (s.op) {
      case Op::constant:
        return out.dtype == DType::s32 ? c.constant_int(static_cast<int64_t>(s.value), out) : c.constant(s.value, out);
      case Op::coordinate: return coordinates_[static_cast<size_t>(s.axis)];
      case Op::read:
        return c.emit(
            "stablehlo.reshape",
            {c.emit("stablehlo.dynamic_slice", {memory(s), in[0]}, {DType::s32, {1}}, "slice_sizes = array<i64: 1>")},
            out);
      case Op::load:
        return c.emit("stablehlo.dynamic_slice", {memory(s), in[0], c.constant_int(0, kScalar)}, out,
                      "slice_sizes = " + mlir_array(out.dims));
      case Op::matmul:
        return c.emit("stablehlo.dot_general", in, out,
                      fmt::format("dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [{}], "
                                  "rhs_contracting_dimensions = [{}]>, precision_config = [#stablehlo<precision "
                                  "HIGHEST>, #stablehlo<precision HIGHEST>]",
                                  s.contract[0], s.contract[1]));
      case Op::add: return plain("stablehlo.add");
      case Op::subtract: return plain("stablehlo.subtract");
      case Op::multiply: return plain("stablehlo.multiply");
      case Op::divide: return plain("stablehlo.divide");
      case Op::maximum: return plain("stablehlo.maximum");
      case Op::minimum: return plain("stablehlo.minimum");
      case Op::both: return plain("stablehlo.and");
      case Op::exp2:
        return c.emit("stablehlo.exponential",
                      {c.emit("stablehlo.multiply", {in[0], c.constant(std::log(2.0), out)}, out)}, out);
      case Op::log2:
        return c.emit("stablehlo.multiply", {c.emit("stablehlo.log", in, out), c.constant(1 / std::log(2.0), out)},
                      out);
      case Op::cast: return plain("stablehlo.convert");
      case Op::max_of:
      case Op::sum_of: return reduced(c, s, in[0]);
      case Op::broadcast: return c.broadcast(in[0], out.dims, in[0].shape.dims.empty() ? Axes{} : Axes{0, 1});
      case Op::select: return plain("stablehlo.select");
      case Op::iota: return c.emit("stablehlo.iota", {}, out, fmt::format("iota_dimension = {} : i64", s.axis));
      case Op::less: return compare("LT");
      case Op::equal: return compare("EQ");
      case Op::concatenate:
        return c.emit("stablehlo.concatenate", in, out, fmt::format("dimension = {} : i64", s.axis));
      case Op::slice:
        return c.emit("stablehlo.slice", in, out,
                      fmt::format("start_indices = array<i64: {}, {}>, limit_indices = array<i64: {}, {}>, strides = "
                                  "array<i64: 1, 1>",
                                  s.start[0], s.start[1], s.start[0] + out.dims[0], s.start[1] + out.dims[1]));
      case Op::transpose: return c.emit("stablehlo.transpose", in, out, "permutation = array<i64: 1, 0>");
      case Op::store:
      case Op::when:
      case Op::loop: break;
    }
    fail(Code::internal, "kernel '{}': a statement without a value", program_.name());
  }

  void print(EmitCtx& c, const Statement& s) {
    if (s.op == Op::when) return when(c, s);
    if (s.op == Op::loop) return loop(c, s);
    if (s.op != Op::store) return bind(s.out[0], of(c, s));
    memory(s) = c.emit("stablehlo.dynamic_update_slice",
                       {memory(s), value(s.in[0]), value(s.in[1]), c.constant_int(0, kScalar)}, memory(s).shape);
  }

  const Program& program_;
  Values coordinates_, memory_, values_;
};

/// Start indices of the step's block in the array.
Values starts(EmitCtx& c, const Memory& m, const Values& coordinates) {
  Values at;
  for (size_t i = 0; i < m.block.size(); ++i) {
    const Place& p = m.place[i];
    if (p.grid < 0) {
      at.push_back(c.constant_int(0, kScalar));
      continue;
    }
    Value block = coordinates[static_cast<size_t>(p.grid)];
    if (p.divide > 1) block = c.emit("stablehlo.divide", {block, c.constant_int(p.divide, kScalar)}, kScalar);
    at.push_back(c.emit("stablehlo.multiply", {block, c.constant_int(m.block[i], kScalar)}, kScalar));
  }
  return at;
}

}  // namespace

std::vector<Value> print_stablehlo(EmitCtx& c, const Program& program, const std::vector<Value>& arrays) {
  const std::vector<Memory>& memories = program.memories();
  // State of the loop: the step, then outputs and scratch in the program's order.
  Values inputs(memories.size()), state = {c.constant_int(0, kScalar)};
  std::vector<size_t> changing;
  size_t next = 0;
  int64_t steps = 1;
  for (int64_t n : program.grid()) steps *= n;
  for (size_t i = 0; i < memories.size(); ++i) {
    const Memory& m = memories[i];
    if (m.space < Space::output) {
      check(next < arrays.size() && arrays[next].shape == m.array, Code::invalid_graph,
            "kernel '{}': '{}' is {}, expected {}", program.name(), m.name,
            next < arrays.size() ? to_string(arrays[next].shape) : "missing", to_string(m.array));
      inputs[i] = arrays[next++];
    } else {
      changing.push_back(i);
      state.push_back(m.array.dtype == DType::s32 ? c.constant_int(0, m.array) : c.constant(std::nan(""), m.array));
    }
  }
  std::vector<Shape> shapes;
  for (const Value& v : state) shapes.push_back(v.shape);
  const std::string condition = c.region(shapes, [&](EmitCtx& r, const Values& a) {
    return Values{r.emit("stablehlo.compare", {a[0], r.constant_int(steps, kScalar)}, kTruth,
                         "comparison_direction = #stablehlo<comparison_direction LT>")};
  });
  const std::string step = c.region(shapes, [&](EmitCtx& r, const Values& a) {
    Values coordinates(program.grid().size());
    Value left = a[0];
    for (size_t d = coordinates.size(); d-- > 0;) {
      const Value size = r.constant_int(program.grid()[d], kScalar);
      coordinates[d] = r.emit("stablehlo.remainder", {left, size}, kScalar);
      left = r.emit("stablehlo.divide", {left, size}, kScalar);
    }
    Values memory(memories.size()), whole = inputs;
    std::vector<Values> at(memories.size());
    for (size_t n = 0; n < changing.size(); ++n) whole[changing[n]] = a[n + 1];
    for (size_t i = 0; i < memories.size(); ++i) {
      const Memory& m = memories[i];
      memory[i] = whole[i];
      if (m.space == Space::scalars || m.space == Space::scratch) continue;
      at[i] = starts(r, m, coordinates);
      Values operands = {whole[i]};
      operands.insert(operands.end(), at[i].begin(), at[i].end());
      memory[i] = r.emit("stablehlo.reshape",
                         {r.emit("stablehlo.dynamic_slice", operands, {m.array.dtype, m.block},
                                 "slice_sizes = " + mlir_array(m.block))},
                         two_dims(m));
    }
    Step body(program, coordinates, memory);
    body.run(r, program.body());
    Values out = {r.emit("stablehlo.add", {a[0], r.constant_int(1, kScalar)}, kScalar)};
    for (size_t i : changing) {
      const Memory& m = memories[i];
      Value v = body.memory()[i];
      if (m.space == Space::output) {
        Values operands = {whole[i], r.emit("stablehlo.reshape", {v}, {m.array.dtype, m.block})};
        operands.insert(operands.end(), at[i].begin(), at[i].end());
        v = r.emit("stablehlo.dynamic_update_slice", operands, m.array);
      }
      out.push_back(v);
    }
    return out;
  });
  const Values end = c.emit_multi("stablehlo.while", state, shapes, "", {condition, step});
  Values results;
  for (size_t n = 0; n < changing.size(); ++n)
    if (memories[changing[n]].space == Space::output) results.push_back(end[n + 1]);
  return results;
}

}  // namespace md::tiles
