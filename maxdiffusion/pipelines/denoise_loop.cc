#include "maxdiffusion/pipelines/denoise_loop.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <span>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/encoders/prompt_schedule.h"
#include "maxdiffusion/encoders/prompt_syntax.h"
#include "maxdiffusion/pipelines/step_graphs.h"
#include "maxdiffusion/schedulers/process.h"

namespace md {
namespace {

/// The scale of each ControlNet at each of `n` steps, f32 [n, ControlNets]; 0 outside its range.
HostArray control_scales(const std::vector<ControlOptions>& controls, int64_t n) {
  HostArray scales(Shape{DType::f32, {n, std::ssize(controls)}});
  auto to_set = scales.mutable_view<float>().begin();
  for (int64_t i = 0; i < n; ++i)
    for (const ControlOptions& c : controls) {
      check(c.start >= 0 && c.start < c.end && c.end <= 1, Code::invalid_config,
            "control_guidance_start {} and control_guidance_end {}: expected 0 <= start < end <= 1", c.start, c.end);
      const double from = static_cast<double>(i) / static_cast<double>(n),
                   to = static_cast<double>(i + 1) / static_cast<double>(n);
      *to_set++ = from < c.start || to > c.end ? 0.0f : static_cast<float>(c.scale);
    }
  return scales;
}

/// Whether prompts come with images.
bool has_images(const Family& family, const PromptConditioning& prompts, const SampleOptions& o) {
  const ImageConditioning* images = family.image_conditioning();
  return images &&
         std::ranges::any_of(images->fields(o.size), [&](const Field& f) { return prompts.positive.contains(f.name); });
}

SamplingPlan sampling_plan(const Family& family, const SampleTable& table, bool images, const SampleOptions& o) {
  const FamilySpec& spec = family.spec();
  const double times = o.scheduler_config.value("num_train_timesteps", 1000.0),
               boundary = spec.boundary_ratio ? o.boundary_ratio.value_or(*spec.boundary_ratio) * times : 0;
  SamplingPlan plan{.stages = {},
                    .times = table.training_timesteps,
                    .height = o.size.height,
                    .magcache_ratios = {},
                    .teacache_coefficients = {}};
  if (spec.magcache_ratios) plan.magcache_ratios = spec.magcache_ratios(o.size, images);
  if (spec.teacache_coefficients) plan.teacache_coefficients = spec.teacache_coefficients(o.size, images);
  for (double& t : plan.times) t /= times;
  std::vector<SamplingStage>& out = plan.stages;
  for (size_t i = 0; i < table.timesteps.size(); ++i) {
    const size_t which = table.training_timesteps[i] < boundary ? 1 : 0;
    double guidance = o.guidance_scales.empty() ? o.guidance_scale : o.guidance_scales.at(which);
    if (1 - plan.times[i] > o.cfg_truncation) guidance = 1;
    if (!o.guidance.guides(static_cast<int64_t>(i), std::ssize(table.timesteps))) guidance = 1;
    const PerturbedGuidance* p = perturbed_guidance(o.guidance);
    const bool perturbed = p && p->acts(o.guidance, static_cast<int64_t>(i), std::ssize(table.timesteps));
    if (!out.empty() && out.back().denoiser == spec.denoisers.at(which) && out.back().guidance == guidance &&
        out.back().perturbed == perturbed) {
      ++out.back().steps;
      continue;
    }
    out.push_back({spec.denoisers[which], guidance, static_cast<int64_t>(i), 1, perturbed});
  }
  return plan;
}

CompileConfig minimize_memory(CompileConfig config) {
  config.minimize_memory = true;
  return config;
}

using Build = std::function<void(Graph&, const ScopeOf&)>;

/// Parameters of a graph.
ParamTable params_of(Graph& g, const Build& build, const ScopeOptions& options) {
  ParamTable params;
  build(g, [&](const std::string& component) { return Scope(g, params, component, options).frozen(); });
  return params;
}

/// The weights that a graph's program needs and `on_devices` does not have with its sharding: input → component.
std::map<std::string, std::string> missing_weights(const Graph& g, const ParamTable& params,
                                                   const ArrayMap& on_devices) {
  std::map<std::string, std::string> missing;
  for (const Param& p : params.params()) missing[p.input] = p.model;
  for (const GraphInput& in : g.inputs())
    if (const auto a = on_devices.find(in.name); a != on_devices.end() && a->second.sharding() == sharding_of(in))
      missing.erase(in.name);
  return missing;
}

HostArrays read_weights(const WeightsOf& weights, const ParamTable& params,
                        const std::map<std::string, std::string>& missing) {
  std::set<std::string> components;
  for (const auto& [input, component] : missing) components.insert(component);
  ParamTable some;  // parts of quantized parameters are read together
  for (const Param& p : params.params())
    if (missing.contains(p.input) || p.few_bits) some.add(p);
  HostArrays read;
  for (const std::string& component : components) read.merge(weights(some, component));
  std::erase_if(read, [&](const auto& a) { return !missing.contains(a.first); });
  return read;
}

/// Compiles a program; meanwhile reads the weights that `resident` lacks.
std::shared_ptr<const Program> compile_with_weights(const Devices& devices, const WeightsOf& weights,
                                                    const SampleOptions& o, const std::string& name, Graph& g,
                                                    const ParamTable& params, ResidentDenoiser& resident) {
  const std::map<std::string, std::string> missing = missing_weights(g, params, resident.weights);
  auto values = std::async(std::launch::async, [&] { return read_weights(weights, params, missing); });
  std::shared_ptr<const Program> program = resident.programs.compile(devices, g, minimize_memory(o.compile), name);
  place(devices, *program, values.get(), resident.weights);
  return program;
}

/// Family::prompt_cache of each group of samples with the conditioning of_group(i); fills steps.context. Empty if the
/// family has none.
std::vector<ArrayMap> make_contexts(const Devices& devices, const WeightsOf& weights, StageGraph& steps, size_t groups,
                                    const std::function<HostArrays(size_t)>& of_group, ResidentDenoiser& resident) {
  std::map<std::string, Shape> shapes;
  auto build = [&](Graph& g, const ScopeOf& scope) {
    for (const auto& [name, x] : steps.family.prompt_cache(steps.models(scope, g), prompt_inputs(g, steps))) {
      shapes[name] = x.shape();
      g.output(name, x);
    }
  };
  std::vector<ArrayMap> contexts(groups);
  Graph trace;
  params_of(trace, build, steps.options.scope);
  if (shapes.empty()) {
    log_warning("use_kv_cache is ignored: this model computes no keys and values from the prompt alone");
    return contexts;
  }
  log_info("use_kv_cache: keys and values of the prompt are computed once for all steps of {}", steps.stage.denoiser);
  Graph g(devices.graph_options(&devices.rules()));
  const ParamTable params = params_of(g, build, steps.options.scope);
  const auto program = compile_with_weights(devices, weights, steps.options, "context", g, params, resident);
  for (size_t group = 0; group < groups; ++group) {
    ArrayMap conditioning;
    place(devices, *program, of_group(group), conditioning);
    contexts[group] = program->run(conditioning, resident.weights);
  }
  steps.context = std::move(shapes);
  return contexts;
}

/// Another program's output with the sharding of this program's input.
Array placed_as_input(const Devices& devices, const Program& program, const std::string& name, Array a) {
  const std::vector<std::string>& names = program.input_names();
  const auto at = std::ranges::find(names, name);
  if (at == names.end() || a.sharding() == program.input_sharding(static_cast<size_t>(at - names.begin()))) return a;
  ArrayMap placed;
  place(devices, program, HostArrays{{name, devices.get(a)}}, placed);
  return std::move(placed.at(name));
}

/// f32 [].
HostArray scalar(double value) {
  const float v = static_cast<float>(value);
  return HostArray::of<float>({DType::f32, {}}, {&v, 1});
}

/// Standard normal noise. A sample's noise depends only on its seed and number, not on the other samples.
HostArray random_noise(const Shape& shape, const SampleOptions& o) {
  HostArray noise(shape);
  auto v = noise.mutable_view<float>();
  const size_t each = v.size() / static_cast<size_t>(shape.dims[0]);
  for (int64_t i = 0; i < shape.dims[0]; ++i)
    HostRng(o.seed_of(i), fmt::format("latents of picture {}", o.number_of(i)))
        .fill(HostRng::Distribution::normal, 1, 0, v.subspan(static_cast<size_t>(i) * each, each));
  return noise;
}

/// The rows that run.
SampleTable table_of(const Scheduler& scheduler, const SampleOptions& o) {
  SampleTable t = scheduler.table(o.num_inference_steps, o.first_step);
  if (!o.denoising_end) return t;
  const int64_t n = steps_before(t.training_timesteps, *o.denoising_end, o.scheduler_config);
  check(n > 0, Code::invalid_config, "denoising_end is {}, and so no step runs; expected a larger part",
        *o.denoising_end);
  t.rows = rows(t.rows, 0, n);
  const auto count = static_cast<size_t>(n);
  t.timesteps.resize(count), t.training_timesteps.resize(count), t.levels.resize(count);
  if (!t.renoise.empty()) t.renoise.resize(count);
  return t;
}

/// The number of the step that each row belongs to, from 0. Samplers may call the model several times in a step. Steps
/// of an image that samples begin with are counted from the first that runs, as AUTOMATIC1111's web UI does.
std::vector<int64_t> step_numbers(const Scheduler& scheduler, const SampleTable& table, const SampleOptions& o) {
  const auto all = std::ssize(scheduler.table(o.num_inference_steps, 0).timesteps);
  std::vector<int64_t> out;
  for (int64_t row = 0; row < std::ssize(table.timesteps); ++row)
    out.push_back(o.earlier_steps + (o.begins_without_noise ? o.first_step : 0) + row * o.num_inference_steps / all);
  return out;
}

/// Input of the first step: noise, or images with the noise of that step's level.
HostArray first_samples_of(const SampleOptions& o, const SampleTable& table, const HostArray& noise) {
  if (o.begins_without_noise) return rows(o.image_latents, 0, noise.dims()[0]);
  HostArray samples = rows(noise, 0, noise.dims()[0]);  // a copy
  const bool begins = o.image_latents && !o.noise_alone;
  const NoiseLevel level = begins ? table.levels.front() : NoiseLevel{0, table.init_noise_sigma};
  auto v = samples.mutable_view<float>();
  for (float& x : v) x *= static_cast<float>(level.noise);
  if (!begins) return samples;
  const auto image = o.image_latents.view<float>();
  for (size_t i = 0; i < v.size(); ++i) v[i] += static_cast<float>(level.signal) * image[i];
  return samples;
}

/// Signal and noise level after each row, f32 [n, 2].
HostArray levels_after(const SampleTable& table) {
  HostArray out(Shape{DType::f32, {std::ssize(table.levels), 2}});
  auto v = out.mutable_view<float>().begin();
  for (size_t i = 1; i <= table.levels.size(); ++i) {
    const NoiseLevel level = i < table.levels.size() ? table.levels[i] : NoiseLevel{};
    *v++ = static_cast<float>(level.signal), *v++ = static_cast<float>(level.noise);
  }
  return out;
}

/// Factors f32 [2] of a sample and of the model's output whose sum is x0: x0 of a flow-matching model is x − σ·output
/// for samples (1 − σ)·x0 + σ·ε; others predict by prediction_type, of samples α·x0 + σ·ε with α² + σ² = 1.
HostArray prediction_factors(const NoiseLevel& level, const nlohmann::json& scheduler_config) {
  std::array<double, 2> out{};
  if (is_flow_matching(scheduler_config)) {
    const double sum = level.signal + level.noise;
    out = {1 / sum, -level.noise / sum};
  } else {
    const double norm = std::hypot(level.signal, level.noise), a = level.signal / norm, s = level.noise / norm;
    const std::string type = scheduler_config.value("prediction_type", "epsilon");
    if (type == "sample")
      out = {0, 1};
    else if (type == "v_prediction")
      out = {a / norm, -s};
    else
      out = {1 / (norm * std::max(a, 1e-3)), -s / std::max(a, 1e-3)};
  }
  const std::array<float, 2> values = {static_cast<float>(out[0]), static_cast<float>(out[1])};
  return HostArray::of<float>({DType::f32, {2}}, values);
}

/// Throws NotFinite if an array of samples contains NaN or infinity.
void check_finite(const char* what, const HostArray& samples, const char* advice) {
  auto v = samples.view<float>();
  const size_t each = v.size() / static_cast<size_t>(samples.dims()[0]);
  const auto bad = std::ranges::find_if_not(v, [](float x) { return std::isfinite(x); });
  if (bad == v.end()) return;
  NotFinite e(Code::device,
              fmt::format("the {} of image {} are not finite", what, static_cast<size_t>(bad - v.begin()) / each + 1));
  e.note(advice);
  throw e;
}

/// The shape with channels first, as in files.
Shape channels_first(Shape s) {
  std::rotate(s.dims.begin() + 1, s.dims.end() - 1, s.dims.end());
  return s;
}

/// Removes rows that are padding in all samples' texts (FamilySpec::text_rows).
void shorten(const Family& family, const SampleOptions& o, PromptConditioning& prompts) {
  const FamilySpec& spec = family.spec();
  if (spec.text_lengths.empty()) return;
  int32_t longest = 0;
  for (const HostArrays* half : {&prompts.positive, &prompts.negative})
    if (const auto lengths = half->find(spec.text_lengths); lengths != half->end())
      longest = std::max(longest, std::ranges::max(lengths->second.view<int32_t>()));
  const int64_t rows = spec.text_rows(longest, family.seen(ReferenceImages::sizes_of(o.references)).tokens);
  for (HostArrays* half : {&prompts.positive, &prompts.negative}) *half = spec.with_text_rows(std::move(*half), rows);
}

/// Throws invalid_config if the number of texts does not match the prompts.
void check_texts(const SampleOptions& o) {
  for (const auto& [key, texts] :
       {std::pair{"prompt_2", &o.second_prompts}, std::pair{"negative_prompt", &o.negative_prompts},
        std::pair{"negative_prompt_2", &o.second_negative_prompts}})
    check(texts->size() <= 1 || texts->size() == o.prompts.size(), Code::invalid_config,
          "{} has {} texts for {} prompts; expected one for all, or one each", key, texts->size(), o.prompts.size());
}

/// Throws invalid_config if latents are set and do not have this shape, [N, (F,) h, w, C].
void check_latents(const SampleOptions& o, const Shape& all) {
  const bool videos = all.dims.size() > 4;
  check(!o.latents || o.latents.shape() == all, Code::invalid_config,
        "latents are {}; {} of {}x{} pixels need {} ({}, channels, {}height, width)",
        o.latents ? to_string(channels_first(o.latents.shape())) : "", o.samples(), o.size.height, o.size.width,
        to_string(channels_first(all)), videos ? "videos" : "images", videos ? "frames, " : "");
}

/// Whether the text of any prompt differs between steps.
bool changes_texts(const SampleOptions& o) {
  if (o.prompt_syntax != "a1111") return false;
  for (const auto* texts : {&o.prompts, &o.negative_prompts, &o.second_prompts, &o.second_negative_prompts})
    for (const std::string& text : *texts)
      if (PromptSchedule(text).changes()) return true;
  return false;
}

/// The texts of prompts in several steps, and their conditioning.
struct TextsOfSteps {
  std::vector<std::string> first, second;  // each pair is encoded once
  HostArrays fields = {};                  // a row for each
  std::vector<std::vector<int64_t>> rows;  // step → prompt → row

  /// second: empty, or as many as `prompts`.
  TextsOfSteps(const std::vector<std::string>& prompts, const std::vector<std::string>& seconds,
               const std::vector<int64_t>& steps, const SampleOptions& o)
      : first(prompts), second(seconds), rows(1) {
    for (size_t i = 0; i < prompts.size(); ++i) rows[0].push_back(static_cast<int64_t>(i));
    if (steps.size() == 1) return;
    first.clear(), second.clear(), rows.assign(steps.size(), {});
    std::map<std::pair<std::string, std::string>, int64_t> known;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const PromptSchedule of_first(prompts[i]), of_second(seconds.empty() ? "" : seconds[i]);
      for (size_t k = 0; k < steps.size(); ++k) {
        const std::pair its(of_first.at(steps[k], o.num_inference_steps),
                            of_second.at(steps[k], o.num_inference_steps));
        const auto [at, is_new] = known.emplace(its, std::ssize(known));
        if (is_new) first.push_back(its.first);
        if (is_new && !seconds.empty()) second.push_back(its.second);
        rows[k].push_back(at->second);
      }
    }
  }
  /// The conditioning of all samples in a step; samples of one prompt are adjacent. part: of several lists of prompts.
  HostArrays of_samples(size_t step, size_t part, const SampleOptions& o) const {
    const size_t n = std::min(rows[step].size(), o.prompts.size());
    const std::span<const int64_t> its(rows[step].data() + part * n, n);
    const int64_t times = o.samples() / std::ssize(its);
    HostArrays out;
    for (const auto& [name, a] : fields) {
      HostArray prompts;
      for (size_t i = 0; i < its.size(); ++i)
        add_rows(prompts, std::ssize(its), static_cast<int64_t>(i), md::rows(a, its[i], 1));
      out[name] = repeat_rows(prompts, times);
    }
    return out;
  }
};

/// f32 [samples, parts].
HostArray weights_of_samples(const std::vector<std::vector<PartOfPrompt>>& parts, int64_t images_per_prompt) {
  HostArray out(Shape{DType::f32, {std::ssize(parts), std::ssize(parts[0])}});
  auto to = out.mutable_view<float>().begin();
  for (const auto& its : parts)
    for (const PartOfPrompt& part : its) *to++ = static_cast<float>(part.weight);
  return repeat_rows(out, images_per_prompt);
}

/// Parts of each prompt, all with as many as the one with the most: those that are added have weight 0.
std::vector<std::vector<PartOfPrompt>> parts_of_prompts(const SampleOptions& o) {
  std::vector<std::vector<PartOfPrompt>> out;
  size_t most = 1;
  for (const std::string& prompt : o.prompts) {
    out.push_back(o.prompt_syntax == "a1111" ? parts_of_prompt(prompt) : std::vector<PartOfPrompt>{{prompt}});
    most = std::max(most, out.back().size());
  }
  for (auto& parts : out) parts.resize(most, {parts[0].text, 0});
  return out;
}

/// Throws invalid_config if prompts have AND and the model or another option cannot take it.
void check_parts(const FamilySpec& spec, const SampleOptions& o) {
  if (o.prompts.empty() || parts_of_prompts(o)[0].size() == 1) return;
  const auto refuse = [](bool conflicts, const std::string& what, const std::string& why) {
    check(!conflicts, Code::invalid_config, "prompt has AND with {}; expected {}", what, why);
  };
  refuse(spec.unguided_only || !o.guided(), "guidance_scale too low to guide",
         "a larger one: its parts are added to the prediction without the prompt");
  const GuidanceKeys& g = o.guidance;
  refuse(g.guidance_method != "cfg", "guidance_method=" + g.guidance_method, "cfg: others combine two predictions");
  refuse(g.guidance_interval != std::vector<double>{0, 1} || o.cfg_truncation < 1,
         "guidance_interval or cfg_truncation", "guidance in all steps");
  if (const PerturbedGuidance* p = perturbed_guidance(g)) refuse(true, p->key, "0");
  const std::string cache = o.cache.use_kv_cache ? "use_kv_cache" : o.cache.step_cache();
  refuse(!cache.empty(), cache + "=true", "false");
  refuse(!o.second_prompts.empty(), "prompt_2", "none");
}

}  // namespace

std::string further_prefix(size_t part) { return fmt::format("and{}_", part + 2); }

HostArrays inputs_of(const PromptConditioning& prompts) {
  HostArrays out = prompts.positive;
  for (const auto& [name, a] : prompts.negative) out["negative_" + name] = a;
  for (size_t i = 0; i < prompts.further.size(); ++i)
    for (const auto& [name, a] : prompts.further[i]) out[further_prefix(i) + name] = a;
  if (prompts.weights) out["prompt_weights"] = prompts.weights;
  return out;
}

PromptConditioning encode_prompts(TextEncoder& text, const Family& family, const SampleOptions& o) {
  check_texts(o);
  const FamilySpec& spec = family.spec();
  // With texts that change, of each row of the sampler's table.
  std::vector<int64_t> steps = {0};
  if (changes_texts(o)) {
    const std::shared_ptr<const Scheduler> scheduler = sampler_of(family, o);
    steps = step_numbers(*scheduler, table_of(*scheduler, o), o);
  }
  const auto widened = [](std::vector<std::string> texts, size_t n) {
    if (texts.size() == 1) texts.resize(n, std::string(texts[0]));
    return texts;
  };
  const auto encode = [&](const std::vector<std::string>& first, const std::vector<std::string>& second,
                          int64_t clip_skip) {
    TextsOfSteps out(first, second, steps, o);
    std::vector<std::vector<HostArray>> images;
    if (!o.references.empty()) images = {o.references};
    out.fields = o.prompt_syntax == "plain"
                     ? text.encode(out.first, out.second, clip_skip, o.text_batch, images)
                     : encode_weighted(text, family, o.prompt_syntax, out.first, out.second, clip_skip, o.text_batch);
    return out;
  };
  const std::vector<std::vector<PartOfPrompt>> parts = parts_of_prompts(o);
  std::vector<std::string> texts;  // the first parts of all prompts, the second ones, …
  for (size_t k = 0; k < parts[0].size(); ++k)
    for (const auto& its : parts) texts.push_back(its[k].text);
  TextsOfSteps positive = encode(texts, widened(o.second_prompts, o.prompts.size()), o.clip_skip);
  std::optional<TextsOfSteps> negative;
  const std::vector<std::string>& second = o.second_negative_prompts;
  const bool zeros = o.guided() && o.negative_prompts.empty() && spec.zero_empty_prompt;
  if (zeros && !second.empty())
    log_warning(
        "negative_prompt_2 is ignored: negative_prompt is empty, and this model then uses zeros as its embedding");
  if (o.guided() && !zeros) {  // as in diffusers, clip_skip is not applied to these
    const std::vector<std::string> first =
        o.negative_prompts.empty() ? std::vector<std::string>{""} : o.negative_prompts;
    const size_t n = std::max(first.size(), second.size());
    negative = encode(widened(first, n), widened(second, n), 0);
    if (o.prompt_syntax != "plain") make_equally_long(spec, positive.fields, negative->fields);
  }
  PromptConditioning out;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool changed =
        i > 0 && (positive.rows[i] != positive.rows[i - 1] || (negative && negative->rows[i] != negative->rows[i - 1]));
    if (i > 0 && !changed) continue;
    PromptConditioning its{.positive = positive.of_samples(i, 0, o)};
    if (negative) its.negative = negative->of_samples(i, 0, o);
    for (size_t k = 1; k < parts[0].size(); ++k) its.further.push_back(positive.of_samples(i, k, o));
    if (parts[0].size() > 1) its.weights = weights_of_samples(parts, o.images_per_prompt);
    if (zeros)
      for (const auto& [name, a] : its.positive)
        its.negative[name] = name == FamilySpec::kChunkRows ? a : zeros_like(a);
    shorten(family, o, its);
    if (i == 0)
      out = std::move(its);
    else
      out.changes[static_cast<int64_t>(i)] = inputs_of(its);
  }
  return out;
}

std::shared_ptr<const Scheduler> sampler_of(const Family& family, const SampleOptions& o) {
  if (o.scheduler) return o.scheduler;
  const FamilySpec& spec = family.spec();
  SampleFacts facts{.tokens = family.tokens(o.size), .even_flow_steps = spec.even_flow_steps};
  if (spec.log_shift) facts.log_shift = spec.log_shift(facts.tokens, o.num_inference_steps);
  return make_scheduler(o.scheduler_config, facts);
}

int64_t steps_before(const std::vector<double>& training_timesteps, double part,
                     const nlohmann::json& scheduler_config) {
  const double times = scheduler_config.value("num_train_timesteps", 1000.0);
  const double last = std::nearbyint(times - part * times);
  return std::ranges::count_if(training_timesteps, [&](double t) { return t >= last; });
}

void check_sampling(const Family& family, const SampleOptions& o) {
  check_texts(o);
  check_guidance(o.guidance, family.spec());
  check(o.prompt_syntax == "plain" || !family.spec().chunk_widths.empty(), Code::invalid_config,
        "prompt_syntax is {}; expected plain: this model's text encoders are not CLIP's alone", o.prompt_syntax);
  if (o.prompt_syntax != "plain")
    for (const auto* texts : {&o.prompts, &o.negative_prompts, &o.second_prompts, &o.second_negative_prompts})
      for (const std::string& text : *texts) parse_weights(o.prompt_syntax, text);  // throws for invalid weights
  check_parts(family.spec(), o);
  if (changes_texts(o)) {
    check(
        o.step_by_step, Code::invalid_config,
        "prompt has [from:to:when] or [a|b] with scan_diffusion_loop=true; expected false: texts change between steps");
    const std::string cache = o.cache.use_kv_cache ? "use_kv_cache" : o.cache.step_cache();
    check(cache.empty(), Code::invalid_config,
          "prompt has [from:to:when] or [a|b] with {}=true; expected false: it reuses what other texts gave", cache);
  }
  check_step_cache(o.cache, family.spec(), !o.controls.empty());
  check(!o.guidance.has_momentum() || o.cache.step_cache().empty(), Code::invalid_config,
        "apg_momentum is {}; expected 0 with {}", o.guidance.apg_momentum, o.cache.step_cache());
  if (const PerturbedGuidance* p = perturbed_guidance(o.guidance))
    check(o.cache.step_cache().empty(), Code::invalid_config, "{} is {}; expected 0 with {}", p->key,
          p->scale(o.guidance), o.cache.step_cache());
  check(!o.guidance.renoises() || o.cache.step_cache().empty(), Code::invalid_config,
        "guidance_method is {}; expected another with {}", o.guidance.guidance_method, o.cache.step_cache());
  family.reference_fields(ReferenceImages::sizes_of(o.references));  // throws for unsupported sizes
  check_latents(o, batched(o.samples(), {DType::f32, family.latent_dims(o.size)}));
  const SampleTable table = table_of(*sampler_of(family, o), o);
  if (o.guided() && o.guidance.renoises() && table.renoise.empty())
    throw Error(
        Code::invalid_config,
        fmt::format("guidance_method is {}; expected another with scheduler {}, whose steps are no sums of x0 and "
                    "noise",
                    o.guidance.guidance_method, sampler_of(family, o)->name()))
        .note("try: scheduler=euler or scheduler=ddim");
  const SamplingPlan plan = sampling_plan(family, table, family.image_conditioning() != nullptr, o);
  make_step_cache(o.cache, plan);
  if (const PerturbedGuidance* p = perturbed_guidance(o.guidance);
      p && std::ranges::none_of(plan.stages, &SamplingStage::perturbed))
    log_warning("{} is ignored: {} applies to none of the {} steps; expected a wider range of steps", p->key, p->name,
                std::ssize(table.timesteps));
  control_scales(o.controls, 1);
}

HostArray denoise(const Devices& devices, const Family& family, const WeightsOf& weights,
                  const PromptConditioning& prompts, const SampleOptions& o, ResidentDenoiser* resident) {
  const int64_t samples = o.samples(), batch = o.batch > 0 ? o.batch : samples;
  const Dims latent = family.latent_dims(o.size);
  const Shape all = batched(samples, {DType::f32, latent});
  check_latents(o, all);
  const std::shared_ptr<const Scheduler> scheduler = sampler_of(family, o);
  const SampleTable table = table_of(*scheduler, o);
  const int64_t columns = table.rows.dims()[1], total = table.rows.dims()[0];
  HostArray times(Shape{DType::f32, {total}}), scales = control_scales(o.controls, total);
  std::ranges::transform(table.timesteps, times.mutable_view<float>().begin(),
                         [](double t) { return static_cast<float>(t); });

  const std::vector<int64_t> numbers = o.change_weights ? step_numbers(*scheduler, table, o) : std::vector<int64_t>();

  const HostArray renoise = HostArray::of<float>({DType::f32, {std::ssize(table.renoise)}},
                                                 std::vector<float>(table.renoise.begin(), table.renoise.end()));

  HostArrays per_sample = inputs_of(prompts);
  for (size_t i = 0; i < o.controls.size(); ++i)
    per_sample[control_image_field(i)] = repeat_rows(o.controls[i].image, samples);
  const HostArray noise = o.latents ? o.latents : random_noise(all, o);
  const HostArray first_samples = first_samples_of(o, table, noise), levels = levels_after(table);
  if (o.mask) {
    per_sample["mask"] = repeat_rows(o.mask, samples);
    per_sample["image_latents"] = o.image_latents;
    per_sample["noise"] = noise;
  }
  std::vector<ArrayMap> carries(static_cast<size_t>((samples + batch - 1) / batch));  // for each group of samples
  int64_t done = 0;
  std::vector<int64_t> reused;  // steps of each group, counted from 1
  const int64_t work = total * static_cast<int64_t>(carries.size());
  const SamplingPlan plan = sampling_plan(family, table, has_images(family, prompts, o), o);
  const std::unique_ptr<StepCache> cache = make_step_cache(o.cache, plan);
  const bool one_by_one = o.step_by_step || o.preview_every > 0 || cache;
  if (o.progress) o.progress(done, work);
  auto local_denoiser = std::make_unique<ResidentDenoiser>();  // freed before another denoiser is loaded
  std::string last_denoiser;
  for (const SamplingStage& stage : plan.stages) {
    const int64_t at_once = one_by_one ? 1 : stage.steps;
    StageGraph steps{family, *scheduler, stage, prompts, o, batch, columns, {}};
    const auto rows_of_group = [&](const HostArrays& all, size_t group, HostArrays& in) {
      for (const auto& [name, a] : all) in[name] = rows(a, static_cast<int64_t>(group) * batch, batch);
    };
    auto of_group = [&](size_t group) {
      HostArrays in;
      rows_of_group(per_sample, group, in);
      if (const auto next = prompts.changes.upper_bound(stage.first); next != prompts.changes.begin())
        rows_of_group(std::prev(next)->second, group, in);
      return in;
    };
    if (stage.denoiser != last_denoiser) local_denoiser = std::make_unique<ResidentDenoiser>();
    last_denoiser = stage.denoiser;
    ResidentDenoiser& denoiser = resident ? *resident : *local_denoiser;
    std::vector<ArrayMap> contexts(carries.size());
    WeightsOf read = weights;
    if (o.cache.use_kv_cache && one_by_one) {
      Graph g;
      ParamTable whole = params_of(
          g, [&](Graph& all, const ScopeOf& scope) { build_steps(all, scope, steps, 1, latent); }, o.scope);
      // Two programs run parts of the same model: its weights are read once, as a whole.
      read = [&weights, whole = std::move(whole), models = std::make_shared<std::map<std::string, HostArrays>>()](
                 const ParamTable&, const std::string& component) {
        if (!models->contains(component)) (*models)[component] = weights(whole, component);
        return models->at(component);
      };
      ResidentDenoiser of_context;  // weights that only this needs are freed before the steps
      contexts = make_contexts(devices, read, steps, carries.size(), of_group, resident ? *resident : of_context);
    }
    std::vector<Shape> of_steps;  // shapes of the cached arrays
    if (cache && cache->decides_on_device()) {
      Graph g(devices.graph_options(&devices.rules()));
      params_of(
          g,
          [&](Graph& step, const ScopeOf& scope) {
            build_cached_step(step, scope, steps, latent, *cache, false, of_steps);
          },
          o.scope);
    }
    Graph graph(devices.graph_options(&devices.rules()));
    const ParamTable params = params_of(
        graph,
        [&](Graph& g, const ScopeOf& scope) {
          if (cache)
            build_cached_step(g, scope, steps, latent, *cache, false, of_steps);
          else
            build_steps(g, scope, steps, at_once, latent);
        },
        o.scope);
    /// Whether weights of row `i` are not on the devices.
    const auto change_weights = [&](int64_t i) {
      if (!o.change_weights) return false;
      const std::vector<std::string> changed =
          o.change_weights(params, numbers.at(static_cast<size_t>(i)), o.num_inference_steps);
      for (const std::string& input : changed) denoiser.weights.erase(input);
      return !changed.empty();
    };
    change_weights(stage.first);
    const std::shared_ptr<const Program> program =
        compile_with_weights(devices, read, o, "denoise", graph, params, denoiser);
    read = nullptr;
    std::shared_ptr<const Program> reusing;
    if (cache && !cache->decides_on_device()) {
      Graph g(devices.graph_options(&devices.rules()));
      params_of(
          g,
          [&](Graph& step, const ScopeOf& scope) {
            build_cached_step(step, scope, steps, latent, *cache, true, of_steps);
          },
          o.scope);
      reusing = denoiser.programs.compile(devices, g, minimize_memory(o.compile), "denoise from the step before");
    }
    if (auto memory = program->memory()) log_info("denoising: {}", to_string(*memory));
    if (o.progress) o.progress(done, work);  // a program is compiled
    for (size_t group = 0; group < carries.size(); ++group) {
      const int64_t first = static_cast<int64_t>(group) * batch;
      HostArrays in = of_group(group);
      in["key"] = key_of_seed(o.seed), in["first"] = scalar_s32(o.first_sample + first);
      if (steps.guided()) in["guidance_scale"] = scalar(stage.guidance);
      if (family.spec().embedded_guidance) in["embedded_guidance"] = scalar(o.embedded_guidance);
      ArrayMap& feed = carries[group];
      if (feed.empty()) {
        in["sample"] = rows(first_samples, first, batch);
        // Guidance with momentum has one more, see build_steps.
        for (int64_t i = 0; i < scheduler->history() + (o.guidance.has_momentum() ? 1 : 0); ++i)
          in[fmt::format("history{}", i)] = zeros_like(in["sample"]);
      }
      for (size_t i = 0; i < of_steps.size(); ++i) in[fmt::format("kept{}", i)] = zeros_like(HostArray(of_steps[i]));
      place(devices, *program, in, feed);
      for (auto& [name, a] : contexts[group]) feed[name] = placed_as_input(devices, *program, name, std::move(a));
      if (cache) cache->begin(stage);
      PendingArray last, moved;
      std::vector<std::pair<int64_t, PendingArray>> decided;  // whether a step reused arrays
      std::optional<PendingArray> preview;
      const auto send_preview = [&] {
        if (preview) o.preview(first, rows(preview->wait(), 0, std::min(batch, samples - first)));
        preview.reset();
      };
      const auto finish = [&](const PendingArray& step) {
        step.wait();
        done += at_once;
        if (o.progress) o.progress(done, work);
      };
      for (int64_t i = stage.first; i < stage.first + stage.steps; i += at_once) {
        if (change_weights(i))
          place(devices, *program, read_weights(weights, params, missing_weights(graph, params, denoiser.weights)),
                denoiser.weights);
        const bool reuse = cache && cache->reuses(stage, i, [&] { return moved.wait().to_doubles()[0]; });
        HostArrays of_step = {
            {"rows", rows(table.rows, i, at_once)}, {"timesteps", rows(times, i, at_once)}, {"start", scalar_s32(i)}};
        if (const auto texts = prompts.changes.find(i); texts != prompts.changes.end() && i > stage.first)
          rows_of_group(texts->second, group, of_step);
        if (!o.controls.empty()) of_step["scales"] = rows(scales, i, at_once);
        if (o.mask) of_step["levels"] = rows(levels, i, at_once);
        if (steps.guided() && o.guidance.renoises()) of_step["renoise"] = rows(renoise, i, at_once);
        if (o.preview_every > 0)
          of_step["prediction"] = prediction_factors(table.levels.at(static_cast<size_t>(i)), o.scheduler_config);
        if (reuse || (cache && cache->decides_on_device()))
          of_step["factors"] = HostArray::of<float>({DType::f32, {2}}, cache->factors(stage, i));
        const Program& runs = reuse ? *reusing : *program;
        place(devices, runs, of_step, feed);
        ArrayMap out = runs.run(feed, denoiser.weights);
        PendingArray now = fetch(devices, out.at("done"));
        if (const auto m = out.find("moved"); m != out.end()) moved = fetch(devices, m->second), out.erase(m);
        out.erase("done");
        if (const auto r = out.find("reused"); r != out.end())
          decided.emplace_back(i + 1, fetch(devices, r->second)), out.erase(r);
        send_preview();  // of an earlier step: the device already has this one
        if (const auto p = out.find("preview"); p != out.end()) {
          if ((i + 1) % o.preview_every == 0 && i + 1 < total) preview = fetch(devices, p->second);
          out.erase(p);
        }
        for (auto& [name, a] : out) feed[name] = std::move(a);  // a reused step keeps kept0 … in `feed`
        if (i > stage.first) finish(last);                      // the device already has the next step
        last = now;
        if (reuse) reused.push_back(i + 1);
      }
      finish(last);
      send_preview();
      for (auto& [step, flag] : decided)
        if (flag.wait().to_doubles()[0] > 0) reused.push_back(step);
      std::erase_if(feed, [](const auto& a) { return a.first != "sample" && !a.first.starts_with("history"); });
    }
  }
  if (cache)
    log_info("[{}] Cached {}/{} steps ({:.1f}% cache ratio){}: {}", cache->name(), reused.size(), work,
             100.0 * static_cast<double>(reused.size()) / static_cast<double>(work), cache->details(),
             fmt::join(reused, " "));
  HostArray latents;
  for (size_t group = 0; group < carries.size(); ++group)
    add_rows(latents, samples, static_cast<int64_t>(group) * batch, devices.get(carries[group].at("sample")));
  check_finite("latents", latents,
               "try: activations_dtype=float32; a prediction_type and timestep_spacing that fit the model (a schedule "
               "of zero terminal SNR needs v_prediction)");
  if (const ImageConditioning* images = family.image_conditioning())
    return images->restored(std::move(latents), prompts.positive);
  return latents;
}

std::vector<SamplingGraph> sampling_graphs(const Family& family, const SampleOptions& o, const GraphOptions& placed) {
  const std::shared_ptr<const Scheduler> scheduler = sampler_of(family, o);
  const SampleTable table = table_of(*scheduler, o);
  PromptConditioning prompts;
  const std::vector<MediaSize> references = ReferenceImages::sizes_of(o.references);
  std::vector<Field> fields = family.caption_fields(references);
  if (family.required_images() > 0)
    std::ranges::copy(family.image_conditioning()->fields(o.size), std::back_inserter(fields));
  if (o.strength && !references.empty())  // samples begin with it, with their size
    fields.push_back({ReferenceImages::field(0), {DType::f32, family.latent_dims(o.size)}});
  else
    std::ranges::copy(family.reference_fields(references), std::back_inserter(fields));
  if (const std::string& inpainting = family.spec().inpainting; !inpainting.empty()) {
    Dims dims = family.latent_dims(o.size);
    dims.back() += family.spec().mask_channels();
    fields.push_back({inpainting, {DType::f32, dims}});
  }
  for (const Field& f : fields) prompts.positive[f.name] = HostArray(batched(1, f.shape));
  const SamplingPlan plan = sampling_plan(family, table, has_images(family, prompts, o), o);
  std::vector<SamplingGraph> graphs;
  for (const SamplingStage& stage : plan.stages) {
    if (std::ranges::count(graphs, stage.denoiser, &SamplingGraph::denoiser) > 0) continue;
    const StageGraph steps{
        family, *scheduler, stage, prompts, o, o.batch > 0 ? o.batch : o.samples(), table.rows.dims()[1], {}};
    SamplingGraph& s = graphs.emplace_back();
    s.denoiser = stage.denoiser;
    s.graph = std::make_unique<Graph>(placed);
    s.params = params_of(
        *s.graph,
        [&](Graph& g, const ScopeOf& scope) {
          build_steps(g, scope, steps, o.step_by_step ? 1 : stage.steps, family.latent_dims(o.size));
        },
        o.scope);
  }
  return graphs;
}

HostArray decode_latents(MediaAutoencoder& coder, const Family& family, const HostArray& latents, bool tiled) {
  HostArray media = coder.decode(family.spec().autoencoder->latent_scale.undo(latents), tiled);
  check_finite("pixels", media, "try: another autoencoder; the weights of this one may be damaged");
  return media;
}

}  // namespace md
