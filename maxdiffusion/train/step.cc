#include "maxdiffusion/train/step.h"

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {

StepGraph trace_step(const Task& task, const GraphOptions& options, const ScopeOptions& scope_options,
                     const OptimConfig& optim, double ema_decay) {
  StepGraph s{std::make_unique<Graph>(options), {}, task.batch()};
  Graph& g = *s.graph;
  Tensor step = g.input("step", {DType::s32, {}}), healthy = g.input("healthy", {DType::pred, {}});
  Tensor key = g.input("key", {DType::u32, {2}});
  Feed feed;
  for (const BatchField& f : s.fields) {
    LogicalAxes axes(f.shape.dims.size());
    if (f.batched) axes[0] = axis::kData;
    feed[f.name] = g.input(f.name, f.shape, axes);
  }
  Scope scope(g, s.params, task.model(), scope_options);
  Tensor loss = task.loss(scope, feed, Rng(key).at(step));

  s.flops = 3 * count_flops(g);  // each product has two in its gradient; what is recomputed is not work done

  std::vector<Param> trained;
  std::vector<Tensor> values, first, second, averages;
  for (const Param& p : s.params.params()) {
    if (!p.trainable) continue;
    trained.push_back(p);
    values.push_back(p.value);
  }
  check(!trained.empty(), Code::invalid_graph, "{}: nothing to train", task.model());
  for (const Param& p : trained) {
    first.push_back(g.input("adam_m/" + p.input, p.shape, p.axes));
    second.push_back(g.input("adam_v/" + p.input, p.shape, p.axes));
    if (ema_decay > 0) averages.push_back(g.input("ema/" + p.input, p.shape, p.axes));
  }
  std::vector<Tensor> grads = grad(loss, values);
  for (size_t i = 0; i < grads.size(); ++i)
    check(static_cast<bool>(grads[i]), Code::invalid_graph, "the loss does not depend on {}", trained[i].input);
  Update u = adamw(optim, step, values, grads, first, second, bit_and(healthy, is_finite(loss)));

  auto state = [&](const std::string& name, Tensor after) {
    g.output(name, after, name);
    g.alias(name, name);
  };
  state("step", where(u.applied, step + 1.0, step));
  state("healthy", u.applied);
  // The average forgets its start quickly: decay min(d, (1 + n) / (10 + n)), as TensorFlow's and diffusers' do.
  Tensor n = cast(step, DType::f32);
  Tensor keep = ema_decay > 0 ? minimum((n + 1.0) / (n + 10.0), scalar_like(n, ema_decay)) : Tensor();
  averages = moving_average(keep, u.applied, averages, ema_decay > 0 ? u.params : std::vector<Tensor>{});
  for (size_t i = 0; i < trained.size(); ++i) {
    const std::string& name = trained[i].input;
    state(name, u.params[i]);
    state("adam_m/" + name, u.first_moments[i]);
    state("adam_v/" + name, u.second_moments[i]);
    if (ema_decay > 0) state("ema/" + name, averages[i]);
  }
  g.output("loss", loss);
  g.output("grad_norm", u.grad_norm);
  g.output("learning_rate", learning_rate(optim, step));
  return s;
}

}  // namespace md
