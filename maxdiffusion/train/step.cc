#include "maxdiffusion/train/step.h"

#include <algorithm>
#include <bit>
#include <regex>
#include <set>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/layer_path.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/process_sum.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/low_precision.h"
#include "maxdiffusion/train/update.h"

namespace md {
namespace {

struct Gradients {
  Tensor loss;
  std::vector<Param> of;
  std::vector<Tensor> values;
};

std::vector<Param> trained(const ParamTable& params, const Task& task) {
  std::vector<Param> all;
  for (const Param& p : params.params())
    if (p.trainable) all.push_back(p);
  check(!all.empty(), Code::invalid_graph, "{}: no trainable parameter", task.model());
  return all;
}

bool has_master(const Param& p, const StepOptions& o) {
  return p.trainable && is_low_precision(p.shape.dtype) &&
         low_precision_update(o.optim.low_precision_update) == LowPrecisionUpdate::master_f32;
}

bool named_by(const std::string& expression, const Param& p) {
  return std::regex_search(p.input, std::regex(expression, std::regex::ECMAScript));
}

bool is_frozen(const StepOptions& o, const Param& p) {
  return std::ranges::any_of(o.frozen, [&](const std::string& e) { return named_by(e, p); });
}

ParamForm form_of(const Param& p) { return {p.shape.dims, p.axes, p.stacked}; }

/// Converts float types below f32 to f32, the type in which optimizers compute.
Tensor widened(Tensor slot) { return slot && is_low_precision(slot.dtype()) ? cast(slot, DType::f32) : slot; }

/// State arrays of parameters as inputs of the graph, created when first used.
class StateInputs {
 public:
  StateInputs(Graph& g, const StepOptions& o)
      : graph_(g), options_(o), optimizer_(make_optimizer(o.optim)), slots_(optimizer_slots(o.optim)) {}

  const Optimizer& optimizer() const { return *optimizer_; }
  const std::vector<StateSlot>& slots() const { return slots_; }

  /// The slot of a parameter in its stored type; empty if the parameter has no array of this slot.
  Tensor operator()(const StateSlot& slot, const Param& p) {
    const std::optional<StateArray> array = state_array(slot, p, options_);
    return array ? input(slot.prefix + p.input, array->shape, array->axes) : Tensor();
  }
  Tensor scalar(const StateScalar& scalar, const std::string& component) {
    return input(scalar.prefix + component, {DType::f32, {}}, {});
  }
  /// The parameter or its master, in f32.
  Tensor value(const Param& p) {
    return has_master(p, options_) ? input(state_prefix::kMaster + p.input, {DType::f32, p.shape.dims}, p.axes)
                                   : cast(p.value, DType::f32);
  }
  /// The point at which loss and gradient are computed, in the parameter's type.
  Tensor point(const Param& p) {
    std::vector<Tensor> slots;
    for (const StateSlot& slot : slots_) slots.push_back(widened((*this)(slot, p)));
    const int region = graph_.set_remat_region(0);
    const Tensor at = cast(optimizer_->point(value(p), slots), p.shape.dtype);
    graph_.set_remat_region(region);
    return at;
  }

 private:
  Tensor input(const std::string& name, const Shape& shape, const LogicalAxes& axes) {
    if (const int at = graph_.input_index(name); at >= 0) return graph_.inputs()[static_cast<size_t>(at)].value;
    const int region = graph_.set_remat_region(0);
    const Tensor made = graph_.input(name, shape, axes);
    graph_.set_remat_region(region);
    return made;
  }

  Graph& graph_;
  const StepOptions& options_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<StateSlot> slots_;
};

/// Loss and gradients of one batch. `in`: the graph for its nodes, which contains `feed`.
Gradients differentiate(const Task& task, StepGraph& s, const StepOptions& o, StateInputs& of_state, Graph& in,
                        const Feed& feed, Rng rng) {
  Gradients g;
  // The differentiated value of each parameter. In a loop it is the body's value. If layers compute in a wider type
  // than the parameter's, it is the converted copy, because a gradient has the type of its value.
  std::map<std::string, Tensor> views;
  auto scope = [&](const std::string& component) {
    Scope root(*s.graph, s.params, component, o.scope);
    if (&in != s.graph.get()) root = root.in_graph(in);
    if (o.scope.dropout > 0 || o.drops_adapters) root = root.with_random(rng.for_("dropout").for_(component));
    root = root.with_source([&](const Scope& below, Param p) {
      const bool widened = p.trainable && below.options().trainable && is_low_precision(p.shape.dtype) &&
                           size_of(p.shape.dtype) < size_of(o.scope.activations);
      const std::string input = p.model + "/" + p.path;
      Tensor stored = below.resolve(std::move(p));
      if (const Param& made = *s.params.find(input);
          of_state.optimizer().looks_ahead() && made.trainable && !is_frozen(o, made))
        stored = of_state.point(made);
      const Tensor value = in.capture(stored);
      return views[input] = widened ? cast(value, o.scope.activations) : value;
    });
    return o.change_scope ? o.change_scope(component, root) : root;
  };
  g.loss = task.loss(scope, feed, rng);
  g.of = trained(s.params, task);
  std::vector<Tensor> inner;
  for (const Param& p : g.of) inner.push_back(views.at(p.input));
  g.values = grad(g.loss, inner);
  // Some parameters do not affect the loss: SDXL does not use the last layer of its first text encoder, where LoRA
  // matrices may be, and Qwen-Image does not use its last block's text output. They have no gradient, and optimizers
  // leave them alone.
  std::vector<std::string> unread;
  for (size_t i = 0; i < g.values.size(); ++i)
    if (!g.values[i] && !is_lora(g.of[i])) unread.push_back(g.of[i].input);
  check(unread.size() < g.of.size() || g.of.empty(), Code::invalid_graph, "the loss depends on no weight");
  if (!unread.empty())
    log_info_once("the loss does not depend on {} of {} weights, such as {}", unread.size(), g.of.size(),
                  unread.front());
  std::vector<Tensor> results = {g.loss};
  std::ranges::copy_if(g.values, std::back_inserter(results), [](Tensor t) { return static_cast<bool>(t); });
  s.flops = count_flops(in, results);
  return g;
}

/// The loss of one batch without gradients, in a graph of its own.
struct LossGraph {
  std::unique_ptr<Graph> graph;
  ParamTable params;
  Tensor loss;
};
LossGraph trace_loss(const Task& task, const StepGraph& s, const StepOptions& o, const ScopeOptions& scope_options) {
  LossGraph once{std::make_unique<Graph>(s.graph->options()), {}, {}};
  Graph& graph = *once.graph;
  auto scope = [&](const std::string& component) {
    Scope root(graph, once.params, component, scope_options);
    return o.change_scope ? o.change_scope(component, root) : root;
  };
  Feed feed;
  for (const BatchField& f : s.fields) {
    Shape shape = f.shape;
    if (f.batched) shape.dims[0] /= o.accumulation;
    feed[f.name] = graph.input(f.name, shape);
  }
  once.loss = task.loss(scope, feed, Rng(graph.input("key", {DType::u32, {2}})));
  return once;
}

/// Of stacked parameters, by name, the layers that the loss does not depend on, if there are any: their gradients are
/// zeros, because the layers of a loop are one program.
std::map<std::string, std::vector<int64_t>> unread_layers(const Task& task, const StepGraph& s, const StepOptions& o) {
  std::map<std::string, std::vector<int64_t>> unread;
  if (std::ranges::none_of(s.params.params(), [](const Param& p) { return p.trainable && p.stacked > 0; }))
    return unread;
  ScopeOptions single = o.scope;
  single.scan_layers = false;
  single.blocks_to_swap = 0;
  const LossGraph once = trace_loss(task, s, o, single);
  std::set<const Node*> read = {once.loss.node()};
  for (std::vector<const Node*> left = {once.loss.node()}; !left.empty();) {
    const Node* node = left.back();
    left.pop_back();
    for (Tensor t : node->inputs)
      if (read.insert(t.node()).second) left.push_back(t.node());
  }
  for (const Param& p : s.params.params())
    for (int64_t i = 0; p.trainable && i < p.stacked; ++i)
      if (const Param* layer = once.params.find(layer_path(p.input, i)); layer && !read.contains(layer->value.node()))
        unread[p.input].push_back(i);
  return unread;
}

/// `after` without the changes of these layers: rows along axis 0.
Tensor without_layers(Tensor after, Tensor before, const std::vector<int64_t>& layers) {
  HostArray flags(Shape{DType::f32, {after.dim(0)}});
  for (int64_t i = 0; i < after.dim(0); ++i)
    flags.mutable_view<float>()[static_cast<size_t>(i)] = std::ranges::count(layers, i) > 0 ? 1 : 0;
  Dims dims(static_cast<size_t>(after.rank()), 1);
  dims[0] = after.dim(0);
  const Tensor flag = reshape(constant(after.graph(), flags), dims);
  return where(broadcast_to(gt(flag, zeros_like(flag)), after.dims()), before, after);
}

/// Mean over `accumulation` batches, which are consecutive along axis 0 of every batched field.
Gradients accumulate(const Task& task, StepGraph& s, const StepOptions& o, StateInputs& of_state, const Feed& feed,
                     Rng rng) {
  const int64_t n = o.accumulation;
  if (n == 1) return differentiate(task, s, o, of_state, *s.graph, feed, rng);
  // The parameters, and so the carry, are only known after tracing the loss, so it is traced once more.
  Gradients g;
  g.of = trained(trace_loss(task, s, o, o.scope).params, task);
  Graph& root = *s.graph;
  std::vector<Tensor> carry = {constant(root, 0.0)};
  for (const Param& p : g.of) carry.push_back(full(root, 0, {DType::f32, p.shape.dims}));
  Feed stacked;
  for (const BatchField& f : s.fields) {
    if (!f.batched) continue;
    Shape one = f.shape;
    one.dims[0] /= n;
    stacked[f.name] = reshape(feed.at(f.name), batched(n, one).dims);
  }
  double flops = 0;
  const ScanResult sums = scan(n, carry, [&](ScanStep& step, const std::vector<Tensor>& c) -> ScanResult {
    Feed one = feed;
    for (const auto& [name, t] : stacked) one[name] = step.slice(t);
    Gradients part = differentiate(task, s, o, of_state, step.body(), one, rng.at_step(step.index()));
    flops = s.flops;
    std::vector<Tensor> next = {c[0] + part.loss};
    for (size_t i = 0; i < part.values.size(); ++i)
      next.push_back(part.values[i] ? c[i + 1] + cast(part.values[i], DType::f32) : c[i + 1]);
    g = part;
    return {next, {}};
  });
  s.flops = flops * static_cast<double>(n);
  const double share = 1 / static_cast<double>(n);
  g.loss = sums.carry[0] * share;
  for (size_t i = 0; i < g.values.size(); ++i)
    if (g.values[i]) g.values[i] = sums.carry[i + 1] * share;
  return g;
}

/// Means of loss and gradients over all replicas, in one call.
void average_over_replicas(Gradients& g, int64_t replicas) {
  std::vector<Tensor> values = {cast(g.loss, DType::f32)};
  std::vector<DimAxes> axes = {{}};
  for (size_t i = 0; i < g.values.size(); ++i)
    if (g.values[i]) {
      values.push_back(cast(g.values[i], DType::f32));
      axes.push_back(dim_axes(g.values[i], g.of[i].axes));
    }
  values = process_sum(values, axes, 1 / static_cast<double>(replicas));
  size_t next = 0;
  g.loss = values[next++];
  for (Tensor& value : g.values)
    if (value) value = values[next++];
}

/// The peak learning rate of each parameter.
std::vector<double> peak_rates(const StepOptions& o, const std::vector<Param>& params, bool has_own_rate) {
  check(!has_own_rate || (o.rates_by_name.empty() && o.loraplus_ratio == 1), Code::invalid_config,
        "optimizer={} with relative_step=True cannot be combined with network_reg_lrs and loraplus_lr_ratio: it finds "
        "its own step sizes",
        o.optim.optimizer);
  std::vector<double> rates;
  std::set<std::string> unread;
  for (const auto& [expression, rate] : o.rates_by_name) unread.insert(expression);
  for (const std::string& expression : o.frozen) unread.insert(expression);
  for (const Param& p : params) {
    double rate = o.optim.learning_rate;
    if (auto component = o.learning_rates.find(p.model); component != o.learning_rates.end()) rate = component->second;
    bool by_name = false;
    for (const auto& [expression, named_rate] : o.rates_by_name)
      if (named_by(expression, p)) {
        unread.erase(expression);
        if (!std::exchange(by_name, true)) rate = named_rate;
      }
    for (const std::string& expression : o.frozen)
      if (named_by(expression, p)) unread.erase(expression);
    if (is_second_lora_matrix(p)) rate *= o.loraplus_ratio;
    rates.push_back(has_own_rate ? 1 : rate);
  }
  check(unread.empty() || o.per_model_step_count, Code::invalid_config,
        "network_reg_lrs or frozen_layers: no trained parameter has '{}' in its name; expected as in '{}'",
        unread.empty() ? "" : *unread.begin(), params.front().input);
  check(std::ranges::any_of(params, [&](const Param& p) { return !is_frozen(o, p); }), Code::invalid_config,
        "frozen_layers names every trained parameter; expected some to train");
  return rates;
}

bool drops(const Graph& g) {
  return std::ranges::any_of(g.nodes(), [](const auto& n) {
    return n->name == nn::kDropout || std::ranges::any_of(n->bodies, [](const auto& body) { return drops(*body); });
  });
}

}  // namespace

StepGraph trace_step(const Task& task, const GraphOptions& options, const StepOptions& o) {
  check(o.accumulation >= 1, Code::invalid_config, "gradient_accumulation_steps is {}; expected 1 or more",
        o.accumulation);
  StepGraph s{std::make_unique<Graph>(options), {}, task.batch(), 0};
  Graph& g = *s.graph;
  Tensor step = g.input("step", {DType::s32, {}}), healthy = g.input("healthy", {DType::pred, {}});
  Tensor key = g.input("key", {DType::u32, {2}});
  Feed feed;
  for (BatchField& f : s.fields) {
    if (f.batched) f.shape.dims[0] *= o.accumulation;
    feed[f.name] = g.input(f.name, f.shape, f.batched ? axis::of_batch(f.shape.dims.size()) : LogicalAxes());
  }
  Rng rng = Rng(key).at_step(step);
  if (o.replicas > 1) rng = rng.with_rows(task.batch_rows(g.input("replica", {DType::s32, {}}), o.replicas));
  StateInputs of_state(g, o);
  Gradients gradients = accumulate(task, s, o, of_state, feed, rng);
  if (o.replicas > 1) average_over_replicas(gradients, o.replicas);
  check(o.scope.dropout == 0 || drops(g), Code::invalid_config,
        "dropout is {}, but {} has no dropout layers; set it to 0", o.scope.dropout, task.model());
  const LowPrecisionUpdate narrow_update = low_precision_update(o.optim.low_precision_update);

  auto state = [&](const std::string& name, Tensor after) {
    g.output(name, after, name);
    g.alias(name, name);
  };
  Tensor updates = step;
  if (o.per_model_step_count) updates = g.input("updates/" + task.model(), {DType::s32, {}});
  // One optimizer per component; if one of them cannot update, none does.
  const Optimizer& optimizer = of_state.optimizer();
  const std::vector<StateSlot>& slots = of_state.slots();
  const std::vector<StateScalar> scalars = optimizer.scalars();
  struct Group {
    std::vector<Param> params;
    std::vector<Tensor> grads;
    std::vector<double> rates;  // peak learning rates
    UpdateGroup values;
    ClippedGradients clipped;
  };
  std::map<std::string, Group> groups;
  const std::vector<double> rates = peak_rates(o, gradients.of, optimizer.has_own_rate());
  for (size_t i = 0; i < gradients.of.size(); ++i) {
    const Param& p = gradients.of[i];
    Group& group = groups[p.model];
    group.params.push_back(p);
    group.grads.push_back(is_frozen(o, p) ? Tensor() : gradients.values[i]);
    group.rates.push_back(rates[i]);
    group.values.params.push_back(of_state.value(p));
    group.values.slots.resize(slots.size());
    for (size_t k = 0; k < slots.size(); ++k) group.values.slots[k].push_back(widened(of_state(slots[k], p)));
    if (o.ema_decay > 0) group.values.averages.push_back(of_state({state_prefix::kAverage}, p));
    group.values.axes.push_back(dim_axes(p.value, p.axes));
    group.values.stacked.push_back(p.stacked);
  }
  for (auto& [name, group] : groups)
    for (const StateScalar& scalar : scalars) group.values.scalars.push_back(of_state.scalar(scalar, name));
  Tensor good = bit_and(healthy, is_finite(gradients.loss)), squares;
  for (auto& [name, group] : groups) {
    group.clipped = clip(g, o.optim, group.grads, group.values.axes);
    good = bit_and(good, is_finite(group.clipped.norm));
    const Tensor square_ = square(group.clipped.norm);
    squares = squares ? squares + square_ : square_;
  }
  // The average starts with the first update and forgets it quickly: decay min(d, (1 + n) / (10 + n)), as in diffusers.
  Tensor n = cast(updates, DType::f32), keep;
  if (o.ema_decay > 0)
    keep = where(gt(n, scalar_like(n, 0)), minimum((n + 1.0) / (n + 10.0), scalar_like(n, o.ema_decay)),
                 scalar_like(n, 0));
  const std::map<std::string, std::vector<int64_t>> unread = unread_layers(task, s, o);
  for (auto& [name, group] : groups) {
    const UpdateGroup before = group.values;
    // Compared by their bits, so that a NaN rate equals itself; the weights then show it.
    std::set<uint64_t> different;
    for (const double rate : group.rates) different.insert(std::bit_cast<uint64_t>(rate));
    check(different.size() == 1 || !optimizer.is_joint(), Code::invalid_config,
          "optimizer={} cannot be combined with network_reg_lrs and loraplus_lr_ratio: the weights of {} have one "
          "learning rate",
          o.optim.optimizer, name);
    for (const uint64_t rate : different) {
      OptimConfig optim = o.optim;
      optim.learning_rate = std::bit_cast<double>(rate);
      ClippedGradients part = group.clipped;
      for (size_t i = 0; i < group.rates.size(); ++i)
        if (std::bit_cast<uint64_t>(group.rates[i]) != rate) part.unclipped[i] = {};
      group.values = apply_update(optimizer, {learning_rate(optim, step), n, good, keep}, part, group.values);
    }
    for (size_t i = 0; i < group.params.size(); ++i) {
      const auto found = unread.find(group.params[i].input);
      if (found == unread.end() || !group.grads[i]) continue;
      const auto keep_layers = [&](Tensor& after, Tensor was) {
        if (after && after.rank() > 0 && after.dim(0) == group.params[i].stacked)
          after = without_layers(after, was, found->second);
      };
      keep_layers(group.values.params[i], before.params[i]);
      for (size_t k = 0; k < slots.size(); ++k) keep_layers(group.values.slots[k][i], before.slots[k][i]);
      if (o.ema_decay > 0) keep_layers(group.values.averages[i], before.averages[i]);
    }
  }

  state("step", where(good, step + 1.0, step));
  state("healthy", good);
  if (o.per_model_step_count) state("updates/" + task.model(), where(good, updates + 1.0, updates));
  auto stored = [&](const std::string& component, const Group& group) {
    std::vector<Tensor> out;
    const DType type = group.params[0].shape.dtype;  // of the component, or of all its LoRA matrices
    if (is_low_precision(type) && narrow_update == LowPrecisionUpdate::stochastic_rounding)
      return round_stochastically(group.values.params, type,
                                  Rng(key).at_step(step).for_("stochastic rounding").for_(component));
    for (size_t i = 0; i < group.params.size(); ++i)
      out.push_back(cast(group.values.params[i], group.params[i].shape.dtype));
    return out;
  };
  // Optimizers compute moments narrower than f32 in f32. Unchanged moments keep their values.
  for (auto& [name, group] : groups)
    for (size_t k = 0; k < slots.size(); ++k) {
      std::vector<Tensor*> narrow;
      std::vector<Tensor> values;
      for (size_t i = 0; i < group.params.size(); ++i)
        if (const auto array = state_array(slots[k], group.params[i], o); array && is_low_precision(array->shape.dtype))
          narrow.push_back(&group.values.slots[k][i]), values.push_back(*narrow.back());
      const std::vector<Tensor> rounded = round_stochastically(
          values, DType::bf16, Rng(key).at_step(step).for_("moments").for_(slots[k].prefix).for_(name));
      for (size_t i = 0; i < narrow.size(); ++i) *narrow[i] = rounded[i];
    }
  for (auto& [name, group] : groups) {
    const std::vector<Tensor> weights = stored(name, group);
    for (size_t i = 0; i < group.params.size(); ++i) {
      const std::string& input = group.params[i].input;
      state(input, weights[i]);
      if (has_master(group.params[i], o)) state(state_prefix::kMaster + input, group.values.params[i]);
      for (size_t k = 0; k < slots.size(); ++k)
        if (group.values.slots[k][i]) state(slots[k].prefix + input, group.values.slots[k][i]);
      if (o.ema_decay > 0) state(state_prefix::kAverage + input, group.values.averages[i]);
    }
  }
  for (auto& [name, group] : groups)
    for (size_t k = 0; k < scalars.size(); ++k) {
      state(scalars[k].prefix + name, group.values.scalars[k]);
      if (scalars[k].metric)
        g.output(groups.size() == 1 ? scalars[k].metric : scalars[k].metric + ("_" + name), group.values.scalars[k]);
    }
  g.output("loss", gradients.loss);
  if (o.per_model_step_count) g.output("loss_" + task.model(), gradients.loss);
  g.output("grad_norm", groups.size() == 1 ? groups.begin()->second.clipped.norm : sqrt(squares));
  OptimConfig shown = o.optim;
  if (optimizer.has_own_rate()) shown.learning_rate = 1;
  g.output("learning_rate", learning_rate(shown, step));
  return s;
}

ParamTable in_f32(const ParamTable& params) {
  ParamTable out;
  for (Param p : params.params()) {
    if (p.trainable && is_low_precision(p.shape.dtype)) p.shape.dtype = DType::f32;
    out.add(std::move(p));
  }
  return out;
}

std::vector<StateSlot> state_slots(const StepOptions& o) {
  std::vector<StateSlot> slots = optimizer_slots(o.optim);
  if (o.ema_decay > 0) slots.push_back({state_prefix::kAverage, StateSlot::Start::copy});
  return slots;
}

std::optional<StateArray> state_array(const StateSlot& slot, const Param& p, const StepOptions& o) {
  if (slot.prefix != std::string_view(state_prefix::kAverage) && is_frozen(o, p)) return std::nullopt;
  return slot.array(form_of(p));
}

bool add_slots(const ParamTable& params, const std::vector<StateSlot>& slots, const StepOptions& o,
               NamedShards& state) {
  bool any = false;
  for (const Param& p : params.params())
    for (const StateSlot& slot : slots) {
      if (!p.trainable || !state.contains(p.input) || state.contains(slot.prefix + p.input)) continue;
      const std::optional<StateArray> array = state_array(slot, p, o);
      if (!array) continue;
      const ShardedArray& value = state.at(p.input);
      ShardedArray start;
      if (slot.start == StateSlot::Start::copy)
        start = value.cast(array->shape.dtype);
      else if (array->shape.dims == value.shape.dims)
        start = ShardedArray(array->shape, value.shards).zeros();
      else  // arrays with other dims are small, or whole on every device
        start = ShardedArray(array->shape, {{Slice::all(array->shape.dims), {}}}).zeros();
      state[slot.prefix + p.input] = std::move(start);
      any = true;
    }
  return any;
}

bool add_scalars(const ParamTable& params, const StepOptions& o, NamedShards& state) {
  bool any = false;
  std::set<std::string> components;
  for (const Param& p : params.params())
    if (p.trainable && state.contains(p.input)) components.insert(p.model);
  for (const StateScalar& scalar : make_optimizer(o.optim)->scalars())
    for (const std::string& component : components) {
      const auto start = static_cast<float>(scalar.start);
      any |= state.try_emplace(scalar.prefix + component, HostArray::of<float>({DType::f32, {}}, {&start, 1})).second;
    }
  return any;
}

NamedShards initial_state(const ParamTable& params, NamedShards values, const StepOptions& o) {
  add_slots(params, state_slots(o), o, values);
  add_scalars(params, o, values);
  return restored_state(params, std::move(values), o);
}

NamedShards restored_state(const ParamTable& params, NamedShards state, const StepOptions& o) {
  std::vector<StateSlot> all = state_slots(o);
  all.push_back({state_prefix::kMaster});
  for (const Param& p : params.params()) {
    if (!p.trainable) continue;
    for (const StateSlot& slot : all)
      if (auto a = state.find(slot.prefix + p.input); a != state.end())
        if (const std::optional<StateArray> array = slot.array(form_of(p)))
          a->second = a->second.cast(array->shape.dtype);
    const auto value = state.find(p.input);
    if (has_master(p, o) && value != state.end())
      state.try_emplace(state_prefix::kMaster + p.input, value->second.cast(DType::f32));
    if (auto master = state.find(state_prefix::kMaster + p.input); master != state.end())
      state[p.input] = master->second.cast(p.shape.dtype);
    else if (value != state.end())
      value->second = value->second.cast(p.shape.dtype);
  }
  return state;
}

NamedShards model_values(const ParamTable& params, const NamedShards& state) {
  NamedShards out;
  for (const Param& p : params.params()) {
    if (!p.trainable) continue;
    const auto average = state.find(state_prefix::kAverage + p.input);
    out[p.input] = (average != state.end() ? average->second : state.at(p.input)).cast(p.shape.dtype);
  }
  return out;
}

}  // namespace md
