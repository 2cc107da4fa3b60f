#include "maxdiffusion/settings/requests.h"

#include <filesystem>
#include <tuple>
#include <utility>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/split_at_commas.h"

namespace md {

AxisRules axis_rules(const DeviceRequest& r, const std::string& of_family) {
  return AxisRules::for_family(r.sharding, r.mesh.axes(), of_family);
}

Devices open_devices(const DeviceRequest& r, const std::string& of_family) {
  return open_devices(r.hardware, r.mesh, r.sharding, of_family);
}

DeviceRequest device_request(const RunConfig& c) { return {c.hardware, c.mesh, c.sharding}; }

namespace {

ComponentsRequest components_request(const RunConfig& c, const RunInfo& run) {
  return {.model = {.keys = c.model,
                    .seed = run.seed,
                    .scheduler = c.scheduler,
                    .norm_num_groups = c.reference.norm_num_groups},
          .devices = device_request(c),
          .encoders = {.keys = c.encoders,
                       .layers = c.layers,
                       .chunks = c.media_chunks,
                       .compile = c.compile,
                       .sizes = c.sample,
                       .resolution = c.images.resolution,
                       .trains_lora = c.lora.train_lora,
                       .averages = c.update.ema_decay > 0}};
}

PipelineOptions pipeline_options(const RunConfig& c) {
  return {.model = c.model,
          .controlnet = c.control.controlnet_model_name_or_path,
          .lora = c.lora,
          .hardware = c.hardware,
          .mesh = c.mesh,
          .sharding = c.sharding,
          .layers = c.layers,
          .encoders = c.encoders,
          .media_chunks = c.media_chunks,
          .compile = c.compile,
          .batch = {c.batches.per_device_batch_size, c.batches.global_batch_size},
          .keep_loaded = false};
}

std::vector<std::string> images_of(const SampleFileKeys& k) {
  if (k.image.empty() && !k.image_url.empty()) return {k.image_url};
  if (k.image.size() == 1 && std::filesystem::exists(k.image[0])) return k.image;  // commas may be in its name
  return split_at_commas(k.image);
}

std::optional<SamplePlan> samples_of(const RunConfig& c, const SamplingRequest& sampling) {
  const RunKeys& k = c.run;
  if (c.sample.prompt.empty() || (k.sample_every == 0 && !k.enable_ssim && !k.enable_generate_video_for_eval))
    return {};
  return SamplePlan{k.sample_every, k.enable_generate_video_for_eval, k.enable_ssim, sampling};
}

RunSearch run_search(const RunConfig& c) {
  RunSearch s{.model = c.model,
              .file = c.file,
              .run_name = c.run.run_name,
              .output_dir = c.run.output_dir,
              .output_dir_of_file = c.output_dir_of_file,
              .checkpoint_dir = c.loop.checkpoint_dir,
              .untrained = random_weight_keys(c.model),
              .on_command_line = c.on_command_line};
  if (c.lora.train_lora) s.untrained.emplace_back("train_lora");
  return s;
}

}  // namespace

TrainingRequest training_request(const RunConfig& c, bool joins) {
  if (joins) join_processes(c.hardware.hardware == "tpu");
  const RunInfo run = make_run_info(c, processes());
  const SamplingRequest sampling = sampling_request(c, run);
  return {.run = run,
          .components = components_request(c, run),
          .data = c,
          .learning = c,
          .sampling = sampling,
          .samples = samples_of(c, sampling),
          .pipeline = pipeline_options(c),
          .rules = KeyRules(c)};
}

GenerateRequest generate_request(const RunConfig& c) {
  return {.search = run_search(c),
          .pipeline = pipeline_options(c),
          .sampling = sampling_request(c, make_run_info(c, processes())),
          .profile = c.profile.enable_profiler,
          .rules = KeyRules(c)};
}

SamplingRequest sampling_request(const RunConfig& c, const RunInfo& run) {
  const SampleFileKeys& k = c.sample;
  SampleRequest r{k};
  const auto& given = c.on_command_line;
  for (const auto& [key, first, texts] :
       {std::tuple{"prompt_2", "prompt", &r.prompt_2}, {"negative_prompt_2", "negative_prompt", &r.negative_prompt_2}})
    if (!texts->empty() && given.contains(first) && !given.contains(key)) {
      log_info_once("{} of the file is ignored: the command line gives {}", key, first);
      texts->clear();
    }
  r.sample_seed = static_cast<int64_t>(run.sample_seed);
  r.resolution = c.images.resolution;
  r.scheduler = c.scheduler;
  r.cache = c.step_cache;
  r.control = {.scale = c.control.controlnet_conditioning_scale,
               .start = c.control.control_guidance_start,
               .end = c.control.control_guidance_end};
  r.decode = k.output_type != "latent";
  return {.request = std::move(r),
          .files = {.latents = k.latents,
                    .last_image = k.last_image,
                    .control_image = c.control.controlnet_image,
                    .control_preprocessor = c.control.controlnet_preprocessor,
                    .images = images_of(k)},
          .batch = {c.batches.per_device_batch_size, c.batches.global_batch_size},
          .output_type = k.output_type,
          .fps = k.fps};
}

}  // namespace md
