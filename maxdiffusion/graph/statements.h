// The printer's text of a block, statement by statement, and the fusion of adjacent kernel calls into one, because
// compile, load and start times grow with the number of calls.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "maxdiffusion/graph/tensor.h"

namespace md {

/// An SSA value as text: "%12" and its type.
struct Value {
  std::string name;
  Shape shape;
};

/// A call of a handler registered with the plugin (XLA FFI, typed API version 4), or of a library function that the
/// compiler knows by name. Operands and results are dense; operands are row-major, and so are results unless `layouts`
/// is set.
struct CustomCall {
  std::string target;  // the name it was registered under
  std::vector<Shape> results;
  std::string backend_config;      // inside of an MLIR dictionary: `scale = 1.0 : f32`
  bool config_is_text = false;     // backend_config is opaque text, as before FFI (API version 2)
  std::vector<Axes> layouts = {};  // axes of each result from the fastest to the slowest varying; empty: row-major
  bool has_side_effect = false;
  std::vector<std::pair<int, int>> in_place = {};  // (result, operand): the result is written over the operand
  /// The handler that can run this call together with others (kFusedCallsKernel in kernels/kernels.h); empty: it is not
  /// fused.
  std::string_view fused_by = {};
};

/// Appends "tensor<2x3xf32>".
void append_type(std::string& text, const Shape& shape);

/// Statements of one block, in the order of printing. A value's number is 12 for "%12" and "%12#1"; arguments ("%arg0")
/// have none.
class Statements {
 public:
  /// Prints `%n = "op"(operands) {attributes} : (types) -> types` and `location`. Several results are "%n#0" and so on.
  /// `used_inside`: numbers of values that regions use. A statement with regions, with an effect or without results is
  /// kept even if no statement uses it.
  std::vector<Value> add(std::string_view op, const std::vector<Value>& operands, const std::vector<Shape>& results,
                         std::string_view attributes, std::string_view location, int& next_number,
                         const std::vector<std::string>& regions = {}, std::vector<int> used_inside = {});
  /// Prints `%n, %n+1 = "stablehlo.custom_call"…`: each result has a number.
  std::vector<Value> add_call(const CustomCall& call, const std::vector<Value>& operands, std::string_view location,
                              int& next_number);

  /// Whether the value is the result, or a reshaped result, of a call that may be fused.
  bool is_call_result(const Value& v) const;

  /// The text of the block. Calls with the same `fused_by` that can be adjacent become one call of it. Results that
  /// only these calls read share scratch memory, the fused call's last result. If any calls were fused, unused
  /// statements are omitted.
  std::string text(int& next_number) const;
  /// Numbers of all values that statements use.
  std::vector<int> uses() const;

 private:
  struct Statement {
    size_t begin = 0, end = 0;  // of text_
    std::vector<int> uses;
    int first = 0, results = 0;  // numbers of its results
    bool live = false;
    bool is_view = false;  // a reshape of its operand
    int call = -1;         // index into calls_ if it may be fused
  };
  struct Call {
    CustomCall call;
    std::vector<Value> operands, results;
    std::string location;
  };
  class Joining;

  std::string text_;
  std::vector<Statement> all_;
  std::vector<Call> calls_;
  std::unordered_set<int> of_calls_;  // numbers of values that calls_ define
};

}  // namespace md
