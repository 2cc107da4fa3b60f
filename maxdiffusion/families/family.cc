// What most families share, and the list of families: a new one is a file of its own and one line here for each
// pipeline class.
#include "maxdiffusion/families/family.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {

std::shared_ptr<const Family> make_stable_diffusion(const ModelFolder& folder);
std::shared_ptr<const Family> make_wan(const ModelFolder& folder);
std::shared_ptr<const Family> make_flux(const ModelFolder& folder);

namespace {

std::vector<FamilyClass>& families() {
  static std::vector<FamilyClass> all = {
      {"StableDiffusionPipeline", make_stable_diffusion, {"sd", "replicated"}},
      {"StableDiffusionImg2ImgPipeline", make_stable_diffusion},
      {"StableDiffusionInpaintPipeline", make_stable_diffusion},
      {"StableDiffusionControlNetPipeline", make_stable_diffusion},
      {"LatentConsistencyModelPipeline", make_stable_diffusion},
      {"StableDiffusionXLPipeline", make_stable_diffusion, {"sdxl", "sdxl_replicated", "lightning"}},
      {"StableDiffusionXLImg2ImgPipeline", make_stable_diffusion},
      {"StableDiffusionXLInpaintPipeline", make_stable_diffusion},
      {"StableDiffusionXLControlNetPipeline", make_stable_diffusion},
      {"WanPipeline", make_wan, {"wan"}, {"wan_txt2vid_data_preprocessing"}},
      {"WanImageToVideoPipeline", make_wan},
      {"FluxPipeline", make_flux, {"flux", "flux_pipeline"}},
      {"FluxImg2ImgPipeline", make_flux},
      {"FluxInpaintPipeline", make_flux},
  };
  return all;
}

}  // namespace

std::vector<std::string> Family::lora_targets(const std::string& component) const {
  const std::vector<std::string> encoders = text_encoders();
  if (std::ranges::count(encoders, component) > 0) return {"q_proj", "k_proj", "v_proj", "out_proj"};
  return {"to_k", "to_q", "to_v", "to_out.0"};
}

Denoised Family::denoise_keeping(const Models&, Tensor, Tensor, const Conditioning&, Tensor) const {
  throw Error(Code::invalid_config,
              fmt::format("use_magcache: {} has no sequence of blocks that could be left out", denoiser()));
}

MediaSize Family::media_size(const Dims& latent) const {
  const int64_t down = downscale(), frames = frame_scale();
  if (frames == 0) return {latent[0] * down, latent[1] * down};
  return {latent[1] * down, latent[2] * down, 1 + (latent[0] - 1) * frames};
}

Dims Family::pixel_dims(const MediaSize& size) const {
  if (frame_scale() == 0) return {size.height, size.width, 3};
  return {size.frames, size.height, size.width, 3};
}

Posterior Family::encode_media(const Models& models, Tensor pixels) const {
  MediaState whole;
  return encode_chunk(models, pixels, whole);
}

Tensor Family::decode_media(const Models& models, Tensor latents) const {
  MediaState whole;
  return decode_chunk(models, latents, whole);
}

Posterior Family::encode_chunk(const Models&, Tensor pixels, MediaState&) const {
  return {cast(pixels, DType::f32), {}};
}

Tensor Family::decode_chunk(const Models&, Tensor latents, MediaState&) const { return cast(latents, DType::f32); }

nlohmann::json Family::fitted_autoencoder(nlohmann::json config, const EachMoments&) const { return config; }

nlohmann::json Family::sampler_config(nlohmann::json config, const MediaSize&) const { return config; }

std::vector<std::string> Family::encoded_columns() const {
  std::vector<std::string> names = {"moments"};
  for (const Field& f : conditioning_fields()) names.push_back(f.name);
  return names;
}

HostArrays Family::from_encoded(const HostArrays& records) const {
  HostArrays out;
  for (const auto& [name, a] : records)
    out[name] = name == "moments" ? latent_scale().apply_to_moments(a.cast(DType::f32)) : a.cast(DType::f32);
  return out;
}

HostArrays Family::to_encoded(const HostArray& moments, const HostArrays&, const HostArrays& conditioning,
                              const std::function<std::vector<float>(size_t)>&) const {
  HostArrays out = conditioning;
  out["moments"] = moments;
  return out;
}

void add_family(FamilyClass family) { families().push_back(std::move(family)); }

std::vector<std::string> family_commands() {
  std::vector<std::string> names;
  for (const FamilyClass& f : families()) names.insert(names.end(), f.commands.begin(), f.commands.end());
  return names;
}

std::vector<std::string> family_converters() {
  std::vector<std::string> names;
  for (const FamilyClass& f : families()) names.insert(names.end(), f.converters.begin(), f.converters.end());
  return names;
}

std::shared_ptr<const Family> make_family(const ModelFolder& folder) {
  std::string name = folder.pipeline();
  if (name.starts_with("Flax")) name = name.substr(4);
  std::vector<std::string> known;
  for (const FamilyClass& f : families()) {
    known.push_back(f.pipeline);
    if (f.pipeline != name) continue;
    if (name.find("Img2Img") != name.npos || name.find("Inpaint") != name.npos)
      log_line_once(LogLevel::warning,
                    fmt::format("{}: a {} changes an image that it is given, which is not here yet; it is opened for "
                                "text to image and begins with noise",
                                folder.path(), folder.pipeline()));
    return f.make(folder);
  }
  fail(Code::invalid_config, "{}/model_index.json: the pipeline class '{}' is not one of: {}", folder.path(),
       folder.pipeline(), fmt::join(known, ", "));
}

}  // namespace md
