// OpDef: one record per operation, in addition to the function that users call. It holds the shape rule, the StableHLO
// text and the gradient.
#pragma once

#include <any>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/graph/tensor.h"

namespace md {

struct OpDef;
class EmitCtx;

/// Mesh axes that shard each dim of a tensor, major first; an empty list: replicated.
using DimAxes = std::vector<std::vector<std::string>>;
/// One cotangent per input of a node; an empty Tensor is zero.
using Grads = std::vector<Tensor>;

/// Inputs of a shape rule. The rule throws invalid_graph with the shapes in the message.
struct InferCtx {
  const OpDef& op;
  std::span<const Shape> in;
  const std::any& attributes;
  template <class T>
  const T& attrs() const {
    return std::any_cast<const T&>(attributes);
  }
};

/// The backward sweep's access to the forward pass: direct, recomputed (checkpoint), or stored by a loop.
class ForwardView {
 public:
  virtual ~ForwardView() = default;
  /// A forward value, as a value of the graph that backward nodes go to.
  virtual Tensor value(Tensor forward) = 0;
  /// The node that computes the value in the backward graph: `forward` itself, or its recomputed copy. Outputs added to
  /// it (residuals of a loop) are accessed through `value`.
  virtual Node& home(Node& forward) = 0;
  /// Whether a forward value is available in the backward pass without a residual: an input, a row of a loop's input.
  virtual bool at_hand(Tensor forward) = 0;
};
/// The forward pass of the graph itself.
class DirectView final : public ForwardView {
 public:
  Tensor value(Tensor forward) override { return forward; }
  Node& home(Node& forward) override { return forward; }
  bool at_hand(Tensor forward) override;
};
/// The reverse sweep over the graph of `ys`; it creates nodes in `into`. autodiff passes it to gradient rules of ops
/// with bodies, as this layer cannot include autodiff. ys, xs: forward values; dys and the result: values of `into`.
using SweepFn = Grads (*)(const std::vector<Tensor>& ys, const Grads& dys, const std::vector<Tensor>& xs, Graph& into,
                          ForwardView& view);

/// Inputs of a gradient rule. Under `checkpoint` inputs and outputs are the recomputed ones, so rules must access them
/// only through in()/out().
class VjpCtx {
 public:
  VjpCtx(const Node& node, std::vector<Tensor> in, std::vector<Tensor> out, std::vector<Tensor> dys,
         std::vector<bool> needs, Graph& into, ForwardView& view, SweepFn sweep);
  const Node& node() const { return node_; }
  Tensor in(int i = 0) const { return in_[static_cast<size_t>(i)]; }
  Tensor out(int i = 0) const { return out_[static_cast<size_t>(i)]; }
  size_t in_count() const { return in_.size(); }
  size_t out_count() const { return out_.size(); }
  /// Cotangent of output i; may be empty for ops of several outputs, never for ops of one.
  Tensor dy(int i = 0) const { return dys_[static_cast<size_t>(i)]; }
  /// Whether the cotangent of input i is needed; expensive rules skip it otherwise.
  bool needs(int i) const { return needs_[static_cast<size_t>(i)]; }
  template <class T>
  const T& attrs() const;
  /// For ops with bodies: the graph for the rule's nodes, and the sweep to run inside a body.
  Graph& into() const { return into_; }
  ForwardView& view() const { return view_; }
  SweepFn sweep() const { return sweep_; }

 private:
  const Node& node_;
  std::vector<Tensor> in_, out_, dys_;
  std::vector<bool> needs_;
  Graph& into_;
  ForwardView& view_;
  SweepFn sweep_;
};

/// Arguments for the generic test in tests/ops, which applies the op to inputs of these shapes, compares the inferred
/// shape with the compiler's, and the gradient with finite differences in f64.
struct OpSample {
  std::vector<Shape> inputs;
  std::any attributes = {};
  double low = -1.0, high = 1.0;         // inputs are sampled uniformly from [low, high] (integers: rounded)
  std::vector<bool> differentiate = {};  // empty: every floating input
};

struct OpDef {
  const char* name;
  std::vector<Shape> (*infer)(const InferCtx&);
  void (*emit)(EmitCtx&);
  /// Null: grad() throws an error naming op and path. `no_gradient`: zero by definition.
  Grads (*vjp)(const VjpCtx&) = nullptr;
  std::vector<OpSample> (*samples)() = nullptr;
  /// Cheaper to recompute than to store (constants, iota, broadcast, reshape): never a residual.
  bool cheap = false;
  /// For ops that compute nothing: index of the input that output `i` equals. Null: outputs are new values.
  size_t (*same_as)(const Node&, int i) = nullptr;
  /// Floating-point operations of the matrix products inside; a multiply-add counts as two. Null: none, or too few to
  /// count.
  double (*flops)(const Node&) = nullptr;
  /// A matrix product, whose attributes are DotDims (ops/dot.h): used by remat policies that save matrix products.
  bool is_dot = false;
  /// Shardings that the op sets, one entry per value. Null: the compiler chooses.
  std::vector<DimAxes> (*shardings)(const Node&) = nullptr;
};

/// Gradient of comparisons, integer ops and the like: no cotangent for any input.
Grads no_gradient(const VjpCtx& c);

/// Adds a node to the graph of the inputs. If some inputs are of a loop body and others of an enclosing graph, the node
/// is added to the innermost body, which captures the outer values. Throws invalid_graph with path and shapes.
Tensor apply(const OpDef& op, const std::vector<Tensor>& inputs, std::any attributes = {});
std::vector<Tensor> apply_multi(const OpDef& op, const std::vector<Tensor>& inputs, std::any attributes = {});
/// Adds a node of an op without inputs (constants, iota) to `graph`.
Tensor apply_in(Graph& graph, const OpDef& op, std::any attributes = {});

}  // namespace md
