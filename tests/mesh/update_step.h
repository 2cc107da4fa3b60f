// The end of a training step in a test's graph: updates all parameters, with state inputs and outputs by name.
#pragma once

#include <string>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/nn/param.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/train/update.h"

namespace md {

/// `step`: an s32 scalar of the graph.
inline void update_step(Graph& g, const ParamTable& params, Tensor loss, const OptimConfig& config, Tensor step) {
  const auto optimizer = make_optimizer(config);
  const std::vector<StateSlot> slots = optimizer->slots();
  UpdateGroup group;
  group.slots.resize(slots.size());
  for (const Param& p : params.params()) {
    group.params.push_back(p.value);
    group.axes.push_back(dim_axes(p.value, p.axes));
    for (size_t k = 0; k < slots.size(); ++k)
      group.slots[k].push_back(g.input(slots[k].prefix + p.input, p.shape, p.axes));
  }
  const ClippedGradients clipped = clip(g, config, grad(loss, group.params), group.axes);
  group =
      apply_update(*optimizer, {learning_rate(config, step), cast(step, DType::f32), is_finite(clipped.norm), Tensor()},
                   clipped, group);
  auto state = [&](const std::string& name, Tensor after) {
    g.output(name, after, name);
    g.alias(name, name);
  };
  for (size_t i = 0; i < group.params.size(); ++i) {
    const std::string& name = params.params()[i].input;
    state(name, group.params[i]);
    for (size_t k = 0; k < slots.size(); ++k) state(slots[k].prefix + name, group.slots[k][i]);
  }
}

}  // namespace md
