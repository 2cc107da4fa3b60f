#include "maxdiffusion/server/job_queue.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/warning_sink.h"
#include "maxdiffusion/config/config.h"
#include "maxdiffusion/data/folders/named_files.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/settings/lora_tags.h"

namespace md {

Seed random_seed() {
  static std::random_device device;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return device() & 0x7fff'ffffU;
}

namespace {

/// Clients need not know the location of files.
std::string without_folder(std::string text, const std::string& folder) {
  for (size_t at = 0; !folder.empty() && (at = text.find(folder, at)) != text.npos;) text.erase(at, folder.size());
  return text;
}

}  // namespace

struct JobQueue::Model {
  explicit Model(ServedModel m, const Model* shares_devices)
      : served(std::move(m)),
        pipeline(shares_devices
                     ? DiffusionPipeline::load_on_same_devices(shares_devices->pipeline, served.model, served.options)
                     : DiffusionPipeline::load(served.model, served.options)),
        loras(served.options.lora) {}
  std::vector<std::string> ignored_in(const SampleRequest& r, const std::set<std::string>& set_keys) const {
    if (set_keys.empty()) return {};
    return served.rules.ignored_in(
        r, set_keys, {pipeline.folder(), *pipeline.family(), pipeline.devices(), sample_size(r, *pipeline.family())});
  }
  SampleOptions check_request(const SampleRequest& r) const {
    SampleOptions o = sample_options(r, *pipeline.family(), pipeline.folder().scheduler_config(), served.options.batch,
                                     pipeline.devices().count());
    check_images(r, *pipeline.family());
    return o;
  }

  /// Throws invalid_config naming the prompt, which names the files, where they do not fit.
  void set_loras(const LoraKeys& keys) {
    const auto for_clients = [&](std::string text) {
      for (const std::string& file : keys.lora_files)
        if (const std::filesystem::path folder = std::filesystem::path(file).parent_path(); !folder.empty())
          text = without_folder(text, folder.string() + "/");
      return text;
    };
    std::vector<std::string> warnings;
    try {
      const WarningSink sink(warnings);
      pipeline.set_loras(keys);
    } catch (const Error& e) {
      if (e.code() != Code::io && e.code() != Code::invalid_config) throw;
      log_warning("{}", e.what());
      throw Error(Code::invalid_config, fmt::format("prompt: a LoRA file that it names does not fit '{}': {}",
                                                    served.name, for_clients(e.message())));
    }
    loras = keys;
    std::ranges::transform(warnings, warnings.begin(), for_clients);
    lora_warnings = std::move(warnings);
  }

  ServedModel served;
  DiffusionPipeline pipeline;
  LoraKeys loras;                          // the LoRA in the current weights; used by the worker only
  std::vector<std::string> lora_warnings;  // about the files of a request; every request with them has these
};

struct JobQueue::Job {
  Model* model = nullptr;
  SampleRequest request;
  LoraKeys loras;
  int64_t samples = 1;
  std::string batch_key;  // equal for jobs that may be sampled together; empty: alone
  JobStatus status;
  int64_t changes = 0;
  bool cancelled = false;
  std::stop_source stop;  // used in the first of the jobs sampled together
};

namespace {

constexpr int64_t kLongestPrompt = 8192;  // bytes
constexpr int64_t kMostSide = 65'535;     // in what a model is conditioned on
constexpr double kMostGuidance = 1000;    // beyond it predictions overflow
/// The settings that jobs sampled together share: everything but prompts and seeds.
std::string settings_of(const SampleRequest& r, const LoraKeys& loras) {
  SampleKeys keys = r;
  SchedulerKeys scheduler = r.scheduler;
  KeyList list;
  list.add(keys), list.add(scheduler);
  std::string out = fmt::format("{} {}\n", r.resolution, r.negative_prompt.empty());
  for (const auto& [name, value] : list.values())
    if (name != "prompt" && name != "negative_prompt" && name != "sample_seed") out += name + "=" + value + "\n";
  return out + text_of_files(loras);
}

/// Throws invalid_config for a number outside its key's range, wherever the request has it from.
void check_ranges(const SampleRequest& r) {
  SampleKeys keys = r;
  SchedulerKeys scheduler = r.scheduler;
  KeyList list;
  list.add(keys), list.add(scheduler);
  for (const ConfigKey& key : list.keys())
    if (key.range) key.set({.text = key.print(), .where = "the request", .kind = ConfigValue::Kind::word});
}

void check_limits(const SampleRequest& r, const Family& family, const ServeKeys& limits) {
  const auto at_most = [](const char* key, int64_t value, int64_t most, const char* limit) {
    if (value < 1 || value > most)
      throw Error(Code::invalid_config, fmt::format("{} is {}; expected 1 to {}", key, value, most))
          .note(fmt::format("the server's {} is {}", limit, most));
  };
  at_most("num_inference_steps", r.num_inference_steps, limits.max_steps, "max_steps");
  at_most("num_images_per_prompt", r.num_images_per_prompt.value_or(1), limits.max_images, "max_images");
  at_most("the number of images", std::ssize(r.prompt) * r.num_images_per_prompt.value_or(1), limits.max_images,
          "max_images");
  for (const std::vector<std::string>* texts : std::initializer_list<const std::vector<std::string>*>{
           &r.prompt, &r.negative_prompt, &r.prompt_2, &r.negative_prompt_2})
    for (const std::string& text : *texts)
      check(std::ssize(text) <= kLongestPrompt, Code::invalid_config, "prompt has {} bytes; expected at most {}",
            text.size(), kLongestPrompt);
  // Of numbers as they were given: each is bounded before it is added or multiplied.
  const int64_t most_side = JobQueue::most_side(limits);
  const auto within = [&](const char* key, const std::optional<int64_t>& value, int64_t least) {
    if (value)
      check(*value >= least && *value <= most_side, Code::invalid_config, "{} is {}; expected {} to {}", key, *value,
            least, most_side);
  };
  within("height", r.height, 1), within("width", r.width, 1);
  within("padding_mask_crop", r.padding_mask_crop, 0);
  for (const int64_t margin : r.outpaint) within("outpaint", margin, 0);
  for (const std::vector<int64_t>& sizes :
       {r.original_size, r.target_size, r.crops_coords_top_left, std::vector{r.upscaler_tile}})
    for (const int64_t side : sizes)
      check(side >= 0 && side <= kMostSide, Code::invalid_config,
            "original_size, target_size, crops_coords_top_left or upscaler_tile has {}; expected 0 to {}", side,
            kMostSide);
  for (const auto& [key, value] : {std::pair{"guidance_scale", std::optional(r.guidance_scale)},
                                   {"true_cfg_scale", std::optional(r.true_cfg_scale)},
                                   {"guidance_scale_high", r.guidance_scale_high},
                                   {"guidance_scale_low", r.guidance_scale_low},
                                   {"cfg_normalization", std::optional(r.cfg_normalization)}})
    if (value)
      check(*value >= 0 && *value <= kMostGuidance, Code::invalid_config, "{} is {}; expected 0 to {}", key, *value,
            kMostGuidance);
  check(r.mask_grow <= 1024 && r.mask_blur <= 1024, Code::invalid_config,
        "mask_grow is {} and mask_blur {}; expected at most 1024", r.mask_grow, r.mask_blur);
  check_ranges(r);
  const auto check_pixels = [&](const char* key, int64_t height, int64_t width, double scale, int64_t most) {
    check(height >= 1 && width >= 1 && std::max(height, width) <= 3 * most_side && height * width <= most &&
              static_cast<double>(height * width) * scale * scale <= static_cast<double>(most),
          Code::invalid_config, "{} is {}x{}{}; expected at most {} pixels, the server's max_pixels", key, width,
          height, scale > 1 ? fmt::format(", enlarged {} times", scale) : "", most);
  };
  const bool continued = r.outpaint.size() == 4;
  if (continued && !r.images.empty())
    check_pixels("the image with outpaint", r.images[0].dims()[0] + r.outpaint[1] + r.outpaint[3],
                 r.images[0].dims()[1] + r.outpaint[0] + r.outpaint[2], 1, 4 * limits.max_pixels);
  const MediaSize size = sample_size(r, family);
  check_pixels("the size of the sample", size.height, size.width, r.hires_scale * r.upscale, limits.max_pixels);
}

/// Whether tokens of the request's texts are not read.
bool is_cut(const SampleRequest& r, const Family& family) {
  if (r.prompt_syntax != "plain") return false;
  std::vector<std::string> warnings;
  const WarningSink sink(warnings, true);
  for (const std::vector<std::string>* texts : std::initializer_list<const std::vector<std::string>*>{
           &r.prompt, &r.negative_prompt, &r.prompt_2, &r.negative_prompt_2})
    if (!texts->empty()) family.tokenize(*texts);
  return !warnings.empty();
}

/// PNG file of a preview, at most so many pixels wide and high.
std::shared_ptr<const std::string> preview_file(const HostArray& rgb) {
  constexpr int64_t kMostSide = 512;
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1], side = std::max(h, w);
  const HostArray shown = side <= kMostSide ? rgb
                                            : resize_rgb8(rgb, std::max<int64_t>(h * kMostSide / side, 1),
                                                          std::max<int64_t>(w * kMostSide / side, 1));
  return std::make_shared<const std::string>(encode_png(shown));
}

}  // namespace

JobQueue::JobQueue(std::vector<ServedModel> models, const ServeKeys& limits) : limits_(limits) {
  std::set<std::string> names;
  for (ServedModel& m : models) {
    check(names.insert(m.name).second, Code::invalid_config,
          "two models are called '{}'; expected folders or configs of different names", m.name);
    m.options.keep_loaded = true;
    log_info("loading {} as '{}'", m.model, m.name);
    models_.push_back(std::make_unique<Model>(std::move(m), models_.empty() ? nullptr : models_[0].get()));
    check(!models_.back()->pipeline.family()->spec().videos(), Code::invalid_config,
          "'{}' is a model of videos; expected models of images", models_.back()->served.name);
  }
  worker_ = std::thread([this] { work(); });
}

JobQueue::~JobQueue() {
  stop();
  worker_.join();
}

int64_t JobQueue::most_side(const ServeKeys& limits) {
  return static_cast<int64_t>(4 * std::sqrt(static_cast<double>(limits.max_pixels)));
}

std::vector<std::string> JobQueue::models() const {
  std::vector<std::string> out;
  for (const auto& m : models_) out.push_back(m->served.name);
  return out;
}

JobQueue::Model& JobQueue::find(const std::string& name) const {
  if (models_.empty()) throw Unavailable(404, "this server has no model: it shows training runs at /runs");
  if (name.empty()) return *models_[0];
  for (const auto& m : models_)
    if (m->served.name == name) return *m;
  fail(Code::invalid_config, "model is '{}'; expected one of: {}", name, nearest_first(name, models()));
}

const ServedModel& JobQueue::model(const std::string& name) const { return find(name).served; }
const Family& JobQueue::family(const std::string& name) const { return *find(name).pipeline.family(); }

bool JobQueue::is_flow_matching(const std::string& name) const {
  return md::is_flow_matching(training_config(find(name).pipeline.folder().scheduler_config(), {}));
}

std::vector<std::string> JobQueue::loras(const std::string& model) const {
  const std::string& folder = find(model).served.lora_dir;
  return folder.empty() ? std::vector<std::string>() : NamedFiles("lora_dir", folder, ".safetensors").names();
}

JobQueue::Ticket JobQueue::submit(const std::string& model, SampleRequest r, const std::set<std::string>& set_keys) {
  Model& m = find(model);
  auto job = std::make_shared<Job>();
  job->model = &m;
  job->loras = m.served.options.lora;
  const WarningSink sink(job->status.warnings);
  try {
    take_lora_tags(r, job->loras, m.served.lora_dir);
  } catch (const Error& e) {
    throw Error(e.code(), without_folder(e.message(), m.served.lora_dir));
  }
  if (!r.sample_seed || r.sample_seed->is_random()) r.sample_seed = random_seed();
  check_limits(r, *m.pipeline.family(), limits_);
  const SampleOptions o = m.check_request(r);
  for (const std::string& text : m.ignored_in(r, set_keys)) log_warning("{}", text);
  job->samples = o.samples();
  // A warning about a prompt quotes it: such a request is not joined with those of others.
  if (may_be_joined(r, o) && !is_cut(r, *m.pipeline.family())) job->batch_key = settings_of(r, job->loras);
  job->request = std::move(r);
  const std::lock_guard lock(mutex_);
  if (stopped_) throw Unavailable(503, "the server stops");
  if (std::ssize(waiting_) >= limits_.max_queue)
    throw Unavailable(
        429, fmt::format("{} requests wait already; the server's max_queue is {}", waiting_.size(), limits_.max_queue));
  waiting_.push_back(job);
  submitted_.notify_one();
  return job;
}

JobStatus JobQueue::status(const Ticket& job) {
  const std::lock_guard lock(mutex_);
  JobStatus out = job->status;
  if (out.state == JobState::waiting) out.ahead = std::ranges::find(waiting_, job) - waiting_.begin();
  return out;
}

void JobQueue::wait(const Ticket& job, int64_t milliseconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                    [&, before = job->changes] { return job->changes != before || job->status.ended(); });
}

void JobQueue::end(Job& job, JobState state, std::shared_ptr<const Error> error) {
  if (job.status.ended()) return;
  job.status.state = state;
  job.status.error = std::move(error);
  job.request.images.clear(), job.request.mask = {};  // frees the large arrays
  job.status.preview.reset();
  ++job.changes;
  changed_.notify_all();
}

void JobQueue::cancel(const Ticket& job) {
  const std::lock_guard lock(mutex_);
  if (const auto at = std::ranges::find(waiting_, job); at != waiting_.end()) {
    waiting_.erase(at);
    return end(*job, JobState::cancelled);
  }
  job->cancelled = true;
  if (!running_.empty() && std::ranges::all_of(running_, &Job::cancelled)) running_[0]->stop.request_stop();
}

void JobQueue::interrupt(bool all) {
  const std::lock_guard lock(mutex_);
  for (const Ticket& job : running_) job->cancelled = true;
  if (!running_.empty()) running_[0]->stop.request_stop();
  if (!all) return;
  for (const Ticket& job : waiting_) end(*job, JobState::cancelled);
  waiting_.clear();
}

JobStatus JobQueue::running() {
  const std::lock_guard lock(mutex_);
  return running_.empty() ? JobStatus() : running_[0]->status;
}

int64_t JobQueue::waiting() {
  const std::lock_guard lock(mutex_);
  return std::ssize(waiting_);
}

void JobQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  for (const Ticket& job : waiting_)
    end(*job, JobState::failed, std::make_shared<Unavailable>(503, "the server stops"));
  waiting_.clear();
  if (!running_.empty()) running_[0]->stop.request_stop();
  submitted_.notify_all();
}

/// Requires the lock. Takes the first waiting job and jobs with equal settings, a power of two in total, so that few
/// programs are compiled.
std::vector<JobQueue::Ticket> JobQueue::next() {
  std::vector<Ticket> out = {waiting_.front()};
  const Job& first = *out[0];
  const int64_t most = sampling_batch(first.model->served.options.batch, first.model->pipeline.devices().count());
  for (const Ticket& job : waiting_)
    if (job != out[0] && !first.batch_key.empty() && job->model == first.model && job->batch_key == first.batch_key &&
        (std::ssize(out) + 1) * first.samples <= most)
      out.push_back(job);
  size_t n = 1;
  while (2 * n <= out.size()) n *= 2;
  out.resize(n);
  std::erase_if(waiting_, [&](const Ticket& job) { return std::ranges::find(out, job) != out.end(); });
  return out;
}

void JobQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [&] { return stopped_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    running_ = next();
    for (const Ticket& job : running_) job->status.state = JobState::running, ++job->changes;
    changed_.notify_all();
    const std::vector<Ticket> jobs = running_;
    lock.unlock();
    std::shared_ptr<const Error> error;
    bool cancelled = false;
    try {
      generate(jobs);
    } catch (const Cancelled&) {
      cancelled = true;
    } catch (const Error& e) {
      error = std::make_shared<Error>(e);
    } catch (const std::bad_alloc&) {
      error = std::make_shared<Error>(Code::out_of_memory, "the host's memory is used up");
    } catch (const std::exception& e) {
      error = std::make_shared<Error>(Code::internal, e.what());
    }
    if (error) log_warning("a request failed: {}", error->message());
    lock.lock();
    running_.clear();
    if (cancelled && stopped_) error = std::make_shared<Unavailable>(503, "the server stops");
    for (const Ticket& job : jobs)
      end(*job, error ? JobState::failed : cancelled || job->cancelled ? JobState::cancelled : JobState::done, error);
  }
}

void JobQueue::generate(const std::vector<Ticket>& jobs) {
  Model& m = *jobs[0]->model;
  std::vector<std::string> warnings;
  const WarningSink sink(warnings);
  if (text_of_files(m.loras) != text_of_files(jobs[0]->loras)) m.set_loras(jobs[0]->loras);
  warnings = m.lora_warnings;
  std::vector<const SampleRequest*> requests;
  for (const Ticket& job : jobs) requests.push_back(&job->request);
  SampleRequest r = joined(requests);
  r.stop = jobs[0]->stop.get_token();
  r.progress = [&](SampleStage stage, int64_t done, int64_t total) {
    if (stage != SampleStage::step) return;
    const std::lock_guard lock(mutex_);
    for (const Ticket& job : jobs) job->status.step = done, job->status.steps = total, ++job->changes;
    changed_.notify_all();
  };
  const int64_t each = jobs[0]->samples;
  if (r.preview_every > 0)
    r.preview = [&](const SamplePreview& p) {
      for (int64_t i = 0; i < std::ssize(p.images); ++i) {
        if ((p.first + i) % each != 0) continue;
        const auto file = preview_file(p.images[static_cast<size_t>(i)]);
        const std::lock_guard lock(mutex_);
        Job& job = *jobs.at(static_cast<size_t>((p.first + i) / each));
        job.status.preview = file, ++job.changes;
        changed_.notify_all();
      }
    };
  const auto start = std::chrono::steady_clock::now();
  const SampleResult result = m.pipeline.generate(r);
  log_info("'{}': {} in {:.2f} s{}", m.served.name, counted(std::ssize(result.parameters), "image"),
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
           jobs.size() > 1 ? fmt::format(", {} requests together", jobs.size()) : "");
  std::vector<std::vector<GeneratedImage>> images(jobs.size());
  for (int64_t i = 0; i < each * std::ssize(jobs); ++i) {
    const Job& job = *jobs[static_cast<size_t>(i / each)];
    images[static_cast<size_t>(i / each)].push_back({image_of_batch(result.media, i),
                                                     result.parameters[static_cast<size_t>(i)],
                                                     job.request.sample_seed.value_or(0).value()});
  }
  const std::lock_guard lock(mutex_);
  for (const Ticket& job : jobs)
    for (const std::string& text : warnings) job->status.warnings.push_back(without_folder(text, m.served.lora_dir));
  for (size_t k = 0; k < jobs.size(); ++k)
    if (!jobs[k]->cancelled) jobs[k]->status.images = std::move(images[k]);
}

}  // namespace md
