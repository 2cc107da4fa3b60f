#include "maxdiffusion/pipelines/sample_request.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

std::array<int64_t, 2> pair(const char* key, const std::vector<int64_t>& values) {
  check(values.size() == 2, Code::invalid_config, "{} has {} numbers; expected two, as in [1024, 1024]", key,
        values.size());
  return {values[0], values[1]};
}

/// The texts; or none, with a warning, if the model has no encoder for them.
std::vector<std::string> second_texts(const char* key, const std::vector<std::string>& texts, const Family& family) {
  if (texts.empty() || !family.spec().second_text_fields().empty()) return texts;
  log_warning("{} is ignored: this model has one text encoder", key);
  return {};
}

void set_guidance(const SampleKeys& k, const Family& family, SampleOptions& o) {
  const bool distilled = family.spec().embedded_guidance, by_true_scale = family.spec().true_guidance;
  o.embedded_guidance = k.guidance_scale;
  const double from_one = 1 - family.spec().unguided;  // 1 if the model's guidance scale counts from 0
  o.guidance_scale = by_true_scale ? k.true_cfg_scale : k.guidance_scale + from_one;
  if (!k.do_classifier_free_guidance || family.spec().unguided_only || (distilled && !by_true_scale))
    o.guidance_scale = 1;
  if (distilled && !k.negative_prompt.empty() && !o.guided())
    log_warning("negative_prompt is ignored: this model was distilled with guidance{}",
                by_true_scale ? "; try true_cfg_scale above 1" : "");
  if (!by_true_scale && k.true_cfg_scale != 1)
    log_warning("true_cfg_scale is ignored: this model is guided by guidance_scale");
  if (family.spec().denoisers.size() == 2) {
    o.guidance_scales = {k.guidance_scale_high.value_or(k.guidance_scale),
                         k.guidance_scale_low.value_or(k.guidance_scale)};
    if (!k.do_classifier_free_guidance) o.guidance_scales = {1, 1};
    check(!k.boundary_ratio || (*k.boundary_ratio >= 0 && *k.boundary_ratio <= 1), Code::invalid_config,
          "boundary_ratio is {}; expected 0 to 1", k.boundary_ratio.value_or(0));
    o.boundary_ratio = k.boundary_ratio;
  } else if (k.guidance_scale_high || k.guidance_scale_low || k.boundary_ratio) {
    log_warning("guidance_scale_high, guidance_scale_low and boundary_ratio are ignored: this model has one denoiser");
  }
  o.guidance_rescale = k.guidance_rescale;
  o.cfg_normalization = k.cfg_normalization;
  o.cfg_truncation = k.cfg_truncation;
  o.guidance = k;
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

/// Sets the options of samples that begin with images.
void set_beginning(const SampleRequest& r, const Family& family, SampleOptions& o) {
  const ImageToImage& its = *family.spec().image_to_image;
  const bool masked = r.mask || !r.outpaint.empty();
  const double usual = masked               ? its.inpaint_strength
                       : r.controls.empty() ? its.strength
                                            : its.control_strength.value_or(its.strength);
  if (r.denoising_start) return;  // set_start
  o.strength = r.strength.value_or(usual);
  check(*o.strength >= 0 && *o.strength <= 1, Code::invalid_config, "strength is {}; expected 0 to 1", *o.strength);
  o.first_step = first_step_of(family, "strength", *o.strength, o.num_inference_steps);
}

/// Sets the options of samples that begin within the way from noise to data.
void set_start(const SampleRequest& r, const Family& family, SampleOptions& o) {
  if (!r.denoising_start) return;
  check(begins_with_images(r, family), Code::invalid_config,
        "denoising_start is {} without image; expected image=FILE too, of which the steps from there on run",
        *r.denoising_start);
  check(!r.mask && r.outpaint.empty(), Code::invalid_config,
        "denoising_start is {} with mask_image or outpaint; expected strength in its place", *r.denoising_start);
  check(!r.denoising_end || *r.denoising_end > *r.denoising_start, Code::invalid_config,
        "denoising_start is {} and denoising_end {}; expected a smaller start", *r.denoising_start,
        r.denoising_end.value_or(1));
  const std::vector<double> all = o.scheduler->table(o.num_inference_steps, 0).training_timesteps;
  check(std::ssize(all) == o.num_inference_steps, Code::invalid_config,
        "denoising_start is {}; expected none with scheduler {}, which calls the model several times a step",
        *r.denoising_start, o.scheduler->name());
  o.first_step = steps_before(all, *r.denoising_start, o.scheduler_config);
  o.begins_without_noise = true;
  check(o.first_step < o.num_inference_steps, Code::invalid_config,
        "denoising_start is {}, and so none of num_inference_steps={} steps runs; expected a smaller part",
        *r.denoising_start, o.num_inference_steps);
}

/// f32 [1, H, W, 3] in [0, 1], with the samples' size.
ControlOptions control_options(const ControlRequest& c, const MediaSize& size, double usual) {
  const HostArray rgb = resize_rgb8(c.image, size.height, size.width, Filter::lanczos);
  HostArray image(Shape{DType::f32, {1, size.height, size.width, 3}});
  std::ranges::transform(rgb.view<uint8_t>(), image.mutable_view<float>().begin(),
                         [](uint8_t v) { return static_cast<float>(v) / 255.0f; });
  return {image, c.scale.value_or(usual), c.start, c.end};
}

}  // namespace

int64_t sampling_batch(const SampleBatch& b, int64_t devices) {
  const auto n = static_cast<double>(devices);
  // Adds half a sample to a global batch, because the product is truncated.
  const double each = b.global > 0 ? (static_cast<double>(b.global) + 0.5) / n : b.per_device;
  return std::max<int64_t>(devices, static_cast<int64_t>(each * n));
}

int64_t first_step_of(const Family& family, const std::string& key, double strength, int64_t steps) {
  const ImageToImage& its = *family.spec().image_to_image;
  const auto runs = [&](int64_t n, double s) { return its.first_step(n, s) < n; };
  if (steps <= 0 || runs(steps, strength)) return its.first_step(steps, strength);
  int64_t percent = 1, enough = steps;
  while (percent < 100 && (percent < 100 * strength || !runs(steps, static_cast<double>(percent) / 100))) ++percent;
  constexpr int64_t kMost = 1000;
  while (enough <= kMost && !runs(enough, strength)) ++enough;
  std::string hint = fmt::format("try: {}={}", key.substr(key.rfind(' ') + 1), static_cast<double>(percent) / 100);
  if (enough <= kMost) hint += fmt::format(", or num_inference_steps={}", enough);
  throw Error(Code::invalid_config, fmt::format("{} is {}, and so none of num_inference_steps={} {} runs; expected a "
                                                "larger part, or more steps",
                                                key, strength, steps, steps == 1 ? "step" : "steps"))
      .note(hint);
}

bool begins_with_images(const SampleRequest& r, const Family& family) {
  return (!r.images.empty() || r.image_latents) && family.spec().image_to_image && !family.image_conditioning() &&
         (!family.reference_images() || r.strength || r.mask || !r.outpaint.empty());
}

void check_images(const SampleRequest& r, const Family& family) {
  const bool begins_with_videos = family.spec().videos() && begins_with_images(r, family);
  for (const HostArray& image : r.images)
    check((image.dims().size() == 4) == begins_with_videos, Code::invalid_config, "image: {} is given; expected {}",
          image.dims().size() == 4 ? "a video" : "an image",
          begins_with_videos ? "a video, as in image=clip.mp4: samples of this model begin with noise or a video"
                             : "an image");
  check(!begins_with_videos || !(r.mask || !r.outpaint.empty() || r.padding_mask_crop), Code::invalid_config,
        "mask_image, padding_mask_crop or outpaint is given; expected none: this model's media are videos");
  const int64_t images = std::ssize(r.images), prompts = std::ssize(r.prompt);
  const bool masked = r.mask || !r.outpaint.empty() || r.padding_mask_crop;
  const bool inpaints = !family.spec().inpainting.empty();
  if (masked && images > 0 && !begins_with_images(r, family))
    throw Error(
        Code::invalid_config,
        "mask_image, padding_mask_crop or outpaint is given; expected none: this model's media do not begin with an "
        "image");
  check(!masked || images > 0, Code::invalid_config,
        "mask_image, padding_mask_crop or outpaint is given without image; expected image=FILE too");
  check(!r.padding_mask_crop || r.mask, Code::invalid_config,
        "padding_mask_crop is given without mask_image; expected mask_image=FILE too");
  if (inpaints && !r.mask && r.outpaint.empty())
    throw Error(Code::invalid_config, "mask_image: empty; this is an inpainting model, which takes an image and a mask")
        .note("try: image=FILE mask_image=FILE, or outpaint=64,0,64,0 in place of the mask");
  if (!begins_with_images(r, family)) return check_images(family, images);
  if (r.image_latents) return;
  check(images == 1 || !family.edits(), Code::invalid_config,
        "image: {} images are given with strength, mask_image or outpaint; this model then takes 1", images);
  check(images == 1 || images == prompts, Code::invalid_config,
        "image: {} images are given for {} {}; expected one for all, or one each", images, prompts,
        prompts == 1 ? "prompt" : "prompts");
}

MediaSize sample_size(const SampleKeys& k, int64_t resolution, const Family& family) {
  return {k.height.value_or(resolution), k.width.value_or(resolution),
          k.num_frames.value_or(family.spec().default_frames)};
}

MediaSize sample_size(const SampleRequest& r, const Family& family) {
  MediaSize size = sample_size(r, r.resolution, family);
  if (r.image_latents) return size;
  const bool of_video = begins_with_images(r, family) && r.images[0].dims().size() == 4;
  if (const int64_t scale = family.spec().autoencoder->frame_scale; of_video && scale > 0)
    size.frames = r.num_frames.value_or((r.images[0].dims()[0] - 1) / scale * scale + 1);
  if (begins_with_images(r, family) && !family.edits()) {
    const int64_t multiple = family.spec().autoencoder->downscale * family.spec().patch;
    const bool continued = r.outpaint.size() == 4;
    const auto image_side = [&](size_t axis) {
      const int64_t extra = continued ? r.outpaint[axis == 0 ? 1 : 0] + r.outpaint[axis == 0 ? 3 : 2] : 0;
      return std::max(multiple, (r.images[0].dims()[axis + (of_video ? 1 : 0)] + extra) / multiple * multiple);
    };
    size.height = r.height.value_or(image_side(0)), size.width = r.width.value_or(image_side(1));
  } else if (const ReferenceImages* references = family.reference_images(); references && !r.images.empty()) {
    const MediaSize reference_size = references->sample_size(ReferenceImages::sizes_of(r.images));
    size.height = r.height.value_or(reference_size.height), size.width = r.width.value_or(reference_size.width);
  }
  if (r.controls.empty()) return size;
  const Dims& image = r.controls[0].image.dims();
  const auto control_size = [&](size_t axis) { return std::max<int64_t>(64, image[axis] / 64 * 64); };
  size.height = r.height.value_or(control_size(0)), size.width = r.width.value_or(control_size(1));
  return size;
}

void check_size(const SampleKeys& keys, const Family& family, const MediaSize& size) {
  try {
    family.latent_dims(size);
  } catch (const Error& e) {
    const bool videos = family.spec().videos();
    std::string named;
    const auto add = [&](const char* key, int64_t value, const std::optional<int64_t>& setting) {
      const std::string text = fmt::format("{}={}", setting == value ? key : "resolution", value);
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
  check_numbers<SampleKeys>(r);
  o.size = sample_size(r, family);
  check_size(r, family, o.size);
  check(!r.prompt.empty(), Code::invalid_config, "prompt is empty; expected a text: prompt=\"…\"");
  o.prompts = r.prompt;
  o.negative_prompts = r.negative_prompt;
  o.second_prompts = second_texts("prompt_2", r.prompt_2, family);
  o.second_negative_prompts = second_texts("negative_prompt_2", r.negative_prompt_2, family);
  o.prompt_syntax = r.prompt_syntax;
  set_guidance(r, family, o);
  o.num_inference_steps = r.num_inference_steps;
  const int64_t most_skip = family.spec().most_clip_skip;
  check(r.clip_skip >= 0 && r.clip_skip <= most_skip, Code::invalid_config, "clip_skip is {}; expected {}", r.clip_skip,
        most_skip > 0 ? fmt::format("0 to {}, layers of this model's text encoder", most_skip)
                      : "0: this model's text encoder has no other layer to read");
  o.clip_skip = r.clip_skip;
  o.step_by_step = !r.scan_diffusion_loop;
  const std::array<int64_t, 2> whole = {o.size.height, o.size.width};
  o.size_hints = {r.original_size.empty() ? whole : pair("original_size", r.original_size),
                  pair("crops_coords_top_left", r.crops_coords_top_left),
                  r.target_size.empty() ? whole : pair("target_size", r.target_size)};
  const Seed seed = r.sample_seed.value_or(0);
  check(!seed.is_random(), Code::invalid_config, "sample_seed is {}; expected 0 or more", seed.text());
  o.seed = seed.value();
  o.first_sample = r.first_sample;
  o.latents = r.latents;
  if (begins_with_images(r, family)) set_beginning(r, family, o);
  if (family.reference_images() && (family.edits() || !o.strength)) o.references = r.images;
  o.images_per_prompt = images_per_prompt(r);
  if (batch.pixels_per_device > 0) {
    o.batch = std::max<int64_t>(batch.pixels_per_device / (o.size.height * o.size.width * o.size.frames), 1) * devices;
    if (o.batch >= o.samples()) o.batch = 0;
  } else {
    o.batch = std::min(sampling_batch(batch, devices), (o.samples() + devices - 1) / devices * devices);
  }
  o.scheduler_config = sampling_config(scheduler_config, r.scheduler);
  o.scheduler = sampler_of(family, o);
  o.denoising_end = r.denoising_end;
  o.aesthetic_score = r.aesthetic_score, o.negative_aesthetic_score = r.negative_aesthetic_score;
  set_start(r, family, o);
  check(!r.denoising_end || (!r.mask && r.outpaint.empty()), Code::invalid_config,
        "denoising_end is {} with mask_image or outpaint; expected none", r.denoising_end.value_or(1));
  check(r.seeds.empty() || (r.seeds.size() == r.prompt.size() && !o.scheduler->stochastic()), Code::invalid_config,
        "seeds: {} are given for {} prompts{}; expected one each, and a sampler that adds no noise", r.seeds.size(),
        r.prompt.size(), o.scheduler->stochastic() ? " and a sampler that adds noise" : "");
  o.seeds = r.seeds;
  o.cache = r.cache;
  if (r.preview) o.preview_every = r.preview_every;
  const bool begins = begins_with_images(r, family), masked = r.mask || !r.outpaint.empty();
  for (const ControlRequest& c : r.controls) {
    if (c.scale) check_number("controlnet_conditioning_scale", *c.scale);
    const double usual = !begins  ? 1
                         : masked ? family.spec().image_to_image->control_inpaint_scale
                                  : family.spec().image_to_image->control_scale;
    o.controls.push_back(control_options(c, o.size, usual));
  }
  check_sampling(family, o);
  return o;
}

bool may_be_joined(const SampleRequest& r, const SampleOptions& o) {
  return r.prompt.size() == 1 && r.seeds.empty() && r.images.empty() && !r.image_latents && !r.latents &&
         r.controls.empty() && r.adapters.empty() && r.hires_scale == 1 && !o.scheduler->stochastic();
}

SampleRequest joined(const std::vector<const SampleRequest*>& requests) {
  SampleRequest out = *requests[0];
  if (requests.size() == 1) return out;
  const auto join = [&](auto texts) {
    (out.*texts).clear();
    for (const SampleRequest* r : requests)
      (out.*texts).insert((out.*texts).end(), (r->*texts).begin(), (r->*texts).end());
  };
  join(&SampleKeys::prompt), join(&SampleKeys::negative_prompt);
  join(&SampleKeys::prompt_2), join(&SampleKeys::negative_prompt_2);
  for (const SampleRequest* r : requests) out.seeds.push_back(r->sample_seed.value_or(0).value());
  return out;
}

}  // namespace md
