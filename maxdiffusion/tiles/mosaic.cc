#include "maxdiffusion/tiles/mosaic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/tiles/arith.h"

namespace md::tiles {
namespace {

constexpr std::string_view kFast = "fastmath = #arith.fastmath<none>", kWrap = "overflowFlags = #arith.overflow<none>";

std::string vector_type(DType type, const Dims& dims) {
  return fmt::format("vector<{}x{}>", fmt::join(dims, "x"), mlir_name(type));
}
std::string type_of(const Shape& s) {
  return s.dims.empty() ? std::string(mlir_name(s.dtype)) : vector_type(s.dtype, s.dims);
}
std::string type_of(const Memory& m) {
  return fmt::format("memref<{}x{}, #tpu.memory_space<{}>>", fmt::join(m.block, "x"), mlir_name(m.array.dtype),
                     m.space == Space::scalars ? "smem" : "vmem");
}
bool is_window(const Memory& m) { return m.space == Space::input || m.space == Space::output; }

class Text {
 public:
  explicit Text(const Program& program) : program_(program), names_(static_cast<size_t>(program.values())) {}

  std::string module() {
    std::vector<std::string> types, arguments, windows;
    for (size_t d = 0; d < program_.grid().size(); ++d) types.emplace_back("i32");
    int scalars = 0, scratch = 0;
    for (const Memory& m : program_.memories()) {
      types.push_back(type_of(m));
      scalars += m.space == Space::scalars, scratch += m.space == Space::scratch;
      if (is_window(m))
        windows.push_back(fmt::format("{{transform_indices = @transform_{}, window_bounds = {}}}", windows.size(),
                                      mlir_array(m.block)));
    }
    for (size_t i = 0; i < types.size(); ++i) arguments.push_back(fmt::format("%a{}: {}", i, types[i]));
    text_ = fmt::format("\"builtin.module\"() ({{\n\"stable_mosaic.func.func\"() ({{\n^bb0({}):\n",
                        fmt::join(arguments, ", "));
    run(program_.body());
    line("\"stable_mosaic.func.return\"() : () -> ()");
    std::vector<std::string> order;
    for (size_t d = 0; d < program_.grid().size(); ++d)
      order.push_back(std::ssize(program_.grid()) - std::ssize(order) > program_.sequential()
                          ? "#tpu.dimension_semantics<parallel>"
                          : "#tpu.dimension_semantics<arbitrary>");
    text_ += fmt::format(
        "}}) {{dimension_semantics = [{}], function_type = ({}) -> (), iteration_bounds = {}, scalar_prefetch = {} : "
        "i64, scratch_operands = {} : i64, sym_name = \"{}\", tpu.core_type = #tpu.core_type<tc>, window_params = "
        "[{}]}} : () -> ()\n",
        fmt::join(order, ", "), fmt::join(types, ", "), mlir_array(program_.grid()), scalars, scratch, program_.name(),
        fmt::join(windows, ", "));
    int n = 0;
    for (const Memory& m : program_.memories())
      if (is_window(m)) transform(m, n++);
    return text_ + "}) {stable_mosaic.version = 15 : i64} : () -> ()\n";
  }

 private:
  void line(const std::string& statement) { text_ += statement + '\n'; }
  std::string fresh() { return fmt::format("%v{}", next_++); }
  /// `%v = "stable_mosaic.op"(operands) {attributes} : types -> type`.
  std::string add(std::string_view op, const std::vector<std::string>& operands, const std::vector<std::string>& types,
                  const std::string& result, std::string_view attributes = "") {
    std::string name = fresh();
    line(fmt::format("{} = \"stable_mosaic.{}\"({}) {{{}}} : ({}) -> {}", name, op, fmt::join(operands, ", "),
                     attributes, fmt::join(types, ", "), result));
    return name;
  }
  std::string constant(double value, const Shape& s) {
    const std::string number =
        is_float(s.dtype) ? mlir_float(value, s.dtype) : fmt::format("{}", static_cast<int64_t>(value));
    return add("arith.constant", {}, {}, type_of(s),
               s.dims.empty() ? fmt::format("value = {} : {}", number, type_of(s))
                              : fmt::format("value = dense<{}> : {}", number, type_of(s)));
  }
  std::string index(int64_t value) {
    return add("arith.constant", {}, {}, "index", fmt::format("value = {} : index", value));
  }
  std::string name(const Tile& t) const { return names_[static_cast<size_t>(t.id)]; }

  std::string memory(const Statement& s) const {
    return fmt::format("%a{}", program_.grid().size() + static_cast<size_t>(s.ref));
  }
  const Memory& memory_of(const Statement& s) const { return program_.memories()[static_cast<size_t>(s.ref)]; }

  /// Indices of rows from `row` on in a memory of any rank.
  std::vector<std::string> indices(const Statement& s, const Tile& row) {
    std::string from = name(row);
    if (s.multiple > 1)
      from = add("tpu.assume_multiple", {from}, {"i32"}, "i32", fmt::format("multiple = {} : i32", s.multiple));
    const size_t rank = memory_of(s).block.size();
    std::vector<std::string> at;
    for (size_t i = 0; i < rank; ++i)
      at.push_back(i + 2 == rank ? add("arith.index_cast", {from}, {"i32"}, "index") : index(0));
    return at;
  }
  /// The tile's shape with the memory's leading axes of size 1.
  std::string whole_type(const Statement& s, const Shape& tile) const {
    Dims dims(memory_of(s).block.size() - 2, 1);
    dims.insert(dims.end(), tile.dims.begin(), tile.dims.end());
    return vector_type(tile.dtype, dims);
  }
  std::string reshaped(const std::string& x, const std::string& from, const std::string& to) {
    return from == to ? x : add("vector.shape_cast", {x}, {from}, to);
  }

  std::string load(const Statement& s) {
    std::vector<std::string> operands = {memory(s)}, types = {type_of(memory_of(s))};
    for (std::string& i : indices(s, s.in[0])) operands.push_back(std::move(i)), types.emplace_back("index");
    const Shape& out = s.out[0].shape;
    const std::string type = whole_type(s, out);
    return reshaped(add("vector.load", operands, types, type), type, type_of(out));
  }
  void store(const Statement& s) {
    const Shape& x = s.in[0].shape;
    const std::string type = whole_type(s, x);
    std::vector<std::string> operands = {reshaped(name(s.in[0]), type_of(x), type), memory(s)},
                             types = {type, type_of(memory_of(s))};
    const size_t rank = memory_of(s).block.size();
    for (std::string& i : indices(s, s.in[1])) operands.push_back(std::move(i)), types.emplace_back("index");
    line(
        fmt::format("\"stable_mosaic.tpu.vector_store\"({}) {{add = false, operandSegmentSizes = array<i32: 1, 1, {}, "
                    "0>, strides = array<i32>}} : ({}) -> ()",
                    fmt::join(operands, ", "), rank, fmt::join(types, ", ")));
  }

  std::string reduced(const Statement& s) {
    const bool most = s.op == Op::max_of;
    const Shape &x = s.in[0].shape, &out = s.out[0].shape,
                reduced_shape{x.dtype, {x.dims[static_cast<size_t>(1 - s.axis)]}};
    const std::string start = constant(most ? -HUGE_VAL : 0, reduced_shape);
    const std::string v = add(
        "vector.multi_reduction", {name(s.in[0]), start}, {type_of(x), type_of(reduced_shape)}, type_of(reduced_shape),
        fmt::format("kind = #vector.kind<{}>, reduction_dims = array<i64: {}>", most ? "maximumf" : "add", s.axis));
    return add("vector.shape_cast", {v}, {type_of(reduced_shape)}, type_of(out));
  }

  void when(const Statement& s) {
    line(fmt::format("\"stable_mosaic.scf.if\"({}) ({{", name(s.in[0])));
    run(*s.bodies[0]);
    line("\"stable_mosaic.scf.yield\"() : () -> ()\n}, {\n\"stable_mosaic.scf.yield\"() : () -> ()\n}) : (i1) -> ()");
  }

  void loop(const Statement& s) {
    const Body& body = *s.bodies[0];
    const Shape number{DType::s32, {}};
    std::vector<std::string> operands = {constant(0, number), name(s.in[0]), constant(1, number)}, arguments, results,
                             types;
    for (size_t i = 1; i < s.in.size(); ++i) operands.push_back(name(s.in[i])), types.push_back(type_of(s.in[i].shape));
    const std::string out = fresh();
    for (const Tile& t : body.arguments) {
      names_[static_cast<size_t>(t.id)] = fresh();
      arguments.push_back(name(t) + ": " + type_of(t.shape));
    }
    line(fmt::format("{}\"stable_mosaic.scf.for\"({}) ({{\n^bb0({}):",
                     types.empty()      ? std::string()
                     : types.size() > 1 ? fmt::format("{}:{} = ", out, types.size())
                                        : out + " = ",
                     fmt::join(operands, ", "), fmt::join(arguments, ", ")));
    run(body);
    for (const Tile& t : body.results) results.push_back(name(t));
    line(fmt::format("\"stable_mosaic.scf.yield\"({}) : ({}) -> ()\n}}) : (i32, i32, i32{}{}) -> ({})",
                     fmt::join(results, ", "), fmt::join(types, ", "), types.empty() ? "" : ", ",
                     fmt::join(types, ", "), fmt::join(types, ", ")));
    for (size_t i = 0; i < s.out.size(); ++i)
      names_[static_cast<size_t>(s.out[i].id)] = types.size() > 1 ? fmt::format("{}#{}", out, i) : out;
  }

  std::string of(const Statement& s) {
    const Shape& shape = s.out[0].shape;
    const std::string out = type_of(shape);
    std::vector<std::string> in, types;
    for (const Tile& t : s.in) in.push_back(name(t)), types.push_back(type_of(t.shape));
    const bool whole = shape.dtype == DType::s32;
    auto compare = [&](int predicate) {
      return add("arith.cmpi", in, types, out, fmt::format("predicate = {} : i64", predicate));
    };
    switch (s.op) {
      case Op::constant: return constant(s.value, shape);
      case Op::coordinate: return fmt::format("%a{}", s.axis);
      case Op::read:
        return add("memref.load", {memory(s), add("arith.index_cast", in, types, "index")},
                   {type_of(memory_of(s)), "index"}, out);
      case Op::load: return load(s);
      case Op::matmul: {
        const int64_t a = s.contract[0], b = s.contract[1];
        return add("tpu.matmul", {in[0], in[1], constant(0, shape)}, {types[0], types[1], out}, out,
                   fmt::format("dimension_numbers = #tpu.dot_dimension_numbers<[{}], [{}], [{}], [{}], [0, {}, 1, {}], "
                               "[], []>, {}transpose_lhs = false, transpose_lhs_hint = false, transpose_rhs = false",
                               a, b, 1 - a, 1 - b, 1 - a, 1 - b,
                               s.exact ? "precision = #tpu.contract_precision<fp32>, " : ""));
      }
      case Op::add:
      case Op::subtract:
      case Op::multiply: return add(arith_name(s.op, !whole), in, types, out, whole ? kWrap : kFast);
      case Op::divide:
      case Op::maximum:
      case Op::minimum:
      case Op::both:
        return add(arith_name(s.op, is_float(shape.dtype)), in, types, out, is_float(shape.dtype) ? kFast : "");
      case Op::exp2: return add("math.exp2", in, types, out, kFast);
      case Op::log2: {
        const std::string natural = add("math.log", in, types, out, kFast);
        return add("arith.mulf", {natural, constant(1 / std::log(2.0), shape)}, {out, out}, out, kFast);
      }
      case Op::cast: return add(shape.dtype == DType::f32 ? "arith.extf" : "arith.truncf", in, types, out);
      case Op::max_of:
      case Op::sum_of: return reduced(s);
      case Op::broadcast: return add("vector.broadcast", in, types, out);
      case Op::select: return add("arith.select", in, types, out);
      case Op::iota: return add("tpu.iota", {}, {}, out, fmt::format("dimensions = array<i32: {}>", s.axis));
      case Op::less: return compare(2);
      case Op::equal: return compare(0);
      case Op::concatenate: return add("tpu.concatenate", in, types, out, fmt::format("dimension = {} : i32", s.axis));
      case Op::slice:
        return add("vector.extract_strided_slice", in, types, out,
                   fmt::format("offsets = [{}, {}], sizes = [{}, {}], strides = [1, 1]", s.start[0], s.start[1],
                               shape.dims[0], shape.dims[1]));
      case Op::transpose: return add("tpu.transpose", in, types, out, "permutation = array<i64: 1, 0>");
      case Op::store:
      case Op::when:
      case Op::loop: break;
    }
    fail(Code::internal, "kernel '{}': a statement without a value", program_.name());
  }

  void run(const Body& body) {
    for (const Statement& s : body.statements) {
      if (s.op == Op::when)
        when(s);
      else if (s.op == Op::loop)
        loop(s);
      else if (s.op == Op::store)
        store(s);
      else
        names_[static_cast<size_t>(s.out[0].id)] = of(s);
    }
  }

  /// Prints the function from a step to its block of an array.
  void transform(const Memory& m, int number) {
    std::vector<std::string> arguments, types, results, of_results;
    for (size_t d = 0; d < program_.grid().size(); ++d) types.emplace_back("i32");
    for (const Memory& other : program_.memories())
      if (other.space == Space::scalars) types.push_back(type_of(other));
    for (size_t i = 0; i < types.size(); ++i) arguments.push_back(fmt::format("%a{}: {}", i, types[i]));
    text_ += fmt::format("\"stable_mosaic.func.func\"() ({{\n^bb0({}):\n", fmt::join(arguments, ", "));
    const Shape number_type{DType::s32, {}};
    for (const Place& p : m.place) {
      std::string block = p.grid < 0 ? constant(0, number_type) : fmt::format("%a{}", p.grid);
      if (p.divide > 1)
        block =
            add("arith.divsi", {block, constant(static_cast<double>(p.divide), number_type)}, {"i32", "i32"}, "i32");
      results.push_back(block), of_results.emplace_back("i32");
    }
    line(
        fmt::format("\"stable_mosaic.func.return\"({}) : ({}) -> ()\n}}) {{function_type = ({}) -> ({}), sym_name = "
                    "\"transform_{}\"}} : () -> ()",
                    fmt::join(results, ", "), fmt::join(of_results, ", "), fmt::join(types, ", "),
                    fmt::join(of_results, ", "), number));
  }

  const Program& program_;
  std::vector<std::string> names_;
  std::string text_;
  int next_ = 0;
};

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    for (size_t k = 0; k < 3; ++k)
      group = group << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0U);
    for (size_t k = 0; k < 4; ++k) out += i + k > bytes.size() ? '=' : kDigits[group >> (18 - 6 * k) & 63U];
  }
  return out;
}

}  // namespace

std::string mosaic_text(const Program& program) { return Text(program).module(); }

CustomCall mosaic_call(const Program& program) {
  constexpr int64_t kUsual = int64_t{14} << 20;  // the compiler's default limit for a kernel is 16 MiB
  const int64_t need = program.fast_memory() * 5 / 4;
  const Program::Work work = program.work();
  return {
      .target = kTpuCall,
      .results = program.results(),
      .backend_config = fmt::format(
          R"({{"custom_call_config": {{"body": "{}", "cost_estimate": {{"flops": {:.0f}, "transcendentals": {:.0f}, )"
          R"("bytes_accessed": {:.0f}}}, "serialization_format": 1, "needs_layout_passes": true}}{}}})",
          base64(mosaic_text(program)), work.flops, work.transcendentals, work.bytes,
          need < kUsual
              ? ""
              : fmt::format(R"(, "scoped_memory_configs": [{{"memory_space": 1, "offset": 0, "size": {}}}])", need)),
      .config_is_text = true};
}

}  // namespace md::tiles
