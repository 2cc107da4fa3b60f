#include "maxdiffusion/run/model_components.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/runtime/memory.h"

namespace md {

ModelComponents::ModelComponents(const ModelRequest& model, const DeviceRequest& devices,
                                 const EncoderOptions& encoders)
    : options_(encoders),
      scheduler_(model.scheduler),
      model_(open_model(model.keys.pretrained_model_name_or_path, model.keys,
                        {.purpose = model.purpose, .seed = model.seed, .inversion = model.inversion})),
      devices_(open_devices(devices, model_.family->spec().axis_rules)),
      local_devices_(devices_.local_devices()) {
  check_repeated_keys(model_.family->spec().reference, model.norm_num_groups);
  model_.weights.set_slices([this](const Param& p) {
    const bool trained = std::ranges::count(model_.family->spec().denoisers, p.model) > 0;
    return local_slices(trained ? devices_ : local_devices_, p.axes, p.shape.dims);
  });
}

std::function<NamedShards()> ModelComponents::open_weights(const ParamTable& params, const std::string& component) {
  if (component != model_.family->spec().autoencoder->component) return model_.weights.open(params, component);
  return [this, &params, component] { return as_shards(component_weights(params, component, autoencoder_values())); };
}

ScopeOptions ModelComponents::denoiser_options() const {
  return md::denoiser_options(options_.layers, devices_, model_.folder, *model_.family);
}

int64_t ModelComponents::encoder_batch() const {
  // Media per program: limited by pixels per device; for videos, those of a chunk.
  constexpr int64_t kPixels = int64_t{1} << 23, kMost = 32;
  const int64_t configured = options_.keys.encoder_batch_size, devices = local_devices_.mesh().devices();
  check(configured >= 0, Code::invalid_config, "encoder_batch_size is {}; expected 0 or more", configured);
  if (configured > 0) return configured * devices;
  const MediaSize size = training_size(options_.sizes, options_.resolution, *model_.family);
  const MediaChunks chunks = options_.chunks.chunks(*model_.family->spec().autoencoder);
  const int64_t frames =
      chunks.encode < 0
          ? size.frames
          : std::min(size.frames, chunks.encode * std::max<int64_t>(model_.family->spec().autoencoder->frame_scale, 1));
  return std::clamp(kPixels / (size.height * size.width * std::max<int64_t>(frames, 1)), int64_t{1}, kMost) * devices;
}

int64_t ModelComponents::text_batch() const {
  constexpr int64_t kTokens = 4096;  // per device: attention of an encoder with 64 heads then needs about 500 MB
  const int64_t devices = local_devices_.mesh().devices();
  if (options_.keys.encoder_batch_size > 0) return encoder_batch();
  int64_t longest = 1;
  for (const Field& f : model_.family->spec().text_fields()) longest = std::max(longest, f.shape.elements());
  return std::min(encoder_batch(), std::max<int64_t>(kTokens / longest, 1) * devices);
}

int64_t ModelComponents::encoder_bytes() const {
  if (options_.keys.encoder_batch_size > 0) return std::numeric_limits<int64_t>::max();
  int64_t weight_bytes = 0;
  const ParamTable params = model_.folder.params(model_.family->spec().denoisers, scope_options(options_.layers));
  for (const Param& p : params.params()) {
    const int64_t of_element = static_cast<int64_t>(size_of(p.shape.dtype)) + options_.state_bytes_per_weight;
    for (const Slice& slice : local_slices(devices_, p.axes, p.shape.dims))
      weight_bytes += slice.elements() * of_element;
  }
  return encoder_bytes(weight_bytes / std::ssize(devices_.local()));
}

int64_t ModelComponents::encoder_bytes(int64_t state_bytes) {
  constexpr int64_t kLeast = 1'500'000'000;
  return std::max(kLeast, state_bytes / 4);
}

TextEncoder& ModelComponents::text_encoder() {
  if (!text_encoder_)
    text_encoder_ = std::make_unique<TextEncoder>(local_devices_, model_.family, text_batch(), weights_of(),
                                                  scope_options(options_.layers), options_.compile, options_.keys);
  return *text_encoder_;
}

void ModelComponents::free_text_encoder() {
  const std::vector<std::string> encoders = model_.family->spec().text_components();
  if (!text_encoder_ || std::ranges::any_of(encoders, [&](auto& e) { return model_.weights.location(e).empty(); }))
    return;
  log_info("the text encoders are removed from the devices");
  text_encoder_.reset();
  return_freed_memory();
}

void ModelComponents::free_autoencoder() {
  if (model_.weights.location(model_.family->spec().autoencoder->component).empty()) return;
  media_autoencoder_.reset();
  autoencoder_values_.clear();
  return_freed_memory();
}

MediaAutoencoder& ModelComponents::media_autoencoder() {
  if (!media_autoencoder_)
    media_autoencoder_ = std::make_unique<MediaAutoencoder>(
        local_devices_, model_.family->spec().autoencoder, autoencoder_values(), encoder_batch(),
        scope_options(options_.layers), options_.compile, options_.keys,
        options_.chunks.chunks(*model_.family->spec().autoencoder), encoder_bytes());
  return *media_autoencoder_;
}

const HostArrays& ModelComponents::autoencoder_values() {
  const std::string component = model_.family->spec().autoencoder->component;
  if (autoencoder_values_.empty() && !component.empty())
    autoencoder_values_ = model_.weights.read(model_.folder.params(component), component);
  return autoencoder_values_;
}

void ModelComponents::set_autoencoder(HostArrays values) {
  model_.weights.set(model_.family->spec().autoencoder->component, values);
  autoencoder_values_ = std::move(values);
  media_autoencoder_.reset();
}

void ModelComponents::fit_autoencoder(const EachMoments& moments) {
  const std::shared_ptr<const Autoencoder> autoencoder = model_.family->spec().autoencoder;
  const auto config = parse_json(model_.folder.files().at(autoencoder->component + "/config.json"));
  model_.folder.set_config(autoencoder->component,
                           dump_json(autoencoder->with_measured_latent_scale(config, moments), 2) + "\n");
  model_.family = make_family(model_.folder);
}

std::string ModelComponents::trained_scheduler_config() const {
  const std::string& text = model_.folder.scheduler_config();
  const nlohmann::json trained = training_config(text, scheduler_);
  return trained == training_config(text, {}) ? text : dump_json(trained, 2) + "\n";
}

void ModelComponents::complete(CheckpointContent& content) {
  for (const auto& [path, text] : model_.folder.files()) content.files[path] = text;
  content.files["scheduler/scheduler_config.json"] = trained_scheduler_config();
  content.files.merge(model_.folder.tokenizer_files());
  for (const auto& [name, component] : model_.folder.components()) {
    if (content.weights.contains(name)) continue;
    const ParamTable params = model_.folder.params(name);
    if (const auto files = model_.weights.linkable(params, name); !files.empty()) {
      for (const std::string& file : files) content.linked[name + file.substr(file.rfind('/'))] = file;
    } else if (!model_.weights.location(name).empty()) {
      content.weights[name] = published(params, name, model_.weights.open(params, name, true)());
    } else if (name == model_.family->spec().autoencoder->component) {
      content.weights[name] = published(params, name, as_shards(autoencoder_values()));
    } else {
      content.weights[name] = as_shards(text_encoder().weights().at(name));
    }
  }
}

}  // namespace md
