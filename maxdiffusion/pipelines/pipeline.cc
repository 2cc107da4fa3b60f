#include "maxdiffusion/pipelines/pipeline.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/encoders/adapter_image.h"
#include "maxdiffusion/encoders/image_conditioner.h"
#include "maxdiffusion/families/loras.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/models/latent_colours.h"
#include "maxdiffusion/pipelines/inpainting.h"
#include "maxdiffusion/pipelines/upscaling.h"
#include "maxdiffusion/runtime/memory.h"
#include "maxdiffusion/schedulers/sampler_names.h"

namespace md {
namespace {

constexpr const char* kPreviewer = "preview_autoencoder";  // the component

/// How a sample came from a smaller one, and how large it became after the last step.
struct Enlargement {
  double hires = 1, upscale = 1;
  std::string hires_by = {}, upscale_by = {};  // "Lanczos", "Latent", or the name of the upscaler's file
};

/// The parameters text of one sample.
std::string parameters(const Family& family, const std::string& model, const SampleOptions& o, int64_t sample,
                       const Enlargement& made) {
  const auto prompt = static_cast<size_t>(sample / o.images_per_prompt);
  const SamplerTitle title = sampler_title(o.scheduler_config);
  std::string text = o.prompts[prompt];
  if (!o.negative_prompts.empty())
    text += "\nNegative prompt: " + o.negative_prompts[o.negative_prompts.size() == 1 ? 0 : prompt];
  return text +
         fmt::format(
             "\nSteps: {}, Sampler: {}, {}CFG scale: {}, {}Seed: {}, Size: {}x{}, Model: {}, {}{}Image: {}, Version: "
             "maxdiffusion {}",
             o.num_inference_steps, title.sampler,
             title.schedule.empty() ? "" : fmt::format("Schedule type: {}, ", title.schedule),
             o.guidance_scale - 1 + family.spec().unguided,
             family.spec().embedded_guidance ? fmt::format("Distilled CFG Scale: {}, ", o.embedded_guidance) : "",
             o.seed_of(sample), o.size.width, o.size.height, model,
             o.clip_skip > 0 ? fmt::format("Clip skip: {}, ", o.clip_skip + 1) : "",
             (o.strength ? fmt::format("Denoising strength: {}, ", *o.strength) : "") +
                 (made.hires > 1 ? fmt::format("Hires upscale: {}, Hires upscaler: {}, ", made.hires, made.hires_by)
                                 : "") +
                 (made.upscale > 1 ? enlargement_text(made.upscale, made.upscale_by) + ", " : ""),
             o.number_of(sample), version());
}

/// Concatenates arrays f32 [N, h, w, …] along the last axis.
HostArray concatenate(const HostArray& a, const HostArray& b) {
  Dims dims = a.dims();
  const int64_t left = dims.back(), right = b.dims().back();
  dims.back() = left + right;
  HostArray out(Shape{DType::f32, dims});
  auto x = a.view<float>().begin(), y = b.view<float>().begin();
  for (auto to = out.mutable_view<float>().begin(); to != out.mutable_view<float>().end(); x += left, y += right)
    to = std::copy_n(y, right, std::copy_n(x, left, to));
  return out;
}

/// Image u8 [H, W, 3] → f32 [1, H, W, 3] in [−1, 1].
HostArray pixels_of(const HostArray& rgb) {
  HostArray pixels(Shape{DType::f32, {1, rgb.dims()[0], rgb.dims()[1], 3}});
  std::ranges::transform(rgb.view<uint8_t>(), pixels.mutable_view<float>().begin(),
                         [](uint8_t v) { return static_cast<float>(v) / 127.5f - 1; });
  return pixels;
}

/// The first frames of a video u8 [F, H, W, 3], each resized (Lanczos): u8 [1, size.frames, size.height, size.width,
/// 3].
HostArray resized_video(const HostArray& video, const MediaSize& size) {
  const Dims& d = video.dims();
  check(d[0] >= size.frames, Code::invalid_config, "image has {} frames; expected num_frames={} or more", d[0],
        size.frames);
  HostArray out;
  for (int64_t f = 0; f < size.frames; ++f)
    add_rows(out, size.frames, f,
             resize_rgb8(rows(video, f, 1).reshaped({d[1], d[2], 3}), size.height, size.width, Filter::lanczos)
                 .reshaped({1, size.height, size.width, 3}));
  return out.reshaped({1, size.frames, size.height, size.width, 3});
}

/// A request whose images were extended, or cropped to the region that is generated, and the inverse for its media.
struct Canvas {
  SampleRequest request;
  std::vector<HostArray> images;  // whole images, if only a region is generated
  HostArray mask;                 // with their size
  Region region;

  Canvas(const SampleRequest& requested, const Family& family) : request(requested) {
    SampleRequest& r = request;
    if (!begins_with_images(r, family) || family.spec().videos()) return;
    if (!r.outpaint.empty()) {
      constexpr int64_t kMost = 16384;
      check(
          r.outpaint.size() == 4 && std::ranges::min(r.outpaint) >= 0 && std::ranges::max(r.outpaint) <= kMost,
          Code::invalid_config,
          "outpaint is [{}]; expected the pixels that are added left, top, right and bottom, up to {} each, as in [64, "
          "0, 64, 0]",
          fmt::join(r.outpaint, ", "), kMost);
      const Margins margins{r.outpaint[0], r.outpaint[1], r.outpaint[2], r.outpaint[3]};
      r.mask = extended_mask(r.mask, r.images[0], margins);
      for (HostArray& image : r.images) image = extended(image, margins);
      r.outpaint.clear();
    }
    if (!r.padding_mask_crop || !r.mask) return;
    const MediaSize size = sample_size(r, family);
    images = r.images;
    mask = resize_rgb8(r.mask, images[0].dims()[0], images[0].dims()[1], Filter::lanczos);
    region = region_around(mask, *r.padding_mask_crop, size.height, size.width);
    for (HostArray& image : r.images) {
      check(image.dims() == images[0].dims(), Code::invalid_config,
            "image: images of several sizes are given with padding_mask_crop; expected one size");
      image = fitted(image, region, size.height, size.width);
    }
    r.mask = fitted(mask, region, size.height, size.width);
    r.height = size.height, r.width = size.width;
  }

  /// Generated media f32 [N, h, w, 3] → media of the whole images.
  HostArray whole(const HostArray& media) const {
    if (images.empty()) return media;
    const int64_t n = media.dims()[0], each = n / std::ssize(images);
    HostArray out;
    for (int64_t i = 0; i < n; ++i) {
      const HostArray& image = images[static_cast<size_t>(i / each)];
      add_rows(out, n, i, pixels_of(put_back(image, mask, region, image_of_batch(media, i))));
    }
    return out;
  }
};

/// The LoRA files of all requests, each once.
std::vector<std::string> lora_files_of(const PipelineOptions& o) {
  std::vector<std::string> files;
  const auto add = [&](const LoraKeys& keys) {
    for (const LoraChoice& l : chosen_loras(keys))
      if (std::ranges::count(files, l.path) == 0) files.push_back(l.path);
  };
  add(o.lora);
  for (const LoraKeys& keys : o.later_loras) add(keys);
  return files;
}

}  // namespace

struct DiffusionPipeline::Impl {
  /// For models that the caller owns.
  explicit Impl(PipelineModels loaded) : models(std::move(loaded)), keep_loaded(true) {}
  Impl(const std::string& folder, const PipelineOptions& o, const Impl* shares_devices)
      : opened(open_model(folder, o.model,
                          {.purpose = Purpose::sampling,
                           .controlnets = o.controlnets,
                           .added = o.added,
                           .adapters = o.adapters,
                           .loras = lora_files_of(o)})),
        client(shares_devices ? shares_devices->client : open_client(o.hardware)),
        opened_devices(
            open_devices(client, o.hardware, o.mesh,
                         AxisRules::for_family(o.sharding, o.mesh.axes(), opened->family->spec().axis_rules))),
        models{*opened_devices,
               opened->family,
               std::filesystem::path(opened->folder.path()).filename().string(),
               opened->folder.scheduler_config(),
               [this](const ParamTable& params, const std::string& component) { return read(params, component); },
               [this]() -> TextEncoder& { return lazy_text_encoder(); },
               [this]() -> MediaAutoencoder& { return lazy_autoencoder(); },
               denoiser_options(o.layers, *opened_devices, opened->folder, *opened->family),
               o.compile,
               o.batch},
        encoders(o.encoders),
        chunks(o.media_chunks.chunks(*opened->family->spec().autoencoder)),
        keep_loaded(o.keep_loaded),
        named_controls(!o.controlnets.empty()),
        upscaler_file(std::filesystem::path(o.added.upscaler).stem().string()) {
    check_weights(*opened);
    if (!o.added.refiner.empty()) load_refiner(o);
    loras = read_loras_of(o.lora);
  }

  void load_refiner(PipelineOptions o) {
    const std::string folder = o.added.refiner;
    o.model = {}, o.controlnets.clear(), o.lora = {}, o.later_loras.clear(), o.added = {};
    refiner = std::make_unique<Impl>(folder, o, this);
    const FamilySpec &its = refiner->models.family->spec(), &base = models.family->spec();
    check(its.autoencoder->channels == base.autoencoder->channels &&
              its.autoencoder->downscale == base.autoencoder->downscale &&
              its.autoencoder->latent_scale.scale == base.autoencoder->latent_scale.scale,
          Code::invalid_config,
          "refiner '{}' has latents of {} channels, scaled by {}; expected {} and {}, as the model's are", folder,
          its.autoencoder->channels, its.autoencoder->latent_scale.scale[0], base.autoencoder->channels,
          base.autoencoder->latent_scale.scale[0]);
    check(its.image_to_image && !refiner->models.family->image_conditioning() && base.image_to_image && !base.videos(),
          Code::invalid_config, "refiner '{}' is given; expected none: {} media do not begin with an image", folder,
          base.image_to_image && !base.videos() ? "its" : "this model's");
  }

  HostArrays read(const ParamTable& params, const std::string& component) const {
    // Two programs run parts of an adapter: one encodes its image, the other denoises.
    for (const auto& adapter : models.family->spec().image_adapters)
      if (std::ranges::count(adapter->components, component) > 0)
        return component_weights(params, component, opened->weights.read(opened->folder.params(component), component));
    const auto left_out = resting.find(component);
    const LeftOut out = left_out == resting.end() ? LeftOut() : left_out->second;
    if (!loras.empty() && has_few_bits(params, component)) {  // LoRA is merged before quantizing
      const ParamTable plain = before_few_bits(params, component);
      HostArrays values = opened->weights.read(plain, component);
      merge_loras(loras, plain, values, out);
      return few_bits_values(params, component, values);
    }
    HostArrays values = opened->weights.read(params, component);
    ParamTable of_component;  // other components have separate calls
    for (const Param& p : params.params())
      if (p.model == component) of_component.add(p);
    merge_loras(loras, of_component, values, out);
    return values;
  }
  std::vector<ScaledLora> read_loras_of(const LoraKeys& keys) const {
    return read_loras(keys, opened->folder, *models.family, opened->learned);
  }
  /// SampleOptions::change_weights of LoRA files with steps.
  std::vector<std::string> change_weights(const ParamTable& params, int64_t step, int64_t steps) {
    LeftOut now;
    for (const ScaledLora& lora : loras) now.push_back(!lora.steps.has(step, steps));
    std::vector<std::string> changed;
    std::map<std::string, LeftOut> before;
    for (const Param& p : params.params()) {
      if (!before.contains(p.model)) {
        before[p.model] = resting.contains(p.model) ? resting.at(p.model) : LeftOut(loras.size());
        resting[p.model] = now;
      }
      const auto differs = [&](const std::string& path) {
        for (size_t i = 0; i < loras.size(); ++i)
          if (before.at(p.model)[i] != now[i] && loras[i].file.has(p.model, path)) return true;
        return false;
      };
      bool its = p.few_bits && before.at(p.model) != now;  // parts of a matrix have names of their own
      for (int64_t i = 0; !its && i < std::max<int64_t>(p.stacked, 1); ++i)
        its = differs(p.stacked > 0 ? layer_path(p.path, i) : p.path);
      if (its) changed.push_back(p.input);
    }
    return changed;
  }
  /// Throws invalid_config if weights that differ between steps cannot be combined with the request.
  void check_lora_steps(const SampleRequest& r) const {
    for (const ScaledLora& lora : loras) {
      if (lora.steps.is_whole()) continue;
      const std::string with = fmt::format("lora_steps is given for '{}' with", lora.file.name);
      check(!r.scan_diffusion_loop, Code::invalid_config,
            "{} scan_diffusion_loop=true; expected false: weights change between steps", with);
      const std::string cache = r.cache.use_kv_cache ? "use_kv_cache" : r.cache.step_cache();
      check(cache.empty(), Code::invalid_config, "{} {}=true; expected false: it reuses what other weights gave", with,
            cache);
      bool acts = false;
      for (int64_t i = 0; i < r.num_inference_steps; ++i) acts = acts || lora.steps.has(i, r.num_inference_steps);
      if (!acts)
        log_warning("lora_steps: LoRA '{}' is ignored: it acts in none of the {} steps", lora.file.name,
                    r.num_inference_steps);
    }
  }
  TextEncoder& lazy_text_encoder() {
    if (!text)
      text = std::make_unique<TextEncoder>(models.devices, models.family, 1, models.weights, models.scope,
                                           models.compile, encoders);
    return *text;
  }
  MediaAutoencoder& lazy_autoencoder() {
    if (!autoencoder) {
      const std::shared_ptr<const Autoencoder>& its = models.family->spec().autoencoder;
      HostArrays values;
      if (!its->component.empty()) values = read(opened->folder.params(its->component), its->component);
      autoencoder = std::make_unique<MediaAutoencoder>(models.devices, its, std::move(values), per_device(1),
                                                       models.scope, models.compile, encoders, chunks);
    }
    return *autoencoder;
  }
  /// A model that was added as an autoencoder (AddedModelKeys), with one sample per device at a time.
  MediaAutoencoder& lazy_added(const std::string& component, std::unique_ptr<MediaAutoencoder>& its) {
    if (!its)
      its = std::make_unique<MediaAutoencoder>(models.devices, added(component),
                                               opened->weights.read(opened->folder.params(component), component),
                                               per_device(1), models.scope, models.compile, encoders);
    return *its;
  }
  std::shared_ptr<const Autoencoder> added(const std::string& component) const {
    return opened->folder.autoencoder(component, component == kPreviewer && models.family->spec().videos());
  }
  /// Image of any size → u8 [height, width, 3]. The upscaler is used if there is one and `by` does not exclude it.
  HostArray enlarged_image(const HostArray& rgb, int64_t height, int64_t width, const std::string& by, int64_t tile) {
    if (upscaler_file.empty() || by == "lanczos") return enlarged(rgb, height, width, nullptr);
    const Upscaler u{added("upscaler"), lazy_added("upscaler", upscaler), tile};
    return enlarged(rgb, height, width, &u);
  }
  /// Scaled latents f32 [n, (F,) h, w, C] → u8 images, of a video the middle frame: by the tiny autoencoder, or with
  /// one pixel for each cell.
  std::vector<HostArray> previews_of(const HostArray& latents) {
    const FamilySpec& spec = models.family->spec();
    const int64_t n = latents.dims()[0], middle = latents.dims()[1] / 2;
    const auto frame = [n](const HostArray& video, int64_t f) {
      const Dims& d = video.dims();
      return block(video, 0, n, f, 1).reshaped({n, d[2], d[3], d[4]});
    };
    HostArray images;
    if (opened && opened->folder.has(kPreviewer)) {
      // A tiny autoencoder of videos begins with the first frame.
      images =
          lazy_added(kPreviewer, previewer)
              .decode(
                  added(kPreviewer)->latent_scale.undo(spec.videos() ? block(latents, 0, n, 0, middle + 1) : latents));
      if (spec.videos()) images = frame(images, images.dims()[1] - 1);
    } else {
      images = latent_colours(*spec.autoencoder).of(spec.videos() ? frame(latents, middle) : latents);
    }
    std::vector<HostArray> out;
    for (int64_t i = 0; i < images.dims()[0]; ++i) out.push_back(image_of_batch(images, i));
    return out;
  }
  /// The autoencoder, with `batch` samples at a time unless the caller owns it.
  MediaAutoencoder& autoencoder_for(int64_t batch) {
    MediaAutoencoder& coder = models.autoencoder();
    if (opened) coder.set_batch(batch);
    return coder;
  }
  int64_t per_device(int64_t n) const {
    const int64_t d = models.devices.mesh().devices();
    return (n + d - 1) / d * d;
  }
  /// Without keep_loaded, frees the models of a finished stage from the devices.
  void leave(auto&... models_of_stage) {
    if (keep_loaded) return;
    (models_of_stage.reset(), ...);
    return_freed_memory();
  }

  /// Without keep_loaded, frees all models from the devices.
  void leave_all() {
    if (keep_loaded) return;
    denoiser = ResidentDenoiser();
    adapter_encoders.clear();
    leave(text, conditioner, autoencoder, previewer, upscaler);
  }

  /// Throws invalid_config unless each adapter of the pipeline has an image, and each image an adapter.
  void check_adapters(const SampleRequest& r) const {
    const auto& known = models.family->spec().image_adapters;
    for (const auto& a : known)
      check(r.adapters.contains(a->name) || !a->needs_image, Code::invalid_config,
            "{}_image is empty; expected an image for {}", a->name, a->name);
    for (const auto& its : r.adapters) {
      const std::string& name = its.first;
      check(std::ranges::any_of(known, [&](const auto& a) { return a->name == name; }), Code::invalid_config,
            "{}_image is given; expected none, or {}=FILE, which this model's family takes", name, name);
    }
  }
  /// For `cache`, which needs the first block alone. Throws invalid_config if they have to be stacked.
  void unstack_blocks(ScopeOptions& scope, const std::string& cache) const {
    if (!opened)
      throw Error(Code::invalid_config,
                  fmt::format("scan_layers is true; expected false with {}: the blocks of a run are stacked", cache))
          .note("try: use_magcache=true, or scan_layers=false");
    if (scope.blocks_to_swap > 0)
      throw Error(Code::invalid_config,
                  fmt::format("blocks_to_swap is {}; expected 0 with {}: it needs the first block alone, and no loop "
                              "copies the others",
                              scope.blocks_to_swap, cache))
          .note("try: use_magcache=true, or blocks_to_swap=0");
    log_info_once("scan_layers: the blocks are not stacked with {}", cache);
    scope.scan_layers = false;
  }
  SampleOptions options(const SampleRequest& r) {
    SampleOptions o = sample_options(r, *models.family, models.scheduler_config, models.batch, models.devices.count());
    check_images(r, *models.family);
    check_lora_steps(r);
    if (std::ranges::any_of(loras, [](const ScaledLora& l) { return !l.steps.is_whole(); }))
      o.change_weights = [this](const ParamTable& params, int64_t step, int64_t steps) {
        return change_weights(params, step, steps);
      };
    if (opened) {
      check_adapters(r);
      if (const std::string& saved_by = opened->folder.pipeline();
          r.pag_scale == 0 && saved_by.find("PAG") != saved_by.npos)
        log_info_once(
            "the model was saved by {}; it samples without perturbed attention, as pag_scale is 0; try: "
            "pag_scale=3, diffusers' default",
            saved_by);
      const size_t nets = models.family->spec().controlnets.size(), images = o.controls.size();
      check(images > 0 || nets == 0 || !named_controls, Code::invalid_config,
            "controlnet_image is empty; expected an image for {} of controlnet_model_name_or_path",
            nets == 1 ? "the ControlNet" : "each ControlNet");
      check(images == 0 || nets > 0, Code::invalid_config,
            "controlnet_image is given; expected none, or a ControlNet in controlnet_model_name_or_path");
      check(images == nets || images == 0, Code::invalid_config,
            "controlnet_image names {} images for {} ControlNets; expected one for each", images, nets);
      o.text_batch = per_device(std::min<int64_t>(std::ssize(o.prompts), 8));
    }
    o.scope = models.scope;
    if (o.scope.scan_layers && (o.cache.use_first_block_cache || o.cache.use_teacache))
      unstack_blocks(o.scope, o.cache.step_cache());
    o.compile = models.compile;
    return o;
  }

  PromptConditioning conditioning(const SampleRequest& r, const SampleOptions& o) {
    PromptConditioning prompts = encode_prompts(models.text_encoder(), *models.family, o);
    leave(text);
    if (r.progress) r.progress(SampleStage::encoded, std::ssize(o.prompts), std::ssize(o.prompts));
    if (r.images.empty() || begins_with_images(r, *models.family)) return prompts;
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

  /// Encodes the images that samples begin with, if any, and the conditioning from a mask.
  void encode_images(const SampleRequest& r, SampleOptions& o, PromptConditioning& prompts) {
    const FamilySpec& spec = models.family->spec();
    if (!begins_with_images(r, *models.family)) return;
    if (r.image_latents) {
      o.image_latents = r.image_latents;
      return;
    }
    HostArray pixels;
    const int64_t n = std::ssize(r.images), height = o.size.height, width = o.size.width, each = o.samples() / n;
    for (int64_t i = 0; i < n; ++i) {
      const HostArray& image = r.images[static_cast<size_t>(i)];
      add_rows(pixels, n, i,
               spec.videos() ? resized_video(image, o.size)
                             : resize_rgb8(image, height, width, Filter::lanczos).reshaped({1, height, width, 3}));
    }
    MediaAutoencoder& coder = autoencoder_for(per_device(1));
    o.image_latents = repeat_rows(coder.latents(pixels), each);
    HostArrays fields;
    // If the denoiser attends to reference images, it also gets this image without a mask.
    if (models.family->reference_images() && (r.mask || models.family->edits()))
      fields[ReferenceImages::field(0)] = o.image_latents;
    if (r.mask) {
      o.noise_alone = o.strength == 1;
      const HostArray mask = mask_of(r.mask, height, width, r.mask_grow, r.mask_blur);
      const HostArray cells = mask_cells(mask, spec.autoencoder->downscale, spec.image_to_image->mask_of_middle);
      if (spec.inpainting.empty()) {
        o.mask = cells;
      } else {
        const HostArray rest = repeat_rows(coder.latents(without_masked(pixels, mask)), each);
        fields[spec.inpainting] = concatenate(
            repeat_rows(spec.inpainting_sees_pixels ? mask_pixels(mask, spec.autoencoder->downscale) : cells,
                        o.samples()),
            rest);
      }
    }
    for (HostArrays* half : {&prompts.positive, &prompts.negative})
      if (!half->empty()) half->insert(fields.begin(), fields.end());
    leave(autoencoder);
  }

  /// Adds the fields of adapters' images to the conditioning.
  void encode_adapters(const SampleRequest& r, const SampleOptions& o, PromptConditioning& prompts) {
    for (const auto& adapter : models.family->spec().image_adapters) {
      if (!r.adapters.contains(adapter->name)) continue;
      const AdapterRequest& its = r.adapters.at(adapter->name);
      std::unique_ptr<AdapterEncoder>& encoder = adapter_encoders[adapter->name];
      if (!encoder)
        encoder = std::make_unique<AdapterEncoder>(models.devices, adapter, models.weights, o.scope, o.compile);
      AdapterFields fields = encoder->encode(its.image, o.size);
      leave(encoder);
      const auto scale = static_cast<float>(its.scale);
      for (const auto& [half, values] :
           {std::pair{&prompts.positive, &fields.image}, {&prompts.negative, &fields.without}}) {
        if (half->empty()) continue;
        (*values)[adapter->scale] = HostArray::of<float>({DType::f32, {1, 1}}, {&scale, 1});
        for (const auto& [name, a] : *values) (*half)[name] = repeat_rows(a, o.samples());
      }
    }
  }

  /// Generates samples, then enlarged samples that begin with them.
  SampleResult generate_twice(const SampleRequest& r) {
    check(r.hires_scale >= 1 && models.family->spec().image_to_image && !models.family->image_conditioning() &&
              !models.family->edits() && !models.family->spec().videos(),
          Code::invalid_config, "hires_scale is {}; expected 1{}", r.hires_scale,
          r.hires_scale < 1        ? " or more"
          : models.family->edits() ? ": this model changes an image"
                                   : ": this model's media do not begin with an image");
    check(r.seeds.empty(), Code::invalid_config, "hires_scale is {} with seeds; expected 1", r.hires_scale);
    check(!r.mask && r.outpaint.empty(), Code::invalid_config,
          "hires_scale is {} with mask_image or outpaint; expected 1: a sample with a mask has its image's size",
          r.hires_scale);
    first_step_of(*models.family, fmt::format("hires_scale is {}: hires_strength", r.hires_scale), r.hires_strength,
                  r.num_inference_steps);
    const std::string by = !r.hires_upscaler.empty() ? r.hires_upscaler
                           : upscaler_file.empty()   ? "lanczos"
                                                     : "upscaler";
    check(by != "upscaler" || !upscaler_file.empty(), Code::invalid_config,
          "hires_upscaler is upscaler without upscaler; expected upscaler=FILE.safetensors too, lanczos or latent");
    const bool of_latents = by == "latent";
    SampleRequest small = r;
    small.hires_scale = 1, small.upscale = 1, small.decode = !of_latents;
    const SampleResult first = generate(small, {});
    SampleRequest large = r;
    const int64_t n = first.latents.dims()[0], each = n / std::ssize(r.prompt);
    const auto of_each_sample = [&](auto& texts) {
      const auto of_prompts = texts;
      if (std::ssize(of_prompts) != std::ssize(r.prompt)) return;
      texts.clear();
      for (const std::string& text : of_prompts) texts.insert(texts.end(), static_cast<size_t>(each), text);
    };
    of_each_sample(large.negative_prompt), of_each_sample(large.prompt_2), of_each_sample(large.negative_prompt_2);
    of_each_sample(large.prompt);
    large.num_images_per_prompt = 1;
    large.latents = {};
    large.images.clear();
    const Autoencoder& coder = *models.family->spec().autoencoder;
    const auto side = [&](size_t axis) {
      const int64_t pixels = first.latents.dims()[axis] * coder.downscale,
                    multiple = coder.downscale * models.family->spec().patch;
      return std::llround(static_cast<double>(pixels) * r.hires_scale) / multiple * multiple;
    };
    large.height = side(1), large.width = side(2);
    if (of_latents)
      large.image_latents =
          resized_latents(first.latents, *large.height / coder.downscale, *large.width / coder.downscale);
    else
      for (int64_t i = 0; i < n; ++i)
        large.images.push_back(
            enlarged_image(image_of_batch(first.media, i), *large.height, *large.width, by, r.upscaler_tile));
    leave(upscaler);
    large.strength = r.hires_strength;
    for (ControlRequest& c : large.controls) c.scale = c.scale.value_or(1);
    large.hires_scale = 1;
    return generate(large, {.hires = r.hires_scale,
                            .hires_by = of_latents        ? "Latent"
                                        : by == "lanczos" ? "Lanczos"
                                                          : upscaler_file});
  }

  /// Enlarges finished images f32 [N, H, W, 3].
  HostArray upscaled(const HostArray& media, const SampleRequest& r) {
    HostArray out;
    const int64_t n = media.dims()[0];
    const auto side = [&](size_t axis) { return std::llround(static_cast<double>(media.dims()[axis]) * r.upscale); };
    for (int64_t i = 0; i < n; ++i)
      add_rows(out, n, i, pixels_of(enlarged_image(image_of_batch(media, i), side(1), side(2), "", r.upscaler_tile)));
    leave(upscaler);
    return out;
  }

  /// The model's steps up to denoising_end, then the refiner's.
  SampleResult generate_refined(const SampleRequest& r) {
    constexpr double kEnd = 0.8;  // of diffusers' documentation of SDXL
    const double end = r.denoising_end.value_or(kEnd);
    for (const auto& [conflicts, key] :
         {std::pair{!r.images.empty() || static_cast<bool>(r.mask), "image or mask_image"},
          {r.hires_scale != 1, "hires_scale"},
          {r.denoising_start.has_value(), "denoising_start"},
          {!r.outpaint.empty(), "outpaint"}})
      check(!conflicts, Code::invalid_config, "refiner is given with {}; expected one of them", key);
    SampleRequest base = r, rest = r;
    base.denoising_end = end, base.decode = false, base.upscale = 1;
    const SampleResult first = generate(base, {});
    const MediaSize size = sample_size(r, *models.family);
    rest.image_latents = first.latents, rest.latents = {};
    rest.height = size.height, rest.width = size.width;
    rest.denoising_start = end, rest.denoising_end.reset(), rest.strength.reset();
    rest.prompt_2.clear(), rest.negative_prompt_2.clear(), rest.controls.clear();
    rest.num_images_per_prompt = first.latents.dims()[0] / std::ssize(r.prompt);
    SampleResult out = refiner->generate(rest, {});
    out.parameters = first.parameters;
    for (std::string& text : out.parameters)
      text.insert(text.rfind(", Image: "),
                  fmt::format(", Refiner: {}, Refiner switch at: {}", refiner->models.name, end));
    return out;
  }

  /// `made`: how the images that samples begin with were enlarged.
  SampleResult generate(const SampleRequest& requested, Enlargement made) {
    check(requested.upscale == 1 || (!models.family->spec().videos() && requested.decode), Code::invalid_config,
          "upscale is {}; expected 1: {} are not enlarged", requested.upscale,
          requested.decode ? "this model's media are videos, which" : "latents");
    check_upscaler_tile(requested.upscaler_tile);
    if (requested.hires_scale != 1) return generate_twice(requested);
    made.upscale = requested.upscale, made.upscale_by = upscaler_file.empty() ? "Lanczos" : upscaler_file;
    const Canvas canvas(requested, *models.family);
    const SampleRequest& r = canvas.request;
    SampleOptions o = options(r);
    if (made.hires > 1) o.earlier_steps = o.num_inference_steps;
    if (!canvas.images.empty() && !o.references.empty()) o.references = canvas.images;  // the text encoder sees all
    const auto check_stop = [&r] {
      if (r.stop.stop_requested()) throw Cancelled();
    };
    const Family& family = *models.family;
    const int64_t n = o.samples();
    check_stop();
    PromptConditioning prompts = conditioning(r, o);
    encode_images(r, o, prompts);
    encode_adapters(r, o, prompts);
    o.progress = [&](int64_t done, int64_t total) {
      check_stop();
      if (r.progress) r.progress(SampleStage::step, done, total);
    };
    if (o.preview_every > 0)
      o.preview = [&](int64_t first, const HostArray& latents) { r.preview({first, previews_of(latents)}); };
    SampleResult out;
    out.latents =
        denoise(models.devices, family, models.weights, prompts, o, opened && keep_loaded ? &denoiser : nullptr);
    leave(previewer);
    if (r.progress) r.progress(SampleStage::denoised, n, n);
    check_stop();
    for (int64_t i = 0; i < n; ++i) out.parameters.push_back(parameters(family, models.name, o, i, made));
    if (!r.decode && !family.spec().autoencoder->other_published_latents) return out;
    const int64_t together = r.vae_slicing ? per_device(1) : o.batch > 0 ? o.batch : per_device(n);
    if (r.decode)
      out.media = canvas.whole(decode_latents(autoencoder_for(together), family, out.latents, r.vae_tiling));
    else
      out.published_latents =
          autoencoder_for(together).published(family.spec().autoencoder->latent_scale.undo(out.latents));
    leave(autoencoder);
    if (r.upscale > 1) out.media = upscaled(out.media, r);
    if (r.progress && r.decode) r.progress(SampleStage::decoded, n, n);
    return out;
  }

  std::optional<OpenedModel> opened;     // none: the caller owns the models
  std::shared_ptr<pjrt::Client> client;  // null: the devices belong to others
  std::optional<Devices> opened_devices;
  std::vector<ScaledLora> loras;
  std::map<std::string, LeftOut> resting;  // denoiser → which of `loras` its weights lack, because of their steps
  PipelineModels models;
  EncoderKeys encoders;
  MediaChunks chunks;
  bool keep_loaded;
  double too_large = std::numeric_limits<double>::infinity();  // work_of() from which models are loaded one at a time
  bool named_controls = true;  // whether the options name ControlNets; the folder's own act where there are images
  std::string upscaler_file;   // name of the upscaler's file without ending; empty: there is none
  ResidentDenoiser denoiser;
  std::unique_ptr<TextEncoder> text;
  std::unique_ptr<MediaAutoencoder> autoencoder, previewer, upscaler;
  std::unique_ptr<Impl> refiner;                                            // on the same devices; null: there is none
  std::unique_ptr<ImageConditioner> conditioner;                            // refers to the autoencoder
  std::map<std::string, std::unique_ptr<AdapterEncoder>> adapter_encoders;  // by ImageAdapter::name
};

DiffusionPipeline::DiffusionPipeline(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DiffusionPipeline::DiffusionPipeline(PipelineModels models) : impl_(std::make_unique<Impl>(std::move(models))) {}
DiffusionPipeline::DiffusionPipeline(DiffusionPipeline&&) noexcept = default;
DiffusionPipeline::~DiffusionPipeline() = default;

DiffusionPipeline DiffusionPipeline::load(const std::string& folder, const PipelineOptions& options) {
  return DiffusionPipeline(std::make_unique<Impl>(folder, options, nullptr));
}
DiffusionPipeline DiffusionPipeline::load_on_same_devices(const DiffusionPipeline& other, const std::string& folder,
                                                          const PipelineOptions& options) {
  return DiffusionPipeline(std::make_unique<Impl>(folder, options, other.impl_.get()));
}

void DiffusionPipeline::set_loras(const LoraKeys& keys) {
  Impl& p = *impl_;
  p.loras = p.read_loras_of(keys);
  p.resting.clear();
  p.denoiser.weights.clear();
  if (p.text) p.text->forget_weights();
}

void DiffusionPipeline::check_loras(const LoraKeys& keys) const { impl_->read_loras_of(keys); }

namespace {

/// What grows with the memory of a request: the samples of a program call by the pixels of the largest one.
double work_of(const SampleRequest& r, const Family& family) {
  const MediaSize size = sample_size(r, family);
  const double samples = static_cast<double>(std::max<int64_t>(std::ssize(r.prompt), 1)) *
                         static_cast<double>(r.num_images_per_prompt.value_or(1));
  return samples * static_cast<double>(size.frames * size.height * size.width) * r.hires_scale * r.hires_scale;
}

}  // namespace

SampleResult DiffusionPipeline::generate(const SampleRequest& request) {
  Impl& p = *impl_;
  const auto sample = [&] { return p.refiner ? p.generate_refined(request) : p.generate(request, {}); };
  const auto each = [&](auto&& act) {
    for (Impl* its : {&p, p.refiner.get()})
      if (its) act(*its);
  };
  const double size = work_of(request, *p.models.family);
  const bool keeps = p.keep_loaded;
  bool again = keeps && p.opened && size >= p.too_large;
  const auto one_at_a_time = [&] {
    each([](Impl& its) { its.keep_loaded = false, its.leave_all(); });
    SampleResult out = sample();
    each([&](Impl& its) { its.keep_loaded = keeps; });
    return out;
  };
  try {
    if (again) return one_at_a_time();
    try {
      return sample();
    } catch (const Error& e) {
      again = e.code() == Code::out_of_memory && p.opened && keeps;
      if (!again) throw;
      log_warning("{}: models are now loaded one at a time, for requests of this size again", e.message());
    }
    SampleResult out = one_at_a_time();
    p.too_large = std::min(p.too_large, size);
    return out;
  } catch (Error& e) {
    each([&](Impl& its) { its.leave_all(), its.keep_loaded |= keeps; });
    if (p.opened && e.code() == Code::device) note_damaged_weights(*p.opened, e);
    throw;
  }
}

const Devices& DiffusionPipeline::devices() const { return impl_->models.devices; }
const std::shared_ptr<const Family>& DiffusionPipeline::family() const { return impl_->models.family; }
const ModelFolder& DiffusionPipeline::folder() const { return impl_->opened->folder; }

}  // namespace md
