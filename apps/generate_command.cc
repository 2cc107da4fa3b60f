#include "apps/generate_command.h"

#include <chrono>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/hub_cache.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/picture.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/canny.h"
#include "maxdiffusion/data/image_folder.h"
#include "maxdiffusion/data/resize.h"
#include "maxdiffusion/pipelines/text_to_image.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;
using Values = std::map<std::string, HostArray>;

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

void write_pngs(const std::string& prefix, const HostArray& pictures) {
  for (int64_t i = 0; i < pictures.dims()[0]; ++i) {
    HostArray one = rows(pictures, i, 1);
    const std::string path = fmt::format("{}{}.png", prefix, i);
    write_png(path, to_rgb8(one.reshaped({one.dims().begin() + 1, one.dims().end()})));
    log_info("wrote {}", path);
  }
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

}  // namespace

void generate_command(const std::string& file, const std::vector<std::string>& overrides, bool with_control) {
  RunConfig c = RunConfig::load(file, overrides);
  const std::string& type = c.sample.output_type;
  check(type == "png" || type == "np" || type == "latent", Code::invalid_config,
        "output_type '{}' is not one of: png, np, latent", type);
  check(!c.run.output_dir.empty(), Code::invalid_config, "output_dir is empty; give output_dir=FOLDER");
  const ModelFolder folder = ModelFolder::open(model_of(c), c.model.clip_bpe_file, c.model.revision);
  const Devices devices = open_devices(c);
  const int64_t count = devices.mesh().devices();
  std::string control_folder;
  const std::optional<ControlOptions> control = control_of(c, with_control, control_folder);
  TextToImageOptions o = text_to_image_options(c, folder, count);
  o.control = control;
  const uint64_t seed = static_cast<uint64_t>(c.run.seed);
  auto weights = [&](const ParamTable& params, const std::string& component) {
    if (component == "controlnet") return folder.values_at(params, component, control_folder);
    if (component == "unet" && !c.model.lightning_repo.empty())
      return folder.values_at(params, component, local_folder(c.model.lightning_repo) + "/" + c.model.lightning_ckpt);
    if (component == "unet" && !c.model.unet_checkpoint.empty())
      return folder.values_at(params, component, unet_folder(c.model.unet_checkpoint));
    const bool fresh = component == "unet"  ? c.model.train_new_unet
                       : component == "vae" ? c.model.train_new_vae
                                            : c.model.random_text_encoder;
    return folder.values(params, component, fresh, seed);
  };

  const auto start = Clock::now();
  auto seconds = [&start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  PromptEmbeddings prompts;
  {  // the encoders leave the devices before the UNet comes
    const int64_t texts = std::min<int64_t>(static_cast<int64_t>(o.prompts.size()), 8);
    TextEncoder text(devices, folder, (texts + count - 1) / count * count, weights, c.compile, c.sample.clip_skip);
    prompts = encode_prompts(text, folder, o);
  }
  log_info("{} prompts encoded after {:.1f} s", o.prompts.size(), seconds());
  const HostArray latents = denoise(devices, folder, weights, prompts, o);
  log_info("{} pictures of {}x{} denoised after {:.1f} s", o.pictures(), o.height, o.width, seconds());

  make_folders(c.run.output_dir);
  if (type == "latent") {
    const std::string path = c.run.output_dir + "/latents.safetensors";
    write_safetensors(path, {{"latents", nhwc_to_nchw(latents)}});
    log_info("wrote {}", path);
    return;
  }
  PictureCoder coder(devices, folder.vae, weights(vae_params(folder, DType::f32), "vae"),
                     c.sample.vae_slicing ? count : o.batch, c.compile);
  const HostArray pictures = decode_latents(coder, folder, latents, c.sample.vae_tiling);
  log_info("decoded after {:.1f} s", seconds());
  if (type == "np") {
    const std::string path = c.run.output_dir + "/images.safetensors";
    write_safetensors(path, {{"images", unit_range(pictures)}});
    log_info("wrote {}", path);
  } else {
    write_pngs(c.run.output_dir + (folder.text_encoder_2 ? "/image_sdxl_" : "/image_"), pictures);
  }
}

}  // namespace md
