#include "maxdiffusion/ops/control_flow.h"

#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/clone.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

// A scan node. Inputs: the initial carry, then the stacked values that are read by row, then captures. Arguments of the
// body: index, carry, rows. Results of the body: carry, rows to stack.
struct ScanAttrs {
  int64_t length = 0;
  bool reverse = false;
  size_t carries = 0, slices = 0;
  std::vector<Shape> outputs;
};

Shape stacked_shape(int64_t length, const Shape& row) {
  Shape s = row;
  s.dims.insert(s.dims.begin(), length);
  return s;
}
Shape row_shape(const Shape& stacked) {
  Shape s = stacked;
  s.dims.erase(s.dims.begin());
  return s;
}

Value compare_less(EmitCtx& c, const Value& a, const Value& b) {
  return c.emit("stablehlo.compare", {a, b}, Shape{DType::pred, {}},
                "comparison_direction = #stablehlo<comparison_direction LT>, "
                "compare_type = #stablehlo<comparison_type SIGNED>");
}

/// The same bits as another type of the same size.
Value as_type(EmitCtx& c, const Value& x, DType t) {
  return x.shape.dtype == t ? x : c.emit("stablehlo.bitcast_convert", {x}, Shape{t, x.shape.dims});
}

/// Whether XLA's CPU compiler computes on this type in float32, slices included: before a loop it converts whole
/// stacks, which takes three times their memory.
bool is_widened(const EmitCtx& c, DType t) { return c.platform() == Platform::cpu && is_float(t) && size_of(t) <= 2; }

/// Whether kernels read and write the rows of this stack: large ones, which the compiler's own loops copy slowly.
bool kernels_access(const EmitCtx& c, const Shape& stack) {
  constexpr int64_t kSmall = 1 << 16;  // bytes of a row
  return c.options().calls_cpu_kernels() && stack.bytes() / stack.dims[0] >= kSmall;
}

/// The type in which rows of this stack are read and written. Integers are not converted, but where no kernel reads
/// them, the stack is copied before the loop.
DType type_of_rows(const EmitCtx& c, const Shape& stack) {
  if (!is_widened(c, stack.dtype) || kernels_access(c, stack)) return stack.dtype;
  return size_of(stack.dtype) == 2 ? DType::u16 : DType::u8;
}

/// Row [1, …] of a stack without its first axis. `index`: s32, clamped as XLA does. `zero`: s32.
Value read_row(EmitCtx& c, const Value& stack, const Value& index, const Value& zero) {
  const Shape row = row_shape(stack.shape);
  if (kernels_access(c, stack.shape))
    return c.emit_call({.target = kReadRowKernel, .results = {row}, .backend_config = {}}, {stack, index})[0];
  std::vector<Value> operands = {stack, index};
  operands.resize(static_cast<size_t>(stack.shape.rank()) + 1, zero);
  Shape one = stack.shape;
  one.dims[0] = 1;
  const Value slice = c.emit("stablehlo.dynamic_slice", operands, one, "slice_sizes = " + mlir_array(one.dims));
  return c.emit("stablehlo.reshape", {slice}, row);
}

/// The stack with another row at `index`.
Value write_row(EmitCtx& c, const Value& stack, const Value& row, const Value& index, const Value& zero) {
  if (kernels_access(c, stack.shape))
    return c.emit_call(
        {.target = kWriteRowKernel, .results = {stack.shape}, .backend_config = {}, .in_place = {{0, 0}}},
        {stack, row, index})[0];
  std::vector<Value> operands = {stack, c.emit("stablehlo.reshape", {row}, stacked_shape(1, row.shape)), index};
  operands.resize(static_cast<size_t>(stack.shape.rank()) + 2, zero);
  return c.emit("stablehlo.dynamic_update_slice", operands, stack.shape);
}

// Prints while (i < n) { row = reverse ? n − 1 − i : i; … }; each stacked result is written to its buffer at `row`.
// Rows of stacks in the host's memory are carried: a step starts the copy of the next step's row, which nothing in it
// waits for. The last step's copy, of its own row, is not read. On GPUs such a loop counts from 1, so that the next row
// is the counter itself: of a counter from 0 it would be the counter's next value, which the compiler writes over the
// old one, and so begins the copies only after the last use of that. On TPUs two rows are carried, of this step and the
// next: there the compiler lets a copy into a carried value begin only after the value's last use.
void emit_scan(EmitCtx& c) {
  const auto& a = c.attrs<ScanAttrs>();
  const Graph& body = *c.node().bodies[0];
  const Shape counter{DType::s32, {}};
  const size_t stacked = a.outputs.size() - a.carries;
  std::vector<Value> stacks;
  for (size_t i = 0; i < a.slices; ++i) {
    const Value& x = c.in(static_cast<int>(a.carries + i));
    stacks.push_back(as_type(c, x, type_of_rows(c, x.shape)));
  }

  const auto is_streamed = [&](size_t slice) { return c.node().inputs[a.carries + slice].node()->in_host_memory; };
  int64_t begin = 0;
  for (size_t i = 0; i < a.slices; ++i)
    if (is_streamed(i) && c.platform() == Platform::gpu) begin = 1;
  std::vector<Value> init = {c.constant_int(begin, counter)};
  for (size_t i = 0; i < a.carries; ++i) init.push_back(c.in(static_cast<int>(i)));
  for (size_t i = 0; i < stacked; ++i) {
    Shape shape = a.outputs[a.carries + i];
    shape.dtype = type_of_rows(c, shape);
    init.push_back(c.constant(0, shape));
  }
  const size_t first_streamed = init.size();
  const bool two_rows = c.platform() == Platform::tpu;
  for (size_t i = 0; i < a.slices; ++i) {
    if (!is_streamed(i)) continue;
    const Value first_row = c.constant_int(a.reverse ? a.length - 1 : 0, counter);
    const Value first = in_memory(c, read_row(c, stacks[i], first_row, c.constant_int(0, counter)), "device");
    Axes row_axes(first.shape.dims.size());
    std::iota(row_axes.begin(), row_axes.end(), 1);
    init.push_back(two_rows ? c.broadcast(first, stacked_shape(2, first.shape).dims, row_axes) : first);
  }
  std::vector<Shape> types;
  for (const Value& v : init) types.push_back(v.shape);

  auto condition = [&](EmitCtx& r, const std::vector<Value>& args) {
    return std::vector<Value>{compare_less(r, args[0], r.constant_int(begin + a.length, counter))};
  };
  auto step = [&](EmitCtx& r, const std::vector<Value>& args) {
    const Value zero = r.constant_int(0, counter);
    const auto row_of_step = [&](int64_t after_this) {  // 0: of this step, 1: of the next one
      const int64_t ahead = after_this - begin;
      if (a.reverse)
        return r.emit("stablehlo.subtract", {r.constant_int(a.length - 1 - ahead, counter), args[0]}, counter);
      return ahead == 0 ? args[0] : r.emit("stablehlo.add", {args[0], r.constant_int(ahead, counter)}, counter);
    };
    const Value row = row_of_step(0);
    std::vector<Value> inner = {row}, streamed;
    inner.insert(inner.end(), args.begin() + 1, args.begin() + 1 + static_cast<int64_t>(a.carries));
    for (size_t i = 0; i < a.slices; ++i) {
      const Value& x = stacks[i];
      if (!is_streamed(i)) {
        inner.push_back(as_type(r, read_row(r, x, row, zero), c.node().inputs[a.carries + i].dtype()));
        continue;
      }
      const Value& carried = args[first_streamed + streamed.size()];
      const Value copied = in_memory(r, read_row(r, x, row_of_step(1), zero), "device");
      if (!two_rows) {
        inner.push_back(carried);
        streamed.push_back(copied);
        continue;
      }
      const Value one = r.constant_int(1, counter), place = r.emit("stablehlo.and", {args[0], one}, counter);
      inner.push_back(read_row(r, carried, place, zero));
      streamed.push_back(write_row(r, carried, copied, r.emit("stablehlo.subtract", {one, place}, counter), zero));
    }
    std::vector<Value> results = r.inline_body(body, inner);
    std::vector<Value> next = {r.emit("stablehlo.add", {args[0], r.constant_int(1, counter)}, counter)};
    next.insert(next.end(), results.begin(), results.begin() + static_cast<int64_t>(a.carries));
    for (size_t i = a.carries; i < results.size(); ++i) {
      const Value& buffer = args[1 + i];
      next.push_back(write_row(r, buffer, as_type(r, results[i], buffer.shape.dtype), row, zero));
    }
    next.insert(next.end(), streamed.begin(), streamed.end());
    return next;
  };
  const std::string head = c.region(types, condition);
  const std::string text = c.region(types, step);
  std::vector<Value> out = c.emit_multi("stablehlo.while", init, types, "", {head, text});
  for (size_t i = 0; i < a.outputs.size(); ++i)
    c.set_out(as_type(c, out[1 + i], a.outputs[i].dtype), static_cast<int>(i));
}

// Access of the reversed loop's body to values of the forward body: rows and captures are read directly, cheap values
// are recomputed, others are stored by the forward loop and read by row ("residuals").
class BodyView final : public ForwardView {
 public:
  BodyView(const VjpCtx& c, const ScanAttrs& attrs, const Graph& forward, Graph& backward, Tensor index)
      : backward_(backward) {
    const auto& arguments = forward.arguments();
    known_[arguments[0]] = index;
    for (size_t i = 0; i < attrs.slices; ++i)
      known_[arguments[1 + attrs.carries + i]] =
          rows_
              .emplace_back(c.in(static_cast<int>(attrs.carries + i)),
                            backward.argument(arguments[1 + attrs.carries + i].shape()))
              .second;
    for (const auto& [t, row] : known_) per_iteration_.insert(t);
    for (size_t i = 0; i < forward.captures().size(); ++i)
      outer_of_[forward.captures()[i].second] = c.in(static_cast<int>(attrs.carries + attrs.slices + i));
  }

  Tensor value(Tensor t) override {
    if (auto it = known_.find(t); it != known_.end()) return it->second;
    if (auto it = outer_of_.find(t); it != outer_of_.end()) return known_[t] = backward_.capture(it->second);
    if (t.node()->op->cheap) {
      Node* copy = clone_node(*t.node(), backward_, [this](Tensor x) { return value(x); });
      for (size_t i = 0; i < copy->outputs.size(); ++i) {
        const int k = static_cast<int>(i);
        known_[t.node()->out(k)] = copy->out(k);
      }
      return known_[t];
    }
    residuals_.emplace_back(t, backward_.argument(t.shape()));
    return known_[t] = residuals_.back().second;
  }
  Node& home(Node& n) override { return n; }
  bool at_hand(Tensor t) override { return per_iteration_.contains(t) || outer_of_.contains(t); }

  /// (stacked outer value, its row in the backward body).
  const std::vector<std::pair<Tensor, Tensor>>& rows() const { return rows_; }
  /// (forward value, its row in the backward body).
  const std::vector<std::pair<Tensor, Tensor>>& residuals() const { return residuals_; }

 private:
  Graph& backward_;
  std::map<Tensor, Tensor> known_, outer_of_;
  std::set<Tensor> per_iteration_;  // index and rows
  std::vector<std::pair<Tensor, Tensor>> rows_, residuals_;
};

// The nodes of a body that depend on the seeds.
std::unordered_set<const Node*> reached_from(const Graph& body, const std::vector<Tensor>& seeds) {
  std::unordered_set<const Node*> reached;
  for (Tensor t : seeds) reached.insert(t.node());
  for (const auto& n : body.nodes()) {
    if (n->op->vjp == no_gradient) continue;
    for (Tensor t : n->inputs)
      if (reached.contains(t.node()) && is_float(t.dtype())) {
        reached.insert(n.get());
        break;
      }
  }
  return reached;
}

// Stacks `value` of the forward body in its loop, unless it is stacked already; returns the output.
Tensor stack_residual(Node& scan, Tensor value) {
  auto& attrs = std::any_cast<ScanAttrs&>(scan.attributes);
  Graph& body = *scan.bodies[0];
  for (size_t i = attrs.carries; i < body.results.size(); ++i)
    if (body.results[i] == value) return scan.out(static_cast<int>(i));
  body.results.push_back(value);
  attrs.outputs.push_back(stacked_shape(attrs.length, value.shape()));
  scan.outputs = attrs.outputs;
  return scan.out(static_cast<int>(scan.outputs.size()) - 1);
}

extern const OpDef kScan;

// The gradient of a loop is the loop in reverse. Its carry: cotangents of the forward carry, and one sum per capture.
// Its rows: cotangents of the stacked results, the forward rows, and residuals. It stacks the cotangents of the rows.
Grads scan_vjp(const VjpCtx& c) {
  Node& home = c.view().home(const_cast<Node&>(c.node()));
  const ScanAttrs attrs = home.attrs<ScanAttrs>();
  Graph& forward = *home.bodies[0];
  const std::vector<Tensor> results = forward.results;
  auto argument = [&](size_t i) { return forward.arguments()[1 + i]; };  // carries, then rows
  const size_t inputs = c.in_count(), operands = attrs.carries + attrs.slices;
  auto inner = [&](size_t input) {
    return input < operands ? argument(input) : forward.captures()[input - operands].second;
  };

  // Carries that depend on an input with a needed gradient, possibly after several iterations; and carries that a
  // cotangent reaches.
  std::vector<bool> needed(attrs.carries), reached(attrs.carries);
  for (size_t i = 0; i < attrs.carries; ++i) needed[i] = c.needs(static_cast<int>(i));
  for (bool grew = true; grew;) {
    grew = false;
    std::vector<Tensor> seeds;
    for (size_t i = 0; i < inputs; ++i)
      if (i < attrs.carries ? needed[i] : c.needs(static_cast<int>(i))) seeds.push_back(inner(i));
    const auto from = reached_from(forward, seeds);
    for (size_t i = 0; i < attrs.carries; ++i)
      if (!needed[i] && is_float(results[i].dtype()) && from.contains(results[i].node())) grew = needed[i] = true;
  }
  for (size_t i = 0; i < attrs.carries; ++i) reached[i] = needed[i] && static_cast<bool>(c.dy(static_cast<int>(i)));
  for (bool grew = true; grew;) {
    grew = false;
    std::vector<Tensor> ends;
    for (size_t i = 0; i < results.size(); ++i)
      if (i < attrs.carries ? reached[i] : i < c.out_count() && c.dy(static_cast<int>(i))) ends.push_back(results[i]);
    const auto live = live_nodes(forward, ends);
    for (size_t i = 0; i < attrs.carries; ++i)
      if (needed[i] && !reached[i] && live.contains(argument(i).node())) grew = reached[i] = true;
  }

  auto body = std::make_shared<Graph>(c.into());
  const Tensor index = body->argument({DType::s32, {}});
  BodyView view(c, attrs, forward, *body, index);
  std::vector<Tensor> ys, xs, carry_in, carry_args, carry_out;
  Grads dys;
  std::vector<std::pair<Tensor, Tensor>> rows;  // (stacked outer value, row)
  for (size_t i = 0; i < attrs.carries; ++i) {
    if (!reached[i]) continue;
    Tensor dy = c.dy(static_cast<int>(i));
    carry_in.push_back(dy ? dy : full(c.into(), 0, results[i].shape()));
    carry_args.push_back(body->argument(results[i].shape()));
    ys.push_back(results[i]);
    dys.push_back(carry_args.back());
  }
  for (size_t i = attrs.carries; i < c.out_count(); ++i) {
    Tensor dy = c.dy(static_cast<int>(i));
    if (!dy) continue;
    rows.emplace_back(dy, body->argument(results[i].shape()));
    ys.push_back(results[i]);
    dys.push_back(rows.back().second);
  }
  std::vector<size_t> x_input;  // input of each x
  for (size_t i = 0; i < inputs; ++i) {
    if (i < attrs.carries ? !needed[i] : !c.needs(static_cast<int>(i))) continue;
    xs.push_back(inner(i));
    x_input.push_back(i);
  }
  const Grads dxs = c.sweep()(ys, dys, xs, *body, view);

  std::vector<Tensor> stacked_out;
  std::vector<int> output_of(inputs, -1);  // for each input, the backward loop's output that is its cotangent
  std::vector<size_t> stacked_input;
  for (size_t k = 0; k < xs.size(); ++k) {
    const size_t i = x_input[k];
    if (i < attrs.carries) {
      if (!reached[i]) continue;
      output_of[i] = static_cast<int>(carry_out.size());
      carry_out.push_back(dxs[k] ? dxs[k] : full(*body, 0, xs[k].shape()));
    } else if (dxs[k] && i >= operands) {
      carry_in.push_back(full(c.into(), 0, xs[k].shape()));
      carry_args.push_back(body->argument(xs[k].shape()));
      output_of[i] = static_cast<int>(carry_out.size());
      carry_out.push_back(add(carry_args.back(), dxs[k]));
    } else if (dxs[k]) {
      stacked_out.push_back(dxs[k]);
      stacked_input.push_back(i);
    }
  }
  for (size_t k = 0; k < stacked_out.size(); ++k) output_of[stacked_input[k]] = static_cast<int>(carry_out.size() + k);

  body->results = carry_out;
  body->results.insert(body->results.end(), stacked_out.begin(), stacked_out.end());
  const auto live = live_nodes(*body, body->results);
  body->prune_captures(live);
  for (const auto& row : view.rows())
    if (live.contains(row.second.node())) rows.push_back(row);
  for (const auto& [value, row] : view.residuals())
    if (live.contains(row.node())) rows.emplace_back(c.view().value(stack_residual(home, value)), row);

  ScanAttrs back{attrs.length, !attrs.reverse, carry_args.size(), rows.size(), {}};
  std::vector<Tensor> arguments = {index}, in = carry_in;
  arguments.insert(arguments.end(), carry_args.begin(), carry_args.end());
  for (const auto& [stacked, row] : rows) {
    in.push_back(stacked);
    arguments.push_back(row);
  }
  body->set_arguments(arguments);
  for (Tensor t : carry_out) back.outputs.push_back(t.shape());
  for (Tensor t : stacked_out) back.outputs.push_back(stacked_shape(attrs.length, t.shape()));
  Grads grads(inputs);
  if (back.outputs.empty()) return grads;
  for (Tensor& t : in) t = c.into().capture(t);
  Node* node = c.into().add(kScan, std::move(in), std::move(back), {body});
  for (size_t i = 0; i < inputs; ++i)
    if (output_of[i] >= 0 && c.needs(static_cast<int>(i))) grads[i] = node->out(output_of[i]);
  return grads;
}

const OpDef kScan = {
    .name = "scan",
    .infer = [](const InferCtx& c) { return c.attrs<ScanAttrs>().outputs; },
    .emit = emit_scan,
    .vjp = scan_vjp,
    .flops =
        [](const Node& n) {
          const Graph& body = *n.bodies[0];
          return static_cast<double>(n.attrs<ScanAttrs>().length) * count_flops(body, body.results);
        },
};

/// Inputs: the condition, the values without the body, as many as the attribute says, then captures.
const OpDef kIf = {
    .name = "if",
    .infer =
        [](const InferCtx& c) {
          return std::vector<Shape>(c.in.begin() + 1, c.in.begin() + 1 + static_cast<int64_t>(c.attrs<size_t>()));
        },
    .emit =
        [](EmitCtx& c) {
          const Value branch = c.emit("stablehlo.convert", {c.in(0)}, Shape{DType::s32, {}});
          const std::string otherwise = c.region({},
                                                 [](EmitCtx&r, const std::vector<Value>&) {
                                                   std::vector<Value> out;
                                                   for (size_t i = 1; i <= r.node().outputs.size(); ++i)
                                                     out.push_back(r.in(static_cast<int>(i)));
                                                   return out;
                                                 }),
                            body = c.region({}, [](EmitCtx&r, const std::vector<Value>&) {
                              return r.inline_body(*r.node().bodies[0], {});
                            });
          const auto& types = c.node().outputs;
          const std::vector<Value> out = c.emit_multi("stablehlo.case", {branch}, types, "", {otherwise, body});
          for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
        },
    .flops = [](const Node& n) { return count_flops(*n.bodies[0], n.bodies[0]->results); },
};

void check_carry(const char* op, const std::vector<Tensor>& init, const std::vector<Tensor>& carry) {
  check(init.size() == carry.size(), Code::invalid_graph, "{}: the carry has {} values, the body returned {}", op,
        init.size(), carry.size());
  for (size_t i = 0; i < init.size(); ++i) {
    check(static_cast<bool>(carry[i]), Code::invalid_graph, "{}: the body returned an absent carry {}", op, i);
    check(init[i].shape() == carry[i].shape(), Code::invalid_graph, "{}: carry {} enters as {} and leaves as {}", op, i,
          to_string(init[i].shape()), to_string(carry[i].shape()));
  }
}

}  // namespace

Tensor ScanStep::slice(Tensor stacked) {
  check(static_cast<bool>(stacked) && stacked.rank() > 0 && stacked.dim(0) == length_, Code::invalid_graph,
        "scan: a loop of {} steps cannot take rows of {}", length_, stacked ? to_string(stacked.shape()) : "nothing");
  const Tensor outer = body_->parent()->capture(stacked);
  for (const auto& [known, row] : slices_)
    if (known == outer) return row;
  slices_.emplace_back(outer, body_->argument(row_shape(outer.shape())));
  return slices_.back().second;
}

/// Traces the body of a scan; the only code that fills a ScanStep.
struct ScanBuilder {
  static ScanResult build(int64_t length, const std::vector<Tensor>& init, const ScanBody& trace, bool reverse) {
    check(!init.empty(), Code::invalid_graph, "scan: the carry is empty");
    check(length >= 1, Code::invalid_graph, "scan: {} steps", length);
    Graph& parent = innermost(init);
    auto body = std::make_shared<Graph>(parent);
    ScanStep step;
    step.body_ = body.get();
    step.index_ = body->argument({DType::s32, {}});
    step.length_ = length;
    std::vector<Tensor> carry;
    for (Tensor t : init) carry.push_back(body->argument(t.shape()));
    ScanResult result = trace(step, carry);
    check_carry("scan", init, result.carry);

    ScanAttrs attrs{length, reverse, init.size(), step.slices_.size(), {}};
    std::vector<Tensor> in;
    for (Tensor t : init) in.push_back(parent.capture(t));
    for (const auto& [outer, row] : step.slices_) in.push_back(outer);
    for (Tensor t : result.carry) {
      body->results.push_back(body->capture(t));
      attrs.outputs.push_back(t.shape());
    }
    for (Tensor t : result.stacked) {
      check(static_cast<bool>(t), Code::invalid_graph, "scan: the body returned an absent value to stack");
      body->results.push_back(body->capture(t));
      attrs.outputs.push_back(stacked_shape(length, t.shape()));
    }
    body->prune_captures(live_nodes(*body, body->results));
    Node* node = parent.add(kScan, std::move(in), attrs, {body});
    ScanResult out;
    for (size_t i = 0; i < attrs.outputs.size(); ++i)
      (i < attrs.carries ? out.carry : out.stacked).push_back(node->out(static_cast<int>(i)));
    return out;
  }
};

ScanResult scan(int64_t length, const std::vector<Tensor>& init, const ScanBody& body, bool reverse) {
  return ScanBuilder::build(length, init, body, reverse);
}

std::vector<Tensor> run_if(Tensor condition, const std::vector<Tensor>& inputs, const std::vector<Tensor>& otherwise,
                           const std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>& body) {
  check(condition && condition.shape() == Shape{DType::pred, {}}, Code::invalid_graph,
        "run_if: the condition must be a scalar pred, found {}", condition ? to_string(condition.shape()) : "nothing");
  std::vector<Tensor> in = {condition};
  in.insert(in.end(), otherwise.begin(), otherwise.end());
  std::vector<Tensor> all = in;
  all.insert(all.end(), inputs.begin(), inputs.end());
  Graph& parent = innermost(all);
  auto graph = std::make_shared<Graph>(parent);
  std::vector<Tensor> inside;
  for (Tensor t : inputs) inside.push_back(graph->capture(t));
  for (Tensor t : body(inside)) graph->results.push_back(graph->capture(t));
  graph->prune_captures(live_nodes(*graph, graph->results));
  check(graph->results.size() == otherwise.size(), Code::invalid_graph,
        "run_if: {} values without the body, {} with it", otherwise.size(), graph->results.size());
  for (size_t i = 0; i < otherwise.size(); ++i)
    check(otherwise[i].shape() == graph->results[i].shape(), Code::invalid_graph,
          "run_if: value {} is {} without the body, {} with it", i, to_string(otherwise[i].shape()),
          to_string(graph->results[i].shape()));
  for (Tensor& t : in) t = parent.capture(t);
  Node* node = parent.add(kIf, std::move(in), otherwise.size(), {graph});
  std::vector<Tensor> out;
  for (size_t i = 0; i < otherwise.size(); ++i) out.push_back(node->out(static_cast<int>(i)));
  return out;
}

OpList control_flow_ops() { return {&kScan, &kIf}; }

}  // namespace md
