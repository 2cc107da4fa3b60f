#include "maxdiffusion/tasks/latent_diffusion.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

int64_t pooled_width(const UNetConfig& c) {
  return c.addition_embed_type ? c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim : 0;
}

}  // namespace

std::vector<BatchField> LatentDiffusion::batch() const {
  const int64_t width = unet.cross_attention_dim.front(), pooled = pooled_width(unet);
  std::vector<BatchField> f = {
      {"moments", {DType::f32, {batch_size, latent_height, latent_width, 2 * unet.in_channels}}},
      {"prompt_embeds", {DType::f32, {batch_size, text_length, width}}}};
  if (pooled) f.push_back({"text_embeds", {DType::f32, {batch_size, pooled}}});
  if (caption_dropout > 0) {
    f.push_back({"empty_prompt_embeds", {DType::f32, {text_length, width}}, false});
    if (pooled) f.push_back({"empty_text_embeds", {DType::f32, {pooled}}, false});
  }
  return f;
}

Tensor LatentDiffusion::loss(const Scope& s, const Feed& feed, Rng rng) const {
  const int64_t b = batch_size;
  std::vector<Tensor> moments = split(feed.at("moments"), 2, -1);
  const Shape latent = moments[0].shape();
  Tensor x0 = moments[0] + moments[1] * random_normal(rng.for_("posterior"), latent);
  Tensor eps = random_normal(rng.for_("noise"), latent);
  Tensor t = sample_timesteps(noise, rng.for_("timestep"), b);

  Tensor prompt = feed.at("prompt_embeds"), pooled;
  const bool micro = unet.addition_embed_type.has_value();
  if (micro) pooled = feed.at("text_embeds");
  if (caption_dropout > 0) {
    Tensor drop = lt(random_uniform(rng.for_("caption"), {DType::f32, {b}}), scalar_like(x0, caption_dropout));
    prompt = where(reshape(drop, {b, 1, 1}), expand_dims(feed.at("empty_prompt_embeds"), 0), prompt);
    if (micro) pooled = where(reshape(drop, {b, 1}), expand_dims(feed.at("empty_text_embeds"), 0), pooled);
  }

  UNetInputs in{.sample = add_noise(noise, x0, eps, t), .timestep = t, .encoder_hidden_states = prompt};
  if (micro) {
    in.text_embeds = pooled;
    in.time_ids = micro_conditioning(s.graph(), b, {resolution, resolution}, {0, 0}, {resolution, resolution});
  }
  Tensor error = square(training_target(noise, x0, eps, t) - unet2d(s, unet, in));
  Tensor per_sample = mean(error, {1, 2, 3});
  if (snr_gamma > 0) per_sample = per_sample * snr_weight(noise, t, snr_gamma);
  return mean(per_sample);
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
