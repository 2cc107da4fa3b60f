#include "maxdiffusion/settings/renamed_keys.h"

namespace md {

const std::vector<KeyRename>& renamed_keys() {
  static const std::vector<KeyRename> all = {
      {"gpu", "gpu_type"},
      {"compile_step", "compile_target"},
      {"vae_image_steps", "vae_image_pretrain_steps"},
      {"text_encoder_lr", "text_encoder_learning_rate"},
      {"lr_scheduler_num_cycles", "lr_num_cycles"},
      {"lr_scheduler_power", "lr_power"},
      {"optimizer_type", "optimizer"},
      {"optimizer",
       "optimizer",
       {{"AdamW", "adamw"},
        {"AdamW8bit", "adamw8bit"},
        {"Adafactor", "adafactor"},
        {"AdaFactor", "adafactor"},
        {"CAME", "came"},
        {"Lion", "lion"},
        {"Muon", "muon"},
        {"Prodigy", "prodigy"},
        {"AdamWScheduleFree", "schedule_free_adamw"},
        {"SGD", "sgd"}}},
      {"discrete_flow_shift", "train_flow_shift"},
      {"ip_noise_gamma", "input_perturbation"},
      {"energy", "explained_variance"},
      {"low_precision_update",
       "low_precision_update",
       {{"master", "master_f32"}, {"stochastic", "stochastic_rounding"}, {"plain", "round_to_nearest"}}},
  };
  return all;
}

}  // namespace md
