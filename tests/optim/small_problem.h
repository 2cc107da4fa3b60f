// Optimizers on problems of a few numbers: a training step's whole state in a graph, without a model.
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/sharding.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/train/update.h"

namespace md {

/// Parameters and a loss of them.
struct SmallProblem {
  std::vector<ParamForm> params;
  std::function<Tensor(const std::vector<Tensor>&)> loss;
};

/// Values by name: p0, adam_m/p0, prodigy_d/all.
using SmallState = std::map<std::string, HostArray>;

/// Runs updates as a compiled program.
class SmallTraining {
 public:
  /// `kernel`: whether the optimizer's CPU kernel may be called. `averages`: moving averages average/p0 … that keep ¾
  /// at every update.
  SmallTraining(const Devices& devices, const OptimConfig& config, const SmallProblem& problem, bool kernel = true,
                bool averages = false)
      : devices_(devices), graph_(options(devices, kernel)), optimizer_(make_optimizer(config)) {
    const Tensor step = graph_.input("step", {DType::s32, {}});
    const std::vector<StateSlot> slots = optimizer_->slots();
    UpdateGroup group;
    group.slots.resize(slots.size());
    std::vector<Tensor> points;
    for (size_t i = 0; i < problem.params.size(); ++i) {
      const ParamForm& form = problem.params[i];
      const std::string name = "p" + std::to_string(i);
      group.params.push_back(input(name, {{DType::f32, form.dims}, form.axes}, StateSlot::Start::copy, name));
      group.axes.push_back(dim_axes(group.params[i], form.axes));
      group.stacked.push_back(form.stacked);
      std::vector<Tensor> arrays_of_slots;
      for (size_t k = 0; k < slots.size(); ++k) {
        const auto array = slots[k].array(form);
        arrays_of_slots.push_back(array ? input(slots[k].prefix + name, *array, slots[k].start, name) : Tensor());
        group.slots[k].push_back(arrays_of_slots.back());
      }
      if (averages)
        group.averages.push_back(
            input("average/" + name, {{DType::f32, form.dims}, form.axes}, StateSlot::Start::zeros, name));
      points.push_back(optimizer_->looks_ahead() ? optimizer_->point(group.params[i], arrays_of_slots)
                                                 : group.params[i]);
    }
    for (const StateScalar& scalar : optimizer_->scalars()) {
      const auto start = static_cast<float>(scalar.start);
      starts_[scalar.prefix + std::string("all")] = HostArray::of<float>({DType::f32, {}}, {&start, 1});
      group.scalars.push_back(graph_.input(scalar.prefix + std::string("all"), {DType::f32, {}}));
    }
    const Tensor loss = problem.loss(points);
    const ClippedGradients clipped = clip(graph_, config, grad(loss, points), group.axes);
    OptimConfig rate = config;
    if (optimizer_->has_own_rate()) rate.learning_rate = 1;
    group = apply_update(*optimizer_,
                         {learning_rate(rate, step), cast(step, DType::f32), is_finite(clipped.norm),
                          averages ? constant(graph_, 0.75) : Tensor()},
                         clipped, group);
    auto output = [&](const std::string& name, Tensor after) { graph_.output(name, after, name); };
    for (size_t i = 0; i < group.params.size(); ++i) {
      const std::string name = "p" + std::to_string(i);
      output(name, group.params[i]);
      if (averages) output("average/" + name, group.averages[i]);
      for (size_t k = 0; k < slots.size(); ++k)
        if (group.slots[k][i]) output(slots[k].prefix + name, group.slots[k][i]);
    }
    for (size_t k = 0; k < group.scalars.size(); ++k)
      output(optimizer_->scalars()[k].prefix + std::string("all"), group.scalars[k]);
    graph_.output("loss", loss);
    program_ = std::make_unique<Program>(compile(
        devices_, graph_, {.jax_cache_dir = "off", .xla_flags = "--xla_backend_optimization_level=0"}, "small"));
  }

  const Optimizer& optimizer() const { return *optimizer_; }
  /// Bytes of the state on one device, by name.
  const std::map<std::string, int64_t>& bytes_per_device() const { return bytes_; }

  SmallState start(const std::vector<HostArray>& params) const {
    SmallState state = starts_;
    for (const auto& [name, like] : copies_) {
      const HostArray& p = params[static_cast<size_t>(std::stoi(name.substr(name.rfind('p') + 1)))];
      state[name] = p;
    }
    return state;
  }

  /// Runs updates `from` to `to` − 1; "loss" is that of the last one.
  SmallState run(const SmallState& state, int from, int to) {
    ArrayMap arrays;
    for (size_t i = 0; i < program_->input_names().size(); ++i) {
      const std::string& name = program_->input_names()[i];
      if (name == "step") continue;
      arrays[name] = devices_.put(state.at(name), program_->input_sharding(i), name);
      bytes_[name] = arrays[name].bytes_per_device();
    }
    double loss = 0;
    for (int32_t step = from; step < to; ++step) {
      ArrayMap step_input;
      step_input["step"] = devices_.put(HostArray::of<int32_t>({DType::s32, {}}, {&step, 1}));
      arrays = program_->run(arrays, step_input);
      loss = devices_.get(arrays.at("loss")).to_doubles()[0];
      arrays.erase("loss");
    }
    SmallState out;
    for (const auto& [name, a] : arrays) out[name] = devices_.get(a);
    const auto as_f32 = static_cast<float>(loss);
    out["loss"] = HostArray::of<float>({DType::f32, {}}, {&as_f32, 1});
    return out;
  }

 private:
  static GraphOptions options(const Devices& devices, bool kernel) {
    GraphOptions o = devices.graph_options(&devices.rules());
    o.cpu_kernels.callable &= kernel;
    return o;
  }
  Tensor input(const std::string& name, const StateArray& array, StateSlot::Start start, const std::string& param) {
    if (start == StateSlot::Start::copy)
      copies_[name] = param;
    else {
      HostArray zeros(array.shape);
      std::fill_n(zeros.mutable_data(), zeros.bytes(), std::byte{0});
      starts_[name] = zeros;
    }
    return graph_.input(name, array.shape, array.axes);
  }

  const Devices& devices_;
  Graph graph_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Program> program_;
  SmallState starts_;
  std::map<std::string, std::string> copies_;
  std::map<std::string, int64_t> bytes_;
};

}  // namespace md
