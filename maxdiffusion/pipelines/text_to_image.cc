#include "maxdiffusion/pipelines/text_to_image.h"

#include <future>
#include <nlohmann/json.hpp>

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
#include "maxdiffusion/tasks/latent_diffusion.h"

namespace md {
namespace {

using nlohmann::json;

/// Each row `times` times, in place of it.
bool zeros_for_missing_prompt(const ModelFolder& m) {
  return m.text_encoder_2 && json::parse(m.files.at("model_index.json")).value("force_zeros_for_empty_prompt", true);
}

/// φ·(ε·σ(positive)/σ(ε)) + (1 − φ)·ε, deviations over all axes but the first.
Tensor rescaled(Tensor guided, Tensor positive, double phi) {
  const Axes axes = {1, 2, 3};
  auto deviation = [&](Tensor x) { return sqrt(mean(square(x - mean(x, axes, true)), axes, true)); };
  return guided * (deviation(positive) / deviation(guided) * phi + (1 - phi));
}

/// The shape of `batch` pictures' latents.
Shape latent_shape(const ModelFolder& m, const TextToImageOptions& o, int64_t batch) {
  const int64_t down = m.vae.downscale();
  return {DType::f32, {batch, o.height / down, o.width / down, m.vae.latent_channels}};
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

/// One denoising loop over `batch` pictures. Inputs: noise [B, h, w, C], prompt_embeds [B, L, D], text_embeds [B, P],
/// with guidance the same two with the prefix negative_, key u32 [2] and first s32 [] (the number of the first
/// picture), with a ControlNet control_picture [B, H, W, C]; output latents [B, h, w, C], still scaled.
void build_loop(const Scope& s, const Scope& control, const ModelFolder& m, const Scheduler& scheduler,
                const SampleTable& table, int64_t batch, const PromptEmbeddings& prompts, const TextToImageOptions& o) {
  Graph& g = s.graph();
  const bool micro = m.unet.addition_embed_type.has_value();
  auto input = [&](const std::string& name, Shape shape) {
    shape.dims[0] = batch;
    LogicalAxes axes(shape.dims.size());
    axes[0] = axis::kData;
    return g.input(name, shape, axes);
  };
  auto conditioning = [&](const std::string& name, const HostArray& rows) {
    Tensor x = input(name, rows.shape());
    return o.guided() ? concatenate({input("negative_" + name, rows.shape()), x}, 0) : x;
  };
  Tensor prompt = conditioning("prompt_embeds", prompts.positive.prompt_embeds), text;
  if (micro) text = conditioning("text_embeds", prompts.positive.text_embeds);
  Tensor picture, scales;
  if (o.control) {
    picture = input("control_picture", o.control->picture.shape());
    if (o.guided()) picture = concatenate({picture, picture}, 0);
    scales = constant(g, control_scales(*o.control, table.rows.dims()[0]));
  }
  Rng rng = Rng(g.input("key", {DType::u32, {2}})).at(g.input("first", {DType::s32, {}}));

  const int64_t calls = o.guided() ? 2 * batch : batch;
  Tensor rows = constant(g, table.rows);
  HostArray times(Shape{DType::f32, {table.rows.dims()[0]}});
  for (size_t i = 0; i < table.timesteps.size(); ++i)
    times.mutable_view<float>()[i] = static_cast<float>(table.timesteps[i]);
  Tensor timesteps = constant(g, times);

  std::vector<Tensor> carry = {input("noise", latent_shape(m, o, batch)) * table.init_noise_sigma};
  for (int64_t i = 0; i < scheduler.history(); ++i) carry.push_back(zeros_like(carry[0]));
  ScanResult out = scan(table.rows.dims()[0], carry, [&](ScanStep& step, const std::vector<Tensor>& c) -> ScanResult {
    Tensor row = step.slice(rows), x = scheduler.scale_input(c[0], row);
    UNetInputs in{.sample = o.guided() ? concatenate({x, x}, 0) : x,
                  .timestep = broadcast_to(reshape(step.slice(timesteps), {1}), {calls}),
                  .encoder_hidden_states = prompt};
    if (micro) {
      in.text_embeds = text;
      const std::array<int64_t, 2> size = {o.height, o.width};
      in.time_ids = micro_conditioning(step.body(), calls, o.original_size.value_or(size), o.crops_coords_top_left,
                                       o.target_size.value_or(size));
    }
    if (o.control) {
      ControlResiduals r = controlnet(control.in_graph(step.body()), o.control->config, in, picture);
      Tensor scale = step.slice(scales);
      for (Tensor& t : r.down) t = t * cast(scale, t.dtype());
      in.down_residuals = r.down;
      in.mid_residual = r.mid * cast(scale, r.mid.dtype());
    }
    Tensor prediction = unet2d(s.in_graph(step.body()), m.unet, in);
    if (o.guided()) {
      std::vector<Tensor> halves = split(prediction, 2, 0);
      prediction = halves[0] + (halves[1] - halves[0]) * o.guidance_scale;
      if (o.guidance_rescale > 0) prediction = rescaled(prediction, halves[1], o.guidance_rescale);
    }
    return {scheduler.step(prediction, c[0], row, {c.begin() + 1, c.end()}, rng.at(step.index()).for_("step")), {}};
  });
  g.output("latents", out.carry[0]);
}

/// Standard normal, the same for picture i whatever else is drawn.
HostArray drawn_noise(const Shape& shape, uint64_t seed) {
  HostArray noise(shape);
  auto v = noise.mutable_view<float>();
  const size_t each = v.size() / static_cast<size_t>(shape.dims[0]);
  for (size_t i = 0; i * each < v.size(); ++i)
    HostRng(seed, fmt::format("latents of picture {}", i))
        .fill(HostRng::Distribution::normal, 1, 0, v.subspan(i * each, each));
  return noise;
}

/// Throws device where an array of pictures holds NaN or infinity.
void check_finite(const char* what, const HostArray& pictures, const char* advice) {
  auto v = pictures.view<float>();
  const size_t each = v.size() / static_cast<size_t>(pictures.dims()[0]);
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

/// f32 [N, C, h, w] of a file as [N, h, w, C].
HostArray read_latents(const std::string& path) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  auto it = file.tensors().find("latents");
  check(it != file.tensors().end() && it->second.shape().rank() == 4, Code::io,
        "'{}' has no tensor 'latents' of four axes (pictures, channels, height, width)", path);
  return nchw_to_nhwc(it->second.cast(DType::f32));
}

}  // namespace

TextToImageOptions text_to_image_options(const RunConfig& c, const ModelFolder& folder, int64_t devices) {
  const SampleKeys& k = c.sample;
  check(!k.prompt.empty(), Code::invalid_config, "prompt is empty; give prompt=\"…\"");
  TextToImageOptions o;
  o.prompts = k.prompt;
  o.negative_prompts = k.negative_prompt;
  o.guidance_scale = k.do_classifier_free_guidance ? k.guidance_scale : 1;
  o.guidance_rescale = k.guidance_rescale;
  o.num_inference_steps = k.num_inference_steps;
  o.height = k.height.value_or(c.data.resolution);
  o.width = k.width.value_or(c.data.resolution);
  if (!k.original_size.empty()) o.original_size = pair("original_size", k.original_size);
  if (!k.target_size.empty()) o.target_size = pair("target_size", k.target_size);
  o.crops_coords_top_left = pair("crops_coords_top_left", k.crops_coords_top_left);
  o.seed = static_cast<uint64_t>(k.sample_seed.value_or(c.run.seed));
  o.scope = scope_options(c.model);
  o.compile = c.compile;

  json scheduler = parse_scheduler_config(folder.scheduler_config());
  for (const auto& [name, text] : k.diffusion_scheduler_config) {
    const json value = json::parse(text);
    if (value == "") continue;                                                           // as absent
    if (name == "rescale_zero_terminal_snr") scheduler.erase("rescale_betas_zero_snr");  // the other spelling
    scheduler[name] = value;
  }
  o.scheduler_config = scheduler.dump();

  // As many pictures of one prompt as the reference draws: the global batch.
  o.batch =
      std::max<int64_t>(devices, static_cast<int64_t>(c.data.per_device_batch_size * static_cast<double>(devices)));
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
  o.batch = std::min(o.batch, (o.pictures() + devices - 1) / devices * devices);
  return o;
}

PromptEmbeddings encode_prompts(TextEncoder& text, const ModelFolder& folder, const TextToImageOptions& o) {
  PromptEmbeddings out;
  auto per_picture = [](TextEmbeddings& e, int64_t times) {
    e.prompt_embeds = repeat_rows(e.prompt_embeds, times);
    if (e.text_embeds) e.text_embeds = repeat_rows(e.text_embeds, times);
  };
  out.positive = text.encode(o.prompts);
  per_picture(out.positive, o.images_per_prompt);
  if (!o.guided()) return out;
  const size_t given = o.negative_prompts.size();
  check(given <= 1 || given == o.prompts.size(), Code::invalid_config,
        "negative_prompt has {} texts for {} prompts; expected one for all, or one each", given, o.prompts.size());
  if (given == 0 && zeros_for_missing_prompt(folder)) {
    out.negative.prompt_embeds = zeros_as(out.positive.prompt_embeds);
    if (out.positive.text_embeds) out.negative.text_embeds = zeros_as(out.positive.text_embeds);
  } else {
    out.negative = text.encode(given == 0 ? std::vector<std::string>{""} : o.negative_prompts,
                               true);  // as diffusers: clip_skip is not for these
    per_picture(out.negative, given <= 1 ? o.pictures() : o.images_per_prompt);
  }
  return out;
}

HostArray denoise(const Devices& devices, const ModelFolder& m, const WeightsOf& weights,
                  const PromptEmbeddings& prompts, const TextToImageOptions& o) {
  const int64_t down = m.vae.downscale(), pictures = o.pictures();
  check(o.height > 0 && o.width > 0 && o.height % down == 0 && o.width % down == 0, Code::invalid_config,
        "size {}x{} is not a multiple of {}, the autoencoder's downscale", o.height, o.width, down);
  const Shape all = latent_shape(m, o, pictures);
  check(!o.latents || o.latents.shape() == all, Code::invalid_config,
        "latents are {}; {} pictures of {}x{} pixels need {} (pictures, height, width, channels)",
        o.latents ? to_string(o.latents.shape()) : "", pictures, o.height, o.width, to_string(all));
  check(
      m.unet.in_channels == m.vae.latent_channels, Code::invalid_config,
      "the UNet takes {} channels, the autoencoder's latents have {}: inpainting and other models that take more than "
      "latents are not supported",
      m.unet.in_channels, m.vae.latent_channels);
  std::unique_ptr<Scheduler> scheduler = make_scheduler(parse_scheduler_config(o.scheduler_config));
  const SampleTable table = scheduler->table(o.num_inference_steps);
  const int64_t batch = o.batch > 0 ? o.batch : pictures;

  Graph g(devices.graph_options(&devices.rules()));
  ParamTable params;
  const Scope unet(g, params, "unet", o.scope), control(g, params, "controlnet", o.scope);
  build_loop(unet.frozen(), control.frozen(), m, *scheduler, table, batch, prompts, o);
  auto values = std::async(std::launch::async, [&] {
    HostArrays all = weights(params, "unet");
    if (o.control) all.merge(weights(params, "controlnet"));
    return all;
  });
  CompileConfig lean = o.compile;
  lean.lean = true;
  Program program = compile(devices, g, lean, "text_to_image");
  if (auto plan = program.memory()) log_info("denoising: {}", to_string(*plan));
  ArrayMap arrays;
  place(devices, program, values.get(), arrays);

  HostArrays per_picture = {{"noise", o.latents ? o.latents : drawn_noise(all, o.seed)},
                            {"prompt_embeds", prompts.positive.prompt_embeds},
                            {"text_embeds", prompts.positive.text_embeds},
                            {"negative_prompt_embeds", prompts.negative.prompt_embeds},
                            {"negative_text_embeds", prompts.negative.text_embeds}};
  if (o.control) per_picture["control_picture"] = repeat_rows(o.control->picture, pictures);
  HostArray latents(all);
  for (int64_t first = 0; first < pictures; first += batch) {
    const int32_t number = static_cast<int32_t>(first);
    HostArrays in = {{"key", key_of_seed(o.seed)}, {"first", HostArray::of<int32_t>({DType::s32, {}}, {&number, 1})}};
    for (const auto& [name, a] : per_picture)
      if (a) in[name] = rows(a, first, batch);
    ArrayMap feed;
    place(devices, program, in, feed);
    set_rows(latents, first, devices.get(program.run(feed, arrays).at("latents")));
  }
  check_finite("latents", latents,
               "try: activations_dtype=float32; a prediction_type and timestep_spacing that fit the model (a schedule "
               "of zero terminal SNR needs v_prediction)");
  return latents;
}

HostArray decode_latents(PictureCoder& coder, const ModelFolder& m, const HostArray& latents, bool tiled) {
  HostArray unscaled(latents.shape());
  auto from = latents.view<float>();
  auto to = unscaled.mutable_view<float>();
  for (size_t i = 0; i < from.size(); ++i)
    to[i] = static_cast<float>(from[i] / m.vae.scaling_factor + m.vae.shift_factor);
  HostArray pictures = coder.decode(unscaled, tiled);
  check_finite("pixels", pictures, "try: another autoencoder; the weights of this one may be damaged");
  return pictures;
}

}  // namespace md
