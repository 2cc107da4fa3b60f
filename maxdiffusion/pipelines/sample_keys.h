// Keys of sampling: prompts, sizes, guidance, steps, outputs, and ControlNet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/pipelines/guidance.h"

namespace md {

/// Largest sides of samples, and numbers of steps and frames.
inline constexpr double kMostPixels = 65536, kMostSteps = 100000;

/// Keys of one sampling run.
struct SampleKeys : GuidanceKeys {
  Texts prompt;
  OptionalTexts negative_prompt, prompt_2, negative_prompt_2;
  std::string prompt_syntax = "plain";
  bool do_classifier_free_guidance = true;
  double guidance_scale = 7.5, guidance_rescale = 0, true_cfg_scale = 1, cfg_normalization = 0, cfg_truncation = 1;
  int64_t num_inference_steps = 30, clip_skip = 0;
  std::optional<Seed> sample_seed;
  std::optional<int64_t> num_images_per_prompt, height, width, num_frames;
  std::optional<double> guidance_scale_high, guidance_scale_low, boundary_ratio, strength, denoising_start,
      denoising_end;
  double aesthetic_score = 6, negative_aesthetic_score = 2.5;
  bool scan_diffusion_loop = false;
  int64_t mask_grow = 0;
  double mask_blur = 0, hires_scale = 1, hires_strength = 0.4, upscale = 1;
  std::string hires_upscaler;
  int64_t upscaler_tile = 192, preview_every = 0;
  std::optional<int64_t> padding_mask_crop;
  std::vector<int64_t> outpaint;
  std::vector<int64_t> original_size, crops_coords_top_left = {0, 0}, target_size;
  bool vae_slicing = false, vae_tiling = false;
  template <class V>
  void visit(V&& v) {
    v("prompt", prompt, "what to generate: one text or a list");
    v("negative_prompt", negative_prompt,
      "negative prompt of classifier-free guidance: one text, or one for each prompt; null: none");
    v("prompt_2", prompt_2, "prompt of a second text encoder: one text, or one for each prompt; null: prompt");
    v("negative_prompt_2", negative_prompt_2,
      "negative prompt of a second text encoder: one text, or one for each prompt; null: negative_prompt");
    v("prompt_syntax", prompt_syntax,
      "weights in prompts, (word:1.3), and more than 77 tokens, as AUTOMATIC1111's web UI or ComfyUI count them, for "
      "models with CLIP's text encoders; plain: brackets are text, and what is over is cut",
      one_of({"plain", "a1111", "comfyui"}));
    v("do_classifier_free_guidance", do_classifier_free_guidance,
      "false: sample without classifier-free guidance, whatever guidance_scale is");
    v("guidance_scale", guidance_scale,
      "classifier-free guidance; <= 1, for models that count from 0 <= 0: off. For a guidance-distilled model: the "
      "scale that it receives as an input",
      at_least(0));
    v("true_cfg_scale", true_cfg_scale,
      "classifier-free guidance of a guidance-distilled model and of Qwen-Image, at twice the work; <= 1: off",
      at_least(0));
    v("guidance_scale_high", guidance_scale_high,
      "guidance_scale of the high-noise expert, in models with two; null: guidance_scale", at_least(0));
    v("guidance_scale_low", guidance_scale_low,
      "guidance_scale of the low-noise expert, in models with two; null: guidance_scale", at_least(0));
    v("boundary_ratio", boundary_ratio,
      "part of the timesteps below which the low-noise expert predicts, in models with two; null: the model's");
    v("guidance_rescale", guidance_rescale,
      "part of the prediction's standard deviation that is restored after guidance; <= 0: off", at_most(1));
    v("cfg_normalization", cfg_normalization,
      "largest norm of a guided prediction, as a multiple of the prompt's prediction; 0 or false: any; true: 1",
      or_switch(at_least(0)));
    v("cfg_truncation", cfg_truncation,
      "part of the way from noise to data, from 0 to 1, behind which steps are not guided; 1: all are", in_range(0, 1));
    GuidanceKeys::visit(v);
    v("num_inference_steps", num_inference_steps, "denoising steps", at_most(kMostSteps));
    v("strength", strength,
      "part of the denoising steps that run on an image with the noise of their first step (image to image); 1: all, "
      "the image is hardly seen; null: the model's own, with image",
      in_range(0, 1));
    v("denoising_start", denoising_start,
      "part of the way from noise to data at which the image to begin with is, and where the steps begin: it gets no "
      "noise; null: strength counts",
      in_range(above(0), below(1)));
    v("denoising_end", denoising_end,
      "part of the way from noise to data at which the steps end, or the steps of refiner begin; null: all run, or 0.8 "
      "with "
      "refiner",
      in_range(above(0), below(1)));
    v("aesthetic_score", aesthetic_score, "input of a refiner with the prompt", in_range(0, 10));
    v("negative_aesthetic_score", negative_aesthetic_score, "input of a refiner with the negative prompt",
      in_range(0, 10));
    v("mask_grow", mask_grow, "pixels by which the white of mask_image grows on all sides", at_least(0));
    v("mask_blur", mask_blur,
      "deviation in pixels of the blur of mask_image's sides, where new and old are mixed; 0: none", at_least(0));
    v("padding_mask_crop", padding_mask_crop,
      "pixels around the white of mask_image: only that part of the image is generated, at the size of the sample, and "
      "put back; null: the whole image",
      at_least(0));
    v("outpaint", outpaint, "pixels that the image is continued by: left, top, right, bottom; empty: none",
      at_least(0));
    v("hires_scale", hires_scale, "the sample is enlarged by this and generated again from that image; 1: it is not",
      at_least(1));
    v("hires_strength", hires_strength, "strength of what hires_scale generates again", in_range(0, 1));
    v("hires_upscaler", hires_upscaler,
      "what enlarges for hires_scale: upscaler (the file of that key), lanczos, or latent (the latents, bilinear); "
      "empty: upscaler if it is given, else lanczos",
      one_of_or_empty({"lanczos", "latent", "upscaler"}));
    v("upscale", upscale,
      "finished images are enlarged by this, by upscaler if it is given, else by Lanczos; 1: they are not",
      in_range(1, 8));
    v("upscaler_tile", upscaler_tile,
      "side of the tiles, pixels, in which upscaler enlarges, a multiple of 16; they overlap by a quarter; 0: the "
      "whole "
      "image at once",
      at_least(0));
    v("preview_every", preview_every,
      "denoising steps between images of what the model predicts then: preview.png, and on the server's page; 0: none",
      at_least(0));
    v("scan_diffusion_loop", scan_diffusion_loop,
      "run all steps as one program, instead of one step at a time with progress");
    v("num_images_per_prompt", num_images_per_prompt,
      "samples per prompt; null: 1, or under MaxDiffusion's command names the global batch for one prompt");
    v("sample_seed", sample_seed, "seed of the initial noise; null: seed; -1: random, logged");
    v("height", height, "height of the samples, pixels; null: resolution", in_range(1, kMostPixels));
    v("width", width, "width of the samples, pixels; null: resolution", in_range(1, kMostPixels));
    v("num_frames", num_frames, "frames of a video; null: the model's own number", at_most(kMostSteps));
    v("original_size", original_size, "size conditioning: height and width before cropping; empty: the image's");
    v("crops_coords_top_left", crops_coords_top_left, "size conditioning: top and left of the crop", at_least(0));
    v("target_size", target_size, "size conditioning: target height and width; empty: the image's");
    v("clip_skip", clip_skip, "last layers of the text encoders to skip, as in diffusers");
    v("vae_slicing", vae_slicing, "decode image by image");
    v("vae_tiling", vae_tiling, "decode images larger than the autoencoder's own in tiles that overlap");
  }
};

/// SampleKeys and the keys of files that are read and written.
struct SampleFileKeys : SampleKeys {
  std::string latents, output_type, image_url, last_image, mask_image;
  std::vector<std::string> image;
  std::optional<int64_t> only_image;
  double fps = 16;
  template <class V>
  void visit(V&& v) {
    SampleKeys::visit(v);
    v("fps", fps, "frames per second of videos");
    v("image", image,
      "image that the sample begins with (image to image; videos: the first frame), a video that a video begins with, "
      "or reference images: a file, or an https:// address; several as a list, or one text with commas",
      KeyPath::input);
    v("image_url", image_url, "as image: MaxDiffusion's key", KeyPath::input);
    v("mask_image", mask_image,
      "inpainting: a file, or an https:// address, white where the image is replaced and black where it stays",
      KeyPath::input);
    v("last_image", last_image, "image that the video ends with", KeyPath::input);
    v("latents", latents,
      "safetensors file whose tensor `latents` (standard normal, NCHW or NCFHW) is the initial noise", KeyPath::input);
    v("only_image", only_image,
      "number, from 0, of the one image that is written of those that prompt and num_images_per_prompt give; null: all",
      at_least(0));
    v("output_type", output_type,
      "what is written: png, mp4, np (images.safetensors, video.safetensors) or latent (latents.safetensors); empty: "
      "png, or mp4 for videos",
      one_of_or_empty({"png", "mp4", "np", "latent"}));
  }
};

/// Keys of caches that reuse predictions of earlier denoising steps.
struct StepCacheKeys {
  bool use_cfg_cache = false, use_magcache = false, use_sen_cache = false, use_first_block_cache = false,
       use_teacache = false, use_deepcache = false, use_kv_cache = false, use_batched_text_encoder = false;
  double magcache_thresh = 0.12, retention_ratio = 0.2, first_block_cache_threshold = 0.05, teacache_thresh = 0.2;
  int64_t magcache_K = 2, deepcache_interval = 3, deepcache_branch = 0;
  std::vector<double> mag_ratios_base, mag_ratios_base_720p, mag_ratios_base_480p, teacache_coefficients;
  template <class V>
  void visit(V&& v) {
    v("use_cfg_cache", use_cfg_cache, "in some steps reuse the guidance of an earlier one");
    v("use_magcache", use_magcache,
      "skip a transformer's blocks in steps where they would change the result little, by measured ratios");
    v("magcache_thresh", magcache_thresh, "error that use_magcache lets add up");
    v("magcache_K", magcache_K, "steps in a row that use_magcache may leave out");
    v("retention_ratio", retention_ratio, "part of the steps, at the beginning, that use_magcache always computes");
    v("mag_ratios_base", mag_ratios_base, "measured ratios for use_magcache: two a step, with prompt and without");
    v("mag_ratios_base_720p", mag_ratios_base_720p, "mag_ratios_base for heights of 720 and more");
    v("mag_ratios_base_480p", mag_ratios_base_480p, "mag_ratios_base for smaller heights");
    v("use_sen_cache", use_sen_cache, "reuse the last prediction while timestep and latents have changed little");
    v("use_first_block_cache", use_first_block_cache,
      "skip a transformer's blocks but the first while that one adds nearly the same as before");
    v("first_block_cache_threshold", first_block_cache_threshold,
      "relative change of what the first block adds, up to which use_first_block_cache skips the others", at_least(0));
    v("use_teacache", use_teacache,
      "skip a transformer's blocks until what the first one computes from has changed enough");
    v("teacache_thresh", teacache_thresh, "change of the result, as predicted, up to which use_teacache skips",
      at_least(0));
    v("teacache_coefficients", teacache_coefficients,
      "polynomial from the change of the first block's input to the change of the result, the highest power first; "
      "empty: "
      "that fitted to the model");
    v("use_deepcache", use_deepcache, "reuse the deep levels of a UNet in some steps");
    v("deepcache_interval", deepcache_interval, "steps from one that computes the deep levels to the next",
      at_least(1));
    v("deepcache_branch", deepcache_branch,
      "skip connection, counted from 0, the finest, below which use_deepcache reuses the levels", at_least(0));
    v("use_kv_cache", use_kv_cache,
      "videos: compute the prompt's keys and values once for all steps; the result is the same");
    v("use_batched_text_encoder", use_batched_text_encoder, "prompts are always encoded together; ignored");
  }
  /// The keys that enable a cache between steps.
  std::vector<std::pair<std::string, bool>> step_caches() const;
  /// The key of the enabled cache: "use_magcache"; empty: none.
  std::string step_cache() const;
  /// Throws invalid_config if several are enabled.
  void validate() const;
};

/// Keys of adapters to images.
struct AdapterKeys {
  std::string ip_adapter, ip_adapter_image, ip_adapter_image_encoder, t2i_adapter, t2i_adapter_image;
  double ip_adapter_scale = 1, t2i_adapter_conditioning_scale = 1;
  template <class V>
  void visit(V&& v) {
    v("ip_adapter", ip_adapter,
      "file of an IP-Adapter, plain or plus, or the folder that holds it: samples follow ip_adapter_image as they do "
      "the "
      "prompt",
      KeyPath::input);
    v("ip_adapter_image", ip_adapter_image, "image of the IP-Adapter: a file, or an https:// address", KeyPath::input);
    v("ip_adapter_scale", ip_adapter_scale, "weight of what the IP-Adapter adds; 0: nothing");
    v("ip_adapter_image_encoder", ip_adapter_image_encoder,
      "folder of the CLIP image encoder that the IP-Adapter was trained with; empty: image_encoder next to it, or the "
      "model folder's",
      KeyPath::input);
    v("t2i_adapter", t2i_adapter, "folder of a T2I-Adapter: samples have the shapes of t2i_adapter_image",
      KeyPath::input);
    v("t2i_adapter_image", t2i_adapter_image, "image of the T2I-Adapter: a file, or an https:// address",
      KeyPath::input);
    v("t2i_adapter_conditioning_scale", t2i_adapter_conditioning_scale,
      "weight of what the T2I-Adapter adds; 0: nothing");
  }
};

/// Keys of ControlNets. Lists have an entry for each ControlNet, or one for all.
struct ControlKeys {
  std::vector<std::string> controlnet_model_name_or_path, controlnet_image, controlnet_preprocessor;
  std::vector<double> controlnet_conditioning_scale, control_guidance_start = {0}, control_guidance_end = {1};
  template <class V>
  void visit(V&& v) {
    v("controlnet_model_name_or_path", controlnet_model_name_or_path,
      "folder or file of a ControlNet, or a list of several, whose results are added; with generate_controlnet also a "
      "name on the hub",
      KeyPath::input_or_word);
    v("controlnet_image", controlnet_image,
      "input of the ControlNet: a file, or an https:// address; of several ControlNets a list", KeyPath::input);
    v("controlnet_preprocessor", controlnet_preprocessor,
      "canny: compute the image's edges first; none or empty: use the image as it is; for several ControlNets a list",
      one_of_or_empty({"none", "canny"}));
    v("controlnet_conditioning_scale", controlnet_conditioning_scale,
      "weight of what the ControlNet adds; for several a list; empty: 1, or what diffusers has where samples begin "
      "with "
      "an image");
    v("control_guidance_start", control_guidance_start,
      "part of the steps before the ControlNet acts; for several a list");
    v("control_guidance_end", control_guidance_end,
      "part of the steps after which the ControlNet no longer acts; for several a list");
  }
};

}  // namespace md
