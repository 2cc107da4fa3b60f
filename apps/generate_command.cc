#include "apps/generate_command.h"

#include <chrono>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/hub_cache.h"
#include "maxdiffusion/base/image.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/images/canny.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/images/resize.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/pipelines/text_to_image.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;

/// The newest checkpoint of this run, if it has trained, else the model folder.
std::string model_of(const RunConfig& c) {
  if (c.run.run_name.empty()) return c.model.pretrained_model_name_or_path;
  const std::string checkpoints = c.folder() + "/checkpoints";
  const std::vector<int64_t> steps = list_checkpoints(checkpoints);
  if (steps.empty()) return c.model.pretrained_model_name_or_path;
  log_info("run '{}' has trained: its checkpoint of step {} is used", c.run.run_name, steps.back());
  return checkpoint_folder(checkpoints, steps.back());
}

/// f32 [−1, 1] → f32 [0, 1], clipped.
HostArray unit_range(const HostArray& pictures) {
  HostArray out(pictures.shape());
  auto from = pictures.view<float>();
  std::transform(from.begin(), from.end(), out.mutable_view<float>().begin(),
                 [](float v) { return std::clamp(v / 2 + 0.5f, 0.0f, 1.0f); });
  return out;
}

/// u8 [H, W, 3] → f32 [1, H, W, 3] in [0, 1].
HostArray as_floats(const HostArray& rgb) {
  HostArray out(Shape{DType::f32, {1, rgb.dims()[0], rgb.dims()[1], 3}});
  auto from = rgb.view<uint8_t>();
  std::transform(from.begin(), from.end(), out.mutable_view<float>().begin(),
                 [](uint8_t v) { return static_cast<float>(v) / 255.0f; });
  return out;
}

/// The ControlNet that the keys name, if any: its folder, and its options. Without height and width in the config, the
/// picture's own, rounded down to multiples of 64, are those of what is drawn.
std::optional<ControlOptions> control_of(RunConfig& c, bool required, std::string& folder) {
  const ControlKeys& k = c.control;
  const bool is_folder = std::filesystem::is_directory(k.controlnet_model_name_or_path);
  if (!required && !is_folder) return {};
  check(!k.controlnet_model_name_or_path.empty(), Code::invalid_config, "controlnet_model_name_or_path is empty");
  folder = local_folder(k.controlnet_model_name_or_path);
  ControlOptions o;
  o.config = read_config<ControlNetConfig>(folder + "/config.json");
  check(!k.controlnet_image.empty(), Code::invalid_config, "controlnet_image is empty; give controlnet_image=FILE");
  HostArray rgb = decode_image(k.controlnet_image);
  check(
      k.controlnet_preprocessor.empty() || k.controlnet_preprocessor == "none" || k.controlnet_preprocessor == "canny",
      Code::invalid_config, "controlnet_preprocessor '{}' is not one of: none, canny", k.controlnet_preprocessor);
  if (k.controlnet_preprocessor == "canny") rgb = canny_edges(rgb, 100, 200);
  if (!c.sample.height) c.sample.height = std::max<int64_t>(64, rgb.dims()[0] / 64 * 64);
  if (!c.sample.width) c.sample.width = std::max<int64_t>(64, rgb.dims()[1] / 64 * 64);
  o.picture = as_floats(resize_rgb8(rgb, *c.sample.height, *c.sample.width, Filter::lanczos));
  o.scale = k.controlnet_conditioning_scale;
  o.start = k.control_guidance_start;
  o.end = k.control_guidance_end;
  log_info("ControlNet: {}", folder);
  return o;
}

/// A model folder on devices, drawing as a config says.
class Painter {
 public:
  Painter(RunConfig config, const std::string& model, bool with_control)
      : config_(std::move(config)),
        folder_(ModelFolder::open(model, config_.model.clip_bpe_file, config_.model.revision)),
        devices_(open_devices(config_)) {
    config_.reference.judge_model(folder_.unet.norm_num_groups);
    std::optional<ControlOptions> control = control_of(config_, with_control, control_folder_);
    options_ = text_to_image_options(config_, folder_, devices());
    options_.control = std::move(control);
    read_loras();
  }
  const ModelFolder& folder() const { return folder_; }
  const Devices& on() const { return devices_; }
  const TextToImageOptions& options() const { return options_; }

  /// Latents f32 [N, h, w, C], scaled.
  HostArray denoise() {
    PromptEmbeddings prompts;
    {  // the encoders leave the devices before the UNet comes
      const int64_t texts = std::min<int64_t>(static_cast<int64_t>(options_.prompts.size()), 8);
      TextEncoder text(devices_, folder_, (texts + devices() - 1) / devices() * devices(), weights(), options_.scope,
                       config_.compile, config_.sample.clip_skip);
      prompts = encode_prompts(text, folder_, options_);
    }
    log_info("{} prompts encoded after {:.1f} s", options_.prompts.size(), seconds());
    const HostArray latents = md::denoise(devices_, folder_, weights(), prompts, options_);
    log_info("{} pictures of {}x{} denoised after {:.1f} s", options_.pictures(), options_.height, options_.width,
             seconds());
    return latents;
  }
  /// f32 [N, H, W, 3] in [−1, 1].
  HostArray decode(const HostArray& latents) {
    PictureCoder coder(devices_, folder_.vae, weights()(vae_params(folder_, DType::f32), "vae"),
                       config_.sample.vae_slicing ? devices() : options_.batch, options_.scope, config_.compile);
    const HostArray pictures = decode_latents(coder, folder_, latents, config_.sample.vae_tiling);
    log_info("decoded after {:.1f} s", seconds());
    return pictures;
  }

 private:
  int64_t devices() const { return devices_.mesh().devices(); }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  /// Those of the keys, and those that the folder's run has trained.
  void read_loras() {
    std::vector<LoraChoice> chosen = chosen_loras(config_.lora);
    const std::string own = folder_.path + "/pytorch_lora_weights.safetensors";
    if (exists(own)) chosen.insert(chosen.begin(), {own, 1});
    if (chosen.empty()) return;
    const LoraTargets targets(denoiser_params(folder_));
    for (const LoraChoice& l : chosen) {
      loras_.push_back({read_lora(l.path, targets), l.scale});
      log_info("LoRA {} with scale {}", l.path, l.scale);
    }
  }
  WeightsOf weights() {
    return [this](const ParamTable& params, const std::string& component) {
      HostArrays values = plain_weights(params, component);
      // Only this component's: the others come with their own call.
      ParamTable own;
      for (const Param& p : params.params())
        if (p.model == component) own.add(p);
      if (!values.empty()) merge_loras(loras_, own, values);
      return values;
    };
  }
  HostArrays plain_weights(const ParamTable& params, const std::string& component) {
    const ModelKeys& m = config_.model;
    if (component == "controlnet") return folder_.values_at(params, component, control_folder_);
    if (component == "unet" && !m.lightning_repo.empty())
      return folder_.values_at(params, component, local_folder(m.lightning_repo) + "/" + m.lightning_ckpt);
    if (component == "unet" && !m.unet_checkpoint.empty())
      return folder_.values_at(params, component, unet_folder(m.unet_checkpoint));
    const bool fresh = component == "unet"  ? m.train_new_unet
                       : component == "vae" ? m.train_new_vae
                                            : m.random_text_encoder;
    return folder_.values(params, component, fresh, static_cast<uint64_t>(config_.run.seed));
  }

  RunConfig config_;
  ModelFolder folder_;
  Devices devices_;
  std::string control_folder_;
  std::vector<ScaledLora> loras_;
  TextToImageOptions options_;
  Clock::time_point start_ = Clock::now();
};

void write_pngs(const std::string& prefix, const HostArray& pictures) {
  for (int64_t i = 0; i < pictures.dims()[0]; ++i) {
    const std::string path = fmt::format("{}{}.png", prefix, i);
    write_png(path, image_of_batch(pictures, i));
    log_info("wrote {}", path);
  }
}

/// As output_type says.
void write_pictures(const RunConfig& c, Painter& painter) {
  const std::string& type = c.sample.output_type;
  const HostArray latents = painter.denoise();
  make_folders(c.run.output_dir);
  if (type == "latent") {
    const std::string path = c.run.output_dir + "/latents.safetensors";
    write_safetensors(path, {{"latents", nhwc_to_nchw(latents)}});
    log_info("wrote {}", path);
    return;
  }
  const HostArray pictures = painter.decode(latents);
  if (type == "np") {
    const std::string path = c.run.output_dir + "/images.safetensors";
    write_safetensors(path, {{"images", unit_range(pictures)}});
    log_info("wrote {}", path);
  } else {
    write_pngs(c.run.output_dir + (painter.folder().text_encoder_2 ? "/image_sdxl_" : "/image_"), pictures);
  }
}

}  // namespace

void draw_class_pictures(const RunConfig& run) {
  const DreamboothKeys& k = run.dreambooth;
  if (k.class_data_dir.empty()) return;  // refused with the rest of the config
  make_folders(k.class_data_dir);
  const int64_t there = std::filesystem::is_empty(k.class_data_dir)
                            ? 0
                            : static_cast<int64_t>(list_image_folder(k.class_data_dir, {}).size());
  const int64_t missing = k.num_class_images - there;
  if (missing <= 0) return;
  log_info("DreamBooth: drawing {} pictures of '{}' into {}", missing, k.class_prompt, k.class_data_dir);
  RunConfig c = run;
  c.sample.prompt = {k.class_prompt};
  c.sample.negative_prompt = {};
  c.sample.num_inference_steps = 50;
  c.sample.guidance_scale = 7.5;
  c.sample.do_classifier_free_guidance = true;
  c.sample.num_images_per_prompt = missing;
  c.sample.latents.clear();
  Painter painter(c, c.model.pretrained_model_name_or_path, false);
  const HostArray pictures = painter.decode(painter.denoise());
  for (int64_t i = 0; i < missing; ++i) {
    const HostArray rgb = image_of_batch(pictures, i);
    const std::string bytes = encode_png(rgb);
    write_file_atomic(fmt::format("{}/{}-{}.png", k.class_data_dir, there + i, content_hash(bytes)), bytes);
  }
}

void generate_command(const std::string& file, const std::vector<std::string>& overrides, bool with_control) {
  const RunConfig c = RunConfig::load(file, overrides);
  const std::string& type = c.sample.output_type;
  check(type == "png" || type == "np" || type == "latent", Code::invalid_config,
        "output_type '{}' is not one of: png, np, latent", type);
  check(!c.run.output_dir.empty(), Code::invalid_config, "output_dir is empty; give output_dir=FOLDER");
  Painter painter(c, model_of(c), with_control);
  std::optional<Profile> profile;  // of all that follows
  if (c.profile.enable_profiler) profile.emplace(painter.on());
  write_pictures(c, painter);
  if (profile) log_info("profile: {}", profile->write(c.run.output_dir + "/tensorboard"));
}

}  // namespace md
