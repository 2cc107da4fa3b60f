#include "maxdiffusion/pipelines/sample_request.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

std::array<int64_t, 2> pair(const char* key, const std::vector<int64_t>& values) {
  check(values.size() == 2, Code::invalid_config, "{} has {} numbers; expected two, as in [1024, 1024]", key,
        values.size());
  return {values[0], values[1]};
}

/// Without what the model has no reader for, which is warned about.
std::vector<std::string> second_texts(const char* key, const std::vector<std::string>& texts, const Family& family) {
  if (texts.empty() || !family.spec().second_text_fields().empty()) return texts;
  log_warning("{} has no effect: this model has one text encoder", key);
  return {};
}

void set_guidance(const SampleKeys& k, const Family& family, SampleOptions& o) {
  const bool distilled = family.spec().embedded_guidance, by_true_scale = family.spec().true_guidance;
  o.embedded_guidance = k.guidance_scale;
  const double from_one = 1 - family.spec().unguided;  // what the factor of the model's guidance counts from
  o.guidance_scale = by_true_scale ? k.true_cfg_scale : k.guidance_scale + from_one;
  if (!k.do_classifier_free_guidance || family.spec().unguided_only) o.guidance_scale = 1;
  if (distilled && !k.negative_prompt.empty() && !o.guided())
    log_warning("negative_prompt has no effect: this model was distilled with guidance; try true_cfg_scale above 1");
  if (!by_true_scale && k.true_cfg_scale != 1)
    log_warning("true_cfg_scale has no effect: this model is guided by guidance_scale");
  if (family.spec().denoisers.size() == 2) {
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
  o.cfg_normalization = k.cfg_normalization;
  o.cfg_truncation = k.cfg_truncation;
}

int64_t images_per_prompt(const SampleRequest& r) {
  int64_t each = r.num_images_per_prompt.value_or(1);
  if (r.latents) {
    const int64_t n = r.latents.dims()[0], prompts = std::ssize(r.prompt);
    check(n % prompts == 0 && (!r.num_images_per_prompt || n == prompts * each), Code::invalid_config,
          "latents are of {} images; {} prompts{} need {}", n, prompts,
          r.num_images_per_prompt ? fmt::format(" with num_images_per_prompt={}", each) : "", prompts * each);
    each = n / prompts;
  }
  check(each >= 1, Code::invalid_config, "num_images_per_prompt is {}; expected 1 or more", each);
  return each;
}

std::vector<MediaSize> sizes_of(const std::vector<HostArray>& images) {
  std::vector<MediaSize> sizes;
  for (const HostArray& image : images) sizes.push_back({image.dims()[0], image.dims()[1]});
  return sizes;
}

/// f32 [1, H, W, 3] in [0, 1], of the samples' size.
ControlOptions control_options(const ControlRequest& c, const MediaSize& size) {
  const HostArray rgb = resize_rgb8(c.image, size.height, size.width, Filter::lanczos);
  HostArray image(Shape{DType::f32, {1, size.height, size.width, 3}});
  std::ranges::transform(rgb.view<uint8_t>(), image.mutable_view<float>().begin(),
                         [](uint8_t v) { return static_cast<float>(v) / 255.0f; });
  return {image, c.scale, c.start, c.end};
}

}  // namespace

int64_t sampling_batch(const SampleBatch& b, int64_t devices) {
  const auto n = static_cast<double>(devices);
  // Half a sample more of a global batch, since what is over is cut off.
  const double each = b.global > 0 ? (static_cast<double>(b.global) + 0.5) / n : b.per_device;
  return std::max<int64_t>(devices, static_cast<int64_t>(each * n));
}

MediaSize sample_size(const SampleKeys& k, int64_t resolution, const Family& family) {
  return {k.height.value_or(resolution), k.width.value_or(resolution),
          k.num_frames.value_or(family.spec().default_frames)};
}

MediaSize sample_size(const SampleRequest& r, const Family& family) {
  MediaSize size = sample_size(r, r.resolution, family);
  if (const ReferenceImages* references = family.reference_images(); references && !r.images.empty()) {
    const MediaSize own = references->sample_size(sizes_of(r.images));
    size.height = r.height.value_or(own.height), size.width = r.width.value_or(own.width);
  }
  if (!r.control.image) return size;
  const auto own = [&](size_t axis) { return std::max<int64_t>(64, r.control.image.dims()[axis] / 64 * 64); };
  size.height = r.height.value_or(own(0)), size.width = r.width.value_or(own(1));
  return size;
}

void check_size(const SampleKeys& keys, const Family& family, const MediaSize& size) {
  try {
    family.latent_dims(size);
  } catch (const Error& e) {
    const bool videos = family.spec().videos();
    std::string named;
    const auto add = [&](const char* key, int64_t value, const std::optional<int64_t>& given) {
      const std::string text = fmt::format("{}={}", given == value ? key : "resolution", value);
      if (named.find(text) == std::string::npos) named += (named.empty() ? "" : ", ") + text;
    };
    add("height", size.height, keys.height);
    add("width", size.width, keys.width);
    if (videos) named += fmt::format(", num_frames={}", size.frames);
    Error error(e.code(), fmt::format("{}: {}", named, e.message()));
    for (const std::string& note : e.notes()) error.note(note);
    throw error;
  }
}

SampleOptions sample_options(const SampleRequest& r, const Family& family, const std::string& scheduler_config,
                             const SampleBatch& batch, int64_t devices) {
  SampleOptions o;
  o.size = sample_size(r, family);
  check_size(r, family, o.size);
  check(!r.prompt.empty(), Code::invalid_config, "prompt is empty; expected a text: prompt=\"…\"");
  o.prompts = r.prompt;
  o.negative_prompts = r.negative_prompt;
  o.second_prompts = second_texts("prompt_2", r.prompt_2, family);
  o.second_negative_prompts = second_texts("negative_prompt_2", r.negative_prompt_2, family);
  set_guidance(r, family, o);
  o.num_inference_steps = r.num_inference_steps;
  o.clip_skip = r.clip_skip;
  o.step_by_step = r.step_by_step || (family.spec().videos() && !r.scan_diffusion_loop);
  const std::array<int64_t, 2> whole = {o.size.height, o.size.width};
  o.size_hints = {r.original_size.empty() ? whole : pair("original_size", r.original_size),
                  pair("crops_coords_top_left", r.crops_coords_top_left),
                  r.target_size.empty() ? whole : pair("target_size", r.target_size)};
  const int64_t seed = r.sample_seed.value_or(0);
  check(seed >= 0, Code::invalid_config, "sample_seed is {}; expected 0 or more", seed);
  o.seed = static_cast<uint64_t>(seed);
  o.first_sample = r.first_sample;
  o.latents = r.latents;
  if (family.reference_images()) o.references = sizes_of(r.images);
  o.images_per_prompt = images_per_prompt(r);
  if (batch.pixels_per_device > 0) {
    o.batch = std::max<int64_t>(batch.pixels_per_device / (o.size.height * o.size.width * o.size.frames), 1) * devices;
    if (o.batch >= o.samples()) o.batch = 0;
  } else {
    o.batch = std::min(sampling_batch(batch, devices), (o.samples() + devices - 1) / devices * devices);
  }
  o.scheduler_config = sampling_config(scheduler_config, r.scheduler);
  o.scheduler = sampler_of(family, o);
  o.cache = r.cache;
  if (r.control.image) o.control = control_options(r.control, o.size);
  check_sampling(family, o);
  return o;
}

}  // namespace md
