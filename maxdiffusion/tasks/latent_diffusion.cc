#include "maxdiffusion/tasks/latent_diffusion.h"

#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/tasks/encode.h"

namespace md {
namespace {

int64_t pooled_width(const UNetConfig& c) {
  return c.addition_embed_type ? c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim : 0;
}

Shape without_batch(Shape s) {
  s.dims.erase(s.dims.begin());
  return s;
}

}  // namespace

std::string LatentDiffusion::variant() const {
  const int64_t down = folder.vae.downscale();
  return bucket ? fmt::format("{}x{}", latent_width * down, latent_height * down) : "";
}

std::vector<BatchField> LatentDiffusion::batch() const {
  const int64_t b = batch_size, width = folder.unet.cross_attention_dim.front(), pooled = pooled_width(folder.unet);
  const int64_t channels = folder.unet.in_channels, down = folder.vae.downscale();
  std::vector<BatchField> text;
  if (from_ids) {
    text.push_back({"ids", {DType::s32, {b, text_length}}});
    if (folder.text_encoder_2) text.push_back({"ids_2", {DType::s32, {b, text_length}}});
  } else {
    text.push_back({"prompt_embeds", {DType::f32, {b, text_length, width}}});
    if (pooled) text.push_back({"text_embeds", {DType::f32, {b, pooled}}});
  }
  std::vector<BatchField> f = text;
  const Shape latent{DType::f32, {b, latent_height, latent_width, channels}};
  if (replay) {
    f.push_back({"latents", latent});
    f.push_back({"noise", latent});
    f.push_back({"timesteps", {DType::s32, {b}}});
    if (pooled) f.push_back({"time_ids", {DType::f32, {b, 6}}});
    return f;
  }
  if (from_latents) {
    f.push_back({"latents", latent});
  } else if (from_pixels) {
    f.push_back({"pixels", {DType::u8, {b, latent_height * down, latent_width * down, 3}}});
  } else {
    f.push_back({"moments", {DType::f32, {b, latent_height, latent_width, 2 * channels}}});
  }
  if (masked) f.push_back({"mask", {DType::f32, {b, latent_height, latent_width, 1}}});
  if (pooled && sizes) f.push_back({"time_ids", {DType::f32, {b, 6}}});
  if (at_timesteps) f.push_back({"timesteps", {DType::s32, {b}}});
  if (prior_loss_weight)
    for (size_t i = 0, n = f.size(); i < n; ++i) f.push_back({"class_" + f[i].name, f[i].shape});
  if (caption_dropout > 0)
    for (const BatchField& t : text) f.push_back({"empty_" + t.name, without_batch(t.shape), false});
  return f;
}

Tensor LatentDiffusion::loss(const Models& models, const Feed& feed, Rng rng) const {
  const Tensor per_sample = sample_losses(models, feed, rng);
  if (!prior_loss_weight) return mean(per_sample);
  const std::vector<Tensor> halves = split(per_sample, 2, 0);
  return mean(halves[0]) + mean(halves[1]) * *prior_loss_weight;
}

Tensor LatentDiffusion::sample_losses(const Models& models, const Feed& feed, Rng rng) const {
  const int64_t b = prior_loss_weight ? 2 * batch_size : batch_size;
  auto both = [&](const std::string& name) {
    return prior_loss_weight ? concatenate({feed.at(name), feed.at("class_" + name)}, 0) : feed.at(name);
  };
  const UNetConfig& unet = folder.unet;
  const bool micro = unet.addition_embed_type.has_value();

  Tensor x0, eps, t;
  if (replay) {
    x0 = feed.at("latents"), eps = feed.at("noise"), t = feed.at("timesteps");
  } else {
    Tensor mean_, deviation;
    if (from_latents) {
      x0 = both("latents");
    } else if (from_pixels) {
      const Posterior q = vae_encode(models("vae"), folder.vae, pixels_to_float(both("pixels")));
      mean_ = (q.mean - folder.vae.shift_factor) * folder.vae.scaling_factor;
      deviation = exp(q.logvar * 0.5) * folder.vae.scaling_factor;
    } else {
      const std::vector<Tensor> moments = split(both("moments"), 2, -1);
      mean_ = moments[0], deviation = moments[1];
    }
    if (!from_latents) x0 = mean_ + deviation * random_normal(rng.for_("posterior"), mean_.shape());
    eps = random_normal(rng.for_("noise"), x0.shape());
    t = at_timesteps ? feed.at("timesteps") : sample_timesteps(noise, rng.for_("timestep"), b, timestep_bias);
    if (noise_offset > 0)  // one shift per picture and channel; Guttenberg 2023
      eps = eps + random_normal(rng.for_("noise offset"), {DType::f32, {b, 1, 1, x0.dim(3)}}) * noise_offset;
  }

  // Captions, some of them dropped.
  Tensor drop;
  if (caption_dropout > 0 && !replay)
    drop = lt(random_uniform(rng.for_("caption"), {DType::f32, {b}}),
              full(x0.graph(), caption_dropout, {DType::f32, {b}}));
  auto caption = [&](const std::string& name) {
    Tensor x = both(name);
    if (!drop) return x;
    Dims dims(x.dims().size(), 1);
    dims[0] = b;
    return where(reshape(drop, dims), expand_dims(feed.at("empty_" + name), 0), x);
  };
  UNetInputs in{.sample = {}, .timestep = t, .encoder_hidden_states = {}};
  if (from_ids) {
    const Scope first = models("text_encoder");
    std::optional<Scope> second;
    Tensor ids_2;
    if (folder.text_encoder_2) second = models("text_encoder_2"), ids_2 = caption("ids_2");
    const TextConditioning c = text_conditioning(folder, first, caption("ids"), second ? &*second : nullptr, ids_2);
    in.encoder_hidden_states = c.prompt_embeds, in.text_embeds = c.text_embeds;
  } else {
    in.encoder_hidden_states = caption("prompt_embeds");
    if (micro) in.text_embeds = caption("text_embeds");
  }

  const Scope s = models("unet");
  if (micro)
    in.time_ids = replay || sizes
                      ? feed.at("time_ids")
                      : micro_conditioning(s.graph(), b, {resolution, resolution}, {0, 0}, {resolution, resolution});
  Tensor added = eps;  // the target knows nothing of the perturbation; Ning et al. 2023
  if (input_perturbation > 0 && !replay)
    added = eps + random_normal(rng.for_("perturbation"), eps.shape()) * input_perturbation;
  in.sample = add_noise(noise, x0, added, t);
  Tensor error = square(training_target(noise, x0, eps, t) - unet2d(s, unet, in));
  if (masked) error = error * feed.at("mask");
  const Tensor per_sample = mean(error, {1, 2, 3});
  return snr_gamma > 0 ? per_sample * snr_weight(noise, t, snr_gamma) : per_sample;
}

Tensor micro_conditioning(Graph& g, int64_t batch, std::array<int64_t, 2> original_size,
                          std::array<int64_t, 2> crop_top_left, std::array<int64_t, 2> target_size) {
  HostArray row(Shape{DType::f32, {1, 6}});
  auto v = row.mutable_view<float>();
  size_t i = 0;
  for (const auto& values : {original_size, crop_top_left, target_size})
    for (int64_t value : values) v[i++] = static_cast<float>(value);
  return broadcast_to(constant(g, row), {batch, 6});
}

}  // namespace md
