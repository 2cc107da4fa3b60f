// The StableHLO printer: a Graph becomes the text of an MLIR module. Records print through EmitCtx.
// Dead nodes are not printed. The printer handles names, types, locations and shardings, the records each operation's
// meaning.
// Source: StableHLO specification (generic MLIR form); Shardy dialect for sdy.*.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/graph/statements.h"

namespace md {

class Printer;

class EmitCtx {
 public:
  EmitCtx(Printer& printer, const Node& node);

  const Node& node() const { return node_; }
  template <class T>
  const T& attrs() const {
    return node_.attrs<T>();
  }
  const GraphOptions& options() const;
  Platform platform() const { return options().platform; }

  int in_count() const { return static_cast<int>(node_.inputs.size()); }
  const Value& in(int i = 0) const;
  /// The value that input i was rounded from, if its record called set_unrounded; else input i.
  const Value& unrounded(int i = 0) const;
  /// The same for any printed tensor of this node's graph: for a record that fuses the operation of its operand. The
  /// operand's statement then has no user and is eliminated.
  const Value& unrounded(Tensor t) const;
  /// Number of uses of a tensor: as operands of live nodes and as results.
  int uses(Tensor t) const;
  const Shape& out(int i = 0) const { return node_.outputs[static_cast<size_t>(i)]; }

  /// Prints `%n = "op"(operands) {attributes} : (types) -> type`, generic form. `attributes` is the inside of the
  /// braces, e.g. `dimension = 0 : i64`.
  Value emit(std::string_view op, const std::vector<Value>& operands, const Shape& result,
             std::string_view attributes = "");
  /// Several results and regions: each region is text made by `region(...)`.
  std::vector<Value> emit_multi(std::string_view op, const std::vector<Value>& operands,
                                const std::vector<Shape>& results, std::string_view attributes = "",
                                const std::vector<std::string>& regions = {});
  /// Prints the call and returns its results.
  std::vector<Value> emit_call(const CustomCall& call, const std::vector<Value>& operands);
  /// Whether input i is the result of a call that may be fused with its neighbours.
  bool is_call_result(int i) const;
  /// Text of a region `({ ^bb0(args): … "terminator"(results) })`; `fill` prints the block and returns the operands of
  /// its terminator. An isolated region uses nothing from outside, constants included.
  std::string region(const std::vector<Shape>& arguments,
                     const std::function<std::vector<Value>(EmitCtx&, const std::vector<Value>& args)>& fill,
                     std::string_view terminator = "stablehlo.return", bool isolated = false);
  /// Prints the live nodes of a body here, its arguments bound to `args` (all of body.arguments(), in order) and its
  /// captures to the outer values; returns its results.
  std::vector<Value> inline_body(const Graph& body, const std::vector<Value>& args);
  /// A scalar or splat constant; printed once per value and block.
  Value constant(double value, const Shape& shape);
  Value constant_int(int64_t value, const Shape& shape);
  /// A constant with different elements; its bytes are printed.
  Value table(const HostArray& values);
  /// A named value that an enclosing node provides to its body, such as the index along a mesh axis.
  void set_scoped(const std::string& name, Value v);
  const Value& scoped(const std::string& name) const;
  Value broadcast(const Value& v, const Dims& to, const Axes& dims);
  /// Declares that output i is `v` rounded to a narrower type. Consumers that round or widen it may use `v` instead.
  void set_unrounded(Value v, int i = 0);
  /// Binds output i. An op of one output must bind it once.
  void set_out(Value v, int i = 0);
  /// The common case: one statement, all inputs, one output.
  void simple(std::string_view op, std::string_view attributes = "");

 private:
  friend class Printer;
  Printer& printer_;
  const Node& node_;
};

/// The module's text: `func.func public @main`. Throws invalid_graph when an output is missing.
std::string to_stablehlo(const Graph& graph, std::string_view module_name = "program");

/// "array<i64: 0, 1>" and "dense<[…]> : tensor<…>" as attributes.
std::string mlir_array(const std::vector<int64_t>& values);
/// A string literal with its quotes.
std::string mlir_string(std::string_view text);
/// The value, copied to this kind of memory ("device", "pinned_host") as JAX's device_put requests it: the compiler
/// overlaps the copy with other work.
Value in_memory(EmitCtx& c, const Value& v, std::string_view kind);
/// `#sdy.sharding<@mesh, [{"data"}, {}]>`.
std::string sdy_sharding(const DimAxes& axes, int64_t rank);
/// Float literal that parses back to the same bits in this type; hexadecimal for inf and nan.
std::string mlir_float(double value, DType type);

}  // namespace md
