#include "maxdiffusion/settings/foreign_keys.h"

#include <fmt/core.h>

namespace md {
namespace {

struct Row {
  const char *theirs, *ours, *but = "";  // `but`: differences besides the name
};

constexpr Row kRows[] = {
    {"adam_beta1", "adam_b1"},
    {"adam_beta2", "adam_b2"},
    {"adam_epsilon", "adam_eps"},
    {"batch_size", "per_device_batch_size"},
    {"bf16", "activations_dtype", ", as in activations_dtype=bfloat16"},
    {"caption_dropout_rate", "caption_dropout"},
    {"cfg", "guidance_scale"},
    {"cfg_scale", "guidance_scale"},
    {"checkpointing_steps", "checkpoint_every", ", which counts samples"},
    {"checkpoints_total_limit", "checkpoints_to_keep"},
    {"controlnet", "controlnet_model_name_or_path"},
    {"controlnet_scale", "controlnet_conditioning_scale"},
    {"dataloader_num_workers", "grain_worker_count"},
    {"dataset_dir", "train_data_dir"},
    {"device", "hardware"},
    {"dtype", "activations_dtype"},
    {"epochs", "num_train_epochs"},
    {"flip_aug", "random_flip"},
    {"fp16", "activations_dtype", ", as in activations_dtype=float16"},
    {"frames", "num_frames"},
    {"gradient_checkpointing", "remat_policy", ", as in remat_policy=FULL"},
    {"guidance", "guidance_scale"},
    {"instance_dir", "instance_data_dir"},
    {"logging_dir", "output_dir"},
    {"lokr_factor", "decompose_factor"},
    {"lora", "lora_files"},
    {"lora_path", "lora_files"},
    {"lora_scale", "lora_scales"},
    {"lora_weight", "lora_scales"},
    {"lora_type", "adapter"},
    {"lr", "learning_rate"},
    {"max_train_epochs", "num_train_epochs"},
    {"min_snr_gamma", "snr_gamma"},
    {"mixed_precision", "activations_dtype",
     ", as in activations_dtype=bfloat16; weights_dtype is that of the weights"},
    {"model", "pretrained_model_name_or_path"},
    {"model_path", "pretrained_model_name_or_path"},
    {"neg_prompt", "negative_prompt"},
    {"network_alpha", "lora_alpha"},
    {"network_dim", "lora_rank"},
    {"network_dropout", "lora_dropout", ", of an adapter's input, as PEFT has it"},
    {"network_module", "adapter"},
    {"network_weights", "lora_init"},
    {"num_epochs", "num_train_epochs"},
    {"num_images", "num_images_per_prompt"},
    {"num_steps", "num_inference_steps", " for samples, `max_train_steps` for training"},
    {"output_name", "run_name"},
    {"pretrained_vae_model_name_or_path", "vae_file"},
    {"proportion_empty_prompts", "caption_dropout"},
    {"rank", "lora_rank"},
    {"sample_every_n_steps", "sample_every"},
    {"sampler", "scheduler", ", as in scheduler=euler"},
    {"sampler_name", "scheduler", ", as in scheduler=euler"},
    {"save_every_n_steps", "checkpoint_every", ", which counts samples"},
    {"steps", "num_inference_steps", " for samples, `max_train_steps` for training"},
    {"torch_dtype", "activations_dtype"},
    {"train_batch_size", "per_device_batch_size"},
    {"use_ema", "ema_decay", ", as in ema_decay=0.9999"},
    {"v_parameterization", "prediction_type", ", as in prediction_type=v_prediction"},
    {"vae", "vae_file"},
    {"validation_prompt", "prompt"},
    {"validation_steps", "sample_every"},
    {"weight_decay", "optimizer_args", ", as in optimizer_args=weight_decay=0.01"},
    {"with_prior_preservation", "class_data_dir", ": the folder of the class's images"},
    {"zero_terminal_snr", "diffusion_scheduler_config",
     ", as in diffusion_scheduler_config=\"{rescale_betas_zero_snr: true}\""},
};

}  // namespace

const std::map<std::string, std::string>& foreign_keys() {
  static const std::map<std::string, std::string> hints = [] {
    std::map<std::string, std::string> out;
    for (const Row& row : kRows) out[row.theirs] = fmt::format("here it is `{}`{}", row.ours, row.but);
    return out;
  }();
  return hints;
}

}  // namespace md
