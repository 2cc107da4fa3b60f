#include "maxdiffusion/tiles/program.h"

#include <algorithm>
#include <map>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/round_up.h"

namespace md::tiles {
namespace {

/// Bytes in registers of 8 × 128 values of 4 bytes; narrower types pack more rows.
int64_t registers_bytes(const Shape& s) {
  if (s.dims.empty()) return 0;
  const int64_t size = std::max<int64_t>(1, static_cast<int64_t>(size_of(s.dtype)));
  Dims d = s.dims;
  d.back() = round_up(d.back(), 128);
  if (d.size() > 1) d[d.size() - 2] = round_up(d[d.size() - 2], 32 / size);
  int64_t bytes = size;
  for (int64_t n : d) bytes *= n;
  return bytes;
}

double product_of(const Dims& dims) {
  double n = 1;
  for (const int64_t d : dims) n *= static_cast<double>(d);
  return n;
}

/// FLOPs and transcendentals of one run of a body. `constants`: scalars by id.
Program::Work work_of(const Body& body, std::map<int, double>& constants) {
  Program::Work all, conditional;
  for (const Statement& s : body.statements) {
    if (s.op == Op::constant && s.out[0].is_scalar()) constants[s.out[0].id] = s.value;
    if (s.op == Op::matmul)
      all.flops += 2 * product_of(s.out[0].shape.dims) *
                   static_cast<double>(s.in[0].shape.dims[static_cast<size_t>(s.contract[0])]);
    if (s.op == Op::exp2 || s.op == Op::log2) all.transcendentals += product_of(s.out[0].shape.dims);
    if (s.op == Op::when) {
      const Program::Work inside = work_of(*s.bodies[0], constants);
      if (inside.flops >= conditional.flops) conditional = inside;
    }
    if (s.op == Op::loop) {
      const Program::Work inside = work_of(*s.bodies[0], constants);
      const auto count = constants.find(s.in[0].id);
      const double times = count == constants.end() ? 1 : count->second;
      all.flops += times * inside.flops;
      all.transcendentals += times * inside.transcendentals;
    }
  }
  all.flops += conditional.flops;
  all.transcendentals += conditional.transcendentals;
  return all;
}

}  // namespace

Program::Program(std::string name, Dims grid, int sequential)
    : name_(std::move(name)), grid_(std::move(grid)), sequential_(sequential) {}

void Program::need(bool ok, const char* what, const std::vector<Tile>& operands) const {
  if (ok) return;
  std::string shapes;
  for (const Tile& t : operands) shapes += (shapes.empty() ? "" : ", ") + to_string(t.shape);
  fail(Code::invalid_graph, "kernel '{}': {} of {}", name_, what, shapes);
}

Ref Program::add_memory(Memory m) {
  check(memories_.empty() || memories_.back().space <= m.space, Code::invalid_graph,
        "kernel '{}': '{}' comes late; scalars come first, then inputs, outputs and scratch memory", name_, m.name);
  const bool whole = m.space == Space::scalars || m.space == Space::scratch;
  if (whole) m.block = m.array.dims, m.place.assign(m.block.size(), {});
  const Dims& a = m.array.dims;
  check(m.block.size() == a.size() && m.place.size() == a.size() && a.size() >= (m.space == Space::scalars ? 1U : 2U),
        Code::invalid_graph, "kernel '{}': '{}' is {} with blocks of {} at {} places", name_, m.name,
        to_string(m.array), to_string(m.block), m.place.size());
  for (size_t i = 0; i < a.size(); ++i) {
    check(m.block[i] > 0 && a[i] % m.block[i] == 0, Code::invalid_graph,
          "kernel '{}': '{}' is {}, which blocks of {} do not divide", name_, m.name, to_string(m.array),
          to_string(m.block));
    check(i + 2 >= a.size() || m.block[i] == 1, Code::invalid_graph,
          "kernel '{}': blocks of '{}' are {}; all but the last two sizes must be 1", name_, m.name,
          to_string(m.block));
    check(m.place[i].grid < std::ssize(grid_), Code::invalid_graph,
          "kernel '{}': '{}' is placed by axis {} of a grid {}", name_, m.name, m.place[i].grid, to_string(grid_));
  }
  Shape shape{m.array.dtype, m.block};
  if (m.space != Space::scalars) shape.dims.erase(shape.dims.begin(), shape.dims.end() - 2);
  memories_.push_back(std::move(m));
  return {static_cast<int>(memories_.size()) - 1, shape};
}

Ref Program::scalars(std::string name, int64_t n) {
  return add_memory({Space::scalars, std::move(name), {DType::s32, {n}}, {}, {}});
}
Ref Program::input(std::string name, Shape array, Dims block, std::vector<Place> place) {
  return add_memory({Space::input, std::move(name), std::move(array), std::move(block), std::move(place)});
}
Ref Program::output(std::string name, Shape array, Dims block, std::vector<Place> place) {
  return add_memory({Space::output, std::move(name), std::move(array), std::move(block), std::move(place)});
}
Ref Program::scratch(std::string name, Shape shape) {
  return add_memory({Space::scratch, std::move(name), std::move(shape), {}, {}});
}

Tile Program::add_statement(Statement s, Shape out) {
  largest_ = std::max(largest_, registers_bytes(out));
  s.out = {{values_++, std::move(out)}};
  Tile result = s.out[0];
  bodies_.back()->statements.push_back(std::move(s));
  return result;
}

Tile Program::constant(double value, Shape shape) {
  return add_statement({.op = Op::constant, .in = {}, .out = {}, .value = value}, std::move(shape));
}
Tile Program::coordinate(int axis) {
  check(axis >= 0 && axis < std::ssize(grid_), Code::invalid_graph, "kernel '{}': no axis {} in a grid {}", name_, axis,
        to_string(grid_));
  return add_statement({.op = Op::coordinate, .in = {}, .out = {}, .axis = axis}, {DType::s32, {}});
}
Tile Program::read(Ref scalars, Tile index) {
  need(index.shape == Shape{DType::s32, {}} && scalars.shape.rank() == 1, "an index into scalars", {index});
  return add_statement({.op = Op::read, .in = {index}, .out = {}, .ref = scalars.id}, {DType::s32, {}});
}

Tile Program::load(Ref from) { return load(from, 0, from.shape.dims[0]); }
Tile Program::load(Ref from, int64_t row, int64_t rows) {
  check(row + rows <= from.shape.dims[0], Code::invalid_graph, "kernel '{}': rows {} to {} of {}", name_, row,
        row + rows, to_string(from.shape));
  return load(from, scalar(row), rows, 1);
}
Tile Program::load(Ref from, Tile row, int64_t rows, int64_t multiple) {
  need(row.shape == Shape{DType::s32, {}} && from.shape.rank() == 2, "the row of a load", {row});
  return add_statement({.op = Op::load, .in = {row}, .out = {}, .ref = from.id, .multiple = multiple},
                       {from.shape.dtype, {rows, from.shape.dims[1]}});
}
void Program::store(Ref to, Tile x, int64_t row) { store(to, x, scalar(row), 1); }
void Program::store(Ref to, Tile x, Tile row, int64_t multiple) {
  need(row.shape == Shape{DType::s32, {}} && x.shape.rank() == 2 && x.shape.dtype == to.shape.dtype &&
           x.columns() == to.shape.dims[1] && x.rows() <= to.shape.dims[0],
       "a store", {x, {-1, to.shape}});
  check(memories_[static_cast<size_t>(to.id)].space >= Space::output, Code::invalid_graph,
        "kernel '{}': a store to the input '{}'", name_, memories_[static_cast<size_t>(to.id)].name);
  bodies_.back()->statements.push_back(
      {.op = Op::store, .in = {x, row}, .out = {}, .ref = to.id, .multiple = multiple});
}

Tile Program::matmul(Tile a, Tile b, int64_t contract_a, int64_t contract_b, bool exact) {
  const bool ok = a.shape.rank() == 2 && b.shape.rank() == 2 && a.shape.dtype == b.shape.dtype &&
                  (a.shape.dtype == DType::f32 || a.shape.dtype == DType::bf16);
  need(ok && a.shape.dim(contract_a) == b.shape.dim(contract_b), "matmul", {a, b});
  Statement s{.op = Op::matmul, .in = {a, b}, .out = {}};
  s.contract[0] = contract_a, s.contract[1] = contract_b, s.exact = exact && a.shape.dtype == DType::f32;
  return add_statement(std::move(s), {DType::f32, {a.shape.dim(1 - contract_a), b.shape.dim(1 - contract_b)}});
}

Tile Program::unary(Op op, Tile x) {
  need(x.shape.dtype == DType::f32 && x.shape.rank() == 2, "a function of f32", {x});
  return add_statement({.op = op, .in = {x}, .out = {}}, x.shape);
}
Tile Program::binary(Op op, Tile a, Tile b) {
  const DType type = a.shape.dtype;
  need(a.shape == b.shape &&
           (op == Op::both ? type == DType::pred : type == DType::f32 || (type == DType::s32 && op != Op::divide)),
       "two operands", {a, b});
  return add_statement({.op = op, .in = {a, b}, .out = {}}, a.shape);
}
Tile Program::compared(Op op, Tile a, Tile b) {
  need(a.shape == b.shape && a.shape.dtype == DType::s32, "comparison", {a, b});
  return add_statement({.op = op, .in = {a, b}, .out = {}}, {DType::pred, a.shape.dims});
}
Tile Program::cast(Tile x, DType type) {
  if (x.shape.dtype == type) return x;
  const auto is_float = [](DType t) { return t == DType::f32 || t == DType::bf16; };
  need(is_float(x.shape.dtype) && is_float(type), "cast", {x});
  return add_statement({.op = Op::cast, .in = {x}, .out = {}}, {type, x.shape.dims});
}
Tile Program::reduced(Op op, Tile x, int64_t axis) {
  need(x.shape.rank() == 2 && x.shape.dtype == DType::f32 && (axis == 0 || axis == 1), "reduction", {x});
  Dims dims = x.shape.dims;
  dims[static_cast<size_t>(axis)] = 1;
  return add_statement({.op = op, .in = {x}, .out = {}, .axis = axis}, {DType::f32, dims});
}
Tile Program::broadcast(Tile x, int64_t rows, int64_t columns) {
  if (x.shape.dims == Dims{rows, columns}) return x;
  need(x.is_scalar() || (x.rows() == 1 && x.columns() == columns) || (x.rows() == rows && x.columns() == 1),
       "broadcast", {x});
  return add_statement({.op = Op::broadcast, .in = {x}, .out = {}}, {x.shape.dtype, {rows, columns}});
}
Tile Program::select(Tile pred, Tile yes, Tile no) {
  need(pred.shape.dtype == DType::pred && pred.shape.dims == yes.shape.dims && yes.shape == no.shape &&
           yes.shape.dtype == DType::f32,
       "select", {pred, yes, no});
  return add_statement({.op = Op::select, .in = {pred, yes, no}, .out = {}}, yes.shape);
}
Tile Program::iota(int64_t rows, int64_t columns, int64_t axis) {
  return add_statement({.op = Op::iota, .in = {}, .out = {}, .axis = axis}, {DType::s32, {rows, columns}});
}
Tile Program::concatenate(std::vector<Tile> parts, int64_t axis) {
  need(!parts.empty(), "concatenation", parts);
  if (parts.size() == 1) return parts[0];
  Shape shape = parts[0].shape;
  int64_t total = 0;
  for (const Tile& t : parts) {
    need(t.shape.rank() == 2 && t.shape.dtype == shape.dtype && t.shape.dim(1 - axis) == shape.dim(1 - axis),
         "concatenation", parts);
    total += t.shape.dim(axis);
  }
  shape.dims[static_cast<size_t>(axis)] = total;
  return add_statement({.op = Op::concatenate, .in = std::move(parts), .out = {}, .axis = axis}, shape);
}
Tile Program::slice(Tile x, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  need(x.shape.rank() == 2 && row >= 0 && column >= 0 && row + rows <= x.rows() && column + columns <= x.columns(),
       "slice", {x});
  if (rows == x.rows() && columns == x.columns()) return x;
  Statement s{.op = Op::slice, .in = {x}, .out = {}};
  s.start[0] = row, s.start[1] = column;
  return add_statement(std::move(s), {x.shape.dtype, {rows, columns}});
}
Tile Program::transpose(Tile x) {
  need(x.shape.rank() == 2 && x.shape.dtype == DType::f32, "transpose", {x});
  return add_statement({.op = Op::transpose, .in = {x}, .out = {}}, {x.shape.dtype, {x.columns(), x.rows()}});
}

std::shared_ptr<Body> Program::traced(const std::function<void()>& body) {
  bodies_.push_back(std::make_shared<Body>());
  body();
  std::shared_ptr<Body> done = bodies_.back();
  bodies_.pop_back();
  return done;
}

void Program::when(Tile condition, const std::function<void()>& body) {
  need(condition.shape == Shape{DType::pred, {}}, "a condition", {condition});
  Statement s{.op = Op::when, .in = {condition}, .out = {}};
  s.bodies = {traced(body)};
  bodies_.back()->statements.push_back(std::move(s));
}

std::vector<Tile> Program::loop(Tile count, std::vector<Tile> carried,
                                const std::function<std::vector<Tile>(Tile, const std::vector<Tile>&)>& body) {
  need(count.shape == Shape{DType::s32, {}}, "a loop's count", {count});
  const auto like = [&](const std::vector<Tile>& tiles) {
    std::vector<Tile> fresh;
    for (const Tile& t : tiles) fresh.push_back({values_++, t.shape});
    return fresh;
  };
  const Tile i{values_++, {DType::s32, {}}};
  const std::vector<Tile> inside = like(carried);
  std::vector<Tile> results;
  std::shared_ptr<Body> loop_body = traced([&] { results = body(i, inside); });
  need(results.size() == carried.size(), "a loop that returns other tiles than it carries,", carried);
  for (size_t n = 0; n < carried.size(); ++n)
    need(results[n].shape == carried[n].shape, "a loop that carries another shape,", {carried[n], results[n]});
  loop_body->arguments = {i};
  loop_body->arguments.insert(loop_body->arguments.end(), inside.begin(), inside.end());
  loop_body->results = std::move(results);
  Statement s{.op = Op::loop, .in = {count}, .out = like(carried)};
  s.in.insert(s.in.end(), carried.begin(), carried.end());
  s.bodies = {std::move(loop_body)};
  std::vector<Tile> out = s.out;
  bodies_.back()->statements.push_back(std::move(s));
  return out;
}

std::vector<Shape> Program::results() const {
  std::vector<Shape> shapes;
  for (const Memory& m : memories_)
    if (m.space == Space::output) shapes.push_back(m.array);
  return shapes;
}

int64_t Program::fast_memory() const {
  int64_t bytes = 2 * largest_;
  for (const Memory& m : memories_)
    if (m.space != Space::scalars)
      bytes += registers_bytes({m.array.dtype, m.block}) * (m.space == Space::scratch ? 1 : 2);
  return bytes;
}

Program::Work Program::work() const {
  std::map<int, double> constants;
  Work w = work_of(body(), constants);
  const double steps = product_of(grid_);
  w.flops *= steps;
  w.transcendentals *= steps;
  for (const Memory& m : memories_) {
    if (m.space != Space::input && m.space != Space::output) continue;
    // The last axis of the grid that moves the block; the block stays while later axes run.
    int last = -1;
    for (const Place& p : m.place) last = std::max(last, p.grid);
    double moves = 1;
    for (int axis = 0; axis <= last; ++axis) moves *= static_cast<double>(grid_[static_cast<size_t>(axis)]);
    w.bytes += moves * static_cast<double>(Shape{m.array.dtype, m.block}.bytes());
  }
  return w;
}

}  // namespace md::tiles
