#include "maxdiffusion/train/step.h"

#include <algorithm>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
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

/// Loss and gradients of one batch; `in` is the graph where its nodes go, and holds the feed.
Gradients differentiate(const Task& task, StepGraph& s, const StepOptions& o, Graph& in, const Feed& feed, Rng rng) {
  Gradients g;
  // What is differentiated, by parameter. In a loop: the body's view of it. Where layers compute in a wider type than
  // that of the parameter: its copy in that type, since a gradient has the type of what it belongs to.
  std::map<std::string, Tensor> views;
  auto scope = [&](const std::string& component) {
    Scope root(*s.graph, s.params, component, o.scope);
    if (&in != s.graph.get()) root = root.in_graph(in);
    if (o.scope.dropout > 0) root = root.with_random(rng.for_("dropout").for_(component));
    root = root.with_source([&](const Scope& below, Param p) {
      const bool widened = p.trainable && below.options().trainable && is_low_precision(p.shape.dtype) &&
                           size_of(p.shape.dtype) < size_of(o.scope.activations);
      const std::string input = p.model + "/" + p.path;
      const Tensor value = in.capture(below.resolve(std::move(p)));
      return views[input] = widened ? cast(value, o.scope.activations) : value;
    });
    return o.change_scope ? o.change_scope(component, root) : root;
  };
  g.loss = task.loss(scope, feed, rng);
  g.of = trained(s.params, task);
  std::vector<Tensor> inner;
  for (const Param& p : g.of) inner.push_back(views.at(p.input));
  g.values = grad(g.loss, inner);
  // SDXL does not read the last layer of its first text encoder; LoRA matrices may sit there all the same. Qwen-Image
  // does not read what its last block makes of the text: the weights of that have a gradient of zero, as in a loop.
  std::vector<std::string> unread;
  for (size_t i = 0; i < g.values.size(); ++i) {
    if (g.values[i] || is_lora(g.of[i])) continue;
    unread.push_back(g.of[i].input);
    g.values[i] = zeros_like(inner[i]);
  }
  check(unread.size() < g.of.size() || g.of.empty(), Code::invalid_graph, "the loss depends on no weight");
  if (!unread.empty())
    log_info_once("the loss does not depend on {} of {} weights, such as {}", unread.size(), g.of.size(),
                  unread.front());
  std::vector<Tensor> results = {g.loss};
  std::ranges::copy_if(g.values, std::back_inserter(results), [](Tensor t) { return static_cast<bool>(t); });
  s.flops = count_flops(in, results);
  return g;
}

/// The mean over `accumulation` batches, which follow each other on axis 0 of every batched field.
Gradients accumulate(const Task& task, StepGraph& s, const StepOptions& o, const Feed& feed, Rng rng) {
  const int64_t n = o.accumulation;
  if (n == 1) return differentiate(task, s, o, *s.graph, feed, rng);
  // The parameters, and with them the carry, are known only after the loss is traced: once for nothing.
  Gradients g;
  {
    Graph nowhere(s.graph->options());
    StepGraph once{nullptr, {}, {}, 0};
    auto scope = [&](const std::string& component) {
      Scope root(nowhere, once.params, component, o.scope);
      return o.change_scope ? o.change_scope(component, root) : root;
    };
    Feed fake;
    for (const BatchField& f : s.fields) {
      Shape shape = f.shape;
      if (f.batched) shape.dims[0] /= n;
      fake[f.name] = nowhere.input(f.name, shape);
    }
    task.loss(scope, fake, Rng(nowhere.input("key", {DType::u32, {2}})));
    g.of = trained(once.params, task);
  }
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
    Gradients part = differentiate(task, s, o, step.body(), one, rng.at(step.index()));
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

/// The means over all replicas, of loss and gradients in one call.
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
  Rng rng = Rng(key).at(step);
  if (o.replicas > 1) rng = rng.with_rows(task.batch_rows(g.input("replica", {DType::s32, {}}), o.replicas));
  Gradients gradients = accumulate(task, s, o, feed, rng);
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
  // One optimizer per component; none moves where one of them would not.
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(o.optim);
  const std::vector<StateSlot> slots = optimizer->slots();
  struct Group {
    std::vector<Param> params;
    std::vector<Tensor> grads;
    UpdateGroup values;
    ClippedGradients clipped;
  };
  std::map<std::string, Group> groups;
  for (size_t i = 0; i < gradients.of.size(); ++i) {
    const Param& p = gradients.of[i];
    Group& group = groups[p.model];
    auto of_parameter = [&](const std::string& kind) {
      return g.input(kind + p.input, {DType::f32, p.shape.dims}, p.axes);
    };
    group.params.push_back(p);
    group.grads.push_back(gradients.values[i]);
    group.values.params.push_back(has_master(p, o) ? of_parameter(state_prefix::kMaster) : cast(p.value, DType::f32));
    group.values.slots.resize(slots.size());
    for (size_t k = 0; k < slots.size(); ++k) group.values.slots[k].push_back(of_parameter(slots[k].prefix));
    if (o.ema_decay > 0) group.values.averages.push_back(of_parameter(state_prefix::kAverage));
    group.values.axes.push_back(dim_axes(p.value, p.axes));
  }
  Tensor good = bit_and(healthy, is_finite(gradients.loss)), squares;
  for (auto& [name, group] : groups) {
    group.clipped = clip(g, o.optim, group.grads, group.values.axes);
    good = bit_and(good, is_finite(group.clipped.norm));
    const Tensor square_ = square(group.clipped.norm);
    squares = squares ? squares + square_ : square_;
  }
  // The average begins with the first update and forgets it quickly: decay min(d, (1 + n) / (10 + n)), as diffusers'.
  Tensor n = cast(updates, DType::f32), keep;
  if (o.ema_decay > 0)
    keep = where(gt(n, scalar_like(n, 0)), minimum((n + 1.0) / (n + 10.0), scalar_like(n, o.ema_decay)),
                 scalar_like(n, 0));
  for (auto& [name, group] : groups) {
    OptimConfig optim = o.optim;
    if (auto rate = o.learning_rates.find(name); rate != o.learning_rates.end()) optim.learning_rate = rate->second;
    group.values = apply_update(*optimizer, {learning_rate(optim, step), n, good, keep}, group.clipped, group.values);
  }

  state("step", where(good, step + 1.0, step));
  state("healthy", good);
  if (o.per_model_step_count) state("updates/" + task.model(), where(good, updates + 1.0, updates));
  auto stored = [&](const std::string& component, const Group& group) {
    std::vector<Tensor> out;
    const DType type = group.params[0].shape.dtype;  // of the component, or of all matrices of its LoRA
    if (is_low_precision(type) && narrow_update == LowPrecisionUpdate::stochastic_rounding)
      return round_stochastically(group.values.params, type,
                                  Rng(key).at(step).for_("stochastic rounding").for_(component));
    for (size_t i = 0; i < group.params.size(); ++i)
      out.push_back(cast(group.values.params[i], group.params[i].shape.dtype));
    return out;
  };
  for (auto& [name, group] : groups) {
    const std::vector<Tensor> weights = stored(name, group);
    for (size_t i = 0; i < group.params.size(); ++i) {
      const std::string& input = group.params[i].input;
      state(input, weights[i]);
      if (has_master(group.params[i], o)) state(state_prefix::kMaster + input, group.values.params[i]);
      for (size_t k = 0; k < slots.size(); ++k) state(slots[k].prefix + input, group.values.slots[k][i]);
      if (o.ema_decay > 0) state(state_prefix::kAverage + input, group.values.averages[i]);
    }
  }
  g.output("loss", gradients.loss);
  if (o.per_model_step_count) g.output("loss_" + task.model(), gradients.loss);
  g.output("grad_norm", groups.size() == 1 ? groups.begin()->second.clipped.norm : sqrt(squares));
  g.output("learning_rate", learning_rate(o.optim, step));
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
  std::vector<StateSlot> slots = make_optimizer(o.optim)->slots();
  if (o.ema_decay > 0) slots.push_back({state_prefix::kAverage, StateSlot::Start::copy});
  return slots;
}

bool add_slots(const ParamTable& params, const std::vector<StateSlot>& slots, NamedShards& state) {
  bool any = false;
  for (const Param& p : params.params())
    for (const StateSlot& slot : slots) {
      if (!p.trainable || !state.contains(p.input) || state.contains(slot.prefix + p.input)) continue;
      const ShardedArray start = state.at(p.input).cast(DType::f32);
      state[slot.prefix + p.input] = slot.start == StateSlot::Start::copy ? start : start.zeros();
      any = true;
    }
  return any;
}

NamedShards initial_state(const ParamTable& params, NamedShards values, const StepOptions& o) {
  add_slots(params, state_slots(o), values);
  return restored_state(params, std::move(values), o);
}

NamedShards restored_state(const ParamTable& params, NamedShards state, const StepOptions& o) {
  std::vector<StateSlot> f32 = state_slots(o);
  f32.push_back({state_prefix::kMaster});
  for (const Param& p : params.params()) {
    if (!p.trainable) continue;
    for (const StateSlot& slot : f32)
      if (auto a = state.find(slot.prefix + p.input); a != state.end()) a->second = a->second.cast(DType::f32);
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
