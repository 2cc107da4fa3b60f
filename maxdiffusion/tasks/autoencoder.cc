#include "maxdiffusion/tasks/autoencoder.h"

#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"

namespace md {

std::vector<BatchField> AutoencoderTask::batch() const {
  return {batch_field(batch_size, {"pixels", {DType::u8, autoencoder->pixel_dims(size)}})};
}

Tensor AutoencoderTask::loss(const Models& models, const Feed& feed, Rng rng) const {
  const Scope shared = models(model());  // used by encoder and decoder
  const Models both = [&shared](const std::string&) { return Scope(shared); };
  Tensor x = pixels_to_float(feed.at("pixels"));
  const Autoencoder& a = *autoencoder;
  const Posterior q = a.encode(both, x, nullptr);
  Tensor z = sample_posterior(q, random_normal(rng.for_("posterior"), q.mean.shape()));
  Tensor reconstruction = mean(abs(a.decode(both, z, nullptr) - x));
  const int64_t of_sample = x.shape().elements() / batch_size;
  const auto values = static_cast<double>(of_sample);
  return reconstruction + kl_divergence(q) * (kl_weight / values);
}

}  // namespace md
