#include "maxdiffusion/commands/generate.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <ranges>
#include <set>
#include <span>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/model_words.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_names.h"
#include "maxdiffusion/settings/foreign_image.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/location.h"
#include "maxdiffusion/storage/remote_sync.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// Logs the progress of a request, with a progress bar over the steps.
SampleProgress logged(const SampleRequest& request, const Family& family) {
  using Clock = std::chrono::steady_clock;
  const bool videos = family.spec().videos();
  return [=, size = sample_size(request, family), steps = !request.scan_diffusion_loop, start = Clock::now(),
          bar = std::shared_ptr<ProgressBar>()](SampleStage stage, int64_t done, int64_t total) mutable {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    switch (stage) {
      case SampleStage::encoded: return log_info("{} encoded after {:.2f} s", counted(total, "prompt"), seconds);
      case SampleStage::step:
        if (!steps) return;
        if (!bar) bar = std::make_shared<ProgressBar>("denoising", total);
        return bar->update(done, "");
      case SampleStage::denoised:
        if (bar) bar->finish();
        return log_info("{} of {}x{} denoised after {:.2f} s", counted(total, videos ? "video" : "image"), size.height,
                        size.width, seconds);
      case SampleStage::decoded: return log_info("decoded after {:.2f} s", seconds);
    }
  };
}

/// Writes the previews of a request to preview.png, side by side.
std::function<void(SamplePreview)> preview_file(const std::string& folder) {
  log_info("previews: {}/preview.png", folder);
  return [path = folder + "/preview.png"](const SamplePreview& p) {
    std::vector<GridCell> cells;
    for (const HostArray& image : p.images) cells.push_back({image, ""});
    write_png(path, make_grid(cells, std::ssize(cells)));
  };
}

/// Names directly in a folder, which may be in a bucket.
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

int64_t number_of_samples(const SampleRequest& r) {
  return r.latents ? r.latents.dims()[0] : std::ssize(r.prompt) * r.num_images_per_prompt.value_or(1);
}

/// Settings as YAML, from which generate_of generates image `number` of `n` again.
std::string settings_of(std::map<std::string, std::string> settings, const SampleRequest& request, int64_t number,
                        int64_t n) {
  if (request.num_images_per_prompt) settings["num_images_per_prompt"] = std::to_string(*request.num_images_per_prompt);
  if (n > 1) settings["only_image"] = std::to_string(number);
  std::string text = fmt::format("# maxdiffusion {}\n", version());
  for (const auto& [key, value] : settings) text += key + ": " + value + "\n";
  return text;
}

/// Encodes and writes samples while the next ones are generated.
class Writer {
 public:
  /// Waits for the samples before, then starts. Throws what writing them threw.
  void start(std::function<void()> write) {
    wait();
    pending_ = std::async(std::launch::async, std::move(write));
  }
  void wait() {
    if (pending_.valid()) pending_.get();
  }
  /// Throws if writing has failed.
  void check_failure() {
    if (pending_.valid() && pending_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) pending_.get();
  }

 private:
  std::future<void> pending_;
};

/// State while a plan runs.
struct Work {
  const GeneratePlan& plan;
  const std::string& folder;       // on this machine
  std::set<std::string> existing;  // names that are not replaced; used by `writer`
  SampleRequest files = {};        // contents of the files of the keys; lines of prompt_file name no other files
  /// With GeneratePlan::axes: for each image of an item, its previews from all items, u8 [H, W, 3].
  std::vector<std::vector<HostArray>> sheets = {};
  Writer writer = {};  // last: it ends before what it uses
};

/// act(); its errors name the item's place in a prompt file, unless they name another item's.
template <class F>
auto naming(const GenerateItem& item, const GeneratePlan& plan, F&& act) {
  const auto note_of = [](const GenerateItem& its) { return "in " + its.where; };
  try {
    return act();
  } catch (Error& e) {
    const bool named = std::ranges::any_of(
        plan.items, [&](const GenerateItem& other) { return std::ranges::count(e.notes(), note_of(other)) > 0; });
    if (!item.where.empty() && !named) e.note(note_of(item));
    throw;
  }
}

SampleRequest request_of(const GenerateItem& item, const Work& work, int64_t devices) {
  const SampleRequest& files = work.files;
  SampleRequest r = item.sampling.request;
  r.images = files.images, r.mask = files.mask, r.latents = files.latents;
  for (const auto& [name, adapter] : files.adapters) r.adapters[name].image = adapter.image;
  r.controls.resize(files.controls.size());
  for (size_t i = 0; i < r.controls.size(); ++i) r.controls[i].image = files.controls[i].image;
  if (work.plan.as_reference && !r.num_images_per_prompt && r.prompt.size() == 1 && !r.latents)
    r.num_images_per_prompt = sampling_batch(work.plan.pipeline.batch, devices);
  return r;
}

using Items = std::span<const GenerateItem>;

/// Whether two items differ in texts and seeds alone.
bool equal_but_for_texts(const GenerateItem& a, const GenerateItem& b) {
  const std::set<std::string> texts = {"prompt", "negative_prompt", "prompt_2", "negative_prompt_2", "sample_seed"};
  const auto rest = [&](const GenerateItem& item) {
    std::map<std::string, std::string> out = item.settings;
    std::erase_if(out, [&](const auto& setting) { return texts.contains(setting.first); });
    return out;
  };
  const auto counts = [](const SampleRequest& r) {
    return std::array{r.prompt.size(), r.negative_prompt.size(), r.prompt_2.size(), r.negative_prompt_2.size()};
  };
  return text_of_files(a.lora) == text_of_files(b.lora) && rest(a) == rest(b) &&
         counts(a.sampling.request) == counts(b.sampling.request);
}

/// Writes the samples of items that were one request.
void write_samples(Items items, const std::vector<SampleRequest>& requests, const SampleResult& result,
                   const Family& family, Work& work) {
  const int64_t n = number_of_samples(requests[0]);
  const std::optional<int64_t> only = items[0].sampling.only_image;
  const HostArray& latents = result.published_latents ? result.published_latents : result.latents;
  for (size_t k = 0; k < items.size(); ++k) {
    const int64_t first = static_cast<int64_t>(k) * n + only.value_or(0), count = only ? 1 : n;
    if (!requests[k].decode) {
      work.existing.merge(write_latents(work.folder, rows(latents, first, count), work.existing));
      continue;
    }
    work.existing.merge(write_media(
        work.folder + "/" + family.spec().reference.prefix_of_files(requests[k].sample_seed->value()),
        items[k].sampling.output_type, rows(result.media, first, count), items[k].sampling.fps,
        [&](int64_t i) -> PngTexts {
          return {{"parameters", result.parameters[static_cast<size_t>(first + i)]},
                  {kImageSettings, settings_of(items[k].settings, requests[k], only.value_or(i), n)}};
        },
        work.existing));
  }
}

/// Generates items that differ in texts and seeds alone as one request, and starts writing their samples.
void generate_together(Items items, std::vector<SampleRequest> requests, DiffusionPipeline& pipeline, Work& work) {
  const std::shared_ptr<const Family> family = pipeline.family();
  std::vector<const SampleRequest*> each;
  for (const SampleRequest& r : requests) each.push_back(&r);
  SampleRequest request = joined(each);
  request.progress = [&work, log = logged(request, *family)](SampleStage stage, int64_t done, int64_t total) {
    work.writer.check_failure();
    log(stage, done, total);
  };
  if (request.preview_every > 0) request.preview = preview_file(work.folder);
  const int64_t n = number_of_samples(requests[0]);
  const std::optional<int64_t> only = items[0].sampling.only_image;
  check(!only || *only < n, Code::invalid_config, "only_image is {}; expected 0 to {}: {} {} generated",
        only.value_or(0), n - 1, n, n == 1 ? "image is" : "images are");
  SampleResult result = pipeline.generate(request);
  if (!work.plan.axes.empty()) {
    if (work.sheets.empty()) work.sheets.resize(only ? 1 : static_cast<size_t>(n));
    for (size_t i = 0; i < work.sheets.size(); ++i)
      work.sheets[i].push_back(preview_of(image_of_batch(result.media, only.value_or(static_cast<int64_t>(i)))));
  }
  work.writer.start([items, family, &work, requests = std::move(requests), result = std::move(result)] {
    naming(items[0], work.plan, [&] { write_samples(items, requests, result, *family, work); });
  });
}

/// Writes the sheet of one image of each item next to the images. Returns its file name.
std::set<std::string> write_sheet(const std::vector<HostArray>& cells, const Work& work) {
  const auto labels = [&](size_t i) {
    std::vector<std::string> all;
    for (size_t k = 0; i < work.plan.axes.size() && k < work.plan.axes[i].values.size(); ++k)
      all.push_back(work.plan.axes[i].label(k));
    return all;
  };
  std::string name;
  for (int64_t i = 0; name.empty() || work.existing.contains(name); ++i) name = fmt::format("sheet_{}.png", i);
  write_png(work.folder + "/" + name, make_sheet(cells, labels(0), labels(1)));
  log_info("wrote {}/{}", work.folder, name);
  return {name};
}

/// Throws what is wrong with an item before any is generated.
void check_items(const GeneratePlan& plan, const DiffusionPipeline& pipeline,
                 const std::function<SampleOptions(const GenerateItem&)>& options_of_item) {
  const FamilySpec& spec = pipeline.family()->spec();
  std::set<std::string> read = {text_of_files(plan.items[0].lora)};
  for (const GenerateItem& item : plan.items)
    naming(item, plan, [&] {
      check_output_type(item.sampling.output_type, spec.videos());
      if (plan.items.size() > 1) options_of_item(item);
      if (read.insert(text_of_files(item.lora)).second) pipeline.check_loras(item.lora);
    });
}

/// Generates into `folder`; `place`: final location of its files, possibly in a bucket.
void generate_into(const std::string& folder, const std::string& place, const GeneratePlan& plan) {
  check_writable(folder, "output_dir");
  make_folders(folder);
  Work work{plan, folder, plan.as_reference ? std::set<std::string>() : names_in(place)};
  PipelineOptions options = plan.pipeline;
  options.lora = plan.items[0].lora;
  std::set<std::string> opened;
  for (const GenerateItem& item : plan.items)
    naming(item, plan, [&] {  // a file that is missing or damaged
      for (const LoraChoice& l : chosen_loras(item.lora))
        if (opened.insert(l.path).second) SafetensorsReader::open(l.path);
      options.later_loras.push_back(item.lora);
    });
  DiffusionPipeline pipeline = DiffusionPipeline::load(plan.model, options);
  const Family& family = *pipeline.family();
  const int64_t devices = pipeline.devices().count();
  work.files = with_files({}, plan.items[0].sampling.files, !plan.pipeline.controlnets.empty(), true);
  const auto options_of_item = [&](const GenerateItem& item) {
    return sample_options(request_of(item, work, devices), family, pipeline.folder().scheduler_config(),
                          item.sampling.batch, devices);
  };
  check_items(plan, pipeline, options_of_item);
  plan.rules.warn_of_ignored(
      {pipeline.folder(), family, pipeline.devices(), sample_size(request_of(plan.items[0], work, devices), family)},
      "generate");
  std::optional<Profile> profile;  // covers everything below
  if (plan.profile) profile.emplace(pipeline.devices());
  std::string loras = text_of_files(options.lora);
  for (Items items = plan.items; !items.empty();) {
    std::vector<SampleRequest> requests = {request_of(items[0], work, devices)};
    naming(items[0], plan, [&] {
      if (std::string its = text_of_files(items[0].lora); its != loras) {
        pipeline.set_loras(items[0].lora);
        loras = std::move(its);
      }
      const bool alone = items.size() == 1 || !plan.axes.empty() || plan.as_reference || items[0].sampling.only_image ||
                         !plan.pipeline.added.refiner.empty() || !requests[0].decode;
      if (alone || !may_be_joined(requests[0], options_of_item(items[0]))) return;
      const int64_t most = sampling_batch(items[0].sampling.batch, devices) / number_of_samples(requests[0]);
      while (std::ssize(requests) < most && requests.size() < items.size() &&
             equal_but_for_texts(items[0], items[requests.size()]))
        requests.push_back(request_of(items[requests.size()], work, devices));
    });
    const Items now = items.first(requests.size());
    naming(now[0], plan, [&] { generate_together(now, std::move(requests), pipeline, work); });
    items = items.subspan(now.size());
  }
  if (profile) log_info("profile: {}", profile->write(work.folder + "/tensorboard"));
  work.writer.wait();
  for (const std::vector<HostArray>& cells : work.sheets) work.existing.merge(write_sheet(cells, work));
}

/// Generates into the plan's folder, which is local or in a bucket.
void generate_to_place(const GeneratePlan& plan) {
  const std::string& place = plan.folder;
  if (!is_remote(place)) return generate_into(place, place, plan);
  const std::string local_folder = local_cache_path(below(place, fmt::format(".generated-{}", ::getpid())));
  generate_into(local_folder, place, plan);
  RemoteSync({{local_folder, place}}, {}).settle();
  log_info("the whole profile is in {}", shown(place));
  remove_folder(local_folder);
}

}  // namespace

void generate(const GenerateRequest& request, const GenerateOptions& options) {
  const GeneratePlan plan = plan_generate(request, options);
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
  if (!models.family()->image_conditioning()) {  // only their sizes are needed
    files.images = sampling.files.images;
    files.mask_image = sampling.files.mask_image;
  }
  SampleOptions o = options_of(models, with_files(sampling.request, files), sampling.batch, devices);
  o.scope = models.denoiser_options();
  o.compile = models.options().compile;
  return o;
}

void check_samples_of_run(const ModelComponents& models, const SamplingRequest& sampling) {
  const SampleRequest request = with_files(sampling.request, sampling.files);
  options_of(models, request, sampling.batch, models.devices().count());
  check_images(request, *models.family());
}

void generate_class_images(const TrainingRequest& r) {
  const DreamboothKeys& k = r.data.dreambooth;
  if (k.class_data_dir.empty()) return;  // rejected with the rest of the config
  make_folders(k.class_data_dir);
  const int64_t existing = std::filesystem::is_empty(k.class_data_dir)
                               ? 0
                               : static_cast<int64_t>(list_image_folder(k.class_data_dir, {.captions = false}).size());
  const int64_t missing = k.num_class_images - existing;
  if (missing <= 0) return;
  log_info("DreamBooth: generating {} images of '{}' into {}", missing, k.class_prompt, k.class_data_dir);
  const PipelineOptions options = with_control_folder(r.pipeline);
  DiffusionPipeline pipeline = DiffusionPipeline::load(options.model.pretrained_model_name_or_path, options);
  SamplingRequest sampling = r.sampling;
  sampling.files.latents.clear();
  if (!pipeline.family()->image_conditioning()) sampling.files.images.clear(), sampling.files.mask_image.clear();
  SampleRequest request = with_files(sampling.request, sampling.files, !options.controlnets.empty(), true);
  request.prompt = {k.class_prompt};
  request.negative_prompt = {};
  request.num_inference_steps = 50;
  if (!pipeline.family()->spec().embedded_guidance) request.guidance_scale = 7.5;
  request.true_cfg_scale = 1;
  request.do_classifier_free_guidance = true;
  request.num_images_per_prompt = missing;
  request.first_sample = existing;  // the seed's earlier samples already exist
  request.decode = true;
  request.progress = logged(request, *pipeline.family());
  const HostArray images = pipeline.generate(request).media;
  for (int64_t i = 0; i < missing; ++i) {
    const std::string bytes = encode_png(image_of_batch(images, i));
    write_file_atomic(fmt::format("{}/{}-{}.png", k.class_data_dir, existing + i, content_hash(bytes)), bytes);
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

bool is_image(const std::string& name) {
  std::string end = name.substr(name.size() - std::min<size_t>(name.size(), 4));
  std::ranges::transform(end, end.begin(), [](unsigned char c) { return std::tolower(c); });
  return end == ".png";
}

/// An image's settings, one key per line as written by settings_of, without keys that images may not set.
std::string settings_in(const std::string& text, const std::string& image) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.starts_with('#')) continue;
    const std::string key = line.substr(0, line.find(':'));
    if (image_keys().contains(key))
      out += line + "\n";
    else
      log_warning("{} ignored: '{}' names it, and images do not set it", shortened(key, 60), image);
  }
  return out;
}

/// The settings of an image of another program, for the model that `words` name, as YAML.
std::string foreign_yaml(const PngTexts& texts, const std::string& image, const Words& words) {
  const std::optional<ForeignSettings> found = foreign_settings(texts, image);
  if (!found)
    throw Error(Code::io,
                fmt::format("'{}' has no settings; expected an image that maxdiffusion, AUTOMATIC1111's web UI "
                            "or ComfyUI generated",
                            image))
        .note(fmt::format("try: {} inspect image {}, which prints its texts", program_name(), image));
  ForeignSettings s = *found;
  const RunSearch search = run_search(config_of_keys(words));
  const std::string& model = search.model.pretrained_model_name_or_path;
  if (model.empty())
    throw Error(Code::invalid_config,
                fmt::format("'{}' names no model folder; expected pretrained_model_name_or_path=FOLDER too", image));
  const ModelFolder folder = described_folder(model_on_this_machine(model), search.model);
  const std::shared_ptr<const Family> family = make_family(folder);
  const FamilySpec& spec = family->spec();
  if (!spec.chunk_widths.empty()) s.keys["prompt_syntax"] = s.prompt_syntax;
  if (!s.automatic_schedule.empty() && !is_flow_matching(sampling_config(folder.scheduler_config(), {})))
    s.keys["sigma_schedule"] = s.automatic_schedule;
  const std::string by_encoders = "Align Your Steps";  // one title in the web UI
  if (const auto levels = s.keys.find("sigma_schedule"); spec.chunk_widths.size() > 1 && levels != s.keys.end())
    if (levels->second == "\"" + schedule_named(by_encoders) + "\"") levels->second = schedule_named(by_encoders, true);
  if (spec.true_guidance && !spec.embedded_guidance && !s.keys.contains("true_cfg_scale"))
    if (auto scale = s.keys.extract("guidance_scale")) s.keys["true_cfg_scale"] = scale.mapped();
  if (!s.unused.empty())
    log_warning("'{}': settings without a key here are not used: {}", image, fmt::join(s.unused, ", "));
  std::string yaml;
  for (const auto& [key, value] : s.keys) yaml += key + ": " + value + "\n";
  log_info("'{}': settings of another program: {}", image, fmt::join(std::views::keys(s.keys), ", "));
  return yaml;
}

/// The words that generate an image again: its settings as a file in `folder`, its model, the image's folder as
/// output_dir, then the words after the image.
Words words_of_image(const Words& words, const std::string& folder) {
  const std::string bytes = read_file(words[0]);
  const PngTexts texts = png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, words[0]);
  const auto found = texts.find(kImageSettings);
  const std::string file = folder + "/settings.yml";
  write_file_atomic(file, found == texts.end() ? foreign_yaml(texts, words[0], Words(words.begin() + 1, words.end()))
                                               : settings_in(found->second, words[0]));
  const auto settings = ConfigSource::load(file, {}).values();
  Words out = {file};
  const char* model = "pretrained_model_name_or_path";
  if (const auto value = settings.find(model); value != settings.end())
    out.push_back(std::string(model) + "=" + value->second.text);
  const std::string place = std::filesystem::absolute(words[0]).parent_path().string();
  out.push_back("output_dir=" + place);
  out.insert(out.end(), words.begin() + 1, words.end());
  return out;
}

/// A run's folder means its config; an image the config that generated it; a model what is usual for it.
template <bool kControl, bool kAsReference>
void generate_of(const Words& words) {
  Words w = words;
  const bool image = !w.empty() && is_image(w[0]);
  const bool model = !image && !w.empty() && names_model(w[0]);
  const TemporaryFolder folder;
  if (image) {
    w = words_of_image(w, folder.path());
  } else if (model) {
    w = words_of_model(w[0], Words(w.begin() + 1, w.end()));
    w.insert(w.begin(), "output_dir=.");
  } else if (!w.empty()) {
    w[0] = config_file(w[0]);
  }
  generate(generate_request(model ? config_of_keys(w) : config_of(kControl ? "generate_controlnet" : "generate", w)),
           {.with_control = kControl, .as_reference = kAsReference});
}

void print_generate_keys(const KeyPrinter& print) {
  print_config_keys(print, {"run", "devices", "model", "LoRA", "samples"});
}

}  // namespace

Command generate_command() {
  return {"generate",
          "CONFIG|RUN|MODEL|IMAGE.png [key=value …]",
          "generate images or videos with a model, with what a run has trained, or an image again",
          generate_of<false, false>,
          print_generate_keys,
          false,
          generate_of<false, true>};
}

Command generate_controlnet_command() {
  return {"generate_controlnet",
          "CONFIG|RUN|MODEL [key=value …]",
          "generate images with a model and a ControlNet",
          generate_of<true, false>,
          print_generate_keys,
          false,
          generate_of<true, true>};
}

}  // namespace md
