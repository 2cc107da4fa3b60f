#include "maxdiffusion/settings/renamed_keys.h"

namespace md {

const std::vector<KeyRename>& renamed_keys() {
  static const std::vector<KeyRename> all = {
      {"gpu", "gpu_type"},
      {"compile_step", "compile_target"},
      {"vae_image_steps", "vae_image_pretrain_steps"},
      {"energy", "explained_variance"},
      {"low_precision_update",
       "low_precision_update",
       {{"master", "master_f32"}, {"stochastic", "stochastic_rounding"}, {"plain", "round_to_nearest"}}},
  };
  return all;
}

}  // namespace md
