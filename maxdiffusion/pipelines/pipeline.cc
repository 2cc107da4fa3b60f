#include "maxdiffusion/pipelines/pipeline.h"

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/families/loras.h"
#include "maxdiffusion/runtime/memory.h"

namespace md {
namespace {

/// Of one sample.
std::string parameters(const Family& family, const std::string& model, const SampleOptions& o, int64_t sample) {
  const auto prompt = static_cast<size_t>(sample / o.images_per_prompt);
  std::string text = o.prompts[prompt];
  if (!o.negative_prompts.empty())
    text += "\nNegative prompt: " + o.negative_prompts[o.negative_prompts.size() == 1 ? 0 : prompt];
  return text +
         fmt::format(
             "\nSteps: {}, Sampler: {}, CFG scale: {}, {}Seed: {}, Size: {}x{}, Model: {}, Image: {}, Version: "
             "maxdiffusion {}",
             o.num_inference_steps, o.scheduler_config.value("_class_name", std::string()),
             o.guidance_scale - 1 + family.spec().unguided,
             family.spec().embedded_guidance ? fmt::format("Distilled CFG Scale: {}, ", o.embedded_guidance) : "",
             o.seed, o.size.width, o.size.height, model, o.first_sample + sample, version());
}

}  // namespace

struct DiffusionPipeline::Impl {
  /// Around models that others hold.
  explicit Impl(PipelineModels given) : models(std::move(given)), keep_loaded(true) {}
  Impl(const std::string& folder, const PipelineOptions& o)
      : opened(open_model(folder, o.model, Purpose::sampling, 0, o.controlnet)),
        own_devices(open_devices(o.hardware, o.mesh, o.sharding, opened->family->spec().axis_rules)),
        models{*own_devices,
               opened->family,
               std::filesystem::path(opened->folder.path()).filename().string(),
               opened->folder.scheduler_config(),
               [this](const ParamTable& params, const std::string& component) { return read(params, component); },
               [this]() -> TextEncoder& { return own_text_encoder(); },
               [this]() -> MediaAutoencoder& { return own_autoencoder(); },
               denoiser_options(o.layers, *own_devices, opened->folder, *opened->family),
               o.compile,
               o.batch},
        encoders(o.encoders),
        chunks(o.media_chunks.chunks(*opened->family->spec().autoencoder)),
        keep_loaded(o.keep_loaded) {
    check_weights(*opened);
    loras = read_loras(o.lora, opened->folder, *opened->family);
  }

  HostArrays read(const ParamTable& params, const std::string& component) const {
    HostArrays values = opened->weights.read(params, component);
    ParamTable of_component;  // the others come with their own call
    for (const Param& p : params.params())
      if (p.model == component) of_component.add(p);
    merge_loras(loras, of_component, values);
    return values;
  }
  TextEncoder& own_text_encoder() {
    if (!text)
      text = std::make_unique<TextEncoder>(models.devices, models.family, 1, models.weights, models.scope,
                                           models.compile, encoders);
    return *text;
  }
  MediaAutoencoder& own_autoencoder() {
    if (!autoencoder) {
      const std::shared_ptr<const Autoencoder>& its = models.family->spec().autoencoder;
      HostArrays values;
      if (!its->component.empty()) values = read(opened->folder.params(its->component), its->component);
      autoencoder = std::make_unique<MediaAutoencoder>(models.devices, its, std::move(values), per_device(1),
                                                       models.scope, models.compile, encoders, chunks);
    }
    return *autoencoder;
  }
  /// `batch` samples at a time, where the autoencoder is not another's.
  MediaAutoencoder& autoencoder_for(int64_t batch) {
    MediaAutoencoder& coder = models.autoencoder();
    if (opened) coder.set_batch(batch);
    return coder;
  }
  int64_t per_device(int64_t n) const {
    const int64_t d = models.devices.mesh().devices();
    return (n + d - 1) / d * d;
  }
  /// Without keep_loaded, what a stage had on the devices leaves them.
  void leave(auto&... models_of_stage) {
    if (keep_loaded) return;
    (models_of_stage.reset(), ...);
    return_freed_memory();
  }

  SampleOptions options(const SampleRequest& r) {
    SampleOptions o = sample_options(r, *models.family, models.scheduler_config, models.batch, models.devices.count());
    check_images(*models.family, std::ssize(r.images));
    if (opened) {
      const bool has_control = opened->folder.has("controlnet");
      check(o.control || !has_control, Code::invalid_config,
            "controlnet_image is empty; expected an image for the ControlNet of controlnet_model_name_or_path");
      check(!o.control || has_control, Code::invalid_config,
            "controlnet_image is given; expected none, or a ControlNet in controlnet_model_name_or_path");
      o.text_batch = per_device(std::min<int64_t>(std::ssize(o.prompts), 8));
    }
    o.scope = models.scope;
    o.compile = models.compile;
    return o;
  }

  PromptConditioning conditioning(const SampleRequest& r, const SampleOptions& o) {
    PromptConditioning prompts = encode_prompts(models.text_encoder(), *models.family, o);
    leave(text);
    if (r.progress) r.progress(SampleStage::encoded, std::ssize(o.prompts), std::ssize(o.prompts));
    if (r.images.empty()) return prompts;
    MediaAutoencoder& coder = autoencoder_for(per_device(1));
    if (!conditioner)
      conditioner =
          std::make_unique<ImageConditioner>(models.devices, models.family, models.weights, coder, o.scope, o.compile);
    const HostArrays fields = conditioner->encode({r.images}, o.size);
    leave(conditioner, autoencoder);
    for (HostArrays* half : {&prompts.positive, &prompts.negative})
      for (const auto& [name, a] : fields)
        if (!half->empty()) (*half)[name] = repeat_rows(a, o.samples());
    return prompts;
  }

  SampleResult generate(const SampleRequest& r) {
    SampleOptions o = options(r);
    const auto check_stop = [&r] {
      if (r.stop.stop_requested()) throw Cancelled();
    };
    const Family& family = *models.family;
    const int64_t n = o.samples();
    check_stop();
    const PromptConditioning prompts = conditioning(r, o);
    o.progress = [&](int64_t done, int64_t total) {
      check_stop();
      if (r.progress) r.progress(SampleStage::step, done, total);
    };
    SampleResult out;
    out.latents =
        denoise(models.devices, family, models.weights, prompts, o, opened && keep_loaded ? &denoiser : nullptr);
    if (r.progress) r.progress(SampleStage::denoised, n, n);
    check_stop();
    for (int64_t i = 0; i < n; ++i) out.parameters.push_back(parameters(family, models.name, o, i));
    if (!r.decode && !family.spec().autoencoder->other_published_latents) return out;
    const int64_t together = r.vae_slicing ? per_device(1) : o.batch > 0 ? o.batch : per_device(n);
    if (r.decode)
      out.media = decode_latents(autoencoder_for(together), family, out.latents, r.vae_tiling);
    else
      out.published_latents =
          autoencoder_for(together).published(family.spec().autoencoder->latent_scale.undo(out.latents));
    leave(autoencoder);
    if (r.progress && r.decode) r.progress(SampleStage::decoded, n, n);
    return out;
  }

  std::optional<OpenedModel> opened;  // none: the models are others'
  std::optional<Devices> own_devices;
  std::vector<ScaledLora> loras;
  PipelineModels models;
  EncoderKeys encoders;
  MediaChunks chunks;
  bool keep_loaded;
  ResidentDenoiser denoiser;
  std::unique_ptr<TextEncoder> text;
  std::unique_ptr<MediaAutoencoder> autoencoder;
  std::unique_ptr<ImageConditioner> conditioner;  // refers to the autoencoder
};

DiffusionPipeline::DiffusionPipeline(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DiffusionPipeline::DiffusionPipeline(PipelineModels models) : impl_(std::make_unique<Impl>(std::move(models))) {}
DiffusionPipeline::DiffusionPipeline(DiffusionPipeline&&) noexcept = default;
DiffusionPipeline::~DiffusionPipeline() = default;

DiffusionPipeline DiffusionPipeline::load(const std::string& folder, const PipelineOptions& options) {
  return DiffusionPipeline(std::make_unique<Impl>(folder, options));
}

SampleResult DiffusionPipeline::generate(const SampleRequest& request) {
  Impl& p = *impl_;
  try {
    return p.generate(request);
  } catch (Error& e) {
    p.leave(p.text, p.conditioner, p.autoencoder);
    if (p.opened && e.code() == Code::device) note_damaged_weights(*p.opened, e);
    throw;
  }
}

const Devices& DiffusionPipeline::devices() const { return impl_->models.devices; }
const std::shared_ptr<const Family>& DiffusionPipeline::family() const { return impl_->models.family; }
const ModelFolder& DiffusionPipeline::folder() const { return impl_->opened->folder; }

}  // namespace md
