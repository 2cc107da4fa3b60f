#include "maxdiffusion/commands/plan_generate.h"

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/naming_key.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/config/flow.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/media/canny.h"
#include "maxdiffusion/media/decode_video.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/storage/hub.h"
#include "maxdiffusion/storage/hub_cache.h"

namespace md {
namespace {

/// The ControlNets that are in a model folder.
std::vector<std::string> own_controls(const std::string& model) {
  std::vector<std::string> folders;
  for (;;) {
    const std::string folder = model + "/" + control_component(folders.size());
    if (!exists(folder + "/config.json")) return folders;
    folders.push_back(folder);
  }
}

/// The folders or files of the ControlNets that the keys name, or those in the model's folder if they are `required`.
std::vector<std::string> control_folders(std::vector<std::string> names, bool required, const std::string& model) {
  if (required && names.empty()) names = own_controls(model);
  const bool any = std::ranges::any_of(names, [](const std::string& name) { return std::filesystem::exists(name); });
  if (!required && !any) return {};  // configs name those of generate_controlnet on the hub
  if (names.empty())
    throw Error(Code::invalid_config, "controlnet_model_name_or_path is empty; expected a ControlNet's folder or file")
        .note("try: controlnet_model_name_or_path=FOLDER controlnet_image=edges.png");
  std::vector<std::string> folders;
  for (const std::string& name : names) {
    folders.push_back(std::filesystem::is_regular_file(name) ? name : local_folder(name));
    log_info("ControlNet: {}", folders.back());
  }
  return folders;
}

/// Pixels of a file, or of a web address.
HostArray image_at(const std::string& place) {
  if (place.find("://") == std::string::npos) return decode_image(place);
  const std::string bytes = download_image(place);
  return decode_image_bytes(bytes.data(), bytes.size(), place);
}
HostArray image_at(const char* key, const std::string& place) {
  return naming_key(key, [&] { return image_at(place); });
}

/// Frames of a video's file, u8 [F, H, W, 3], by its ending; of another file the pixels of an image.
HostArray media_at(const std::string& place) {
  const std::string ending = std::filesystem::path(place).extension();
  const bool video = ending == ".mp4" || ending == ".mov" || ending == ".mkv" || ending == ".webm" ||
                     ending == ".avi" || ending == ".gif";
  return video && place.find("://") == std::string::npos ? decode_video(place) : image_at(place);
}

/// f32 [N, C, h, w] of a file → channels last.
HostArray read_latents(const std::string& path) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  auto it = file.tensors().find("latents");
  check(it != file.tensors().end() && it->second.shape().rank() >= 4 && it->second.shape().rank() <= 5, Code::io,
        "'{}' has no tensor 'latents' of four axes (images, channels, height, width) or five (of videos)", path);
  return channels_last(it->second.cast(DType::f32));
}

}  // namespace

SampleRequest with_files(SampleRequest r, const SampleFiles& files, bool control, bool adapters) {
  r.controls.resize(control ? files.control_images.size() : 0);
  for (size_t i = 0; i < r.controls.size(); ++i) {
    const std::string& preprocessor = files.control_preprocessors.at(i);
    r.controls[i].image = image_at("controlnet_image", files.control_images.at(i));
    if (preprocessor == "canny") r.controls[i].image = canny_edges(r.controls[i].image, 100, 200);
  }
  if (!adapters) r.adapters.clear();
  for (const auto& [name, image] : files.adapter_images)
    if (adapters) r.adapters[name].image = image_at((name + "_image").c_str(), image);
  if (!files.latents.empty()) r.latents = naming_key("latents", [&] { return read_latents(files.latents); });
  check(files.last_image.empty() || !files.images.empty(), Code::invalid_config, "last_image is given without image");
  for (const std::string& file : files.images) r.images.push_back(naming_key("image", [&] { return media_at(file); }));
  if (!files.mask_image.empty()) r.mask = image_at("mask_image", files.mask_image);
  if (!files.last_image.empty()) r.images.push_back(image_at("last_image", files.last_image));
  return r;
}

PipelineOptions with_control_folder(PipelineOptions options, bool required, const std::string& model) {
  options.controlnets = control_folders(options.controlnets, required, model);
  return options;
}

GeneratePlan plan_generate(const GenerateRequest& r, const GenerateOptions& options) {
  const ModelToSample what = model_to_sample(r.search);
  GeneratePlan plan{.model = what.model,
                    .folder = options.as_reference ? r.search.output_dir : what.folder,
                    .pipeline = with_control_folder(r.pipeline, options.with_control, what.model),
                    .items = r.items,
                    .axes = r.axes,
                    .as_reference = options.as_reference,
                    .profile = r.profile,
                    .rules = r.rules};
  plan.pipeline.model = what.keys;
  const bool is_local = std::filesystem::exists(plan.model);
  for (GenerateItem& item : plan.items) {
    item.settings["pretrained_model_name_or_path"] =
        quoted(is_local ? std::filesystem::absolute(plan.model).lexically_normal().string() : plan.model);
    item.settings["sample_seed"] = item.sampling.request.sample_seed.value_or(0).text();
  }
  check(!plan.folder.empty(), Code::invalid_config, "output_dir is empty; expected a folder: output_dir=FOLDER");
  return plan;
}

}  // namespace md
