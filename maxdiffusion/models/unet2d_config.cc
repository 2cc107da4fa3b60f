// config.json of UNet2DConditionModel → UNetConfig, with diffusers' defaults and its quirks: `attention_head_dim` names
// the NUMBER of heads; most sizes are one value or one per level.
#include <array>
#include <nlohmann/json.hpp>

#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/models/unet2d.h"

namespace md {
namespace {

using Strings = std::vector<std::string>;

template <size_t N>
void require_known(const ConfigReader& r, const char* key, const Strings& types, size_t levels,
                   const std::array<const char*, N>& known) {
  check(types.size() == levels, Code::invalid_config, "{}: '{}' has {} entries, 'block_out_channels' has {}", r.what(),
        key, types.size(), levels);
  for (const auto& t : types) {
    bool ok = false;
    for (const char* k : known) ok = ok || t == k;
    check(ok, Code::invalid_config, "{}: '{}' holds '{}', which is not one of: {}, {}", r.what(), key, t, known[0],
          known[1]);
  }
}

void require_positive(const ConfigReader& r, const char* key, const std::vector<int64_t>& values) {
  for (int64_t v : values)
    check(v > 0, Code::invalid_config, "{}: '{}' holds {}, expected positive numbers", r.what(), key, v);
}

/// Throws for fields that would change the graph and are not supported.
void refuse_others(ConfigReader& r) {
  r.neutral("center_input_sample", {false});
  r.neutral("reverse_transformer_layers_per_block");
  r.neutral("encoder_hid_dim");
  r.neutral("encoder_hid_dim_type");
  r.neutral("dual_cross_attention", {false});
  r.neutral("class_embed_type");
  r.neutral("num_class_embeds");
  r.neutral("class_embeddings_concat", {false});
  r.neutral("resnet_time_scale_shift", {"default"});
  r.neutral("resnet_skip_time_act", {false});
  r.neutral("resnet_out_scale_factor", {1.0});
  r.neutral("time_embedding_type", {"positional"});
  r.neutral("time_embedding_dim");
  r.neutral("time_embedding_act_fn");
  r.neutral("timestep_post_act");
  r.neutral("conv_in_kernel", {3});
  r.neutral("conv_out_kernel", {3});
  r.neutral("attention_type", {"default"});
  r.neutral("cross_attention_norm");
  r.neutral("dropout", {0.0});
  // Fields of an addition_embed_type and a mid block type that are not supported.
  r.ignore({"addition_embed_type_num_heads", "mid_block_only_cross_attention"});
  r.finish();
}

}  // namespace

UNetConfig UNetConfig::from_json(const nlohmann::json& config) {
  ConfigReader r(config, "UNet2DConditionModel config");
  UNetConfig c;
  if (config.contains("sample_size") && config["sample_size"].is_array()) {
    auto size = r.get<std::vector<int64_t>>("sample_size", {});
    check(!size.empty(), Code::invalid_config, "{}: 'sample_size' is empty", r.what());
    c.sample_size = size[0];
  } else {
    c.sample_size = r.get<int64_t>("sample_size", c.sample_size);
  }
  c.in_channels = r.get("in_channels", c.in_channels);
  c.out_channels = r.get("out_channels", c.out_channels);
  c.flip_sin_to_cos = r.get("flip_sin_to_cos", c.flip_sin_to_cos);
  c.freq_shift = r.get("freq_shift", c.freq_shift);
  c.block_out_channels = r.get<std::vector<int64_t>>("block_out_channels", {320, 640, 1280, 1280});
  check(!c.block_out_channels.empty(), Code::invalid_config, "{}: 'block_out_channels' is empty", r.what());
  const size_t n = c.block_out_channels.size();
  c.down_block_types = r.get<Strings>(
      "down_block_types", {"CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"});
  c.up_block_types =
      r.get<Strings>("up_block_types", {"UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"});
  require_known(r, "down_block_types", c.down_block_types, n, std::array{"DownBlock2D", "CrossAttnDownBlock2D"});
  require_known(r, "up_block_types", c.up_block_types, n, std::array{"UpBlock2D", "CrossAttnUpBlock2D"});
  if (config.contains("mid_block_type")) {  // null means: no mid block
    c.mid_block_type = r.get_optional<std::string>("mid_block_type");
    check(!c.mid_block_type || *c.mid_block_type == "UNetMidBlock2DCrossAttn" || *c.mid_block_type == "UNetMidBlock2D",
          Code::invalid_config,
          "{}: 'mid_block_type' is '{}', which is not one of: UNetMidBlock2DCrossAttn, UNetMidBlock2D, null", r.what(),
          c.mid_block_type.value_or(""));
  }
  c.layers_per_block = r.per_level<int64_t>("layers_per_block", n, 2);
  c.transformer_layers_per_block = r.per_level<int64_t>("transformer_layers_per_block", n, 1);
  auto head_dim = r.per_level<int64_t>("attention_head_dim", n, 8);
  c.num_heads = config.contains("num_attention_heads") && !config["num_attention_heads"].is_null()
                    ? r.per_level<int64_t>("num_attention_heads", n, 8)
                    : head_dim;
  r.ignore({"num_attention_heads"});
  c.only_cross_attention = r.per_level<bool>("only_cross_attention", n, false);
  c.cross_attention_dim = r.per_level<int64_t>("cross_attention_dim", n, 1280);
  c.norm_num_groups = r.get("norm_num_groups", c.norm_num_groups);
  check(!config.contains("norm_num_groups") || !config["norm_num_groups"].is_null(), Code::invalid_config,
        "{}: 'norm_num_groups' is null, which is not supported; expected a number", r.what());
  c.norm_eps = r.get("norm_eps", c.norm_eps);
  c.act_fn = r.get("act_fn", c.act_fn);
  c.use_linear_projection = r.get("use_linear_projection", c.use_linear_projection);
  c.upcast_attention = r.get("upcast_attention", c.upcast_attention);
  c.downsample_padding = r.get("downsample_padding", c.downsample_padding);
  check(c.downsample_padding == 0 || c.downsample_padding == 1, Code::invalid_config,
        "{}: 'downsample_padding' is {}, expected 0 or 1", r.what(), c.downsample_padding);
  c.mid_block_scale_factor = r.get("mid_block_scale_factor", c.mid_block_scale_factor);
  c.addition_embed_type = r.get_optional<std::string>("addition_embed_type");
  check(!c.addition_embed_type || *c.addition_embed_type == "text_time", Code::invalid_config,
        "{}: 'addition_embed_type' is '{}', which is not one of: text_time, null", r.what(),
        c.addition_embed_type.value_or(""));
  c.addition_time_embed_dim = r.get("addition_time_embed_dim", c.addition_time_embed_dim);
  c.projection_class_embeddings_input_dim =
      r.get("projection_class_embeddings_input_dim", c.projection_class_embeddings_input_dim);
  check(!c.addition_embed_type || c.projection_class_embeddings_input_dim > 0, Code::invalid_config,
        "{}: 'addition_embed_type' text_time needs 'projection_class_embeddings_input_dim'", r.what());
  c.time_cond_proj_dim = r.get_optional<int64_t>("time_cond_proj_dim");
  refuse_others(r);

  require_positive(r, "block_out_channels", c.block_out_channels);
  require_positive(r, "layers_per_block", c.layers_per_block);
  require_positive(r, "attention_head_dim", c.num_heads);
  require_positive(r, "cross_attention_dim", c.cross_attention_dim);
  require_positive(r, "in_channels, out_channels, norm_num_groups", {c.in_channels, c.out_channels, c.norm_num_groups});
  for (int64_t width : c.block_out_channels)
    check(width % c.norm_num_groups == 0, Code::invalid_config,
          "{}: 'block_out_channels' holds {}, which 'norm_num_groups' {} does not divide", r.what(), width,
          c.norm_num_groups);
  return c;
}

}  // namespace md
