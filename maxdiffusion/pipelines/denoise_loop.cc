#include "maxdiffusion/pipelines/denoise_loop.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {
namespace {

/// φ·(ε·σ(positive)/σ(ε)) + (1 − φ)·ε, deviations over all axes but the first.
Tensor rescaled(Tensor guided, Tensor positive, double phi) {
  Axes axes;
  for (int64_t i = 1; i < guided.rank(); ++i) axes.push_back(i);
  auto deviation = [&](Tensor x) { return sqrt(mean(square(x - mean(x, axes, true)), axes, true)); };
  return guided * (deviation(positive) / deviation(guided) * phi + (1 - phi));
}

/// The ControlNet's weight at each of `n` steps: its scale where it acts.
HostArray control_scales(const ControlOptions& c, int64_t n) {
  check(c.start >= 0 && c.start < c.end && c.end <= 1, Code::invalid_config,
        "control_guidance_start {} and control_guidance_end {}: expected 0 <= start < end <= 1", c.start, c.end);
  HostArray scales(Shape{DType::f32, {n}});
  for (int64_t i = 0; i < n; ++i) {
    const double from = static_cast<double>(i) / static_cast<double>(n),
                 to = static_cast<double>(i + 1) / static_cast<double>(n);
    scales.mutable_view<float>()[static_cast<size_t>(i)] =
        from < c.start || to > c.end ? 0.0f : static_cast<float>(c.scale);
  }
  return scales;
}

/// Steps in a row that one component predicts.
struct Stretch {
  std::string denoiser;
  double guidance;
  int64_t first, steps;
};

std::vector<Stretch> stretches(const Family& family, const SampleTable& table, const SampleOptions& o) {
  const std::vector<std::string> denoisers = family.denoisers();
  const double boundary = family.boundary_time(o.boundary_ratio);
  std::vector<Stretch> out;
  for (size_t i = 0; i < table.timesteps.size(); ++i) {
    const size_t which = table.timesteps[i] < boundary ? 1 : 0;
    if (!out.empty() && out.back().denoiser == denoisers.at(which)) {
      ++out.back().steps;
      continue;
    }
    const double guidance = o.guidance_scales.empty() ? o.guidance_scale : o.guidance_scales.at(which);
    out.push_back({denoisers[which], guidance, static_cast<int64_t>(i), 1});
  }
  return out;
}

/// `steps` denoising steps of `batch` samples. Inputs: sample [B, …] and history0 …, which are the outputs too; rows
/// [steps, columns] and timesteps [steps] of the scheduler's table, start s32 [] (the number of the first step); the
/// fields of the conditioning, with guidance the same with the prefix negative_; key u32 [2] and first s32 [] (the
/// number of the first sample); with a ControlNet control_image [B, H, W, C] and scales [steps].
void build_steps(Graph& g, const std::function<Scope(const std::string&)>& scope, const Family& family,
                 const Scheduler& scheduler, const Stretch& stretch, int64_t steps, int64_t columns, int64_t batch,
                 const Dims& latent, const PromptConditioning& prompts, const SampleOptions& o) {
  auto input = [&](const std::string& name, Shape shape) {
    shape.dims[0] = batch;
    return g.input(name, shape, axis::of_batch(shape.dims.size()));
  };
  const bool guided = stretch.guidance > 1;
  auto twice = [&](Tensor x) { return guided ? concatenate({x, x}, 0) : x; };
  const int64_t calls = guided ? 2 * batch : batch;
  Conditioning given;
  for (const auto& [name, rows] : prompts.positive) {
    Tensor x = input(name, rows.shape());
    given[name] = guided ? concatenate({input("negative_" + name, rows.shape()), x}, 0) : x;
  }
  const std::array<int64_t, 2> whole = {o.size.height, o.size.width};
  given.merge(family.size_conditioning(g, calls, o.said.value_or(SizeHints{whole, {0, 0}, whole})));
  Tensor scales;
  if (o.control) {
    given["control_image"] = twice(input("control_image", o.control->image.shape()));
    scales = g.input("scales", {DType::f32, {steps}});
  }
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).at(g.input("first", {DType::s32, {}}));
  const Tensor rows = g.input("rows", {DType::f32, {steps, columns}}), start = g.input("start", {DType::s32, {}}),
               timesteps = g.input("timesteps", {DType::f32, {steps}});

  const Shape whole_shape = batched(batch, {DType::f32, latent});
  std::vector<std::string> names = {"sample"};
  std::vector<Tensor> carry = {input("sample", whole_shape)};
  for (int64_t i = 0; i < scheduler.history(); ++i) {
    names.push_back(fmt::format("history{}", i));
    carry.push_back(input(names.back(), whole_shape));
  }
  ScanResult out = scan(steps, carry, [&](ScanStep& step, const std::vector<Tensor>& c) -> ScanResult {
    Tensor row = step.slice(rows);
    Conditioning conditioning = given;
    if (o.control) conditioning["control_scale"] = step.slice(scales);
    const Models models = [&](const std::string& component) {
      return scope(component == family.denoiser() ? stretch.denoiser : component).in_graph(step.body());
    };
    Tensor prediction = family.denoise(models, twice(scheduler.scale_input(c[0], row)),
                                       broadcast_to(reshape(step.slice(timesteps), {1}), {calls}), conditioning);
    if (guided) {
      std::vector<Tensor> halves = split(prediction, 2, 0);
      prediction = halves[0] + (halves[1] - halves[0]) * stretch.guidance;
      if (o.guidance_rescale > 0) prediction = rescaled(prediction, halves[1], o.guidance_rescale);
    }
    return {scheduler.step(prediction, c[0], row, {c.begin() + 1, c.end()},
                           rng.at(step.index() + step.body().capture(start)).for_("step")),
            {}};
  });
  for (size_t i = 0; i < names.size(); ++i) {
    g.output(names[i], out.carry[i], names[i]);
    g.alias(names[i], names[i]);
  }
  g.output("done", start);
}

/// Standard normal, the same for sample i whatever else is drawn.
HostArray drawn_noise(const Shape& shape, uint64_t seed) {
  HostArray noise(shape);
  auto v = noise.mutable_view<float>();
  const size_t each = v.size() / static_cast<size_t>(shape.dims[0]);
  for (size_t i = 0; i * each < v.size(); ++i)
    HostRng(seed, fmt::format("latents of picture {}", i))
        .fill(HostRng::Distribution::normal, 1, 0, v.subspan(i * each, each));
  return noise;
}

/// Throws device where an array of samples holds NaN or infinity.
void check_finite(const char* what, const HostArray& samples, const char* advice) {
  auto v = samples.view<float>();
  const size_t each = v.size() / static_cast<size_t>(samples.dims()[0]);
  const auto bad = std::ranges::find_if_not(v, [](float x) { return std::isfinite(x); });
  if (bad == v.end()) return;
  throw Error(Code::device,
              fmt::format("the {} of picture {} are not finite", what, static_cast<size_t>(bad - v.begin()) / each + 1))
      .note(advice);
}

std::array<int64_t, 2> pair(const char* key, const std::vector<int64_t>& values) {
  check(values.size() == 2, Code::invalid_config, "{} has {} numbers; expected two, as in [1024, 1024]", key,
        values.size());
  return {values[0], values[1]};
}

/// f32 [N, C, h, w] of a file, channels last.
HostArray read_latents(const std::string& path) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  auto it = file.tensors().find("latents");
  check(it != file.tensors().end() && it->second.shape().rank() >= 4, Code::io,
        "'{}' has no tensor 'latents' of four axes (pictures, channels, height, width) or five (of videos)", path);
  return channels_last(it->second.cast(DType::f32));
}

}  // namespace

SampleOptions sample_options(const SampleKeys& k, const Family& family, const MediaSize& size, double per_device_batch,
                             int64_t devices, uint64_t seed) {
  check(!k.prompt.empty(), Code::invalid_config, "prompt is empty; give prompt=\"…\"");
  SampleOptions o;
  o.prompts = k.prompt;
  o.negative_prompts = k.negative_prompt;
  o.guidance_scale = k.do_classifier_free_guidance ? k.guidance_scale : 1;
  if (family.denoisers().size() == 2) {
    o.guidance_scales = {k.guidance_scale_high.value_or(k.guidance_scale),
                         k.guidance_scale_low.value_or(k.guidance_scale)};
    if (!k.do_classifier_free_guidance) o.guidance_scales = {1, 1};
    check(!k.boundary_ratio || (*k.boundary_ratio >= 0 && *k.boundary_ratio <= 1), Code::invalid_config,
          "boundary_ratio is {}; expected 0 to 1", k.boundary_ratio.value_or(0));
    o.boundary_ratio = k.boundary_ratio;
  } else if (k.guidance_scale_high || k.guidance_scale_low || k.boundary_ratio) {
    log_warning(
        "guidance_scale_high, guidance_scale_low and boundary_ratio have no effect: this model has one denoiser");
  }
  o.guidance_rescale = k.guidance_rescale;
  o.num_inference_steps = k.num_inference_steps;
  o.size = size;
  o.step_by_step = family.frame_scale() > 0 && !k.scan_diffusion_loop;
  const std::array<int64_t, 2> whole = {o.size.height, o.size.width};
  o.said = {k.original_size.empty() ? whole : pair("original_size", k.original_size),
            pair("crops_coords_top_left", k.crops_coords_top_left),
            k.target_size.empty() ? whole : pair("target_size", k.target_size)};
  o.seed = k.sample_seed ? static_cast<uint64_t>(*k.sample_seed) : seed;

  // As many samples of one prompt as the reference draws: the global batch.
  o.batch = std::max<int64_t>(devices, static_cast<int64_t>(per_device_batch * static_cast<double>(devices)));
  if (!k.latents.empty()) {
    o.latents = read_latents(k.latents);
    const int64_t n = o.latents.dims()[0], prompts = static_cast<int64_t>(o.prompts.size());
    check(n % prompts == 0 && (!k.num_images_per_prompt || n == prompts * *k.num_images_per_prompt),
          Code::invalid_config, "latents '{}' are of {} pictures; {} prompts{} ask for {}", k.latents, n, prompts,
          k.num_images_per_prompt ? fmt::format(" with num_images_per_prompt={}", *k.num_images_per_prompt) : "",
          k.num_images_per_prompt ? prompts * *k.num_images_per_prompt : prompts);
    o.images_per_prompt = n / prompts;
  } else {
    o.images_per_prompt = k.num_images_per_prompt.value_or(o.prompts.size() == 1 ? o.batch : 1);
  }
  check(o.images_per_prompt >= 1, Code::invalid_config, "num_images_per_prompt is {}; expected 1 or more",
        o.images_per_prompt);
  o.batch = std::min(o.batch, (o.samples() + devices - 1) / devices * devices);
  return o;
}

PromptConditioning encode_prompts(TextEncoder& text, const Family& family, const SampleOptions& o) {
  PromptConditioning out;
  auto per_sample = [](HostArrays fields, int64_t times) {
    for (auto& [name, a] : fields) a = repeat_rows(a, times);
    return fields;
  };
  out.positive = per_sample(text.encode(o.prompts), o.images_per_prompt);
  if (!o.guided()) return out;
  const size_t given = o.negative_prompts.size();
  check(given <= 1 || given == o.prompts.size(), Code::invalid_config,
        "negative_prompt has {} texts for {} prompts; expected one for all, or one each", given, o.prompts.size());
  if (given == 0 && family.zeros_for_empty_prompt()) {
    for (const auto& [name, a] : out.positive) out.negative[name] = zeros_as(a);
  } else {  // as in diffusers, clip_skip is not for these
    out.negative = per_sample(text.encode(given == 0 ? std::vector<std::string>{""} : o.negative_prompts, true),
                              given <= 1 ? o.samples() : o.images_per_prompt);
  }
  return out;
}

HostArray denoise(const Devices& devices, const Family& family, const WeightsOf& weights,
                  const PromptConditioning& prompts, const SampleOptions& o) {
  const int64_t samples = o.samples(), batch = o.batch > 0 ? o.batch : samples;
  const Dims latent = family.latent_dims(o.size);
  const Shape all = batched(samples, {DType::f32, latent});
  check(!o.latents || o.latents.shape() == all, Code::invalid_config,
        "latents are {}; {} pictures of {}x{} pixels need {} (pictures, height, width, channels)",
        o.latents ? to_string(o.latents.shape()) : "", samples, o.size.height, o.size.width, to_string(all));
  const std::unique_ptr<Scheduler> scheduler = make_scheduler(o.scheduler_config);
  const SampleTable table = scheduler->table(o.num_inference_steps);
  const int64_t columns = table.rows.dims()[1], total = table.rows.dims()[0];
  HostArray times(Shape{DType::f32, {total}}), scales = o.control ? control_scales(*o.control, total) : HostArray();
  std::ranges::transform(table.timesteps, times.mutable_view<float>().begin(),
                         [](double t) { return static_cast<float>(t); });

  HostArrays per_sample = prompts.positive;
  for (const auto& [name, a] : prompts.negative) per_sample["negative_" + name] = a;
  if (o.control) per_sample["control_image"] = repeat_rows(o.control->image, samples);
  HostArray noise = o.latents ? rows(o.latents, 0, samples) : drawn_noise(all, o.seed);
  for (float& v : noise.mutable_view<float>()) v *= static_cast<float>(table.init_noise_sigma);
  std::vector<ArrayMap> carries(static_cast<size_t>((samples + batch - 1) / batch));  // of each group of samples
  int64_t done = 0;
  const int64_t work = total * static_cast<int64_t>(carries.size());
  for (const Stretch& stretch : stretches(family, table, o)) {
    const int64_t at_once = o.step_by_step ? 1 : stretch.steps;
    Graph g(devices.graph_options(&devices.rules()));
    ParamTable params;
    build_steps(
        g, [&](const std::string& component) { return Scope(g, params, component, o.scope).frozen(); }, family,
        *scheduler, stretch, at_once, columns, batch, latent, prompts, o);
    auto values = std::async(std::launch::async, [&] {
      std::set<std::string> components;
      for (const Param& p : params.params()) components.insert(p.model);
      HostArrays read;
      for (const std::string& component : components) read.merge(weights(params, component));
      return read;
    });
    CompileConfig lean = o.compile;
    lean.lean = true;
    const Program program = compile(devices, g, lean, "denoise");
    if (auto plan = program.memory()) log_info("denoising: {}", to_string(*plan));
    ArrayMap kept;
    place(devices, program, values.get(), kept);
    for (size_t group = 0; group < carries.size(); ++group) {
      const int64_t first = static_cast<int64_t>(group) * batch;
      HostArrays in = {{"key", key_of_seed(o.seed)}, {"first", scalar_s32(first)}};
      for (const auto& [name, a] : per_sample) in[name] = rows(a, first, batch);
      if (carries[group].empty()) {
        in["sample"] = rows(noise, first, batch);
        for (int64_t i = 0; i < scheduler->history(); ++i) in[fmt::format("history{}", i)] = zeros_as(in["sample"]);
      }
      ArrayMap feed;
      place(devices, program, in, feed);
      for (auto& [name, a] : feed)
        (name == "sample" || name.starts_with("history") ? carries[group] : kept)[name] = std::move(a);
      PendingArray last;
      for (int64_t i = stretch.first; i < stretch.first + stretch.steps; i += at_once) {
        HostArrays of_step = {
            {"rows", rows(table.rows, i, at_once)}, {"timesteps", rows(times, i, at_once)}, {"start", scalar_s32(i)}};
        if (o.control) of_step["scales"] = rows(scales, i, at_once);
        place(devices, program, of_step, kept);
        ArrayMap out = program.run(carries[group], kept);
        PendingArray now = fetch(devices, out.at("done"));
        out.erase("done");
        carries[group] = std::move(out);
        if (i > stretch.first) last.wait();  // the device has the next step already
        last = now;
        done += at_once;
        if (o.progress) o.progress(done, work);
      }
    }
  }
  HostArray latents;
  for (size_t group = 0; group < carries.size(); ++group)
    add_rows(latents, samples, static_cast<int64_t>(group) * batch, devices.get(carries[group].at("sample")));
  check_finite("latents", latents,
               "try: activations_dtype=float32; a prediction_type and timestep_spacing that fit the model (a schedule "
               "of zero terminal SNR needs v_prediction)");
  return latents;
}

HostArray decode_latents(MediaAutoencoder& coder, const Family& family, const HostArray& latents, bool tiled) {
  HostArray media = coder.decode(family.latent_scale().undo(latents), tiled);
  check_finite("pixels", media, "try: another autoencoder; the weights of this one may be damaged");
  return media;
}

}  // namespace md
