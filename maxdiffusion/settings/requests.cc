#include "maxdiffusion/settings/requests.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/data/folders/dynamic_prompts.h"
#include "maxdiffusion/optim/low_precision.h"
#include "maxdiffusion/settings/lora_tags.h"
#include "maxdiffusion/settings/prompt_file.h"

namespace md {

AxisRules axis_rules(const DeviceRequest& r, const std::string& of_family) {
  return AxisRules::for_family(r.sharding, r.mesh.axes(), of_family);
}

Devices open_devices(const DeviceRequest& r, const std::string& of_family) {
  return open_devices(r.hardware, r.mesh, r.sharding, of_family);
}

DeviceRequest device_request(const RunConfig& c) { return {c.hardware, c.mesh, c.sharding}; }

namespace {

/// Bytes of optimizer slots, float32 master weight and average per element of a large matrix.
int64_t state_bytes_per_weight(const RunConfig& c) {
  constexpr int64_t kSide = 1024;
  int64_t bytes = 0;
  for (const StateSlot& slot : optimizer_slots(c.optim))
    if (const auto array = slot.array({.dims = {kSide, kSide}, .axes = {}})) bytes += array->shape.bytes();
  bytes /= kSide * kSide;
  const bool has_copy = is_low_precision(parse_dtype(c.layers.weights_dtype)) &&
                        low_precision_update(c.optim.low_precision_update) == LowPrecisionUpdate::master_f32;
  return bytes + (has_copy ? 4 : 0) + (c.update.ema_decay > 0 ? 4 : 0);
}

ComponentsRequest components_request(const RunConfig& c, const RunInfo& run) {
  return {.model = {.keys = c.model,
                    .seed = run.seed,
                    .scheduler = c.scheduler,
                    .inversion = c.inversion,
                    .norm_num_groups = c.reference.norm_num_groups},
          .devices = device_request(c),
          .encoders = {.keys = c.encoders,
                       .layers = c.layers,
                       .chunks = c.media_chunks,
                       .compile = c.compile,
                       .sizes = c.sample,
                       .resolution = c.images.resolution,
                       .state_bytes_per_weight = c.lora.train_lora ? 0 : state_bytes_per_weight(c)}};
}

PipelineOptions pipeline_options(const RunConfig& c) {
  return {.model = c.model,
          .controlnets = split_paths(c.control.controlnet_model_name_or_path),
          .added = c.added_models,
          .adapters = {c.adapters.ip_adapter, c.adapters.ip_adapter_image_encoder, c.adapters.t2i_adapter},
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
  return split_paths(k.image);
}

std::optional<SamplePlan> samples_of(const RunConfig& c, const SamplingRequest& sampling) {
  const RunKeys& k = c.run;
  if (c.sample.prompt.empty() || (k.sample_every == 0 && !k.enable_ssim && !k.enable_generate_video_for_eval))
    return {};
  return SamplePlan{k.sample_every, k.enable_generate_video_for_eval, k.enable_ssim, sampling};
}

}  // namespace

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

TrainingRequest training_request(const RunConfig& c, bool joins) {
  if (joins) {
    join_processes(c.hardware.hardware == "tpu");
    throw_together(processes(), "start", {});  // as refuse_together() in a process that refuses its command
  }
  const RunInfo run = make_run_info(c, processes());
  const SamplingRequest sampling = sampling_request(c, run);
  return {.run = run,
          .components = components_request(c, run),
          .data = c,
          .learning = c,
          .sampling = sampling,
          .samples = samples_of(c, sampling),
          .pipeline = pipeline_options(c),
          .check_dir = c.run.check_dir,
          .rules = KeyRules(c)};
}

namespace {

std::map<std::string, std::string> changed_settings(const RunConfig& c) {
  RunConfig copy = c, usual;
  KeyList keys, defaults;
  keys.add(copy), defaults.add(usual);
  keys.make_paths_absolute();
  const std::map<std::string, std::string> unchanged = defaults.values();
  std::map<std::string, std::string> out = keys.values();
  std::erase_if(out,
                [&](const auto& v) { return v.second == unchanged.at(v.first) || !image_keys().contains(v.first); });
  return out;
}

}  // namespace

const std::set<std::string>& image_keys() {
  static const std::set<std::string> names = [] {
    RunConfig c;
    KeyList keys;
    c.groups([&](const std::string& title, auto&... structs) {
      if (title == "samples" || title == "LoRA") (keys.add(structs), ...);
    });
    keys.add(c.model), keys.add(c.layers), keys.add(c.encoders), keys.add(c.mesh), keys.add(c.sharding);
    std::set<std::string> all = {"hardware", "cpu_device_count", "resolution", "per_device_batch_size",
                                 "global_batch_size"};
    for (const ConfigKey& key : keys.keys()) all.insert(key.name);
    c.prompts.visit([&](const char* name, auto&&...) { all.erase(name); });
    all.erase("preview_every"), all.erase("preview_autoencoder");
    return all;
  }();
  return names;
}

namespace {

/// Expands the prompts of each image if they have alternatives; returns whether they have.
bool choose_prompts(RunConfig& c, DynamicPrompts& dynamic, uint64_t seed) {
  SampleKeys& k = c.sample;
  const std::vector<std::pair<const char*, Texts*>> texts = {{"prompt", &k.prompt},
                                                             {"negative_prompt", &k.negative_prompt},
                                                             {"prompt_2", &k.prompt_2},
                                                             {"negative_prompt_2", &k.negative_prompt_2}};
  if (std::ranges::none_of(texts,
                           [](const auto& t) { return std::ranges::any_of(*t.second, DynamicPrompts::has_choices); }))
    return false;
  const int64_t prompts = std::ssize(k.prompt), each = k.num_images_per_prompt.value_or(1);
  check(each >= 1, Code::invalid_config, "num_images_per_prompt is {}; expected 1 or more", each);
  check(prompts == 1 || each == 1 || images_of(c.sample).size() < 2, Code::invalid_config,
        "image: several images are given for several prompts with choices and num_images_per_prompt={}; expected 1",
        each);
  for (size_t stream = 0; stream < texts.size(); ++stream) {
    const auto& [key, list] = texts[stream];
    const bool for_all = std::ssize(*list) == 1;
    if (!for_all && std::ssize(*list) != prompts) continue;  // empty, or rejected later
    if (for_all && stream > 0 && !DynamicPrompts::has_choices(list->front())) continue;
    const Texts patterns = *list;
    list->clear();
    for (int64_t image = 0; image < prompts * each; ++image)
      list->push_back(
          dynamic.chosen(key, patterns[for_all ? 0 : static_cast<size_t>(image / each)], seed, image, stream));
  }
  k.num_images_per_prompt = 1;
  return true;
}

}  // namespace

GenerateRequest generate_request(const RunConfig& c) {
  GenerateRequest r{.search = run_search(c),
                    .pipeline = pipeline_options(c),
                    .items = {},
                    .profile = c.profile.enable_profiler,
                    .rules = KeyRules(c)};
  const bool of_file = !c.prompts.prompt_file.empty();
  std::vector<PromptLine> lines = of_file ? prompt_lines(c) : std::vector<PromptLine>{{c, ""}};
  if (const std::string& xy = c.prompts.xy; !xy.empty()) {
    check(!of_file, Code::invalid_config, "xy is given with prompt_file; expected one of them");
    check(c.sample.output_type != "latent", Code::invalid_config,
          "xy is given with output_type=latent; expected another: a sheet shows pixels");
    r.axes = xy_axes(xy);
    lines.clear();
    for (RunConfig& its : xy_configs(c, r.axes)) lines.push_back({std::move(its), ""});
  }
  DynamicPrompts dynamic(c.prompts.wildcards_dir);
  bool chosen = false, tagged = false;
  for (PromptLine& line : lines) try {
      RunConfig& its = line.config;
      if (of_file && !its.sample.num_images_per_prompt) its.sample.num_images_per_prompt = 1;
      const RunInfo run = make_run_info(its, processes());
      if (its.prompts.dynamic_prompts) chosen |= choose_prompts(its, dynamic, run.sample_seed);
      tagged |= take_lora_tags(its.sample, its.lora, its.prompts.lora_dir);
      r.items.push_back({sampling_request(its, run), its.lora, line.where, changed_settings(its)});
    } catch (Error& e) {
      if (of_file) e.note("in " + line.where);
      throw;
    }
  if (c.prompts.dynamic_prompts && !chosen)
    log_warning("dynamic_prompts is ignored: no prompt has alternatives, {{a|b}}, or wildcards, __name__");
  if (!c.prompts.lora_dir.empty() && !tagged)
    log_warning("lora_dir is ignored: no prompt names a LoRA file, <lora:name:0.8>");
  r.pipeline.keep_loaded = r.items.size() > 1;
  return r;
}

GenerateRequest serve_request(const RunConfig& c) {
  for (const char* key :
       {"prompt", "prompt_2", "image", "image_url", "mask_image", "last_image", "latents", "only_image", "output_type",
        "prompt_file", "dynamic_prompts", "wildcards_dir", "controlnet_model_name_or_path", "controlnet_image",
        "ip_adapter", "t2i_adapter", "sample_seed"})
    if (c.on_command_line.contains(key)) log_warning("{} is ignored: requests to the server give it, or cannot", key);
  GenerateRequest r{.search = run_search(c),
                    .pipeline = pipeline_options(c),
                    .items = {{sampling_request(c, make_run_info(c, processes())), c.lora, "", {}}},
                    .profile = false,
                    .rules = KeyRules(c),
                    .lora_dir = c.prompts.lora_dir};
  r.pipeline.controlnets.clear();
  r.pipeline.adapters = {};
  r.pipeline.keep_loaded = true;
  SampleRequest& defaults = r.items[0].sampling.request;
  defaults.prompt.clear(), defaults.prompt_2.clear();
  defaults.controls.clear();
  defaults.adapters.clear();
  return r;
}

namespace {

/// The value of ControlNet `i` of `n`, of a key with one for all or one each; an empty list: `usual`.
template <class T>
std::vector<T> for_each_control(const char* key, std::vector<T> values, size_t n, const T& usual) {
  if (values.empty()) values = {usual};
  check(values.size() == 1 || values.size() == n, Code::invalid_config,
        "{} has {} values for {} ControlNets; expected one for all, or one each", key, values.size(), n);
  if (values.size() == 1) values.resize(n, T(values[0]));
  return values;
}

ControlRequest control_request(const ControlKeys& k, size_t i, size_t n) {
  std::optional<double> scale;
  if (const auto& scales = k.controlnet_conditioning_scale; !scales.empty())
    scale = for_each_control("controlnet_conditioning_scale", scales, n, 1.0)[i];
  return {.scale = scale,
          .start = for_each_control("control_guidance_start", k.control_guidance_start, n, 0.0)[i],
          .end = for_each_control("control_guidance_end", k.control_guidance_end, n, 1.0)[i]};
}

}  // namespace

SamplingRequest sampling_request(const RunConfig& c, const RunInfo& run) {
  const SampleFileKeys& k = c.sample;
  SampleRequest r{k};
  const auto& on_command_line = c.on_command_line;
  for (const auto& [key, first, texts] :
       {std::tuple{"prompt_2", "prompt", &r.prompt_2}, {"negative_prompt_2", "negative_prompt", &r.negative_prompt_2}})
    if (!texts->empty() && on_command_line.contains(first) && !on_command_line.contains(key)) {
      log_info_once("{} of the file is ignored: the command line gives {}", key, first);
      texts->clear();
    }
  r.sample_seed = run.sample_seed;
  r.resolution = c.images.resolution;
  r.scheduler = c.scheduler;
  r.cache = c.step_cache;
  const std::vector<std::string> control_images = split_paths(c.control.controlnet_image);
  const std::vector<std::string> preprocessors = for_each_control(
      "controlnet_preprocessor", c.control.controlnet_preprocessor, control_images.size(), std::string("none"));
  for (size_t i = 0; i < control_images.size(); ++i)
    r.controls.push_back(control_request(c.control, i, control_images.size()));
  std::map<std::string, std::string> adapter_images;
  for (const auto& [name, image, scale] :
       {std::tuple{"ip_adapter", c.adapters.ip_adapter_image, c.adapters.ip_adapter_scale},
        {"t2i_adapter", c.adapters.t2i_adapter_image, c.adapters.t2i_adapter_conditioning_scale}})
    if (!image.empty()) adapter_images[name] = image, r.adapters[name].scale = scale;
  r.decode = k.output_type != "latent";
  return {.request = std::move(r),
          .files = {.latents = k.latents,
                    .last_image = k.last_image,
                    .mask_image = k.mask_image,
                    .adapter_images = adapter_images,
                    .images = images_of(k),
                    .control_images = control_images,
                    .control_preprocessors = preprocessors},
          .batch = {c.batches.per_device_batch_size, c.batches.global_batch_size},
          .only_image = k.only_image,
          .output_type = k.output_type,
          .fps = k.fps};
}

}  // namespace md
