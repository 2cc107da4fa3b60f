// Code that families share, and the list of families. A new family is one file and one row here.
#include "maxdiffusion/families/family.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/shortened.h"

namespace md {

std::shared_ptr<const Family> make_stable_diffusion(const ModelFolder& folder);
std::shared_ptr<const Family> make_wan(const ModelFolder& folder);
std::shared_ptr<const Family> make_flux(const ModelFolder& folder);
std::shared_ptr<const Family> make_flux2(const ModelFolder& folder);
std::shared_ptr<const Family> make_z_image(const ModelFolder& folder);
std::shared_ptr<const Family> make_qwen_image(const ModelFolder& folder);

namespace {

std::vector<FamilyClass>& families() {
  static std::vector<FamilyClass> all = {
      {{"StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline",
        "StableDiffusionControlNetImg2ImgPipeline",
        "StableDiffusionControlNetInpaintPipeline",
        "StableDiffusionAdapterPipeline",
        "StableDiffusionPAGPipeline",
        "StableDiffusionPAGImg2ImgPipeline",
        "StableDiffusionPAGInpaintPipeline",
        "StableDiffusionControlNetPAGPipeline",
        "StableDiffusionControlNetPAGInpaintPipeline",
        "LatentConsistencyModelPipeline",
        "LatentConsistencyModelImg2ImgPipeline",
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLControlNetImg2ImgPipeline",
        "StableDiffusionXLControlNetInpaintPipeline",
        "StableDiffusionXLAdapterPipeline",
        "StableDiffusionXLPAGPipeline",
        "StableDiffusionXLPAGImg2ImgPipeline",
        "StableDiffusionXLPAGInpaintPipeline",
        "StableDiffusionXLControlNetPAGPipeline",
        "StableDiffusionXLControlNetPAGImg2ImgPipeline"},
       make_stable_diffusion},
      {{"WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"}, make_wan},
      {{"FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxFillPipeline"}, make_flux},
      {{"Flux2KleinPipeline", "Flux2KleinInpaintPipeline"}, make_flux2},
      {{"ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"}, make_z_image},
      {{"QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", "QwenImageEditPipeline",
        "QwenImageEditInpaintPipeline", "QwenImageEditPlusPipeline"},
       make_qwen_image},
  };
  return all;
}

/// Classes of diffusers whose folders hold the parts of a family above, but whose models take other inputs, and which.
constexpr std::pair<std::string_view, std::string_view> kOtherInputs[] = {
    {"StableDiffusionInstructPix2PixPipeline", "a UNet that takes the image to edit in addition to the latents"},
    {"StableDiffusionXLInstructPix2PixPipeline", "a UNet that takes the image to edit in addition to the latents"},
    {"StableDiffusionUpscalePipeline",
     "a UNet that takes a smaller image and its noise level in addition to the latents"},
    {"StableDiffusionLatentUpscalePipeline", "a UNet that takes smaller latents in addition to the latents"},
    {"StableDiffusionDepth2ImgPipeline", "a UNet that takes a depth map in addition to the latents"},
    {"StableDiffusionImageVariationPipeline", "a UNet that takes an image in place of a prompt"},
    {"FluxControlPipeline", "a transformer that takes a control image in addition to the latents"},
    {"FluxControlImg2ImgPipeline", "a transformer that takes a control image in addition to the latents"},
    {"FluxControlInpaintPipeline", "a transformer that takes a control image in addition to the latents"},
    {"FluxKontextPipeline", "a transformer that takes the image to edit as tokens in addition to the latents"},
    {"FluxKontextInpaintPipeline", "a transformer that takes the image to edit as tokens in addition to the latents"},
    {"Flux2KleinKVPipeline", "a transformer whose keys and values of reference images are kept over the steps"},
    {"QwenImageLayeredPipeline", "a transformer and an autoencoder of images in layers"},
};

/// Number of tokens by which a caption is too long; of captions of megabytes only a prefix is counted.
int64_t tokens_lost(const TextEncoderSpec& e, const std::string& prepared, int64_t read) {
  constexpr int64_t kCounted = int64_t{1} << 16;
  return std::ssize(e.tokenizer->tokens(prepared, kCounted + read)) - read;
}

/// Tensors of the fields name(0), name(1), …, up to the first that is missing.
std::vector<Tensor> numbered(const Conditioning& fields, std::string (*name)(size_t)) {
  std::vector<Tensor> found;
  for (auto it = fields.find(name(0)); it != fields.end(); it = fields.find(name(found.size())))
    found.push_back(it->second);
  return found;
}

}  // namespace

int64_t ImageToImage::first_step(int64_t steps, double part) const {
  const auto n = static_cast<double>(steps);
  const double running = std::min(n * part, n);
  return runs_begun_steps ? static_cast<int64_t>(n - running) : steps - static_cast<int64_t>(running);
}

std::string control_component(size_t i) { return i == 0 ? "controlnet" : fmt::format("controlnet_{}", i); }
std::string control_image_field(size_t i) { return fmt::format("control_image_{}", i); }
std::string control_scale_field(size_t i) { return fmt::format("control_scale_{}", i); }

std::vector<std::string> FamilySpec::text_components() const {
  std::vector<std::string> names;
  for (const TextEncoderSpec& e : text_encoders)
    if (!e.component.empty()) names.push_back(e.component);
  return names;
}

std::vector<Field> FamilySpec::text_fields(int64_t rows) const {
  std::vector<Field> fields;
  for (const TextEncoderSpec& e : text_encoders)
    for (const std::string& name : {e.ids, e.mask})
      if (!name.empty()) fields.push_back({name, {DType::s32, {rows > 0 ? rows + e.template_tokens : e.max_tokens}}});
  return fields;
}

int64_t FamilySpec::length_of_programs(int64_t longest) {
  int64_t rows = 64;
  while (rows < longest) rows *= 2;
  return rows;
}

int64_t FamilySpec::text_rows(int64_t longest, int64_t of_images) const {
  int64_t all = 0;
  for (const Field& f : conditioning)
    if (f.shape.rank() == 2) all = std::max(all, f.shape.dims[0]);
  return (text_lengths.empty() ? all : std::min(length_of_programs(longest - of_images), all)) +
         rows_of_images(of_images);
}

HostArrays FamilySpec::with_text_rows(HostArrays fields, int64_t rows) const {
  for (const Field& f : conditioning) {
    const auto found = fields.find(f.name);
    if (f.shape.rank() != 2 || found == fields.end() || found->second.dims()[1] == rows) continue;
    HostArray& a = found->second;
    const int64_t texts = a.dims()[0];
    if (rows < a.dims()[1]) {
      a = block(a, 0, texts, 0, rows);
      continue;
    }
    HostArray longer = zeros_like(HostArray(batched(texts, {a.dtype(), {rows, f.shape.dims[1]}})));
    set_block(longer, 0, 0, a);
    a = longer;
  }
  return fields;
}

std::vector<std::string> FamilySpec::second_text_fields() const {
  std::vector<std::string> names;
  for (const TextEncoderSpec& e : text_encoders)
    if (e.second_prompt) names.push_back(e.ids);
  return names;
}

std::vector<std::string> FamilySpec::lora_targets(const std::string& component) const {
  const auto e = std::ranges::find(text_encoders, component, &TextEncoderSpec::component);
  return e == text_encoders.end() ? lora.targets : e->lora_targets;
}

HostArrays Family::tokenize(const std::vector<std::string>& captions, const std::vector<MediaSize>& references) const {
  const ReferenceImages::Seen images = seen(references);
  HostArrays out;
  std::set<size_t> cut;
  int64_t limit = 0, lost = 0;  // of the first truncated caption
  for (const TextEncoderSpec& e : spec_.text_encoders) {
    check(e.tokenizer != nullptr, Code::invalid_config,
          "tokenizer: none; expected a model folder on disk, not one opened from texts");
    const int64_t most = e.max_tokens + images.tokens, room = e.max_tokens + FamilySpec::rows_of_images(images.tokens);
    HostArray ids(Shape{DType::s32, {std::ssize(captions), room}}), mask = zeros_like(ids);
    auto id = ids.mutable_view<int32_t>().begin(), real = mask.mutable_view<int32_t>().begin();
    for (size_t i = 0; i < captions.size(); ++i, id += room, real += room) {
      bool truncated = false;
      const std::string text = images.text + captions[i], prepared = e.prepare ? e.prepare(text) : text;
      const std::vector<int32_t> row = e.tokenizer->tokens(prepared, most, &truncated);
      std::fill_n(std::ranges::copy(row, id).out, room - std::ssize(row), e.tokenizer->pad_id());
      std::fill_n(real, row.size(), 1);
      if (!truncated || e.pooled) continue;
      if (cut.empty() || i == *cut.begin()) lost = tokens_lost(e, prepared, most);
      cut.insert(i), limit = e.max_tokens - e.template_tokens;
    }
    out[e.ids] = ids;
    if (!e.mask.empty()) out[e.mask] = mask;
  }
  if (!cut.empty())
    log_warning("caption longer than {} tokens is cut: \"{}\"; its last {} tokens are not read", limit,
                shortened(captions[*cut.begin()]), lost);
  if (cut.size() > 1) log_warning("{} captions are longer than {} tokens and are cut", cut.size(), limit);
  return out;
}

Dims Family::latent_dims(const MediaSize& size) const {
  const Autoencoder& a = *spec_.autoencoder;
  const int64_t multiple = a.downscale * spec_.patch, scale = a.frame_scale;
  auto nearest = [&](int64_t n) { return std::max<int64_t>((n + multiple / 2) / multiple, 1) * multiple; };
  check(size.height > 0 && size.width > 0 && size.height % multiple == 0 && size.width % multiple == 0,
        Code::invalid_config, "size {}x{} is not a multiple of {}, as this model needs; the nearest is {}x{}",
        size.height, size.width, multiple, nearest(size.height), nearest(size.width));
  if (scale == 0)
    check(size.frames == 1, Code::invalid_config, "num_frames is {}; expected 1: this model generates images",
          size.frames);
  else
    check(size.frames > 0 && (size.frames - 1) % scale == 0 && ((size.frames - 1) / scale + 1) % spec_.frame_patch == 0,
          Code::invalid_config, "num_frames is {}; expected 1 plus a multiple of {}: the nearest is {}", size.frames,
          scale * spec_.frame_patch, 1 + std::max<int64_t>(size.frames - 1 + scale / 2, 0) / scale * scale);
  check_size(size);
  return a.latent_dims(size);
}

int64_t Family::tokens(const MediaSize& size) const {
  const Dims latent = latent_dims(size);  // channels last
  int64_t cells = 1;
  for (size_t i = 0; i + 1 < latent.size(); ++i) cells *= latent[i];
  return cells / (spec_.patch * spec_.patch * spec_.frame_patch);
}

std::string ReferenceImages::field(size_t i) { return fmt::format("reference_{}", i); }
std::string ReferenceImages::seen_field(size_t i) { return fmt::format("seen_{}", i); }
std::vector<Tensor> ReferenceImages::fields_in(const Conditioning& conditioning) {
  return numbered(conditioning, field);
}
std::vector<Tensor> ReferenceImages::seen_of(const Conditioning& text) { return numbered(text, seen_field); }

std::vector<MediaSize> ReferenceImages::sizes_of(const std::vector<HostArray>& images) {
  std::vector<MediaSize> sizes;
  for (const HostArray& image : images) sizes.push_back({image.dims()[0], image.dims()[1]});
  return sizes;
}

ReferenceImages::Seen Family::seen(const std::vector<MediaSize>& references) const {
  return reference_images() && !references.empty() ? reference_images()->seen(references) : ReferenceImages::Seen();
}

std::vector<Field> Family::caption_fields(const std::vector<MediaSize>& references) const {
  std::vector<Field> fields = spec_.conditioning;
  for (Field& f : fields)
    if (f.shape.rank() == 2) f.shape.dims[0] += FamilySpec::rows_of_images(seen(references).tokens);
  return fields;
}

std::vector<Field> Family::reference_fields(const std::vector<MediaSize>& sizes) const {
  std::vector<Field> fields;
  for (const MediaSize& size : sizes) {
    const MediaSize cropped = reference_images()->fitted(size).cropped;
    fields.push_back({ReferenceImages::field(fields.size()), {DType::f32, spec_.autoencoder->latent_dims(cropped)}});
  }
  return fields;
}

void add_family(FamilyClass family) { families().push_back(std::move(family)); }

std::vector<std::string> family_pipelines() {
  std::vector<std::string> names;
  for (const FamilyClass& f : families()) names.insert(names.end(), f.pipelines.begin(), f.pipelines.end());
  return names;
}

std::shared_ptr<const Family> make_family(const ModelFolder& folder) {
  std::string name = folder.pipeline();
  if (name.starts_with("Flax")) name = name.substr(4);
  for (const FamilyClass& f : families()) {
    if (std::ranges::count(f.pipelines, name) == 0) continue;
    return f.make(folder);
  }
  for (const auto& [other, why] : kOtherInputs)
    check(name != other, Code::invalid_config, "{}/model_index.json: _class_name is '{}': {}, which is not supported",
          folder.path(), name, why);
  fail(Code::invalid_config, "{}/model_index.json: _class_name is '{}'; expected one of: {}", folder.path(),
       folder.pipeline(), nearest_first(folder.pipeline(), family_pipelines()));
}

}  // namespace md
