// Autoencoder objective: mean |x − x̂| plus a small KL term. Source: Rombach et al. 2022 (LDM), section 3.1 and G,
// without the perceptual and adversarial terms.
#pragma once

#include <memory>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

/// The autoencoder stage (`train_new_vae`).
struct AutoencoderKeys {
  int64_t vae_max_train_steps = 0, vae_image_pretrain_steps = 0;
  double vae_learning_rate = 1e-3, vae_kl_weight = 1e-6, vae_per_device_batch_size = 8;
  template <class V>
  void visit(V&& v) {
    v("vae_max_train_steps", vae_max_train_steps, "optimizer updates of the autoencoder stage");
    v("vae_image_pretrain_steps", vae_image_pretrain_steps,
      "updates on single frames before those on videos, as many frames as a batch of videos has; layers over time are "
      "not trained in them");
    v("vae_learning_rate", vae_learning_rate, "peak step size of the autoencoder stage", at_least(0));
    v("vae_kl_weight", vae_kl_weight, "weight of KL(q || N(0, 1)) per pixel value, added to the reconstruction error",
      at_least(0));
    v("vae_per_device_batch_size", vae_per_device_batch_size, "images or videos per device in the autoencoder stage");
  }
};

struct AutoencoderTask : Task {
  std::shared_ptr<const Autoencoder> autoencoder;
  int64_t batch_size = 1;
  MediaSize size;           // of the media in pixels
  double kl_weight = 1e-6;  // times the KL per pixel value

  std::string model() const override { return autoencoder->component; }
  /// pixels: u8 [B] + Autoencoder::pixel_dims.
  std::vector<BatchField> batch() const override;
  Tensor loss(const Models& models, const Feed& feed, Rng rng) const override;
};

}  // namespace md
