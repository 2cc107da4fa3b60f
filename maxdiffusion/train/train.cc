#include "maxdiffusion/train/train.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/picture.h"
#include "maxdiffusion/data/emoji.h"
#include "maxdiffusion/data/image_folder.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/tasks/latent_cache.h"
#include "maxdiffusion/tasks/latent_diffusion.h"

namespace md {
namespace {

using nlohmann::json;

/// The folder of pictures to train on; makes the emoji on first use.
std::string pictures_folder(const DataKeys& d) {
  if (d.dataset_name.empty()) {
    check(!d.train_data_dir.empty(), Code::invalid_config,
          "no data: give train_data_dir=FOLDER (pictures with metadata.jsonl or .txt captions) or "
          "dataset_name=noto-emoji");
    return d.train_data_dir;
  }
  check(d.dataset_name == "noto-emoji", Code::invalid_config, "dataset_name '{}' is not one of: noto-emoji",
        d.dataset_name);
  check(!d.dataset_save_location.empty(), Code::invalid_config, "dataset_name=noto-emoji needs dataset_save_location");
  const std::string folder = fmt::format("{}/noto-emoji-{}", d.dataset_save_location, d.resolution);
  if (!exists(folder + "/metadata.jsonl")) {
    log_info("drawing the emoji into {}", folder);
    log_info("{} pictures", prepare_emoji(folder, {.resolution = d.resolution}));
  }
  return folder;
}

/// With `scale_lr`, the rate times the global batch.
double scaled_rate(const OptimConfig& optim, double rate, int64_t batch) {
  return optim.scale_lr ? rate * static_cast<double>(batch) : rate;
}

LoopOptions loop_options(const RunConfig& c, const std::string& folder, const std::string& title) {
  LoopOptions o;
  o.title = title;
  o.folder = folder;
  o.checkpoint_dir = folder + "/checkpoints";
  o.optim = c.optim;
  o.scope = scope_options(c.model);
  o.seed = static_cast<uint64_t>(c.run.seed);
  o.checkpoint_every = c.run.checkpoint_every;
  o.checkpoints_to_keep = c.run.checkpoints_to_keep;
  o.reuse_example_batch = c.data.reuse_example_batch;
  o.metrics = c.metrics;
  o.compile = c.compile;
  o.run_name = c.run.run_name;
  o.texts = {{"config", "```yaml\n" + c.to_yaml() + "```"}};
  return o;
}

/// Mean and spread of latents over pictures: LDM's scaling_factor is one over their standard deviation.
double latent_scale(const HostArray& moments) {
  const int64_t c = moments.dims().back() / 2;
  auto v = moments.view<float>();
  double sum = 0, squares = 0, n = 0;
  for (size_t i = 0; i < v.size(); i += static_cast<size_t>(2 * c))
    for (int64_t k = 0; k < c; ++k) {
      const double mean = v[i + static_cast<size_t>(k)], deviation = v[i + static_cast<size_t>(c + k)];
      sum += mean, squares += mean * mean + deviation * deviation, n += 1;
    }
  return 1 / std::sqrt(std::max(squares / n - (sum / n) * (sum / n), 1e-12));
}

/// The first half of the last axis.
HostArray means(const HostArray& moments) {
  Dims dims = moments.dims();
  const int64_t c = dims.back() /= 2;
  HostArray out(Shape{DType::f32, dims});
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) to[i] = from[i / c * 2 * c + i % c];
  return out;
}

HostArray picture(const HostArray& f32_pictures, int64_t i) {
  Dims dims(f32_pictures.dims().begin() + 1, f32_pictures.dims().end());
  return to_rgb8(rows(f32_pictures, i, 1).reshaped(dims));
}

/// Originals above their reconstructions.
void write_reconstructions(PictureCoder& coder, const HostArray& pixels, const std::string& path) {
  const int64_t n = std::min<int64_t>(12, pixels.dims()[0]), stride = pixels.dims()[0] / n;
  HostArray chosen = rows(pixels, 0, n);
  for (int64_t i = 0; i < n; ++i) set_rows(chosen, i, rows(pixels, i * stride, 1));
  const HostArray decoded = coder.decode(means(coder.encode(chosen)));
  std::vector<GridCell> above, below;
  for (int64_t i = 0; i < n; ++i) {
    above.push_back({rows(chosen, i, 1).reshaped(Dims(chosen.dims().begin() + 1, chosen.dims().end())), ""});
    below.push_back({picture(decoded, i), ""});
  }
  const int64_t columns = static_cast<int64_t>(above.size());
  above.insert(above.end(), below.begin(), below.end());
  write_png(path, make_grid(above, columns, 2));
}

/// Weights of the autoencoder, by input name; trains it first where the config says so.
Values autoencoder(const RunConfig& c, const Devices& devices, ModelFolder& folder, const LoadedFolder& pictures) {
  if (!c.model.train_new_vae)
    return folder.values(vae_params(folder, DType::f32), "vae", false, static_cast<uint64_t>(c.run.seed));
  Autoencoder task;
  task.vae = folder.vae;
  task.batch_size =
      global_batch(c.vae.vae_per_device_batch_size, devices.mesh().devices(), "vae_per_device_batch_size");
  task.resolution = c.data.resolution;
  task.kl_weight = c.vae.vae_kl_weight;
  LoopOptions o = loop_options(c, c.folder() + "/vae", "train vae");
  o.optim.max_train_steps = c.vae.vae_max_train_steps;
  o.optim.learning_rate_schedule_steps = -1;
  o.optim.learning_rate = scaled_rate(c.optim, c.vae.vae_learning_rate, task.batch_size);
  LoopCallbacks callbacks;
  callbacks.initial = [&](const ParamTable& p) { return folder.open_values(p, "vae", true, o.seed); };
  callbacks.complete = [&](CheckpointContent& content) {
    content.files["vae/config.json"] = folder.files.at("vae/config.json");
  };
  Trained t = train_loop(
      devices, task, in_memory({{"pixels", pictures.pixels}}, task.batch_size, o.seed, c.data.enable_data_shuffling), o,
      callbacks);
  return t.values;
}

/// What the cached arrays depend on beside the pictures and captions: the weights and configs that made them.
std::string cache_key(const RunConfig& c, const ModelFolder& folder, const Values& vae, const TextEncoder& text) {
  std::string key = fmt::format("v1 resolution {} flip {}", c.data.resolution, c.data.random_flip);
  for (const auto& [path, content] : folder.files)
    if (path.starts_with("vae/") || path.starts_with("text_encoder")) key += "\n" + path + " " + content_hash(content);
  auto add = [&key](const std::string& name, const HostArray& a) {
    key += "\n" + name + " " + content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
  };
  for (const auto& [name, a] : vae) add(name, a);
  for (const auto& [component, weights] : text.weights())
    for (const auto& [name, a] : weights) add(component + "/" + name, a);
  return key;
}

/// Pictures [from, to) of the set in which every picture comes once as it is and then once mirrored.
HostArray with_mirrored(const HostArray& pixels, int64_t from, int64_t to) {
  const Dims& d = pixels.dims();
  HostArray out = rows(pixels, 0, to - from);
  auto v = out.mutable_view<uint8_t>();
  const size_t row_bytes = static_cast<size_t>(d[2] * d[3]), picture = static_cast<size_t>(d[1]) * row_bytes;
  for (int64_t i = from; i < to; ++i) {
    set_rows(out, i - from, rows(pixels, i % d[0], 1));
    if (i < d[0]) continue;
    for (uint8_t* row = &v[static_cast<size_t>(i - from) * picture];
         row < v.data() + (static_cast<size_t>(i - from) + 1) * picture; row += row_bytes)
      for (int64_t l = 0, r = d[2] - 1; l < r; ++l, --r)
        std::swap_ranges(row + l * d[3], row + (l + 1) * d[3], row + r * d[3]);
  }
  return out;
}

/// moments (unscaled), prompt_embeds and, for SDXL, text_embeds of every picture; with random_flip every picture is
/// there twice, once mirrored. Only what the cache does not hold is computed.
std::map<std::string, HostArray> encoded(const std::string& cache_folder, const LoadedFolder& pictures, bool flip,
                                         const std::string& key, PictureCoder& coder, TextEncoder& text) {
  const int64_t n = pictures.pixels.dims()[0], copies = flip ? 2 : 1;
  LatentCache cache(cache_folder, "pictures " + pictures.fingerprint + "\n" + key, n * copies, 512);
  if (!cache.complete()) log_info("caching latents and text embeddings in {}", cache_folder);
  ProgressBar bar("cache", n * copies);
  while (auto part = cache.next_missing()) {
    std::vector<std::string> captions;
    for (int64_t i = part->begin; i < part->end; ++i) captions.push_back(pictures.captions[static_cast<size_t>(i % n)]);
    TextEmbeddings e = text.encode(captions);
    std::map<std::string, HostArray> arrays = {
        {"moments", coder.encode(with_mirrored(pictures.pixels, part->begin, part->end))},
        {"prompt_embeds", e.prompt_embeds}};
    if (e.text_embeds) arrays["text_embeds"] = e.text_embeds;
    cache.put(*part, arrays);
    bar.update(part->end, "");
  }
  bar.finish();
  return cache.read_all();
}

/// Latents become (z − shift)·scale: the means move and stretch, the deviations stretch.
HostArray scaled(const HostArray& moments, const VaeConfig& vae) {
  HostArray out(moments.shape());
  const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (size_t i = 0; i < from.size(); ++i) {
    const double shift = i % (2 * c) < c ? vae.shift_factor : 0;
    to[i] = static_cast<float>((from[i] - shift) * vae.scaling_factor);
  }
  return out;
}

}  // namespace

void train(const RunConfig& c, const OnSample& on_sample) {
  const std::string run = c.folder();
  const Devices devices = open_devices(c);
  ModelFolder folder =
      ModelFolder::open(c.model.pretrained_model_name_or_path, c.model.clip_bpe_file, c.model.revision);
  NoiseSchedule noise = NoiseSchedule::from_json(json::parse(folder.scheduler_config()));
  if (!c.model.prediction_type.empty()) noise.prediction_type = c.model.prediction_type;
  const uint64_t seed = static_cast<uint64_t>(c.run.seed);

  make_folders(run);
  write_file_atomic(run + "/config.yml", c.to_yaml());
  ImageFolderConfig images{.resolution = c.data.resolution,
                           .center_crop = c.data.center_crop,
                           .random_flip = c.data.random_flip,
                           .image_column = c.data.image_column,
                           .caption_column = c.data.caption_column,
                           .max_train_samples = c.data.max_train_samples};
  const LoadedFolder pictures = load_image_folder(pictures_folder(c.data), images);
  const int64_t n = pictures.pixels.dims()[0];
  log_info("{} pictures, {} skipped", n, pictures.skipped.size());

  // Autoencoder.
  const int64_t coder_batch = 32 * devices.mesh().devices();
  const std::string samples = run + "/samples";
  make_folders(samples);
  Values vae = autoencoder(c, devices, folder, pictures);
  PictureCoder coder(devices, folder.vae, vae, coder_batch, c.compile);
  write_reconstructions(coder, pictures.pixels, samples + "/reconstructions.png");
  log_info("autoencoder: originals above reconstructions in {}", samples + "/reconstructions.png");

  // What the UNet is trained on: moments of latents and text embeddings, computed once.
  const bool random_text = c.model.random_text_encoder;
  TextEncoder text(
      devices, folder, coder_batch,
      [&](const ParamTable& p, const std::string& component) { return folder.values(p, component, random_text, seed); },
      c.compile);
  const std::string cache_folder =
      (c.data.dataset_save_location.empty() ? run : c.data.dataset_save_location) + "/cache";
  std::map<std::string, HostArray> samples_on_host =
      encoded(cache_folder, pictures, c.data.random_flip, cache_key(c, folder, vae, text), coder, text);
  if (c.model.train_new_vae) {
    folder.vae.scaling_factor = latent_scale(samples_on_host.at("moments"));
    json config = json::parse(folder.files.at("vae/config.json"));
    config["scaling_factor"] = folder.vae.scaling_factor;
    folder.files["vae/config.json"] = config.dump(2) + "\n";
    log_info("autoencoder: scaling_factor {:.5f} (one over the latents' standard deviation)",
             folder.vae.scaling_factor);
  }
  samples_on_host["moments"] = scaled(samples_on_host.at("moments"), folder.vae);

  // UNet.
  const HostArray& moments = samples_on_host.at("moments");
  LatentDiffusion task;
  task.unet = folder.unet;
  task.noise = noise;
  task.batch_size = global_batch(c.data.per_device_batch_size, devices.mesh().devices());
  task.latent_height = moments.dims()[1];
  task.latent_width = moments.dims()[2];
  task.text_length = samples_on_host.at("prompt_embeds").dims()[1];
  task.resolution = c.data.resolution;
  task.snr_gamma = c.loss.snr_gamma;
  task.caption_dropout = c.data.caption_dropout;

  LoopOptions o = loop_options(c, run, "train unet");
  o.optim.learning_rate = scaled_rate(c.optim, c.optim.learning_rate, task.batch_size);
  o.ema_decay = c.loss.ema_decay;
  o.sample_every = c.sample.sample_every;
  o.save_final_checkpoint = c.run.save_final_checkpoint;
  LoopCallbacks callbacks;
  callbacks.initial = [&](const ParamTable& p) { return folder.open_values(p, "unet", c.model.train_new_unet, seed); };
  if (c.data.caption_dropout > 0) {
    TextEmbeddings empty = text.encode({""});
    auto row = [](const HostArray& a) { return a.reshaped(Dims(a.dims().begin() + 1, a.dims().end())); };
    callbacks.constants["empty_prompt_embeds"] = row(empty.prompt_embeds);
    if (empty.text_embeds) callbacks.constants["empty_text_embeds"] = row(empty.text_embeds);
  }
  const auto vae_published = published(vae_params(folder, DType::f32), "vae", vae);
  callbacks.complete = [&](CheckpointContent& content) {
    content.weights["vae"] = vae_published;
    for (const auto& [component, weights] : text.weights()) content.weights[component] = weights;
    for (const auto& [path, content_of] : folder.files) content.files[path] = content_of;
    folder.add_tokenizers(content.files);
  };
  auto draw = [&](int64_t step, const Values& unet) {
    if (!on_sample) return;
    const std::string path = on_sample({devices, c, folder, text, coder, o.scope, unet, step, samples});
    if (!path.empty()) log_info("pictures of step {}: {}", step, path);
  };
  callbacks.sample = [&](int64_t step, const ParamTable&, const Values& unet) { draw(step, unet); };
  Trained t = train_loop(devices, task, in_memory(samples_on_host, task.batch_size, seed, c.data.enable_data_shuffling),
                         o, callbacks);
  draw(t.steps, t.values);
}

}  // namespace md
