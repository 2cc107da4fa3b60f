#include "maxdiffusion/commands/generate.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/remote_sync.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// Logs how far a request is; of videos a bar shows the steps.
SampleProgress logged(const SampleRequest& request, const Family& family) {
  using Clock = std::chrono::steady_clock;
  const bool videos = family.spec().videos();
  return [=, size = sample_size(request, family), steps = videos && !request.scan_diffusion_loop, start = Clock::now(),
          bar = std::shared_ptr<ProgressBar>()](SampleStage stage, int64_t done, int64_t total) mutable {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    switch (stage) {
      case SampleStage::encoded: return log_info("{} encoded after {:.1f} s", counted(total, "prompt"), seconds);
      case SampleStage::step:
        if (steps && !bar) bar = std::make_shared<ProgressBar>("denoising", total);
        if (steps && done > 0) bar->update(done, "");
        return;
      case SampleStage::denoised:
        if (bar) bar->finish();
        return log_info("{} of {}x{} denoised after {:.1f} s", counted(total, videos ? "video" : "image"), size.height,
                        size.width, seconds);
      case SampleStage::decoded: return log_info("decoded after {:.1f} s", seconds);
    }
  };
}

/// Names of what is directly in a folder, which may be in a bucket.
std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  if (is_remote(folder)) {
    const std::string head = below(split_location(folder).path, "");
    for (const FoundFile& f : list_all_files(folder)) {
      const std::string path = split_location(f.location).path;
      if (path.starts_with(head)) names.insert(path.substr(head.size(), path.find('/', head.size()) - head.size()));
    }
    return names;
  }
  std::error_code none;
  for (const auto& f : std::filesystem::directory_iterator(folder, none)) names.insert(f.path().filename());
  return names;
}

/// Throws as sample_options does.
SampleOptions options_of(const ModelComponents& models, const SampleRequest& request, const SampleBatch& batch,
                         int64_t devices) {
  return sample_options(request, *models.family(), models.folder().scheduler_config(), batch, devices);
}

/// Samples into `folder`; `place`: where its files are in the end, which may be a bucket.
void generate_into(const std::string& folder, const std::string& place, const GeneratePlan& plan) {
  check_writable(folder, "output_dir");
  make_folders(folder);
  DiffusionPipeline pipeline = DiffusionPipeline::load(plan.model, plan.pipeline);
  const Family& family = *pipeline.family();
  SampleRequest request = with_files(plan.sampling.request, plan.sampling.files, !plan.pipeline.controlnet.empty());
  if (plan.as_reference && !request.num_images_per_prompt && request.prompt.size() == 1 && !request.latents)
    request.num_images_per_prompt = sampling_batch(plan.pipeline.batch, pipeline.devices().count());
  request.progress = logged(request, family);
  plan.rules.warn_of_ignored({pipeline.folder(), family, pipeline.devices(), sample_size(request, family)}, "generate");
  std::optional<Profile> profile;  // of all that follows
  if (plan.profile) profile.emplace(pipeline.devices());
  const SampleResult result = pipeline.generate(request);
  const std::set<std::string> taken = plan.as_reference ? std::set<std::string>() : names_in(place);
  if (!request.decode)
    write_latents(folder, result.published_latents ? result.published_latents : result.latents, taken);
  else
    write_media(
        folder + "/" + family.spec().reference.prefix_of_files(static_cast<uint64_t>(*request.sample_seed)),
        plan.sampling.output_type, result.media, plan.sampling.fps,
        [&](int64_t i) -> PngTexts {
          return {{"parameters", result.parameters[static_cast<size_t>(i)]}};
        },
        taken);
  if (profile) log_info("profile: {}", profile->write(folder + "/tensorboard"));
}

/// Likewise, where the plan's folder is one of this machine or in a bucket.
void generate_to_place(const GeneratePlan& plan) {
  const std::string& place = plan.folder;
  if (!is_remote(place)) return generate_into(place, place, plan);
  const std::string here = local_cache_path(below(place, fmt::format(".generated-{}", ::getpid())));
  generate_into(here, place, plan);
  RemoteSync({{here, place}}, {}).settle();
  log_info("the whole profile is in {}", shown(place));
  remove_folder(here);
}

}  // namespace

void generate(const GenerateRequest& request, const GenerateOptions& how) {
  const GeneratePlan plan = plan_generate(request, how);
  try {
    generate_to_place(plan);
  } catch (Error& e) {
    if (e.code() == Code::out_of_memory)
      e.note(
          "try: fewer pixels (height, width, resolution), vae_tiling=true for large images, vae_slicing=true and a "
          "smaller per_device_batch_size for many, or activations_dtype=bfloat16");
    throw;
  }
}

SampleOptions planned_sampling(const ModelComponents& models, const SamplingRequest& sampling, int64_t devices) {
  SampleFiles files{.latents = sampling.files.latents};
  if (models.family()->reference_images()) files.images = sampling.files.images;  // their sizes count
  SampleOptions o = options_of(models, with_files(sampling.request, files), sampling.batch, devices);
  o.scope = models.denoiser_options();
  o.compile = models.options().compile;
  return o;
}

void check_samples_of_run(const ModelComponents& models, const SamplingRequest& sampling) {
  const SampleRequest request = with_files(sampling.request, sampling.files);
  options_of(models, request, sampling.batch, models.devices().count());
  check_images(*models.family(), std::ssize(request.images));
}

void generate_class_images(const TrainingRequest& r) {
  const DreamboothKeys& k = r.data.dreambooth;
  if (k.class_data_dir.empty()) return;  // refused with the rest of the config
  make_folders(k.class_data_dir);
  const int64_t there = std::filesystem::is_empty(k.class_data_dir)
                            ? 0
                            : static_cast<int64_t>(list_image_folder(k.class_data_dir, {}).size());
  const int64_t missing = k.num_class_images - there;
  if (missing <= 0) return;
  log_info("DreamBooth: generating {} images of '{}' into {}", missing, k.class_prompt, k.class_data_dir);
  const PipelineOptions options = with_control_folder(r.pipeline);
  DiffusionPipeline pipeline = DiffusionPipeline::load(options.model.pretrained_model_name_or_path, options);
  SamplingRequest sampling = r.sampling;
  sampling.files.latents.clear();
  SampleRequest request = with_files(sampling.request, sampling.files, !options.controlnet.empty());
  request.prompt = {k.class_prompt};
  request.negative_prompt = {};
  request.num_inference_steps = 50;
  if (!pipeline.family()->spec().embedded_guidance) request.guidance_scale = 7.5;
  request.true_cfg_scale = 1;
  request.do_classifier_free_guidance = true;
  request.num_images_per_prompt = missing;
  request.first_sample = there;  // the seed has given those before
  request.decode = true;
  request.progress = logged(request, *pipeline.family());
  const HostArray images = pipeline.generate(request).media;
  for (int64_t i = 0; i < missing; ++i) {
    const std::string bytes = encode_png(image_of_batch(images, i));
    write_file_atomic(fmt::format("{}/{}-{}.png", k.class_data_dir, there + i, content_hash(bytes)), bytes);
  }
}

HostArray sample_images(ModelComponents& models, const SamplingRequest& sampling, TextEncoder& text,
                        const WeightsOf& weights) {
  SampleRequest request = with_files(sampling.request, sampling.files);
  request.decode = true;
  request.progress = [](SampleStage, int64_t, int64_t) { check_interrupt("the samples are left out"); };
  return DiffusionPipeline({.devices = models.devices(),
                            .family = models.family(),
                            .name = "",
                            .scheduler_config = models.folder().scheduler_config(),
                            .weights = weights,
                            .text_encoder = [&]() -> TextEncoder& { return text; },
                            .autoencoder = [&]() -> MediaAutoencoder& { return models.media_autoencoder(); },
                            .scope = models.denoiser_options(),
                            .compile = models.options().compile,
                            .batch = {.pixels_per_device = int64_t{1} << 19}})
      .generate(request)
      .media;
}

HostArray write_sample_grid(const SamplingRequest& sampling, const HostArray& media, const std::string& path) {
  const Texts& prompts = sampling.request.prompt;
  const int64_t n = media.dims()[0], of_prompt = n / std::ssize(prompts);
  std::vector<GridCell> cells;
  for (int64_t i = 0; i < n; ++i)
    cells.push_back({preview_of(image_of_batch(media, i)), prompts[static_cast<size_t>(i / of_prompt)]});
  const bool videos = media.dims().size() == 5;
  if (videos) write_media(path + "_", "mp4", media, sampling.fps);
  const auto columns = videos ? 2 : static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
  const int64_t height = media.dims()[media.dims().size() - 3];
  HostArray grid = make_grid(cells, columns, std::max<int64_t>(1, (videos ? 64 : 128) / height));
  write_png(path + ".png", grid);
  return grid;
}

namespace {

/// A run's folder stands for its own config.
template <bool kControl, bool kAsReference>
void generate_of(const Words& words) {
  Words w = words;
  if (!w.empty()) w[0] = config_file(w[0]);
  generate(generate_request(config_of(kControl ? "generate_controlnet" : "generate", w)),
           {.with_control = kControl, .as_reference = kAsReference});
}

void print_generate_keys(const KeyPrinter& print) {
  print_config_keys(print, {"run", "devices", "model", "LoRA", "samples"});
}

}  // namespace

Command generate_command() {
  return {"generate",
          "CONFIG|RUN [key=value …]",
          "generate images or videos with a model folder, or with what a run has trained",
          generate_of<false, false>,
          print_generate_keys,
          false,
          generate_of<false, true>};
}

Command generate_controlnet_command() {
  return {"generate_controlnet",    "CONFIG|RUN [key=value …]", "generate images with a model and a ControlNet",
          generate_of<true, false>, print_generate_keys,        false,
          generate_of<true, true>};
}

}  // namespace md
