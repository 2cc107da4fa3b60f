#include "maxdiffusion/graph/emit.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "maxdiffusion/base/error.h"

namespace md {

std::string mlir_array(const std::vector<int64_t>& values) {
  if (values.empty()) return "array<i64>";
  return fmt::format("array<i64: {}>", fmt::join(values, ", "));
}

std::string mlir_string(std::string_view text) {
  std::string s = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') s += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      s += fmt::format("\\{:02X}", static_cast<unsigned>(c));
    else
      s += c;
  }
  return s + '"';
}

std::string sdy_sharding(const DimAxes& axes, int64_t rank) {
  std::string s = "<@mesh, [";
  for (int64_t i = 0; i < rank; ++i) {
    s += i ? ", {" : "{";
    if (static_cast<size_t>(i) < axes.size()) {
      const auto& names = axes[static_cast<size_t>(i)];
      for (size_t k = 0; k < names.size(); ++k) s += (k ? ", \"" : "\"") + names[k] + "\"";
    }
    s += "}";
  }
  return s + "]>";
}

std::string mlir_float(double value, DType type) {
  if (std::isfinite(value)) {
    std::string s = type == DType::f64 ? fmt::format("{:.17e}", value) : fmt::format("{:.9e}", value);
    return s;
  }
  const bool nan = std::isnan(value), negative = value < 0;
  switch (type) {
    case DType::f64: return nan ? "0x7FF8000000000000" : negative ? "0xFFF0000000000000" : "0x7FF0000000000000";
    case DType::f32: return nan ? "0x7FC00000" : negative ? "0xFF800000" : "0x7F800000";
    case DType::bf16: return nan ? "0x7FC0" : negative ? "0xFF80" : "0x7F80";
    case DType::f16: return nan ? "0x7E00" : negative ? "0xFC00" : "0x7C00";
    case DType::f8e5m2: return nan ? "0x7E" : negative ? "0xFC" : "0x7C";
    case DType::f8e4m3fn:
      if (nan) return "0x7F";
      [[fallthrough]];  // this type has no infinity
    default: fail(Code::invalid_graph, "constant: {} is not a value of {}", value, to_string(type));
  }
}

class Printer {
 public:
  explicit Printer(const Graph& graph) : graph_(graph) { values_.reserve(graph.nodes().size()); }

  std::string module(std::string_view name);

  struct Key {
    const Node* node;
    int index;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& k) const {
      return std::hash<const void*>()(k.node) * 31 + static_cast<size_t>(k.index);
    }
  };

  const Value& value(Tensor t) const {
    auto it = values_.find({t.node(), t.index()});
    check(it != values_.end(), Code::internal, "printer: value of {} at {} is not printed yet", t.node()->op->name,
          *t.node()->path);
    return it->second;
  }
  void bind(Tensor t, Value v) { values_[{t.node(), t.index()}] = std::move(v); }
  std::string fresh() { return "%" + std::to_string(next_++); }
  /// " loc(#loc7)"; the location is printed once at the end, because many statements have the same path.
  std::string location(const Node& node);
  std::vector<Value> print_nodes(const Graph& g, const std::vector<Tensor>& results);
  /// `v` with its axes in another order; unchanged if `order` is empty.
  Value in_order_of(const Axes& order, const Value& v);

  const Graph& graph_;
  Statements block_;
  std::vector<int> used_in_regions_;  // by regions of the next statement
  std::unordered_map<Key, Value, KeyHash> values_;
  std::unordered_map<Key, Value, KeyHash> unrounded_;
  std::unordered_map<Key, int, KeyHash> uses_;
  std::vector<std::unordered_map<std::string, Value>> constants_ = {{}};
  std::unordered_map<std::string, int> locations_;  // text → number
  std::string loc_, location_definitions_;
  std::unordered_map<std::string, Value> scoped_;
  int next_ = 0;
};

std::string Printer::location(const Node& node) {
  std::string name = *node.path;
  if (!name.empty()) name += '/';
  name += node.op->name;
  if (node.backward) name += " (grad)";
  auto [it, fresh] = locations_.try_emplace(std::move(name), static_cast<int>(locations_.size()));
  if (fresh) location_definitions_ += fmt::format("#loc{} = loc({})\n", it->second, mlir_string(it->first));
  return fmt::format(" loc(#loc{})", it->second);
}

std::vector<Value> Printer::print_nodes(const Graph& g, const std::vector<Tensor>& results) {
  const std::unordered_set<const Node*> live = live_nodes(g, results);
  std::string loc = loc_;
  for (const Node* n : live)
    for (Tensor t : n->inputs) ++uses_[{t.node(), t.index()}];
  for (Tensor t : results) ++uses_[{t.node(), t.index()}];
  for (const auto& n : g.nodes()) {
    if (!live.contains(n.get()) || n->op == &kParameter) continue;
    loc_ = location(*n);
    EmitCtx c(*this, *n);
    n->op->emit(c);
  }
  loc_ = std::move(loc);
  std::vector<Value> out;
  for (Tensor t : results) out.push_back(value(t));
  return out;
}

Value Printer::in_order_of(const Axes& order, const Value& v) {
  if (order.empty()) return v;
  return block_.add("stablehlo.transpose", {v}, {{v.shape.dtype, in_order(v.shape.dims, order)}},
                    "permutation = " + mlir_array(order), "", next_)[0];
}

/// As `sdy_sharding`, for an array whose axes are stored in this order.
std::string stored_sharding(DimAxes axes, int64_t rank, const Axes& order) {
  axes.resize(static_cast<size_t>(rank));
  return "sdy.sharding = #sdy.sharding" + sdy_sharding(in_order(axes, order), rank);
}

std::string Printer::module(std::string_view name) {
  const auto& axes = graph_.options().mesh_axes;
  int64_t devices = 1;
  std::string mesh;
  for (const auto& [axis, size] : axes) {
    mesh += fmt::format("{}\"{}\"={}", mesh.empty() ? "" : ", ", axis, size);
    devices *= size;
  }
  std::string args, results;
  for (size_t i = 0; i < graph_.inputs().size(); ++i) {
    const GraphInput& in = graph_.inputs()[i];
    const Value v{fmt::format("%arg{}", i), {in.value.dtype(), in_order(in.value.dims(), in.order)}};
    bind(in.value, in_order_of(inverse(in.order), v));
    std::vector<std::string> attributes;
    if (!axes.empty()) attributes.push_back(stored_sharding(in.sharding, v.shape.rank(), in.order));
    if (in.in_host_memory) attributes.emplace_back("mhlo.memory_kind = \"pinned_host\"");
    if (in.alias) attributes.push_back(fmt::format("tf.aliasing_output = {} : i32", *in.alias));
    args += fmt::format("{}{}: {}", i ? ", " : "", v.name, mlir_type(v.shape));
    if (!attributes.empty()) args += fmt::format(" {{{}}}", fmt::join(attributes, ", "));
    args += fmt::format(" loc({})", mlir_string(in.name));
  }
  std::vector<Tensor> outs;
  for (size_t i = 0; i < graph_.outputs().size(); ++i) {
    const GraphOutput& out = graph_.outputs()[i];
    outs.push_back(out.value);
    std::string type = mlir_type({out.value.dtype(), in_order(out.value.dims(), out.order)});
    results += (i ? ", " : "") + type;
    if (!axes.empty())  // an output without a sharding is replicated
      results += " {" + stored_sharding(out.sharding, out.value.rank(), out.order) + "}";
  }
  std::vector<Value> values = print_nodes(graph_, outs);
  for (size_t i = 0; i < values.size(); ++i) values[i] = in_order_of(graph_.outputs()[i].order, values[i]);
  block_.add("func.return", values, {}, "", "", next_);
  return fmt::format(
      "module @{} attributes {{mhlo.num_partitions = {} : i32, mhlo.num_replicas = 1 : i32}} {{\n{}"
      "func.func public @main({}) -> ({}) {{\n{}}}\n}}\n{}",
      name, devices, axes.empty() ? "" : fmt::format("sdy.mesh @mesh = <[{}]>\n", mesh), args, results,
      block_.text(next_), location_definitions_);
}

EmitCtx::EmitCtx(Printer& printer, const Node& node) : printer_(printer), node_(node) {}

const GraphOptions& EmitCtx::options() const { return node_.graph->options(); }

const Value& EmitCtx::in(int i) const { return printer_.value(node_.inputs[static_cast<size_t>(i)]); }

const Value& EmitCtx::unrounded(int i) const { return unrounded(node_.inputs[static_cast<size_t>(i)]); }

const Value& EmitCtx::unrounded(Tensor t) const {
  const auto found = printer_.unrounded_.find({t.node(), t.index()});
  return found == printer_.unrounded_.end() ? printer_.value(t) : found->second;
}

int EmitCtx::uses(Tensor t) const {
  const auto found = printer_.uses_.find({t.node(), t.index()});
  return found == printer_.uses_.end() ? 0 : found->second;
}

Value EmitCtx::emit(std::string_view op, const std::vector<Value>& operands, const Shape& result,
                    std::string_view attributes) {
  return emit_multi(op, operands, {result}, attributes).front();
}

std::vector<Value> EmitCtx::emit_multi(std::string_view op, const std::vector<Value>& operands,
                                       const std::vector<Shape>& results, std::string_view attributes,
                                       const std::vector<std::string>& regions) {
  return printer_.block_.add(op, operands, results, attributes, printer_.loc_, printer_.next_, regions,
                             regions.empty() ? std::vector<int>() : std::exchange(printer_.used_in_regions_, {}));
}

std::vector<Value> EmitCtx::emit_call(const CustomCall& call, const std::vector<Value>& operands) {
  return printer_.block_.add_call(call, operands, printer_.loc_, printer_.next_);
}

bool EmitCtx::is_call_result(int i) const { return printer_.block_.is_call_result(in(i)); }

std::string EmitCtx::region(const std::vector<Shape>& arguments,
                            const std::function<std::vector<Value>(EmitCtx&, const std::vector<Value>&)>& fill,
                            std::string_view terminator, bool isolated) {
  Statements outer = std::exchange(printer_.block_, {});
  auto outside = isolated ? std::exchange(printer_.constants_, {}) : decltype(printer_.constants_)();
  printer_.constants_.emplace_back();
  std::string head;
  std::vector<Value> args;
  for (const Shape& s : arguments) {
    args.push_back({printer_.fresh(), s});
    head += fmt::format("{}{}: {}", head.empty() ? "" : ", ", args.back().name, mlir_type(s));
  }
  std::vector<Value> results = fill(*this, args);
  emit_multi(terminator, results, {});
  printer_.constants_.pop_back();
  if (isolated) printer_.constants_ = std::move(outside);
  const Statements body = std::exchange(printer_.block_, std::move(outer));
  const std::vector<int> used = body.uses();
  printer_.used_in_regions_.insert(printer_.used_in_regions_.end(), used.begin(), used.end());
  return fmt::format("{{\n{}{}}}", arguments.empty() ? "" : "^bb0(" + head + "):\n", body.text(printer_.next_));
}

std::vector<Value> EmitCtx::inline_body(const Graph& body, const std::vector<Value>& args) {
  check(args.size() == body.arguments().size(), Code::internal, "{}: body takes {} arguments, {} given", node_.op->name,
        body.arguments().size(), args.size());
  for (size_t i = 0; i < args.size(); ++i) printer_.bind(body.arguments()[i], args[i]);
  for (const auto& [outer, inner] : body.captures()) {
    // The outer value of a capture that no node inside uses may be unprinted.
    auto it = printer_.values_.find({outer.node(), outer.index()});
    if (it != printer_.values_.end()) {
      Value v = it->second;
      printer_.bind(inner, std::move(v));
    }
  }
  return printer_.print_nodes(body, body.results);
}

Value EmitCtx::constant(double value, const Shape& shape) {
  if (!is_float(shape.dtype)) return constant_int(static_cast<int64_t>(value), shape);
  std::string literal = mlir_float(value, shape.dtype), type = mlir_type(shape);
  std::string key = literal + type;
  for (auto& level : printer_.constants_)
    if (auto it = level.find(key); it != level.end()) return it->second;
  Value v = emit("stablehlo.constant", {}, shape, fmt::format("value = dense<{}> : {}", literal, type));
  return printer_.constants_.back()[key] = v;
}

Value EmitCtx::constant_int(int64_t value, const Shape& shape) {
  if (is_float(shape.dtype)) return constant(static_cast<double>(value), shape);
  std::string literal = shape.dtype == DType::pred ? (value ? "true" : "false")
                        : is_unsigned(shape.dtype) ? std::to_string(static_cast<uint64_t>(value))
                                                   : std::to_string(value);
  std::string type = mlir_type(shape), key = literal + type;
  for (auto& level : printer_.constants_)
    if (auto it = level.find(key); it != level.end()) return it->second;
  Value v = emit("stablehlo.constant", {}, shape, fmt::format("value = dense<{}> : {}", literal, type));
  return printer_.constants_.back()[key] = v;
}

Value EmitCtx::table(const HostArray& values) {
  const Shape& shape = values.shape();
  std::string literal;
  if (shape.dtype == DType::pred) {  // a hexadecimal pred literal is bit-packed: print words instead
    Dims position(shape.dims.size(), 0);
    for (double v : values.to_doubles()) {
      std::string open, close;
      for (size_t d = position.size(); d-- > 0 && position[d] == 0;) open += '[';
      for (size_t d = position.size(); d-- > 0;) {
        if (++position[d] < shape.dims[d]) break;
        position[d] = 0;
        close += ']';
      }
      literal += fmt::format("{}{}{}{}", literal.empty() ? "" : ", ", open, v != 0 ? "true" : "false", close);
    }
  } else if (values.bytes() > 0) {
    literal = "\"0x";
    constexpr char kDigits[] = "0123456789ABCDEF";
    for (size_t i = 0; i < values.bytes(); ++i) {
      auto byte = static_cast<unsigned>(values.data()[i]);
      literal += kDigits[byte >> 4];
      literal += kDigits[byte & 15];
    }
    literal += '"';
  }
  return emit("stablehlo.constant", {}, shape, fmt::format("value = dense<{}> : {}", literal, mlir_type(shape)));
}

void EmitCtx::set_scoped(const std::string& name, Value v) { printer_.scoped_[name] = std::move(v); }

const Value& EmitCtx::scoped(const std::string& name) const {
  auto it = printer_.scoped_.find(name);
  check(it != printer_.scoped_.end(), Code::invalid_graph, "{} at {}: no enclosing node provides '{}'", node_.op->name,
        *node_.path, name);
  return it->second;
}

Value EmitCtx::broadcast(const Value& v, const Dims& to, const Axes& dims) {
  return emit("stablehlo.broadcast_in_dim", {v}, Shape{v.shape.dtype, to},
              "broadcast_dimensions = " + mlir_array(dims));
}

void EmitCtx::set_unrounded(Value v, int i) { printer_.unrounded_[{&node_, i}] = std::move(v); }

void EmitCtx::set_out(Value v, int i) {
  if (v.shape != out(i))
    fail(Code::internal, "{}: printed {}, inferred {}, at {}", node_.op->name, to_string(v.shape), to_string(out(i)),
         *node_.path);
  printer_.bind(Tensor(const_cast<Node*>(&node_), i), std::move(v));
}

void EmitCtx::simple(std::string_view op, std::string_view attributes) {
  std::vector<Value> operands;
  for (int i = 0; i < in_count(); ++i) operands.push_back(in(i));
  set_out(emit(op, operands, out(), attributes));
}

Value in_memory(EmitCtx& c, const Value& v, std::string_view kind) {
  return c.emit("stablehlo.custom_call", {v}, v.shape,
                fmt::format("call_target_name = \"annotate_device_placement\", has_side_effect = true, "
                            "mhlo.frontend_attributes = {{_xla_buffer_placement = \"{}\"}}",
                            kind));
}

std::string to_stablehlo(const Graph& graph, std::string_view module_name) {
  check(!graph.outputs().empty(), Code::invalid_graph, "program '{}' has no outputs", module_name);
  return Printer(graph).module(module_name);
}

}  // namespace md
