#include "maxdiffusion/families/reference_conventions.h"

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/wan_transformer.h"

namespace md {
namespace {

ReferenceConventions stable_diffusion(const ModelFolder& folder) {
  const bool two = folder.has("text_encoder_2");
  return {.file_prefix = two ? "image_sdxl_" : "image_",
          .always_clips_by_norm = !two,
          .norm_num_groups = folder.config<UNetConfig>("unet").norm_num_groups};
}

ReferenceConventions flux(const ModelFolder& folder) {
  const bool dev = folder.config<FluxTransformerConfig>("transformer").guidance_embeds;
  return {.names = {dev ? "flux-dev" : "flux-schnell"}, .types = {"T2I"}, .file_prefix = "flux_"};
}

ReferenceConventions flux2(const ModelFolder&) {
  return {.names = {"flux2klein", "flux2klein_9B"}, .types = {"T2I"}, .file_prefix = "flux2klein_generated_image_"};
}

ReferenceConventions z_image(const ModelFolder&) {
  return {.names = {"z_image"}, .types = {"T2I"}, .file_prefix = "zimage_output_{}_"};
}

/// MaxDiffusion has no Qwen-Image; the names follow those of its other models.
ReferenceConventions qwen_image(const ModelFolder&) {
  return {.names = {"qwen_image"}, .types = {"T2I"}, .file_prefix = "qwen_image_output_{}_"};
}

ReferenceConventions qwen_image_edit(const ModelFolder&) {
  return {.names = {"qwen_image_edit"}, .types = {"I2I"}, .file_prefix = "qwen_image_edit_output_{}_"};
}

/// Includes three products of D² per text token, two of them for keys and values.
double wan_tflops(const WanTransformerConfig& c, int64_t text_tokens, const Dims& latent) {
  int64_t tokens = 1;
  for (size_t i = 0; i < 3; ++i) tokens *= latent[i] / c.patch_size[i];
  const double d = static_cast<double>(c.width()), ffn = static_cast<double>(c.ffn_dim),
               s = static_cast<double>(tokens), text = static_cast<double>(text_tokens);
  const double self = 6 * s * d * d + 4 * s * s * d, cross = 6 * text * d * d + 2 * s * d * d + 4 * s * text * d,
               out = 4 * s * d * d, feed_forward = 4 * s * d * ffn;
  return 3 * static_cast<double>(c.num_layers) * (self + cross + out + feed_forward) / 1e12;
}

ReferenceConventions wan(const ModelFolder& folder) {
  const auto& transformer = folder.config<WanTransformerConfig>("transformer");
  const bool ti2v = folder.option("expand_timesteps", false),
             image = transformer.in_channels != folder.autoencoder("vae", true)->channels;
  std::vector<std::string> types = {image ? "I2V" : "T2V"};
  if (ti2v) types = {"T2V", "I2V", "TI2V"};
  return {.names = {folder.has("transformer_2") || ti2v ? "wan2.2" : "wan2.1"},
          .types = types,
          .file_prefix = "wan_output_{}_",
          .tflops = [transformer, length = folder.option<int64_t>("max_sequence_length", 512)](const Dims& latent) {
            return wan_tflops(transformer, length, latent);
          }};
}

const struct Row {
  const char* pipeline;  // prefix of its class
  std::vector<std::string> commands, converters;
  ReferenceConventions (*of)(const ModelFolder&);
} kRows[] = {
    {"StableDiffusionXL", {"sdxl", "sdxl_replicated", "lightning"}, {}, stable_diffusion},
    {"StableDiffusion", {"sd", "replicated"}, {}, stable_diffusion},
    {"LatentConsistencyModel", {}, {}, stable_diffusion},
    {"Wan", {"wan"}, {"wan_txt2vid_data_preprocessing"}, wan},
    {"Flux2", {"flux2klein"}, {}, flux2},
    {"Flux", {"flux", "flux_pipeline"}, {}, flux},
    {"ZImage", {"zimage"}, {}, z_image},
    {"QwenImageEdit", {"qwen_image_edit"}, {}, qwen_image_edit},
    {"QwenImage", {"qwen_image"}, {}, qwen_image},
};

std::vector<std::string> all(std::vector<std::string> Row::*names) {
  std::vector<std::string> out;
  for (const Row& row : kRows) out.insert(out.end(), (row.*names).begin(), (row.*names).end());
  return out;
}

}  // namespace

std::string ReferenceConventions::prefix_of_files(uint64_t seed) const {
  return fmt::format(fmt::runtime(file_prefix), seed);
}

void check_repeated_keys(const ReferenceConventions& reference, int64_t norm_num_groups) {
  constexpr int64_t kEverywhere = 32;  // value in all of MaxDiffusion's configs
  const int64_t groups = reference.norm_num_groups.value_or(norm_num_groups);
  if (norm_num_groups != kEverywhere && norm_num_groups != groups)
    log_warning("norm_num_groups={} is ignored: the UNet's config.json says {}", norm_num_groups, groups);
}

ReferenceConventions reference_conventions(const ModelFolder& folder) {
  const std::string& name = folder.pipeline();
  for (const Row& row : kRows)
    if (name.starts_with(row.pipeline) || name.starts_with(std::string("Flax") + row.pipeline)) return row.of(folder);
  return {};
}

const std::vector<MissingFamily>& missing_families() {
  static const std::vector<MissingFamily> families = {
      {"LTX-2", "model_name", "ltx2"},
      {"LTX-Video", "first_pass"},
      {"LTX-Video", "pretrained_model_name_or_path", "Lightricks/LTX-Video"},
      {"Wan Animate", "mode", "animate"},
  };
  return families;
}

const std::vector<FamilyKeys>& keys_of_families() {
  static const std::vector<FamilyKeys> families = {
      {"FLUX.2-klein",
       "flux_name",
       "flux2klein",
       {"batch_size", "depth", "hidden_size", "interactive", "latents_path", "num_attention_heads", "num_double_layers",
        "num_reps", "output_name", "scale_shift_order", "text_encoder_attention", "text_encoder_flash_block_sizes",
        "text_encoder_max_layer", "use_latents"}},
  };
  return families;
}

std::vector<std::string> reference_commands() { return all(&Row::commands); }
std::vector<std::string> reference_converters() { return all(&Row::converters); }

}  // namespace md
