#include "maxdiffusion/commands/plan_generate.h"

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/media/canny.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/storage/hub.h"
#include "maxdiffusion/storage/hub_cache.h"

namespace md {
namespace {

/// The ControlNet's folder or file that the keys name; empty: none.
std::string control_folder(const std::string& name, bool required) {
  const bool is_file = std::filesystem::is_regular_file(name);
  if (!required && !is_file && !std::filesystem::is_directory(name)) return "";
  check(!name.empty(), Code::invalid_config, "controlnet_model_name_or_path is empty");
  std::string folder = is_file ? name : local_folder(name);
  log_info("ControlNet: {}", folder);
  return folder;
}

/// The pixels of a file, or of an address of the web.
HostArray image_at(const std::string& place) {
  if (place.find("://") == std::string::npos) return decode_image(place);
  const std::string bytes = download_image(place);
  return decode_image_bytes(bytes.data(), bytes.size(), place);
}

/// f32 [N, C, h, w] of a file, channels last.
HostArray read_latents(const std::string& path) try {
  const SafetensorsReader file = SafetensorsReader::open(path);
  auto it = file.tensors().find("latents");
  check(it != file.tensors().end() && it->second.shape().rank() >= 4 && it->second.shape().rank() <= 5, Code::io,
        "'{}' has no tensor 'latents' of four axes (images, channels, height, width) or five (of videos)", path);
  return channels_last(it->second.cast(DType::f32));
} catch (Error& e) {
  throw e.note("latents names this file");
}

}  // namespace

SampleRequest with_files(SampleRequest r, const SampleFiles& files, bool control) {
  if (control && !files.control_image.empty()) {
    r.control.image = image_at(files.control_image);
    if (files.control_preprocessor == "canny") r.control.image = canny_edges(r.control.image, 100, 200);
  }
  if (!files.latents.empty()) r.latents = read_latents(files.latents);
  check(files.last_image.empty() || !files.first_image.empty(), Code::invalid_config,
        "last_image is given without image");
  for (const std::string& file : {files.first_image, files.last_image})
    if (!file.empty()) r.images.push_back(image_at(file));
  return r;
}

PipelineOptions pipeline_options(const RunConfig& c, const ModelKeys& replacements, bool with_control) {
  return {.model = replacements,
          .controlnet = control_folder(c.control.controlnet_model_name_or_path, with_control),
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

GeneratePlan plan_generate(const RunConfig& c, const RunInfo& run, const GenerateOptions& how) {
  const ModelToSample what = model_to_sample(c);
  GeneratePlan plan{.model = what.model,
                    .folder = how.as_reference ? c.run.output_dir : what.folder,
                    .pipeline = pipeline_options(c, what.keys, how.with_control),
                    .sampling = sampling_request(c, run),
                    .as_reference = how.as_reference,
                    .profile = c.profile.enable_profiler};
  check(!plan.folder.empty(), Code::invalid_config, "output_dir is empty; give output_dir=FOLDER");
  return plan;
}

}  // namespace md
