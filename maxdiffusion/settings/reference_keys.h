// Keys of MaxDiffusion's configs that this program ignores, so that those files can be loaded unchanged. A value that
// would change the result in MaxDiffusion is rejected or causes a warning naming the key.
#pragma once

#include <cstdint>
#include <string>

#include "maxdiffusion/base/json_text.h"
#include "maxdiffusion/config/config.h"

namespace md {

/// Declared so that files with these keys can be loaded. Source: MaxDiffusion's configs/base_xl.yml and its siblings.
struct ReferenceKeys {
  // Settings of MaxDiffusion's implementation; any value is accepted.
  bool jit_initializers = true, from_pt = true, controlnet_from_pt = true, lightning_from_pt = true;
  bool split_head_dim = true, mask_padding_tokens = true, skip_jax_distributed_system = false, offload_encoders = true;
  int64_t tokenize_captions_num_proc = 4, transform_images_num_proc = 4;
  bool use_base2_exp = true, use_experimental_scheduler = true, compile_text_encoder = false,
       enable_jax_named_scopes = false;
  int64_t ulysses_attention_chunks = 1;
  std::string tensorboard_dir;
  JsonText vae_logical_axis_rules, sharding;
  // Refused or warned about when set.
  bool enable_mllog = false, enable_ml_diagnostics = false, enable_ondemand_xprof = false;
  int64_t norm_num_groups = 32, ulysses_shards = -1, vae_spatial = -1;
  std::string converted_weights_dir, pretrained_orbax_dir, scheduler_dtype = "float32";
  std::string profiler, profiler_gcs_path, dataset_config_name, output_file;

  template <class V>
  void visit(V&& v) {
    constexpr const char* kAny = "accepted for MaxDiffusion's files; ignored";
    constexpr const char* kNeutral = "accepted for MaxDiffusion's files; other values are refused or warned about";
    v("jit_initializers", jit_initializers, kAny);
    v("from_pt", from_pt, kAny);
    v("controlnet_from_pt", controlnet_from_pt, kAny);
    v("lightning_from_pt", lightning_from_pt, kAny);
    v("split_head_dim", split_head_dim, kAny);
    v("mask_padding_tokens", mask_padding_tokens, kAny);
    v("skip_jax_distributed_system", skip_jax_distributed_system, kAny);
    v("offload_encoders", offload_encoders,
      "accepted for MaxDiffusion's files; text encoders leave the devices before the denoiser comes");
    v("tokenize_captions_num_proc", tokenize_captions_num_proc, kAny);
    v("transform_images_num_proc", transform_images_num_proc, kAny);
    v("tensorboard_dir", tensorboard_dir, kAny);
    v("use_base2_exp", use_base2_exp, kAny);
    v("use_experimental_scheduler", use_experimental_scheduler, kAny);
    v("ulysses_attention_chunks", ulysses_attention_chunks, kAny);
    v("compile_text_encoder", compile_text_encoder,
      "accepted for MaxDiffusion's files; text encoders always are compiled");
    v("enable_jax_named_scopes", enable_jax_named_scopes,
      "accepted for MaxDiffusion's files; operations always carry the paths of their layers");
    v("vae_logical_axis_rules", vae_logical_axis_rules,
      "accepted for MaxDiffusion's files; the autoencoder has no mesh of its own, and follows logical_axis_rules");
    v("sharding", sharding, "accepted for MaxDiffusion's files; logical_axis_rules say how models are split");
    v("output_file", output_file,
      "accepted for MaxDiffusion's files; images go into output_dir, under the names of their model");
    v("norm_num_groups", norm_num_groups,
      "accepted for MaxDiffusion's files; the value in the UNet's config.json is used");
    v("enable_mllog", enable_mllog, kNeutral);
    v("enable_ml_diagnostics", enable_ml_diagnostics, kNeutral);
    v("enable_ondemand_xprof", enable_ondemand_xprof, kNeutral);
    v("profiler", profiler, kNeutral);
    v("profiler_gcs_path", profiler_gcs_path, kNeutral);
    v("dataset_config_name", dataset_config_name, kNeutral);
    v("ulysses_shards", ulysses_shards, kNeutral);
    v("vae_spatial", vae_spatial, kNeutral);
    v("converted_weights_dir", converted_weights_dir, kNeutral);
    v("pretrained_orbax_dir", pretrained_orbax_dir, kNeutral);
    v("scheduler_dtype", scheduler_dtype, kNeutral);
  }

  /// Throws invalid_config for unsupported keys that would change the result; warns of the other ones.
  void validate() const;
};

/// Throws invalid_config, naming the family, for a MaxDiffusion config of an unsupported family.
void check_family_of_file(const ConfigSource& source);
/// Removes the keys that only MaxDiffusion's configs of this family have and that have no effect; logs those of the
/// command line.
ConfigSource without_keys_of_family(ConfigSource source);

}  // namespace md
