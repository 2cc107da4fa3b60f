#include "maxdiffusion/tiles/triton.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/tiles/arith.h"

namespace md::tiles {
namespace {

using Names = std::vector<std::string>;

bool is_power_of_two(int64_t n) { return n > 0 && std::has_single_bit(static_cast<uint64_t>(n)); }

std::string tensor_of(const std::string& element, const Dims& dims) {
  return fmt::format("tensor<{}x{}>", fmt::join(dims, "x"), element);
}
std::string triton_type(const Shape& s) {
  const std::string element(mlir_name(s.dtype));
  return s.dims.empty() ? element : tensor_of(element, s.dims);
}
std::string pointer_to(DType type) { return fmt::format("!tt.ptr<{}>", mlir_name(type)); }
Shape scratch_shape(const Memory& m) { return {m.array.dtype, m.block}; }

class TritonText {
 public:
  explicit TritonText(const Program& program)
      : program_(program),
        names_(static_cast<size_t>(program.values())),
        scratch_(program.memories().size()),
        coordinates_(program.grid().size()) {}

  std::string module() {
    Names arguments;
    for (const Memory& m : program_.memories())
      if (m.space != Space::scratch)
        arguments.push_back(
            fmt::format("%a{}: {} {{tt.divisibility = 16 : i32}}", arguments.size(), pointer_to(m.array.dtype)));
    const size_t parallel = program_.grid().size() - static_cast<size_t>(program_.sequential());
    std::string left = set("tt.get_program_id x : i32");
    for (size_t d = parallel; d-- > 0;) {
      const std::string size = number(program_.grid()[d]);
      coordinates_[d] = set(fmt::format("arith.remsi {}, {} : i32", left, size));
      left = set(fmt::format("arith.divsi {}, {} : i32", left, size));
    }
    for (size_t i = 0; i < scratch_.size(); ++i)
      if (const Memory& m = program_.memories()[i]; m.space == Space::scratch)
        scratch_[i] = constant(0, scratch_shape(m));
    if (program_.sequential() == 0)
      run(program_.body().statements);
    else
      steps(parallel);
    return fmt::format("module {{\ntt.func public @{}({}) attributes {{noinline = false}} {{\n{}tt.return\n}}\n}}\n",
                       program_.name(), fmt::join(arguments, ", "), text_);
  }

  int64_t largest() const { return largest_; }  // elements of a tile of the printed module

 private:
  using Statements = std::vector<Statement>;

  [[noreturn]] void refuse(const std::string& what) const {
    fail(Code::invalid_graph, "kernel '{}': {}, which Triton has no form of", program_.name(), what);
  }

  void line(const std::string& statement) { text_ += statement + '\n'; }
  std::string fresh() { return fmt::format("%v{}", next_++); }
  std::string set(const std::string& expression) {
    std::string name = fresh();
    line(name + " = " + expression);
    return name;
  }
  /// The lines that `print` adds, apart.
  std::string printed(const std::function<void()>& print) {
    std::string outer = std::exchange(text_, {});
    print();
    return std::exchange(text_, std::move(outer));
  }
  /// A statement with several results: their names.
  Names with_results(size_t results, const std::string& statement) {
    const std::string out = fresh();
    line((results == 1 ? out + " = " : results > 1 ? fmt::format("{}:{} = ", out, results) : "") + statement);
    Names all;
    for (size_t i = 0; i < results; ++i) all.push_back(results == 1 ? out : fmt::format("{}#{}", out, i));
    return all;
  }

  std::string number(int64_t value, const char* type = "i32") {
    return set(fmt::format("arith.constant {} : {}", value, type));
  }
  std::string constant(double value, const Shape& s) {
    const std::string text = s.dtype == DType::pred ? (value != 0 ? "true" : "false")
                             : is_float(s.dtype)    ? mlir_float(value, s.dtype)
                                                    : fmt::format("{}", static_cast<int64_t>(value));
    return set(fmt::format("arith.constant {} : {}", s.dims.empty() ? text : "dense<" + text + ">", triton_type(s)));
  }

  const std::string& name(const Tile& t) const { return names_[static_cast<size_t>(t.id)]; }
  const Memory& memory_of(const Statement& s) const { return program_.memories()[static_cast<size_t>(s.ref)]; }

  // ---- the grid

  /// The value of a scalar if it is a constant of these statements; else −1.
  static double constant_of(const Statements& statements, const Tile& t) {
    for (const Statement& s : statements)
      if (s.op == Op::constant && s.out[0].id == t.id) return s.value;
    return -1;
  }
  static bool is_of_scalars(const Statement& s) { return !s.out.empty() && s.op != Op::loop && s.out[0].is_scalar(); }
  /// Whether a statement runs only in the step with coordinate `at` of the last axis, and reads no tile from outside.
  bool only_at(const Statements& all, const Statement& s, int64_t at) const {
    if (s.op != Op::when) return false;
    const auto condition =
        std::ranges::find_if(all, [&](const Statement& o) { return o.op == Op::equal && o.out[0].id == s.in[0].id; });
    if (condition == all.end() || constant_of(all, condition->in[1]) != static_cast<double>(at)) return false;
    const auto step = std::ranges::find_if(
        all, [&](const Statement& o) { return o.op == Op::coordinate && o.out[0].id == condition->in[0].id; });
    if (step == all.end() || step->axis + 1 != std::ssize(program_.grid())) return false;
    std::set<int> tiles;
    for (const Statement& o : all)
      for (const Tile& t : o.out)
        if (!t.is_scalar()) tiles.insert(t.id);
    return !uses(*s.bodies[0], tiles);
  }
  static bool uses(const Body& body, const std::set<int>& tiles) {
    const auto used = [&](const Tile& t) { return tiles.contains(t.id); };
    return std::ranges::any_of(body.statements, [&](const Statement& s) {
      return std::ranges::any_of(s.in, used) ||
             std::ranges::any_of(s.bodies, [&](const auto& inner) { return uses(*inner, tiles); });
    });
  }
  void run_scalars(const Statements& all) {
    for (const Statement& s : all)
      if (is_of_scalars(s)) run(s);
  }

  /// Loops over the sequential axes. With one of them, what only the first or only the last step does stands before or
  /// after the loop, where it costs no branch.
  void steps(size_t axis) {
    const Statements& all = program_.body().statements;
    size_t begin = 0, end = all.size();
    const int64_t last = program_.grid()[axis] - 1;
    if (program_.sequential() == 1) {
      while (begin < end && is_of_scalars(all[begin])) ++begin;
      const bool first_is_apart = begin < end && only_at(all, all[begin], 0),
                 last_is_apart = end > begin + 1 && only_at(all, all[end - 1], last);
      if (first_is_apart) {
        coordinates_[axis] = number(0);
        run_scalars(all);
        run(all[begin].bodies[0]->statements);
      }
      begin = first_is_apart ? begin + 1 : 0;
      end = last_is_apart ? end - 1 : end;
    }
    loop_over(axis, [&] {
      for (size_t i = 0; i < begin; ++i)
        if (is_of_scalars(all[i])) run(all[i]);
      for (size_t i = begin; i < end; ++i) run(all[i]);
    });
    if (end == all.size()) return;
    coordinates_[axis] = number(last);
    run_scalars(all);
    run(all[end].bodies[0]->statements);
  }
  void loop_over(size_t axis, const std::function<void()>& step) {
    if (axis == program_.grid().size()) return step();
    coordinates_[axis] = fresh();
    for_loop(coordinates_[axis], number(program_.grid()[axis]), {}, {}, {}, [&] {
      loop_over(axis + 1, step);
      return Names();
    });
  }

  /// `scf.for` that carries values and the scratch memory. `arguments`: names of the carried values in the body, which
  /// returns their next ones.
  Names for_loop(const std::string& i, const std::string& count, const Names& carried, const Names& arguments,
                 Names types, const std::function<Names()>& body) {
    const std::string zero = number(0), one = number(1);
    Names start = carried, inside = arguments;
    const std::vector<size_t> refs = scratch();
    for (size_t m : refs) {
      start.push_back(scratch_[m]);
      types.push_back(triton_type(scratch_shape(program_.memories()[m])));
      inside.push_back(scratch_[m] = fresh());
    }
    const std::string inner = printed([&] {
      Names next = body();
      for (size_t m : refs) next.push_back(scratch_[m]);
      line(next.empty() ? "scf.yield"
                        : fmt::format("scf.yield {} : {}", fmt::join(next, ", "), fmt::join(types, ", ")));
    });
    Names assigned;
    for (size_t n = 0; n < start.size(); ++n) assigned.push_back(inside[n] + " = " + start[n]);
    const std::string carries =
        assigned.empty() ? ""
                         : fmt::format(" iter_args({}) -> ({})", fmt::join(assigned, ", "), fmt::join(types, ", "));
    Names out = with_results(start.size(), fmt::format("scf.for {} = {} to {} step {}{} : i32 {{\n{}}}", i, zero, count,
                                                       one, carries, inner));
    for (size_t n = 0; n < refs.size(); ++n) scratch_[refs[n]] = out[carried.size() + n];
    out.resize(carried.size());
    return out;
  }
  std::vector<size_t> scratch() const {
    std::vector<size_t> of;
    for (size_t i = 0; i < scratch_.size(); ++i)
      if (program_.memories()[i].space == Space::scratch) of.push_back(i);
    return of;
  }

  // ---- memory

  /// Pointers to the elements of rows from `row` on of the step's block.
  std::string pointers(const Statement& s, const Tile& row, const Shape& tile) {
    const Memory& m = memory_of(s);
    const std::string pointer = pointer_to(m.array.dtype);
    std::string start = number(0, "i64");
    int64_t stride = 1;
    for (size_t i = m.block.size(); i-- > 0; stride *= m.array.dims[i]) {
      std::string at;
      if (const Place& p = m.place[i]; p.grid >= 0) {
        at = coordinates_[static_cast<size_t>(p.grid)];
        if (p.divide > 1) at = set(fmt::format("arith.divsi {}, {} : i32", at, number(p.divide)));
        at = set(fmt::format("arith.muli {}, {} : i32", at, number(m.block[i])));
      }
      if (i + 2 == m.block.size())
        at = at.empty() ? name(row) : set(fmt::format("arith.addi {}, {} : i32", at, name(row)));
      if (at.empty()) continue;
      const std::string wide = set(fmt::format("arith.extsi {} : i32 to i64", at));
      const std::string scaled = set(fmt::format("arith.muli {}, {} : i64", wide, number(stride, "i64")));
      start = set(fmt::format("arith.addi {}, {} : i64", start, scaled));
    }
    const std::string base = set(fmt::format("tt.addptr %a{}, {} : {}, i64", s.ref, start, pointer));
    const Shape offsets{DType::s32, tile.dims}, rows{DType::s32, {tile.dims[0], 1}};
    const std::string row_offsets =
        set(fmt::format("arith.muli {}, {} : {}", range(tile.dims[0], 0),
                        constant(static_cast<double>(m.array.dims.back()), rows), triton_type(rows)));
    const std::string of_rows = broadcast(row_offsets, rows, offsets),
                      of_columns = broadcast(range(tile.dims[1], 1), {DType::s32, {1, tile.dims[1]}}, offsets);
    const std::string offset = set(fmt::format("arith.addi {}, {} : {}", of_rows, of_columns, triton_type(offsets)));
    const std::string all = tensor_of(pointer, tile.dims);
    return set(fmt::format("tt.addptr {}, {} : {}, {}", set(fmt::format("tt.splat {} : {} -> {}", base, pointer, all)),
                           offset, all, triton_type(offsets)));
  }
  /// s32: 0 … n − 1 along an axis of two; the other has size 1.
  std::string range(int64_t n, int64_t axis) {
    const Shape out{DType::s32, axis == 0 ? Dims{n, 1} : Dims{1, n}};
    if (n == 1) return constant(0, out);
    const Shape line{DType::s32, {n}};
    return expanded(set(fmt::format("tt.make_range {{end = {} : i32, start = 0 : i32}} : {}", n, triton_type(line))),
                    line, 1 - axis, out);
  }
  std::string expanded(const std::string& x, const Shape& from, int64_t axis, const Shape& to) {
    return set(
        fmt::format("tt.expand_dims {} {{axis = {} : i32}} : {} -> {}", x, axis, triton_type(from), triton_type(to)));
  }
  std::string broadcast(const std::string& x, const Shape& from, const Shape& to) {
    if (from == to) return x;
    return set(fmt::format("{} {} : {} -> {}", from.dims.empty() ? "tt.splat" : "tt.broadcast", x, triton_type(from),
                           triton_type(to)));
  }

  void expect_whole(const Statement& s, const Tile& row, const Shape& tile) const {
    const Memory& m = memory_of(s);
    const auto at = constants_.find(row.id);
    if (tile.dims != m.block || at == constants_.end() || at->second != 0)
      refuse(fmt::format("some rows of the scratch memory '{}'", m.name));
  }
  std::string load(const Statement& s) {
    const Shape& out = s.out[0].shape;
    if (memory_of(s).space == Space::scratch) {
      expect_whole(s, s.in[0], out);
      return scratch_[static_cast<size_t>(s.ref)];
    }
    if (memory_of(s).space == Space::output) refuse(fmt::format("a load of the output '{}'", memory_of(s).name));
    const std::string at = pointers(s, s.in[0], out);
    return set(fmt::format("tt.load {} : {}", at, tensor_of(pointer_to(out.dtype), out.dims)));
  }
  void store(const Statement& s) {
    const Shape& x = s.in[0].shape;
    if (memory_of(s).space == Space::scratch) {
      expect_whole(s, s.in[1], x);
      scratch_[static_cast<size_t>(s.ref)] = name(s.in[0]);
      return;
    }
    const std::string at = pointers(s, s.in[1], x);
    line(fmt::format("tt.store {}, {} : {}", at, name(s.in[0]), tensor_of(pointer_to(x.dtype), x.dims)));
  }

  // ---- parts of tiles, by halves

  std::string reshaped(const std::string& x, const Shape& from, const Shape& to) {
    return set(fmt::format("tt.reshape {} : {} -> {}", x, triton_type(from), triton_type(to)));
  }
  std::string permuted(const std::string& x, const Shape& from, const Axes& order, const Shape& to) {
    return set(fmt::format("tt.trans {} {{order = array<i32: {}>}} : {} -> {}", x, fmt::join(order, ", "),
                           triton_type(from), triton_type(to)));
  }
  /// Elements [start, start + n) along an axis.
  std::string part(std::string x, Shape from, size_t axis, int64_t start, int64_t n) {
    if (start % n != 0) refuse(fmt::format("a slice of {} from {} on", n, start));
    while (from.dims[axis] > n) {
      const int64_t half = from.dims[axis] / 2;
      Shape halves = from, apart = from, out = from;
      halves.dims[axis] = half;
      out.dims[axis] = half;
      halves.dims.insert(halves.dims.begin() + static_cast<int64_t>(axis), 2);
      apart.dims[axis] = half;
      apart.dims.push_back(2);
      x = permuted(reshaped(x, from, halves), halves, axis == 0 ? Axes{1, 2, 0} : Axes{0, 2, 1}, apart);
      const std::string left = fresh(), right = fresh();
      line(fmt::format("{}, {} = tt.split {} : {} -> {}", left, right, x, triton_type(apart), triton_type(out)));
      x = start >= half ? right : left;
      start %= half;
      from = out;
    }
    return x;
  }
  std::string concatenated(Names parts, Shape each, size_t axis) {
    if (!is_power_of_two(std::ssize(parts))) refuse(fmt::format("{} tiles concatenated", parts.size()));
    for (; parts.size() > 1; each.dims[axis] *= 2) {
      Shape joined = each, halves = each, out = each;
      joined.dims.push_back(2);
      halves.dims.insert(halves.dims.begin() + static_cast<int64_t>(axis), 2);
      out.dims[axis] *= 2;
      Names next;
      for (size_t i = 0; i < parts.size(); i += 2) {
        const std::string both = set(
            fmt::format("tt.join {}, {} : {} -> {}", parts[i], parts[i + 1], triton_type(each), triton_type(joined)));
        next.push_back(
            reshaped(permuted(both, joined, axis == 0 ? Axes{2, 0, 1} : Axes{0, 2, 1}, halves), halves, out));
      }
      parts = std::move(next);
    }
    return parts[0];
  }

  // ---- statements

  std::string reduced(const Statement& s) {
    const Shape &x = s.in[0].shape, &out = s.out[0].shape;
    Shape line_shape = x;
    line_shape.dims.erase(line_shape.dims.begin() + s.axis);
    const std::string element(mlir_name(x.dtype)), v = fresh(), a = fresh(), b = fresh(), sum = fresh();
    line(fmt::format(
        "{} = \"tt.reduce\"({}) <{{axis = {} : i32}}> ({{\n^bb0({}: {}, {}: {}):\n{} = {} {}, {} : "
        "{}\ntt.reduce.return {} : {}\n}}) : ({}) -> {}",
        v, name(s.in[0]), s.axis, a, element, b, element, sum, s.op == Op::max_of ? "arith.maximumf" : "arith.addf", a,
        b, element, sum, element, triton_type(x), triton_type(line_shape)));
    return expanded(v, line_shape, s.axis, out);
  }

  std::string matmul(const Statement& s) {
    Shape a = s.in[0].shape, b = s.in[1].shape;
    std::string left = name(s.in[0]), right = name(s.in[1]);
    const auto turned = [&](std::string& x, Shape& shape) {
      const Shape from = shape;
      std::swap(shape.dims[0], shape.dims[1]);
      x = permuted(x, from, {1, 0}, shape);
    };
    if (s.contract[0] == 0) turned(left, a);
    if (s.contract[1] == 1) turned(right, b);
    for (int64_t n : {a.dims[0], a.dims[1], b.dims[1]})
      if (n < 16) refuse(fmt::format("a matmul of {} by {}", to_string(a), to_string(b)));
    const char* precision = a.dtype != DType::f32 ? ""
                            : s.exact             ? ", inputPrecision = tf32x3"
                                                  : ", inputPrecision = tf32";
    const std::string start = constant(0, s.out[0].shape);
    return set(fmt::format("tt.dot {}, {}, {}{} : {} * {} -> {}", left, right, start, precision, triton_type(a),
                           triton_type(b), triton_type(s.out[0].shape)));
  }

  void when(const Statement& s) {
    const Names before = scratch_;
    std::vector<size_t> changed;
    Names types, yes, no;
    const std::string inner = printed([&] { run(s.bodies[0]->statements); });
    for (size_t m : scratch()) {
      if (scratch_[m] == before[m]) continue;
      changed.push_back(m);
      yes.push_back(scratch_[m]);
      no.push_back(before[m]);
      types.push_back(triton_type(scratch_shape(program_.memories()[m])));
    }
    const std::string condition = "scf.if " + name(s.in[0]);
    if (changed.empty()) return line(condition + " {\n" + inner + "}");
    const std::string all = fmt::format("{}", fmt::join(types, ", "));
    const Names out = with_results(
        changed.size(), fmt::format("{} -> ({}) {{\n{}scf.yield {} : {}\n}} else {{\nscf.yield {} : {}\n}}", condition,
                                    all, inner, fmt::join(yes, ", "), all, fmt::join(no, ", "), all));
    for (size_t n = 0; n < changed.size(); ++n) scratch_[changed[n]] = out[n];
  }

  void loop(const Statement& s) {
    const Body& body = *s.bodies[0];
    Names carried, arguments, types;
    for (const Tile& t : body.arguments) names_[static_cast<size_t>(t.id)] = fresh();
    for (size_t i = 1; i < s.in.size(); ++i) {
      carried.push_back(name(s.in[i]));
      types.push_back(triton_type(s.in[i].shape));
      arguments.push_back(name(body.arguments[i]));
    }
    const Names out = for_loop(name(body.arguments[0]), name(s.in[0]), carried, arguments, types, [&] {
      run(body.statements);
      Names next;
      for (const Tile& t : body.results) next.push_back(name(t));
      return next;
    });
    for (size_t i = 0; i < out.size(); ++i) names_[static_cast<size_t>(s.out[i].id)] = out[i];
  }

  std::string of(const Statement& s) {
    const Shape& shape = s.out[0].shape;
    const std::string out = triton_type(shape);
    const auto first = [&] { return name(s.in[0]); };
    const auto unary = [&](const char* op) { return set(fmt::format("{} {} : {}", op, first(), out)); };
    const auto compare = [&](const char* how) {
      return set(
          fmt::format("arith.cmpi {}, {}, {} : {}", how, name(s.in[0]), name(s.in[1]), triton_type(s.in[0].shape)));
    };
    switch (s.op) {
      case Op::constant:
        if (shape.dims.empty()) constants_[s.out[0].id] = s.value;
        return constant(s.value, shape);
      case Op::coordinate: return coordinates_[static_cast<size_t>(s.axis)];
      case Op::read: {
        const std::string at = set(fmt::format("tt.addptr %a{}, {} : {}, i32", s.ref, first(), pointer_to(DType::s32)));
        return set(fmt::format("tt.load {} : {}", at, pointer_to(DType::s32)));
      }
      case Op::load: return load(s);
      case Op::matmul: return matmul(s);
      case Op::add:
      case Op::subtract:
      case Op::multiply:
      case Op::divide:
      case Op::maximum:
      case Op::minimum:
      case Op::both:
        return set(
            fmt::format("{} {}, {} : {}", arith_name(s.op, is_float(shape.dtype)), name(s.in[0]), name(s.in[1]), out));
      case Op::exp2: return unary("math.exp2");
      case Op::log2: return unary("math.log2");
      case Op::cast:
        return set(fmt::format("{} {} : {} to {}", shape.dtype == DType::f32 ? "arith.extf" : "arith.truncf", first(),
                               triton_type(s.in[0].shape), out));
      case Op::max_of:
      case Op::sum_of: return reduced(s);
      case Op::broadcast: return broadcast(first(), s.in[0].shape, shape);
      case Op::select:
        return set(fmt::format("arith.select {}, {}, {} : {}, {}", first(), name(s.in[1]), name(s.in[2]),
                               triton_type(s.in[0].shape), out));
      case Op::iota: {
        const Shape line_shape{DType::s32, s.axis == 0 ? Dims{shape.dims[0], 1} : Dims{1, shape.dims[1]}};
        return broadcast(range(shape.dims[static_cast<size_t>(s.axis)], s.axis), line_shape, shape);
      }
      case Op::less: return compare("slt");
      case Op::equal: return compare("eq");
      case Op::concatenate: {
        Names parts;
        for (const Tile& t : s.in) {
          if (t.shape != s.in[0].shape) refuse("tiles of several sizes concatenated");
          parts.push_back(name(t));
        }
        return concatenated(std::move(parts), s.in[0].shape, static_cast<size_t>(s.axis));
      }
      case Op::slice: {
        Shape rows = s.in[0].shape;
        const std::string x = part(first(), rows, 0, s.start[0], shape.dims[0]);
        rows.dims[0] = shape.dims[0];
        return part(x, rows, 1, s.start[1], shape.dims[1]);
      }
      case Op::transpose: return permuted(first(), s.in[0].shape, {1, 0}, shape);
      case Op::store:
      case Op::when:
      case Op::loop: break;
    }
    fail(Code::internal, "kernel '{}': a statement without a value", program_.name());
  }

  void run(const Statement& s) {
    for (const Tile& t : s.out) {
      if (!std::ranges::all_of(t.shape.dims, is_power_of_two)) refuse("a tile " + to_string(t.shape));
      largest_ = std::max(largest_, t.shape.elements());
    }
    if (s.op == Op::when)
      when(s);
    else if (s.op == Op::loop)
      loop(s);
    else if (s.op == Op::store)
      store(s);
    else
      names_[static_cast<size_t>(s.out[0].id)] = of(s);
  }
  void run(const Statements& all) {
    for (const Statement& s : all) run(s);
  }

  const Program& program_;
  Names names_;    // of values, by id
  Names scratch_;  // current value of each scratch memory
  Names coordinates_;
  std::map<int, double> constants_;  // scalars
  std::string text_;
  int next_ = 0;
  int64_t largest_ = 0;
};

}  // namespace

std::string triton_text(const Program& program) { return TritonText(program).module(); }

CustomCall triton_call(const Program& program) {
  constexpr int64_t kLarge = int64_t{128} * 128;  // elements of a tile that four warps do not hold in registers
  TritonText text(program);
  const std::string module = text.module();
  int64_t programs = 1;
  for (size_t d = 0; d + static_cast<size_t>(program.sequential()) < program.grid().size(); ++d)
    programs *= program.grid()[d];
  return {.target = kTritonCall,
          .results = program.results(),
          .backend_config = fmt::format(
              "debug = false, grid_x = {} : i32, grid_y = 1 : i32, grid_z = 1 : i32, ir = {}, name = {}, "
              "num_stages = 2 : i32, num_warps = {} : i32",
              programs, mlir_string(module), mlir_string(program.name()), text.largest() >= kLarge ? 8 : 4)};
}

}  // namespace md::tiles
