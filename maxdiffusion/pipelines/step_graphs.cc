#include "maxdiffusion/pipelines/step_graphs.h"

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// φ·(ε·σ(positive)/σ(ε)) + (1 − φ)·ε, deviations over all axes but the first.
Tensor rescaled(Tensor guided, Tensor positive, double phi) {
  Axes axes;
  for (int64_t i = 1; i < guided.rank(); ++i) axes.push_back(i);
  auto deviation = [&](Tensor x) { return sqrt(mean(square(x - mean(x, axes, true)), axes, true)); };
  return guided * (deviation(positive) / deviation(guided) * phi + (1 - phi));
}

/// Of a norm, over all axes but the first, of at most `most` times that of `positive`.
Tensor with_norm(Tensor guided, Tensor positive, double most) {
  Axes axes;
  for (int64_t i = 1; i < guided.rank(); ++i) axes.push_back(i);
  auto norm = [&](Tensor x) { return sqrt(sum(square(x), axes, true)); };
  Tensor own = norm(guided), largest = norm(positive) * most;
  return guided * where(gt(own, largest), largest / own, full(own.graph(), 1, own.shape()));
}

Tensor batch_input(Graph& g, const StageGraph& steps, const std::string& name, Shape shape) {
  shape.dims[0] = steps.batch;
  return g.input(name, shape, axis::of_batch(shape.dims.size()));
}

/// Everything that all steps are given, as inputs: prompt_inputs, the shared context, with a ControlNet control_image
/// [B, H, W, C].
Conditioning step_inputs(Graph& g, const StageGraph& steps) {
  Conditioning given = prompt_inputs(g, steps);
  for (const auto& [name, shape] : steps.context) {
    std::vector<std::string> axes(shape.dims.size());
    axes.at(1) = axis::kData;
    given[name] = g.input(name, shape, axes);
  }
  const SampleOptions& o = steps.options;
  const std::array<int64_t, 2> whole = {o.size.height, o.size.width};
  given.merge(steps.family.extra_conditioning(
      g, steps.calls(), {o.size_hints.value_or(SizeHints{whole, {0, 0}, whole}), o.embedded_guidance}));
  if (o.control) {
    Tensor image = batch_input(g, steps, "control_image", o.control->image.shape());
    given["control_image"] = steps.guided() ? concatenate({image, image}, 0) : image;
  }
  return given;
}

/// The rows of the positive half.
Conditioning positive_half(const StageGraph& steps, Conditioning given) {
  for (auto& [name, x] : given) x = slice_axis(x, steps.context.contains(name) ? 1 : 0, steps.batch, 2 * steps.batch);
  return given;
}

/// One step's model and guidance. row: of the scheduler's table; time: f32 []; control_scale: f32 [] or absent.
DenoisingStep step_graph(const StageGraph& steps, const Models& models, const Conditioning& given, Tensor sample,
                         Tensor row, Tensor time, Tensor control_scale) {
  DenoisingStep g;
  g.sample = sample;
  auto run = [=, &steps](bool both, const PredictOptions& options) {
    Conditioning c = both || !steps.guided() ? given : positive_half(steps, given);
    if (control_scale) c["control_scale"] = control_scale;
    Tensor x = steps.scheduler.scale_input(sample, row);
    if (both) x = concatenate({x, x}, 0);
    return steps.family.predict(models, x, broadcast_to(reshape(time, {1}), {x.dim(0)}), c, options);
  };
  g.predict = [=](bool both) { return run(both, {}).sample; };
  g.predict_with_residual = [=, &steps](Tensor residual) {
    Prediction p = run(true, {.residual = residual});
    check(static_cast<bool>(p.residual), Code::invalid_config,
          "use_magcache is true; expected false: {} has no sequence of blocks to skip", steps.family.spec().denoiser());
    return p;
  };
  g.guide = [&steps](Tensor negative, Tensor positive) {
    Tensor guided = negative + (positive - negative) * steps.stage.guidance;
    const double rescale = steps.options.guidance_rescale, most = steps.options.cfg_normalization;
    if (rescale > 0) guided = rescaled(guided, positive, rescale);
    if (most > 0) guided = with_norm(guided, positive, most);
    const auto& own = steps.family.spec().after_guidance;
    return own ? own(guided, positive) : guided;
  };
  return g;
}

/// Names of what a step hands to the next: the sample and the scheduler's history.
std::vector<std::string> carried(const Scheduler& scheduler) {
  std::vector<std::string> names = {"sample"};
  for (int64_t i = 0; i < scheduler.history(); ++i) names.push_back(fmt::format("history{}", i));
  return names;
}

/// Makes an input of a graph its output again, in the same memory.
void hand_on(Graph& g, const std::string& name, Tensor value) {
  g.output(name, value, name);
  g.alias(name, name);
}

}  // namespace

Conditioning prompt_inputs(Graph& g, const StageGraph& steps) {
  Conditioning given;
  for (const auto& [name, rows] : steps.prompts.positive) {
    Tensor x = batch_input(g, steps, name, rows.shape());
    given[name] = steps.guided() ? concatenate({batch_input(g, steps, "negative_" + name, rows.shape()), x}, 0) : x;
  }
  return given;
}

void build_steps(Graph& g, const ScopeOf& scope, const StageGraph& steps, int64_t count, const Dims& latent) {
  const SampleOptions& o = steps.options;
  Conditioning given = step_inputs(g, steps);
  if (o.cache.use_kv_cache && steps.context.empty())
    given.merge(steps.family.prompt_cache(steps.models(scope, g), given));
  Tensor scales;
  if (o.control) scales = g.input("scales", {DType::f32, {count}});
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).at(g.input("first", {DType::s32, {}}));
  const Tensor rows = g.input("rows", {DType::f32, {count, steps.columns}}), start = g.input("start", {DType::s32, {}}),
               timesteps = g.input("timesteps", {DType::f32, {count}});
  const std::vector<std::string> names = carried(steps.scheduler);
  std::vector<Tensor> carry;
  for (const std::string& name : names)
    carry.push_back(batch_input(g, steps, name, batched(steps.batch, {DType::f32, latent})));
  ScanResult out = scan(count, carry, [&](ScanStep& step, const std::vector<Tensor>& c) -> ScanResult {
    Tensor row = step.slice(rows);
    const DenoisingStep one = step_graph(steps, steps.models(scope, step.body()), given, c[0], row,
                                         step.slice(timesteps), scales ? step.slice(scales) : Tensor());
    Tensor prediction = one.predict(steps.guided());
    if (steps.guided()) {
      const std::vector<Tensor> halves = split(prediction, 2, 0);
      prediction = one.guide(halves[0], halves[1]);
    }
    return {steps.scheduler.step(prediction, c[0], row, {c.begin() + 1, c.end()},
                                 rng.at(step.index() + step.body().capture(start)).for_("step")),
            {}};
  });
  for (size_t i = 0; i < names.size(); ++i) hand_on(g, names[i], out.carry[i]);
  g.output("done", start);
}

void build_cached_step(Graph& g, const ScopeOf& scope, const StageGraph& steps, const Dims& latent,
                       const StepCache& cache, bool reused, std::vector<Shape>& kept) {
  const Conditioning given = step_inputs(g, steps);
  Tensor scale;
  if (steps.options.control) scale = reshape(g.input("scales", {DType::f32, {1}}), {});
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).at(g.input("first", {DType::s32, {}}));
  const Tensor row = reshape(g.input("rows", {DType::f32, {1, steps.columns}}), {steps.columns}),
               start = g.input("start", {DType::s32, {}}), time = reshape(g.input("timesteps", {DType::f32, {1}}), {});
  const std::vector<std::string> names = carried(steps.scheduler);
  std::vector<Tensor> carry, arrays;
  for (const std::string& name : names)
    carry.push_back(batch_input(g, steps, name, batched(steps.batch, {DType::f32, latent})));
  auto input_of = [&](size_t i) {
    return g.input(fmt::format("kept{}", i), kept[i], axis::of_batch(kept[i].dims.size()));
  };
  for (size_t i = 0; reused && i < kept.size(); ++i) arrays.push_back(input_of(i));
  const DenoisingStep one = step_graph(steps, steps.models(scope, g), given, carry[0], row, time, scale);
  const Tensor prediction =
      reused ? cache.reuse(one, arrays, g.input("factors", {DType::f32, {2}})) : cache.compute(one, arrays);
  const std::vector<Tensor> next =
      steps.scheduler.step(prediction, carry[0], row, {carry.begin() + 1, carry.end()}, rng.at(start).for_("step"));
  for (size_t i = 0; i < names.size(); ++i) hand_on(g, names[i], next[i]);
  for (size_t i = 0; !reused && i < arrays.size(); ++i) {
    kept.push_back(arrays[i].shape());
    input_of(i);
    hand_on(g, fmt::format("kept{}", i), arrays[i]);
  }
  if (Tensor moved = cache.moved(next[0], arrays)) g.output("moved", moved);
  g.output("done", start);
}

}  // namespace md
