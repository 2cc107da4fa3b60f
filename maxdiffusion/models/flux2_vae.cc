#include "maxdiffusion/models/flux2_vae.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/latent_patches.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

using Config = Flux2VaeConfig;

class Flux2Autoencoder final : public Autoencoder {
 public:
  explicit Flux2Autoencoder(const Config& config) : config_(config) {
    channels = config.channels(), downscale = config.downscale();
    decoder_tile = config.decoder.sample_size / downscale;
    other_published_latents = true;
  }
  Posterior encode(const Models& models, Tensor pixels, MediaState*) const override {
    const Scope s = models(component);
    return flux2_vae_encode(s, config_, flux2_vae_statistics(s, config_), pixels);
  }
  Tensor decode(const Models& models, Tensor latents, MediaState*) const override {
    const Scope s = models(component);
    return cast(flux2_vae_decode(s, config_, flux2_vae_statistics(s, config_), latents), DType::f32);
  }
  Tensor published_latents(const Models& models, Tensor latents) const override {
    return flux2_vae_unpatched(flux2_vae_statistics(models(component), config_), latents);
  }

 private:
  Config config_;
};

}  // namespace

int64_t Flux2VaeConfig::channels() const { return encoder.latent_channels * kLatentPatch * kLatentPatch; }
int64_t Flux2VaeConfig::downscale() const { return encoder.downscale() * kLatentPatch; }

Flux2VaeConfig Flux2VaeConfig::from_json(const nlohmann::json& config) {
  Config c;
  nlohmann::json rest = config, of_bn = nlohmann::json::object();
  for (const char* key : {"batch_norm_eps", "batch_norm_momentum", "patch_size", "decoder_block_out_channels"})
    if (const auto found = rest.find(key); found != rest.end()) {
      of_bn[key] = *found;
      rest.erase(found);
    }
  // Defaults that differ from AutoencoderKL's.
  const nlohmann::json defaults = {{"block_out_channels", {128, 256, 512, 512}},
                                   {"down_block_types", std::vector<std::string>(4, "DownEncoderBlock2D")},
                                   {"up_block_types", std::vector<std::string>(4, "UpDecoderBlock2D")},
                                   {"layers_per_block", 2},
                                   {"latent_channels", 32},
                                   {"sample_size", 1024}};
  for (const auto& [key, value] : defaults.items()) rest.emplace(key, value);
  c.encoder = c.decoder = VaeConfig::from_json(rest);
  ConfigReader r(of_bn, "AutoencoderKLFlux2 config");
  r.ignore({"batch_norm_momentum"});  // only used in training
  c.batch_norm_eps = r.get("batch_norm_eps", c.batch_norm_eps);
  const std::vector<int64_t> patch(2, kLatentPatch), values = r.get("patch_size", patch);
  check(values == patch, Code::invalid_config, "{}: 'patch_size' has {} numbers, the first {}, expected [{}, {}]",
        r.what(), values.size(), values.empty() ? 0 : values[0], kLatentPatch, kLatentPatch);
  if (const auto widths = r.get_optional<std::vector<int64_t>>("decoder_block_out_channels")) {
    rest["block_out_channels"] = *widths;
    c.decoder = VaeConfig::from_json(rest);
  }
  r.finish();
  return c;
}

LatentStatistics flux2_vae_statistics(const Scope& root, const Config& c) {
  const Scope s = (root / "bn").frozen();
  const int64_t n = c.channels();
  auto read = [&](const char* name, Init start) {
    return reshape(cast(s.param(name, {n}, {""}, start), DType::f32), {1, 1, 1, n});
  };
  Tensor mean = read("running_mean", init::zeros());
  return {mean, read("running_var", init::ones()) + c.batch_norm_eps};
}

Posterior flux2_vae_encode(const Scope& s, const Config& c, const LatentStatistics& statistics, Tensor pixels) {
  check(pixels.rank() == 4 && pixels.dim(1) % c.downscale() == 0 && pixels.dim(2) % c.downscale() == 0,
        Code::invalid_graph, "flux2_vae: pixels are {}, expected [B, H, W, {}] with H and W multiples of {}",
        to_string(pixels.shape()), c.encoder.in_channels, c.downscale());
  const Posterior p = vae_encode(s, c.encoder, pixels);
  return {.mean = (to_latent_patches(p.mean) - statistics.mean) / sqrt(statistics.variance),
          .logvar = to_latent_patches(p.logvar) - log(statistics.variance)};
}

Tensor flux2_vae_unpatched(const LatentStatistics& statistics, Tensor latents) {
  check(latents.rank() == 4 && latents.dim(-1) == statistics.mean.dim(-1), Code::invalid_graph,
        "flux2_vae: latents are {}, expected [B, h, w, {}]", to_string(latents.shape()), statistics.mean.dim(-1));
  return from_latent_patches(cast(latents, DType::f32) * sqrt(statistics.variance) + statistics.mean);
}

Tensor flux2_vae_decode(const Scope& s, const Config& c, const LatentStatistics& statistics, Tensor latents) {
  return vae_decode(s, c.decoder, flux2_vae_unpatched(statistics, latents));
}

std::shared_ptr<Autoencoder> flux2_autoencoder(const Config& c) { return std::make_shared<Flux2Autoencoder>(c); }

void trace_flux2_vae(const Scope& s, const Config& c) {
  const int64_t side = c.downscale();
  const LatentStatistics statistics = flux2_vae_statistics(s, c);
  Tensor pixels = full(s.graph(), 0, {DType::f32, {1, side, side, c.encoder.in_channels}});
  flux2_vae_decode(s, c, statistics, flux2_vae_encode(s, c, statistics, pixels).mean);
}

}  // namespace md
