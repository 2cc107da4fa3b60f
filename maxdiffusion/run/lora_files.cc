#include "maxdiffusion/run/lora_files.h"

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/run/plan.h"

namespace md {

void write_lora_layout(const std::string& path, const LoraFile& lora, const ModelFolder& folder, const Family& family,
                       const std::string& layout, const std::map<std::string, std::string>& metadata) {
  const LoraNames names = lora_names(folder, family);
  if (layout == "diffusers") {
    const TemporaryFolder t;
    const std::string written = write_peft_lora(t.path(), lora, names);
    std::filesystem::copy_file(written, path);
  } else if (layout == "comfyui" || (layout.empty() && family.spec().lora.original_names)) {
    write_comfyui_lora(path, lora, names);
  } else {
    std::map<std::string, std::string> said = metadata;
    if (const std::string version = family.spec().lora.kohya_version; !version.empty()) {
      said["ss_base_model_version"] = version;
      said["ss_v2"] = version.starts_with("sd_v2") ? "True" : "False";
    }
    write_kohya_lora(path, lora, names, family.spec().text_components().size() == 2, said);
  }
}

std::map<std::string, std::string> kohya_metadata(const RunConfig& c, const RunInfo& run, const Family& family) {
  auto number = [](auto v) { return fmt::format("{}", v); };
  const std::string none = "None";  // as Python writes it
  const MediaSize size = training_size(c, family);
  const auto warmup = c.optim.warmup_steps_fraction * static_cast<double>(c.optim.max_train_steps);
  return {
      {"ss_sd_model_name", std::filesystem::path(c.model.pretrained_model_name_or_path).filename().string()},
      {"ss_output_name", c.run.run_name},
      {"ss_learning_rate", number(c.optim.learning_rate)},
      {"ss_unet_lr", number(c.optim.learning_rate)},
      {"ss_text_encoder_lr", c.denoise.train_text_encoder ? number(c.update.text_encoder_learning_rate) : none},
      {"ss_max_train_steps", number(c.optim.max_train_steps)},
      {"ss_lr_scheduler", c.optim.lr_scheduler},
      {"ss_lr_warmup_steps", number(static_cast<int64_t>(warmup))},
      {"ss_optimizer", make_optimizer(c.optim)->full_name()},
      {"ss_max_grad_norm", number(c.optim.max_grad_norm)},
      {"ss_gradient_accumulation_steps", number(c.update.gradient_accumulation_steps)},
      {"ss_batch_size_per_device", number(c.batches.per_device_batch_size)},
      {"ss_resolution", fmt::format("({}, {})", size.width, size.height)},
      {"ss_enable_bucket", c.images.enable_bucket ? "True" : "False"},
      {"ss_mixed_precision", c.layers.activations_dtype == "bfloat16" ? "bf16" : "no"},
      {"ss_seed", number(run.seed)},
      {"ss_noise_offset", c.denoise.noise_offset != 0 ? number(c.denoise.noise_offset) : none},
      {"ss_min_snr_gamma", c.process.snr_gamma > 0 ? number(c.process.snr_gamma) : none},
      {"ss_caption_dropout_rate", number(c.denoise.caption_dropout)},
  };
}

}  // namespace md
