// Autoencoder objective: mean |x − x̂| plus a small KL term. Source: Rombach et al. 2022 (LDM), section 3.1 and G,
// without the perceptual and adversarial terms.
#pragma once

#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

struct Autoencoder : Task {
  VaeConfig vae;
  int64_t batch_size = 1, resolution = 64;
  double kl_weight = 1e-6;  // times the KL per pixel value

  std::string model() const override { return "vae"; }
  /// pixels: u8 [B, R, R, 3].
  std::vector<BatchField> batch() const override;
  Tensor loss(const Models& models, const Feed& feed, Rng rng) const override;
};

/// u8 [0, 255] → f32 [−1, 1].
Tensor pixels_to_float(Tensor pixels);

}  // namespace md
