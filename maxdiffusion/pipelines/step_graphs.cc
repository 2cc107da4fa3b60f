#include "maxdiffusion/pipelines/step_graphs.h"

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Limits the norm of `guided`, over all axes but the first, to `most` times that of `positive`.
Tensor with_norm(Tensor guided, Tensor positive, double most) {
  Axes axes;
  for (int64_t i = 1; i < guided.rank(); ++i) axes.push_back(i);
  auto norm = [&](Tensor x) { return sqrt(sum(square(x), axes, true)); };
  Tensor norm_of_guided = norm(guided), largest = norm(positive) * most;
  return guided * where(gt(norm_of_guided, largest), largest / norm_of_guided,
                        full(norm_of_guided.graph(), 1, norm_of_guided.shape()));
}

Tensor batch_input(Graph& g, const StageGraph& steps, const std::string& name, Shape shape) {
  shape.dims[0] = steps.batch;
  return g.input(name, shape, axis::of_batch(shape.dims.size()));
}

/// Inputs that all steps share: prompt_inputs, the shared context, with embedded guidance its scale, for each
/// ControlNet control_image_field [B, H, W, C].
Conditioning step_inputs(Graph& g, const StageGraph& steps) {
  Conditioning conditioning = prompt_inputs(g, steps);
  for (const auto& [name, shape] : steps.context) {
    std::vector<std::string> axes(shape.dims.size());
    axes.at(1) = axis::kData;
    conditioning[name] = g.input(name, shape, axes);
  }
  const SampleOptions& o = steps.options;
  const std::array<int64_t, 2> whole = {o.size.height, o.size.width};
  conditioning.merge(steps.family.extra_conditioning(
      g, steps.calls(),
      {o.size_hints.value_or(SizeHints{whole, {0, 0}, whole}),
       steps.family.spec().embedded_guidance ? g.input("embedded_guidance", {DType::f32, {}}) : Tensor(),
       o.aesthetic_score, o.negative_aesthetic_score, steps.guided() ? steps.batch : 0}));
  for (size_t i = 0; i < o.controls.size(); ++i) {
    Tensor image = batch_input(g, steps, control_image_field(i), o.controls[i].image.shape());
    conditioning[control_image_field(i)] =
        concatenate(std::vector<Tensor>(static_cast<size_t>(steps.parts()), image), 0);
  }
  return conditioning;
}

/// The rows of the positive half.
Conditioning positive_half(const StageGraph& steps, Conditioning conditioning) {
  for (auto& [name, x] : conditioning)
    x = slice_axis(x, steps.context.contains(name) ? 1 : 0, steps.batch, 2 * steps.batch);
  return conditioning;
}

/// Part `i` of the rows: `steps.batch` rows each of negative, positive and perturbed.
Tensor part(const StageGraph& steps, Tensor all, int64_t i) {
  return slice_axis(all, 0, i * steps.batch, (i + 1) * steps.batch);
}

/// The weights of the parts of prompts with AND, f32 [B, parts]; absent without.
Tensor weights_input(Graph& g, const StageGraph& steps) {
  return steps.prompts.weights ? batch_input(g, steps, "prompt_weights", steps.prompts.weights.shape()) : Tensor();
}

/// negative + Σ weight · (part − negative) over the positive parts of `all`, which guidance takes as the prediction
/// with the prompt. weights: f32 [B, parts]. Source: Liu et al. 2022 (composable diffusion), equation 11.
Tensor composed(const StageGraph& steps, Tensor all, Tensor weights) {
  const Tensor negative = part(steps, all, 0);
  Tensor sum = negative;
  for (int64_t i = 0; i < weights.dim(1); ++i) {
    Dims each(static_cast<size_t>(negative.rank()), 1);
    each[0] = steps.batch;
    const Tensor weight = cast(reshape(slice_axis(weights, 1, i, i + 1), each), negative.dtype());
    sum = sum + (part(steps, all, 1 + i) - negative) * broadcast_to(weight, negative.dims());
  }
  return sum;
}

/// The model and guidance of one step. row: of the scheduler's table; time: f32 []; number: s32 [];
/// guidance_scale: f32 [], absent without guidance; weights: of the parts of prompts, f32 [B, parts], or absent;
/// control_scales: f32 [ControlNets] or absent; momentum: of guidance, replaced by the next step's.
DenoisingStep step_graph(const StageGraph& steps, const Models& models, const Conditioning& conditioning, Tensor sample,
                         Tensor row, Tensor time, Tensor number, Tensor guidance_scale, Tensor weights,
                         Tensor control_scales, Tensor* momentum = nullptr) {
  DenoisingStep g;
  g.sample = sample;
  auto run = [=, &steps](bool all, PredictOptions options) {
    Conditioning c = all || !steps.guided() ? conditioning : positive_half(steps, conditioning);
    for (int64_t i = 0; control_scales && i < control_scales.dim(0); ++i)
      c[control_scale_field(static_cast<size_t>(i))] = reshape(slice(control_scales, {i}, {i + 1}), {});
    if (const std::vector<double>& f = steps.options.guidance.freeu; !f.empty())
      options.freeu = {f[0], f[1], f[2], f[3]};
    Tensor x = steps.scheduler.scale_input(sample, row);
    if (all && steps.parts() > 1) x = concatenate(std::vector<Tensor>(static_cast<size_t>(steps.parts()), x), 0);
    return steps.family.predict(models, x, broadcast_to(reshape(time, {1}), {x.dim(0)}), c, options);
  };
  g.predict = [=](bool both) { return run(both, {}); };
  g.predict_reusing = [=, &steps](StepReuse& reuse) {
    const Tensor prediction = run(true, {.reuse = &reuse});
    check(!reuse.arrays.empty(), Code::invalid_config, "{} is true; expected false: {} has nothing to reuse",
          steps.options.cache.step_cache(), steps.family.spec().denoiser());
    return prediction;
  };
  /// negative, away: may be absent.
  auto guide = [&steps, number, guidance_scale, momentum](Tensor negative, Tensor positive, Tensor away) {
    Tensor prediction = positive;
    if (negative) {
      const Guided sum =
          guided(steps.options.guidance, guidance_scale, negative, positive, momentum ? *momentum : Tensor());
      if (momentum && sum.momentum) *momentum = sum.momentum;
      prediction = sum.prediction;
    }
    if (away) prediction = prediction + away;
    const double rescale = steps.options.guidance_rescale, most = steps.options.cfg_normalization;
    if (rescale > 0 && negative) prediction = rescaled(prediction, positive, rescale);
    if (most > 0) prediction = with_norm(prediction, positive, most);
    const auto& after_guidance = steps.family.spec().after_guidance;
    if (after_guidance) prediction = after_guidance(prediction, positive);
    return negative ? finished(steps.options.guidance, prediction, number) : prediction;
  };
  g.guide = [guide](Tensor negative, Tensor positive) { return guide(negative, positive, {}); };
  g.combine = [=, &steps](Tensor all) {
    if (steps.parts() == 1) return all;
    const int64_t at = steps.guided() ? 1 : 0;
    Tensor positive = weights ? composed(steps, all, weights) : part(steps, all, at), away;
    if (steps.stage.perturbed) {
      const PerturbedGuidance& p = *perturbed_guidance(steps.options.guidance);
      Tensor factor = p.factor(steps.options.guidance, steps.guided(), time);
      away = (positive - part(steps, all, at + 1)) * factor;
    }
    return guide(steps.guided() ? part(steps, all, 0) : Tensor(), positive, away);
  };
  return g;
}

Tensor guidance_input(Graph& g, const StageGraph& steps) {
  return steps.guided() ? g.input("guidance_scale", {DType::f32, {}}) : Tensor();
}

/// Names of the arrays that a step passes to the next: the sample and the scheduler's history, then in guided steps the
/// momentum of guidance.
std::vector<std::string> carried(const StageGraph& steps) {
  std::vector<std::string> names = {"sample"};
  const bool momentum = steps.guided() && steps.options.guidance.has_momentum();
  for (int64_t i = 0; i < steps.scheduler.history() + (momentum ? 1 : 0); ++i)
    names.push_back(fmt::format("history{}", i));
  return names;
}

/// The image that samples keep where the mask is 0: inputs of every step.
struct KeptImage {
  Tensor mask, latents, noise;  // absent without a mask
  KeptImage(Graph& g, const StageGraph& steps, const Dims& latent) {
    if (!steps.options.mask) return;
    mask = batch_input(g, steps, "mask", steps.options.mask.shape());
    latents = batch_input(g, steps, "image_latents", batched(steps.batch, {DType::f32, latent}));
    noise = batch_input(g, steps, "noise", batched(steps.batch, {DType::f32, latent}));
  }
  /// level: f32 [2], signal and noise of `sample`.
  Tensor into(Tensor sample, Tensor level) const {
    auto of = [&](int64_t i) { return reshape(slice(level, {i}, {i + 1}), {}); };
    const Tensor known = latents * of(0) + noise * of(1);
    return (1.0 - mask) * known + mask * sample;
  }
};

/// The samples without noise as the model predicts them, if previews are requested: output preview.
void output_preview(Graph& g, const StageGraph& steps, Tensor sample, Tensor output) {
  if (steps.options.preview_every == 0) return;
  const Tensor factors = g.input("prediction", {DType::f32, {2}});
  auto of = [&](int64_t i) { return reshape(slice(factors, {i}, {i + 1}), {}); };
  g.output("preview", sample * of(0) + output * of(1));
}

/// Makes an input of a graph an output too, in the same memory.
void hand_on(Graph& g, const std::string& name, Tensor value) {
  g.output(name, value, name);
  g.alias(name, name);
}

}  // namespace

Models StageGraph::models(const ScopeOf& scope, Graph& g) const {
  return [this, &scope, &g](const std::string& component) {
    const bool denoiser = component == family.spec().denoiser();
    Scope s = scope(denoiser ? stage.denoiser : component).in_graph(g);
    if (!denoiser || !stage.perturbed) return s;
    ScopeOptions o = s.options();
    Perturbation layers = perturbed_guidance(options.guidance)->layers(options.guidance, family.spec());
    layers.first = unperturbed();
    o.perturbation = std::make_shared<const Perturbation>(std::move(layers));
    return s.with(o);
  };
}

Conditioning prompt_inputs(Graph& g, const StageGraph& steps) {
  Conditioning conditioning;
  for (const auto& [name, rows] : steps.prompts.positive) {
    Tensor x = batch_input(g, steps, name, rows.shape());
    std::vector<Tensor> parts;
    if (steps.guided()) parts.push_back(batch_input(g, steps, "negative_" + name, rows.shape()));
    parts.push_back(x);
    for (size_t i = 0; steps.guided() && i < steps.prompts.further.size(); ++i)  // fields of images have one value
      parts.push_back(
          steps.prompts.further[i].contains(name) ? batch_input(g, steps, further_prefix(i) + name, rows.shape()) : x);
    parts.resize(static_cast<size_t>(steps.parts()), x);
    conditioning[name] = parts.size() > 1 ? concatenate(parts, 0) : x;
  }
  return conditioning;
}

void build_steps(Graph& g, const ScopeOf& scope, const StageGraph& steps, int64_t count, const Dims& latent) {
  const SampleOptions& o = steps.options;
  Conditioning conditioning = step_inputs(g, steps);
  if (o.cache.use_kv_cache && steps.context.empty())
    conditioning.merge(steps.family.prompt_cache(steps.models(scope, g), conditioning));
  Tensor scales;
  if (!o.controls.empty()) scales = g.input("scales", {DType::f32, {count, std::ssize(o.controls)}});
  const Tensor guidance_scale = guidance_input(g, steps), weights = weights_input(g, steps);
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).at_step(g.input("first", {DType::s32, {}}));
  const Tensor rows = g.input("rows", {DType::f32, {count, steps.columns}}), start = g.input("start", {DType::s32, {}}),
               timesteps = g.input("timesteps", {DType::f32, {count}});
  const KeptImage image(g, steps, latent);
  const Tensor levels = image.mask ? g.input("levels", {DType::f32, {count, 2}}) : Tensor();
  const Tensor renoise = steps.guided() && o.guidance.renoises() ? g.input("renoise", {DType::f32, {count}}) : Tensor();
  const std::vector<std::string> names = carried(steps);
  std::vector<Tensor> carry;
  for (const std::string& name : names)
    carry.push_back(batch_input(g, steps, name, batched(steps.batch, {DType::f32, latent})));
  ScanResult out = scan(count, carry, [&](ScanStep& step, const std::vector<Tensor>& c) -> ScanResult {
    Tensor row = step.slice(rows), number = step.index() + step.body().capture(start);
    std::vector<Tensor> history = {c.begin() + 1, c.end()};
    const bool has_momentum = std::ssize(history) > steps.scheduler.history();
    Tensor momentum = has_momentum ? history.back() : Tensor();
    if (has_momentum) history.pop_back();
    const DenoisingStep one =
        step_graph(steps, steps.models(scope, step.body()), conditioning, c[0], row, step.slice(timesteps), number,
                   guidance_scale, weights, scales ? step.slice(scales) : Tensor(), &momentum);
    const Tensor all = one.predict(true), prediction = one.combine(all);
    std::vector<Tensor> next = steps.scheduler.step(prediction, c[0], row, history, rng.at_step(number).for_("step"));
    if (renoise) next[0] = next[0] + (part(steps, all, 0) - prediction) * step.slice(renoise);
    if (image.mask) next[0] = image.into(next[0], step.slice(levels));
    if (has_momentum) next.push_back(momentum);
    return {next, o.preview_every > 0 ? std::vector<Tensor>{prediction} : std::vector<Tensor>()};
  });
  if (o.preview_every > 0) output_preview(g, steps, carry[0], reshape(out.stacked.at(0), carry[0].dims()));
  for (size_t i = 0; i < names.size(); ++i) hand_on(g, names[i], out.carry[i]);
  g.output("done", start);
}

void build_cached_step(Graph& g, const ScopeOf& scope, const StageGraph& steps, const Dims& latent,
                       const StepCache& cache, bool reused, std::vector<Shape>& cached) {
  const Conditioning conditioning = step_inputs(g, steps);
  Tensor scales;
  if (const int64_t n = std::ssize(steps.options.controls); n > 0)
    scales = reshape(g.input("scales", {DType::f32, {1, n}}), {n});
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).at_step(g.input("first", {DType::s32, {}}));
  const Tensor row = reshape(g.input("rows", {DType::f32, {1, steps.columns}}), {steps.columns}),
               start = g.input("start", {DType::s32, {}}), time = reshape(g.input("timesteps", {DType::f32, {1}}), {});
  const KeptImage image(g, steps, latent);
  const Tensor level = image.mask ? reshape(g.input("levels", {DType::f32, {1, 2}}), {2}) : Tensor();
  const std::vector<std::string> names = carried(steps);
  std::vector<Tensor> carry, arrays;
  for (const std::string& name : names)
    carry.push_back(batch_input(g, steps, name, batched(steps.batch, {DType::f32, latent})));
  auto input_of = [&](size_t i) {
    const size_t rank = cached[i].dims.size();
    return g.input(fmt::format("kept{}", i), cached[i], rank > 0 ? axis::of_batch(rank) : LogicalAxes());
  };
  const bool known = !cached.empty();
  for (size_t i = 0; i < cached.size(); ++i) arrays.push_back(input_of(i));
  const DenoisingStep one = step_graph(steps, steps.models(scope, g), conditioning, carry[0], row, time, start,
                                       guidance_input(g, steps), {}, scales);
  const Tensor factors = reused || cache.decides_on_device() ? g.input("factors", {DType::f32, {2}}) : Tensor();
  const CachedStep made = reused ? CachedStep{cache.reuse(one, arrays, factors)} : cache.compute(one, arrays, factors);
  const Tensor prediction = made.prediction;
  if (!reused) arrays = made.arrays;
  std::vector<Tensor> next = steps.scheduler.step(prediction, carry[0], row, {carry.begin() + 1, carry.end()},
                                                  rng.at_step(start).for_("step"));
  if (image.mask) next[0] = image.into(next[0], level);
  for (size_t i = 0; i < names.size(); ++i) hand_on(g, names[i], next[i]);
  for (size_t i = 0; !reused && i < arrays.size(); ++i) {
    if (!known) {
      cached.push_back(arrays[i].shape());
      input_of(i);
    }
    hand_on(g, fmt::format("kept{}", i), arrays[i]);
  }
  output_preview(g, steps, carry[0], prediction);
  if (Tensor moved = cache.moved(next[0], arrays)) g.output("moved", moved);
  if (made.reused) g.output("reused", made.reused);
  g.output("done", start);
}

}  // namespace md
