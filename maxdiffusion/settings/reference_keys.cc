#include "maxdiffusion/settings/reference_keys.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/families/reference_conventions.h"

namespace md {
namespace {

void refuse(bool set, const char* key, const char* reason) {
  check(!set, Code::invalid_config, "{} is set; expected its default: {}", key, reason);
}

void warn(bool set, const char* key, const char* reason) {
  if (set) log_warning("{} is ignored: {}", key, reason);
}

}  // namespace

void check_family_of_file(const ConfigSource& source) {
  for (const MissingFamily& family : missing_families()) {
    const auto it = source.values().find(family.key);
    if (it == source.values().end() || !it->second.text.starts_with(family.value)) continue;
    throw Error(Code::invalid_config,
                fmt::format("config: {}: {}{} is of the family {}, which is not supported", it->second.where,
                            family.key, *family.value ? "=" + it->second.text : "", family.name))
        .note(fmt::format("supported families: {}", kFamiliesHere));
  }
}

ConfigSource without_keys_of_family(ConfigSource source) {
  for (const FamilyKeys& family : keys_of_families()) {
    const auto it = source.values().find(family.key);
    if (it == source.values().end() || !it->second.text.starts_with(family.value)) continue;
    for (const std::string& key : family.unread) {
      const auto found = source.values().find(key);
      if (found == source.values().end()) continue;
      if (found->second.where == kCommandLine)
        log_warning("{} is ignored: only MaxDiffusion's program for {} reads it", key, family.name);
      source.drop(key);
    }
  }
  return source;
}

void ReferenceKeys::validate() const {
  constexpr const char* kWeights = "weights are read from the model folder, where nothing has to be converted";
  refuse(scheduler_dtype != "float32", "scheduler_dtype", "samplers compute in float32");
  constexpr const char* kService = "Google Cloud's diagnostics are not supported";
  refuse(enable_ml_diagnostics, "enable_ml_diagnostics", kService);
  refuse(enable_ondemand_xprof, "enable_ondemand_xprof", kService);
  warn(!profiler_gcs_path.empty(), "profiler_gcs_path", kService);
  warn(!profiler.empty(), "profiler", "nothing reads it in the reference either; enable_profiler is the switch");
  warn(enable_mllog, "enable_mllog", "nothing reads it in the reference either");
  warn(!dataset_config_name.empty(), "dataset_config_name", "nothing reads it in the reference either");
  warn(ulysses_shards > 0, "ulysses_shards", "logical_axis_rules split sequences over the mesh axis context");
  warn(vae_spatial > 0, "vae_spatial", "the samples of a batch are split over the devices, not their width");
  warn(!converted_weights_dir.empty(), "converted_weights_dir", kWeights);
  warn(!pretrained_orbax_dir.empty(), "pretrained_orbax_dir", kWeights);
  // Keys for choices that this program makes automatically.
  const ReferenceKeys usual;
  constexpr const char *kFormat = "weights are read from .safetensors files",
                       *kThreads = "grain_worker_count sets the threads that prepare captions and images";
  warn(jit_initializers != usual.jit_initializers, "jit_initializers", "starting values are made on the host");
  warn(from_pt != usual.from_pt, "from_pt", kFormat);
  warn(controlnet_from_pt != usual.controlnet_from_pt, "controlnet_from_pt", kFormat);
  warn(lightning_from_pt != usual.lightning_from_pt, "lightning_from_pt", kFormat);
  warn(split_head_dim != usual.split_head_dim, "split_head_dim", "heads are always a separate axis");
  warn(mask_padding_tokens != usual.mask_padding_tokens, "mask_padding_tokens", "padding is never attended to");
  warn(skip_jax_distributed_system != usual.skip_jax_distributed_system, "skip_jax_distributed_system",
       "the launcher sets the processes");
  warn(offload_encoders != usual.offload_encoders, "offload_encoders",
       "text encoders always leave the devices before the denoiser comes");
  warn(tokenize_captions_num_proc != usual.tokenize_captions_num_proc, "tokenize_captions_num_proc", kThreads);
  warn(transform_images_num_proc != usual.transform_images_num_proc, "transform_images_num_proc", kThreads);
  warn(tensorboard_dir != usual.tensorboard_dir, "tensorboard_dir", "it is the folder tensorboard of the run");
  warn(use_base2_exp != usual.use_base2_exp, "use_base2_exp", "the compiler chooses how it takes powers of e");
  warn(use_experimental_scheduler != usual.use_experimental_scheduler, "use_experimental_scheduler",
       "libtpu_flags says how the compiler arranges a program");
  warn(ulysses_attention_chunks != usual.ulysses_attention_chunks, "ulysses_attention_chunks",
       "sequences are exchanged at once");
  warn(compile_text_encoder != usual.compile_text_encoder, "compile_text_encoder", "text encoders always are compiled");
  warn(enable_jax_named_scopes != usual.enable_jax_named_scopes, "enable_jax_named_scopes",
       "operations always carry the paths of their layers");
  warn(!vae_logical_axis_rules.text.empty(), "vae_logical_axis_rules",
       "the autoencoder has no mesh of its own, and follows logical_axis_rules");
  warn(!sharding.text.empty(), "sharding", "logical_axis_rules say how models are split");
  warn(!output_file.empty(), "output_file", "images go into output_dir");
}

}  // namespace md
