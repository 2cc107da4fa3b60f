#include "maxdiffusion/settings/requests.h"

#include <tuple>
#include <utility>

#include "maxdiffusion/base/log.h"

namespace md {

AxisRules axis_rules(const DeviceRequest& r, const std::string& of_family) {
  return AxisRules::for_family(r.sharding, r.mesh.axes(), of_family);
}

Devices open_devices(const DeviceRequest& r, const std::string& of_family) {
  return open_devices(r.hardware, r.mesh, r.sharding, of_family);
}

DeviceRequest device_request(const RunConfig& c) { return {c.hardware, c.mesh, c.sharding}; }

ComponentsRequest components_request(const RunConfig& c, const RunInfo& run, Purpose purpose) {
  return {.model = {.keys = c.model,
                    .folder = c.model.pretrained_model_name_or_path,
                    .purpose = purpose,
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

SamplingRequest sampling_request(const RunConfig& c, const RunInfo& run) {
  const SampleFileKeys& k = c.sample;
  if (!k.image.empty() && !k.image_url.empty()) log_warning("image is given; image_url '{}' is not read", k.image_url);
  SampleRequest r{k};
  const auto& given = c.on_command_line;
  for (const auto& [key, first, texts] :
       {std::tuple{"prompt_2", "prompt", &r.prompt_2}, {"negative_prompt_2", "negative_prompt", &r.negative_prompt_2}})
    if (!texts->empty() && given.contains(first) && !given.contains(key)) {
      log_info_once("{} of the file is left aside, since {} was given on the command line", key, first);
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
                    .first_image = k.image.empty() ? k.image_url : k.image,
                    .last_image = k.last_image,
                    .control_image = c.control.controlnet_image,
                    .control_preprocessor = c.control.controlnet_preprocessor},
          .batch = {c.batches.per_device_batch_size, c.batches.global_batch_size},
          .output_type = k.output_type,
          .fps = k.fps};
}

}  // namespace md
