#include "maxdiffusion/commands/generate.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/media/canny.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/run/ignored_keys.h"
#include "maxdiffusion/run/lora_files.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/runtime/memory.h"
#include "maxdiffusion/storage/hub.h"
#include "maxdiffusion/storage/hub_cache.h"
#include "maxdiffusion/storage/mirror.h"
#include "maxdiffusion/storage/staging.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;

/// u8 [H, W, 3] → f32 [1, H, W, 3] in [0, 1].
HostArray as_floats(const HostArray& rgb) {
  HostArray out(Shape{DType::f32, {1, rgb.dims()[0], rgb.dims()[1], 3}});
  auto from = rgb.view<uint8_t>();
  std::ranges::transform(from, out.mutable_view<float>().begin(),
                         [](uint8_t v) { return static_cast<float>(v) / 255.0f; });
  return out;
}

/// The ControlNet's folder or file that the keys name; empty: none.
std::string control_folder(const ControlKeys& k, bool required) {
  const bool is_file = std::filesystem::is_regular_file(k.controlnet_model_name_or_path);
  if (!required && !is_file && !std::filesystem::is_directory(k.controlnet_model_name_or_path)) return "";
  check(!k.controlnet_model_name_or_path.empty(), Code::invalid_config, "controlnet_model_name_or_path is empty");
  std::string folder = is_file ? k.controlnet_model_name_or_path : local_folder(k.controlnet_model_name_or_path);
  log_info("ControlNet: {}", folder);
  return folder;
}

/// The pixels of a file, or of an address of the web.
HostArray image_at(const std::string& place) {
  if (place.find("://") == std::string::npos) return decode_image(place);
  const std::string bytes = download_image(place);
  return decode_image_bytes(bytes.data(), bytes.size(), place);
}

/// What the ControlNet sees. Without height and width in the config, the image's own, rounded down to multiples of
/// 64, are those of what is drawn.
ControlOptions control_options(RunConfig& c) {
  const ControlKeys& k = c.control;
  check(!k.controlnet_image.empty(), Code::invalid_config,
        "controlnet_image is empty, and the ControlNet of controlnet_model_name_or_path looks at one; give "
        "controlnet_image=FILE");
  HostArray rgb = image_at(k.controlnet_image);
  if (k.controlnet_preprocessor == "canny") rgb = canny_edges(rgb, 100, 200);
  if (!c.sample.height) c.sample.height = std::max<int64_t>(64, rgb.dims()[0] / 64 * 64);
  if (!c.sample.width) c.sample.width = std::max<int64_t>(64, rgb.dims()[1] / 64 * 64);
  ControlOptions o;
  o.image = as_floats(resize_rgb8(rgb, *c.sample.height, *c.sample.width, Filter::lanczos));
  o.scale = k.controlnet_conditioning_scale;
  o.start = k.control_guidance_start;
  o.end = k.control_guidance_end;
  return o;
}

SampleOptions options_of(const RunModels& models, bool as_reference = false) {
  return planned_sampling(models, models.devices().mesh().devices(), as_reference);
}

bool has_images(const RunModels& models) {
  const SampleKeys& k = models.config().sample;
  return models.family()->image_conditioning() || !(k.image + k.image_url + k.last_image).empty();
}

/// The images of the keys, as many as the model takes. Throws invalid_config, and io naming a file.
std::vector<HostArray> given_images(const RunModels& models) {
  const SampleKeys& k = models.config().sample;
  std::vector<HostArray> images;
  if (!k.image.empty() && !k.image_url.empty()) log_warning("image is given; image_url '{}' is not read", k.image_url);
  const std::string& first = k.image.empty() ? k.image_url : k.image;
  check(k.last_image.empty() || !first.empty(), Code::invalid_config, "last_image is given without image");
  for (const std::string& file : {first, k.last_image}) {
    if (!file.empty()) images.push_back(image_at(file));
  }
  check_images(*models.family(), std::ssize(images));
  return images;
}

/// Adds what the images of the keys say; called where there are any, or the model takes any.
void add_images(const RunModels& models, MediaAutoencoder& autoencoder, const WeightsOf& weights,
                const SampleOptions& o, PromptConditioning& prompts) {
  const std::vector<HostArray> images = given_images(models);
  const HostArrays fields =
      ImageConditioner(models.devices(), models.family(), weights, autoencoder, o.scope, o.compile)
          .encode({images}, o.size);
  for (HostArrays* half : {&prompts.positive, &prompts.negative})
    for (const auto& [name, a] : fields)
      if (!half->empty()) (*half)[name] = repeat_rows(a, o.samples());
}

/// A model folder on devices, drawing as a config says.
class Sampler {
 public:
  Sampler(RunConfig config, const RunInfo& run, const std::string& model, const GenerateOptions& how)
      : config_(std::move(config)),
        control_(control_folder(config_.control, how.with_control)),
        models_(config_, run, model, Purpose::sampling, control_) {
    models_.check_weights();
    std::optional<ControlOptions> control;
    if (!control_.empty()) control = control_options(config_);
    options_ = options_of(models_, how.as_reference);
    options_.control = std::move(control);
    check_sampling(*models_.family(), options_);
    if (has_images(models_)) given_images(models_);
    loras_ = read_loras(config_.lora, models_.folder(), *models_.family());
  }
  const RunModels& models() const { return models_; }
  uint64_t seed() const { return options_.seed; }
  void set_embedded_guidance(double scale) { options_.embedded_guidance = scale; }
  /// The samples have the numbers from `first` on, instead of from 0.
  void number_from(int64_t first) { options_.first_sample = first; }

  /// What the file of a picture says of it, in the form that AUTOMATIC1111's web UI writes and other programs read.
  PngTexts texts_of(int64_t picture) const {
    const SampleOptions& o = options_;
    const auto prompt = static_cast<size_t>(picture / o.images_per_prompt);
    std::string text = o.prompts[prompt];
    if (!o.negative_prompts.empty())
      text += "\nNegative prompt: " + o.negative_prompts[o.negative_prompts.size() == 1 ? 0 : prompt];
    text += fmt::format(
        "\nSteps: {}, Sampler: {}, CFG scale: {}, {}Seed: {}, Size: {}x{}, Model: {}, Picture: {}, Version: "
        "maxdiffusion {}",
        o.num_inference_steps, o.scheduler_config.value("_class_name", std::string()), o.guidance_scale,
        models_.family()->spec().embedded_guidance ? fmt::format("Distilled CFG Scale: {}, ", o.embedded_guidance) : "",
        o.seed, o.size.width, o.size.height, std::filesystem::path(models_.folder().path()).filename().string(),
        o.first_sample + picture, version());
    return {{"parameters", text}};
  }

  /// Latents, channels last, scaled.
  HostArray denoise() {
    const Family& family = *models_.family();
    PromptConditioning prompts;
    {  // the encoders leave the devices before the denoiser comes
      const int64_t texts = std::min<int64_t>(static_cast<int64_t>(options_.prompts.size()), 8), d = devices();
      TextEncoder text(models_.devices(), models_.family(), (texts + d - 1) / d * d, weights(), options_.scope,
                       config_.compile, config_.sample.clip_skip, config_.encoders);
      prompts = encode_prompts(text, family, options_);
    }
    return_freed_memory();
    log_info("{} encoded after {:.1f} s", counted(std::ssize(options_.prompts), "prompt"), seconds());
    if (has_images(models_)) {
      std::unique_ptr<MediaAutoencoder> coder = autoencoder(devices());
      add_images(models_, *coder, weights(), options_, prompts);
    }
    ProgressBar bar("denoising", options_.num_inference_steps * ((options_.samples() - 1) / options_.batch + 1));
    if (options_.step_by_step) options_.progress = [&](int64_t done, int64_t) { bar.update(done, ""); };
    HostArray latents = md::denoise(models_.devices(), family, weights(), prompts, options_);
    if (options_.step_by_step) bar.finish();
    log_info("{} of {}x{} denoised after {:.1f} s",
             counted(options_.samples(), family.spec().videos() ? "video" : "image"), options_.size.height,
             options_.size.width, seconds());
    return latents;
  }
  /// f32 [N, H, W, 3] in [−1, 1].
  HostArray decode(const HostArray& latents) {
    std::unique_ptr<MediaAutoencoder> coder = autoencoder(config_.sample.vae_slicing ? devices() : options_.batch);
    HostArray images = decode_latents(*coder, *models_.family(), latents, config_.sample.vae_tiling);
    log_info("decoded after {:.1f} s", seconds());
    return images;
  }

 private:
  int64_t devices() const { return models_.devices().mesh().devices(); }
  std::unique_ptr<MediaAutoencoder> autoencoder(int64_t batch) {
    return std::make_unique<MediaAutoencoder>(models_.devices(), models_.family(), models_.autoencoder_values(), batch,
                                              options_.scope, config_.compile, config_.encoders,
                                              config_.media_chunks.chunks(*models_.family()));
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  WeightsOf weights() {
    return [this](const ParamTable& params, const std::string& component) {
      HostArrays values = models_.weights_of()(params, component);
      // Only this component's: the others come with their own call.
      ParamTable own;
      for (const Param& p : params.params())
        if (p.model == component) own.add(p);
      if (!values.empty()) merge_loras(loras_, own, values);
      return values;
    };
  }

  RunConfig config_;
  std::string control_;
  RunModels models_;
  std::vector<ScaledLora> loras_;
  SampleOptions options_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

SampleOptions planned_sampling(const RunModels& models, int64_t devices, bool as_reference) {
  const RunConfig& c = models.config();
  const int64_t global = c.batches.global_batch_size;
  const double per_device = global > 0  // half a picture more, since what is over is cut off
                                ? (static_cast<double>(global) + 0.5) / static_cast<double>(devices)
                                : c.batches.per_device_batch_size;
  SampleKeys keys = c.sample;
  keys.sample_seed = static_cast<int64_t>(models.run().sample_seed);
  if (!keys.prompt_2.empty() && c.on_command_line.contains("prompt") && !c.on_command_line.contains("prompt_2")) {
    log_info_once("prompt_2 of the file is left aside, since prompt was given on the command line");
    keys.prompt_2.clear();
  }
  if (!keys.negative_prompt_2.empty() && c.on_command_line.contains("negative_prompt") &&
      !c.on_command_line.contains("negative_prompt_2")) {
    log_info_once("negative_prompt_2 of the file is left aside, since negative_prompt was given on the command line");
    keys.negative_prompt_2.clear();
  }
  if (as_reference && !keys.num_images_per_prompt && keys.prompt.size() == 1 && keys.latents.empty())
    keys.num_images_per_prompt = sampling_batch(per_device, devices);
  const MediaSize size = sample_size(c, *models.family());
  check_size(c, *models.family(), size);
  SampleOptions o = sample_options(keys, *models.family(), size, per_device, devices, models.run().seed);
  o.scheduler_config = sampling_config(models.folder().scheduler_config(), c.scheduler);
  o.scheduler = sampler_of(*models.family(), o);
  o.scope = models.denoiser_options();
  o.compile = c.compile;
  o.cache = c.step_cache;
  check_sampling(*models.family(), o);
  return o;
}

namespace {

/// Names of what is directly in a folder, which may be in a bucket.
std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  if (is_remote(folder)) {
    const std::string head = below(parts_of(folder).path, "");
    for (const FoundFile& f : all_below(folder)) {
      const std::string path = parts_of(f.location).path;
      if (path.starts_with(head)) names.insert(path.substr(head.size(), path.find('/', head.size()) - head.size()));
    }
    return names;
  }
  std::error_code none;
  for (const auto& f : std::filesystem::directory_iterator(folder, none)) names.insert(f.path().filename());
  return names;
}

/// Samples into `folder`; `place`: where its files are in the end, which may be a bucket.
void generate_into(const std::string& folder, const std::string& place, const RunInfo& run, const ModelToSample& what,
                   const GenerateOptions& how) {
  const RunConfig& c = what.config;
  check_writable(folder, "output_dir");
  make_folders(folder);
  Sampler sampler(c, run, what.model, how);
  warn_of_ignored_keys(sampler.models(), "generate");
  std::optional<Profile> profile;  // of all that follows
  if (c.profile.enable_profiler) profile.emplace(sampler.models().devices());
  const HostArray latents = naming_damaged_weights(sampler.models(), [&] { return sampler.denoise(); });
  const std::string& type = c.sample.output_type;
  const HostArray media = type == "latent"
                              ? HostArray()
                              : naming_damaged_weights(sampler.models(), [&] { return sampler.decode(latents); });
  const std::set<std::string> taken = how.as_reference ? std::set<std::string>() : names_in(place);
  if (type == "latent")
    write_latents(folder, latents, taken);
  else
    write_media(
        folder + "/" + sampler.models().family()->spec().reference.prefix_of_files(sampler.seed()), type, media,
        c.sample.fps, [&](int64_t i) { return sampler.texts_of(i); }, taken);
  if (profile) log_info("profile: {}", profile->write(folder + "/tensorboard"));
}

/// Likewise, where `place` is a folder of this machine or in a bucket.
void generate_to(const std::string& place, const RunInfo& run, const ModelToSample& what, const GenerateOptions& how) {
  if (!is_remote(place)) return generate_into(place, place, run, what, how);
  const std::string here = staging(below(place, fmt::format(".generated-{}", ::getpid())));
  generate_into(here, place, run, what, how);
  Mirror({{here, place}}, {}).settle();
  log_info("all of it is in {}", shown(place));
  remove_below(here);
}

}  // namespace

void generate(const RunConfig& c, const GenerateOptions& how) {
  const RunInfo run = make_run_info(c, processes());
  const ModelToSample what = model_to_sample(c);
  const std::string place = how.as_reference ? c.run.output_dir : what.folder;
  check(!place.empty(), Code::invalid_config, "output_dir is empty; give output_dir=FOLDER");
  try {
    generate_to(place, run, what, how);
  } catch (Error& e) {
    if (e.code() == Code::out_of_memory)
      e.note(
          "try: fewer pixels (height, width, resolution), vae_tiling=true for large images, vae_slicing=true and a "
          "smaller per_device_batch_size for many, or activations_dtype=bfloat16");
    throw;
  }
}

void check_samples_of_run(const RunModels& models) {
  planned_sampling(models, models.devices().mesh().devices());
  if (has_images(models)) given_images(models);
}

void draw_class_images(const RunConfig& config, const RunInfo& run) {
  const DreamboothKeys& k = config.dreambooth;
  if (k.class_data_dir.empty()) return;  // refused with the rest of the config
  make_folders(k.class_data_dir);
  const int64_t there = std::filesystem::is_empty(k.class_data_dir)
                            ? 0
                            : static_cast<int64_t>(list_image_folder(k.class_data_dir, {}).size());
  const int64_t missing = k.num_class_images - there;
  if (missing <= 0) return;
  log_info("DreamBooth: drawing {} pictures of '{}' into {}", missing, k.class_prompt, k.class_data_dir);
  RunConfig c = config;
  c.sample.prompt = {k.class_prompt};
  c.sample.negative_prompt = {};
  c.sample.num_inference_steps = 50;
  c.sample.guidance_scale = 7.5;
  c.sample.true_cfg_scale = 1;
  c.sample.do_classifier_free_guidance = true;
  c.sample.num_images_per_prompt = missing;
  c.sample.latents.clear();
  Sampler sampler(c, run, c.model.pretrained_model_name_or_path, {});
  sampler.number_from(there);  // the seed has drawn those before
  if (sampler.models().family()->spec().embedded_guidance) sampler.set_embedded_guidance(config.sample.guidance_scale);
  const HostArray images = sampler.decode(sampler.denoise());
  for (int64_t i = 0; i < missing; ++i) {
    const std::string bytes = encode_png(image_of_batch(images, i));
    write_file_atomic(fmt::format("{}/{}-{}.png", k.class_data_dir, there + i, content_hash(bytes)), bytes);
  }
}

HostArray draw_samples(RunModels& models, TextEncoder& text, const WeightsOf& weights) {
  const SampleKeys& keys = models.config().sample;
  SampleOptions o = options_of(models);
  constexpr int64_t kPixels = int64_t{1} << 19;  // at a time on each device
  o.batch = std::max<int64_t>(kPixels / (o.size.height * o.size.width * o.size.frames), 1) * models.devices().count();
  if (o.batch >= o.samples()) o.batch = 0;
  o.progress = [](int64_t, int64_t) { check_interrupt("the samples are left out"); };
  const Family& family = *models.family();
  std::optional<TextEncoder> skipping;
  if (keys.clip_skip != 0)
    skipping.emplace(models.devices(), models.family(), models.text_batch(), weights, o.scope, o.compile,
                     keys.clip_skip, models.config().encoders);
  PromptConditioning prompts = encode_prompts(skipping ? *skipping : text, family, o);
  if (has_images(models)) add_images(models, models.media_autoencoder(), weights, o, prompts);
  const HostArray latents = denoise(models.devices(), family, weights, prompts, o);
  return decode_latents(models.media_autoencoder(), family, latents, keys.vae_tiling);
}

HostArray write_sample_grid(const RunModels& models, const HostArray& media, const std::string& path) {
  const SampleKeys& keys = models.config().sample;
  const int64_t n = media.dims()[0], of_prompt = n / std::ssize(keys.prompt);
  std::vector<GridCell> cells;
  for (int64_t i = 0; i < n; ++i)
    cells.push_back({still_of(image_of_batch(media, i)), keys.prompt[static_cast<size_t>(i / of_prompt)]});
  const bool videos = media.dims().size() == 5;
  if (videos) write_media(path + "_", "mp4", media, keys.fps);
  const auto columns = videos ? 2 : static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
  const int64_t height = media.dims()[media.dims().size() - 3];
  HostArray grid = make_grid(cells, columns, std::max<int64_t>(1, (videos ? 64 : 128) / height));
  write_png(path + ".png", grid);
  return grid;
}

}  // namespace md
