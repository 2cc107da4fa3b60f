#include "maxdiffusion/models/original_weight_names.h"

#include <fmt/format.h>

#include <optional>
#include <string_view>

namespace md {
namespace {

struct Respelling {
  std::string published, original;
};
using Table = std::vector<Respelling>;

/// `name` with its prefix replaced by the first table row that matches up to a dot.
std::optional<std::string> beginning_respelled(const std::string& name, const Table& table) {
  for (const auto& [published, original] : table)
    if (name.starts_with(published) && (name.size() == published.size() || name[published.size()] == '.'))
      return original + name.substr(published.size());
  return std::nullopt;
}

/// `name` with the first matching table row replaced, between dots or at the start.
std::string inner_respelled(const std::string& name, const Table& table) {
  const std::string dotted = "." + name;
  for (const auto& [published, original] : table)
    if (const size_t at = dotted.find("." + published + "."); at != std::string::npos)
      return name.substr(0, at) + original + name.substr(at + published.size());
  return name;
}

const Table kResnet = {{"norm1", "in_layers.0"},          {"conv1", "in_layers.2"},
                       {"norm2", "out_layers.0"},         {"conv2", "out_layers.3"},
                       {"time_emb_proj", "emb_layers.1"}, {"conv_shortcut", "skip_connection"}};

/// conv_in, down blocks and mid block: input blocks are numbered over all levels, one for each resnet and each
/// downsampler.
Table down_blocks(const UNetConfig& c) {
  Table t = {{"conv_in", "input_blocks.0.0"},
             {"time_embedding.linear_1", "time_embed.0"},
             {"time_embedding.linear_2", "time_embed.2"},
             {"add_embedding.linear_1", "label_emb.0.0"},
             {"add_embedding.linear_2", "label_emb.0.2"},
             {"mid_block.resnets.0", "middle_block.0"},
             {"mid_block.attentions.0", "middle_block.1"},
             {"mid_block.resnets.1", "middle_block.2"}};
  int next = 1;
  for (size_t level = 0; level < c.layers_per_block.size(); ++level) {
    const std::string block = fmt::format("down_blocks.{}", level);
    for (int64_t i = 0; i < c.layers_per_block[level]; ++i, ++next) {
      t.push_back({fmt::format("{}.resnets.{}", block, i), fmt::format("input_blocks.{}.0", next)});
      t.push_back({fmt::format("{}.attentions.{}", block, i), fmt::format("input_blocks.{}.1", next)});
    }
    t.push_back({block + ".downsamplers.0.conv", fmt::format("input_blocks.{}.0.op", next++)});
  }
  return t;
}

/// Up blocks: an upsampler is in the block of its level's last resnet.
Table up_blocks(const UNetConfig& c) {
  Table t = {{"conv_norm_out", "out.0"}, {"conv_out", "out.2"}};
  int next = 0;
  const size_t levels = c.layers_per_block.size();
  for (size_t i = 0; i < levels; ++i) {
    const std::string block = fmt::format("up_blocks.{}", i);
    for (int64_t k = 0; k <= c.layers_per_block[levels - 1 - i]; ++k, ++next) {
      t.push_back({fmt::format("{}.resnets.{}", block, k), fmt::format("output_blocks.{}.0", next)});
      t.push_back({fmt::format("{}.attentions.{}", block, k), fmt::format("output_blocks.{}.1", next)});
    }
    t.push_back({block + ".upsamplers.0",
                 fmt::format("output_blocks.{}.{}", next - 1, c.up_block_types[i] == "UpBlock2D" ? 1 : 2)});
  }
  return t;
}

/// Names by a table of blocks, without and with the prefix.
WeightNameMap of_blocks(Table table, std::string prefix) {
  return {.aliases = [table = std::move(table), prefix = std::move(prefix)](const std::string& name) {
    std::vector<WeightAlias> names;
    if (std::optional<std::string> original = beginning_respelled(name, table)) {
      if (name.find(".resnets.") != std::string::npos) original = inner_respelled(*original, kResnet);
      names = {{.prefix = prefix, .name = *original}, {.name = *original}};
    }
    return names;
  }};
}

Table vae_blocks(const VaeConfig& c) {
  Table t;
  const size_t levels = c.block_out_channels.size();
  for (const char* half : {"encoder", "decoder"}) {
    auto add = [&](const std::string& published, const std::string& original) {
      t.push_back({fmt::format("{}.{}", half, published), fmt::format("{}.{}", half, original)});
    };
    add("conv_in", "conv_in"), add("conv_out", "conv_out"), add("conv_norm_out", "norm_out");
    add("mid_block.resnets.0", "mid.block_1"), add("mid_block.resnets.1", "mid.block_2");
    add("mid_block.attentions.0", "mid.attn_1");
    const bool up = half == std::string_view("decoder");
    for (size_t i = 0; i < levels; ++i) {  // the decoder's levels are numbered from the finest
      const std::string published = fmt::format("{}_blocks.{}", up ? "up" : "down", i),
                        original = fmt::format("{}.{}", up ? "up" : "down", up ? levels - 1 - i : i);
      for (int64_t k = 0; k < c.layers_per_block + (up ? 1 : 0); ++k)
        add(fmt::format("{}.resnets.{}", published, k), fmt::format("{}.block.{}", original, k));
      add(published + (up ? ".upsamplers.0" : ".downsamplers.0"), original + (up ? ".upsample" : ".downsample"));
    }
  }
  t.push_back({"quant_conv", "quant_conv"});
  t.push_back({"post_quant_conv", "post_quant_conv"});
  return t;
}

const Table kVaeLayer = {
    {"conv_shortcut", "nin_shortcut"}, {"group_norm", "norm"}, {"to_q", "q"}, {"to_k", "k"}, {"to_v", "v"},
    {"to_out.0", "proj_out"}};

const Table kOpenClip = {{"text_model.embeddings.token_embedding", "token_embedding"},
                         {"text_model.final_layer_norm", "ln_final"},
                         {"text_model.encoder.layers", "transformer.resblocks"}};
const Table kOpenClipLayer = {{"layer_norm1", "ln_1"},
                              {"layer_norm2", "ln_2"},
                              {"mlp.fc1", "mlp.c_fc"},
                              {"mlp.fc2", "mlp.c_proj"},
                              {"self_attn.out_proj", "attn.out_proj"}};

/// The name without a prefix.
std::optional<WeightAlias> open_clip_name(const std::string& name) {
  if (name == "text_projection.weight") return WeightAlias{.name = "text_projection", .transposed = true};
  if (name == "text_model.embeddings.position_embedding.weight") return WeightAlias{.name = "positional_embedding"};
  const std::optional<std::string> original = beginning_respelled(name, kOpenClip);
  if (!original) return std::nullopt;
  const std::string fused[] = {".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."};
  for (int64_t part = 0; part < 3; ++part)
    if (const size_t at = original->find(fused[part]); at != std::string::npos)
      return WeightAlias{.name = original->substr(0, at) + ".attn.in_proj_" + original->substr(at + fused[part].size()),
                         .part = {part},
                         .parts = 3};
  return WeightAlias{.name = inner_respelled(*original, kOpenClipLayer)};
}

}  // namespace

WeightNameMap original_unet_names(const UNetConfig& c) {
  Table t = down_blocks(c), up = up_blocks(c);
  t.insert(t.end(), up.begin(), up.end());
  WeightNameMap names = of_blocks(std::move(t), "model.diffusion_model.");
  names.architecture = c.addition_embed_type == "text_time" ? "sdxl" : "sd1";
  return names;
}

WeightNameMap original_controlnet_names(const ControlNetConfig& c) {
  Table t = down_blocks(c.unet);
  t.push_back({"controlnet_mid_block", "middle_block_out.0"});
  size_t residuals = 0;  // number of input blocks: one per resnet, one per downsampler, and conv_in
  for (int64_t layers : c.unet.layers_per_block) residuals += static_cast<size_t>(layers) + 1;
  for (size_t i = 0; i < residuals; ++i)
    t.push_back({fmt::format("controlnet_down_blocks.{}", i), fmt::format("zero_convs.{}.0", i)});
  const size_t blocks = 2 * (c.conditioning_embedding_out_channels.size() - 1);
  t.push_back({"controlnet_cond_embedding.conv_in", "input_hint_block.0"});
  for (size_t i = 0; i < blocks; ++i)
    t.push_back({fmt::format("controlnet_cond_embedding.blocks.{}", i), fmt::format("input_hint_block.{}", 2 * i + 2)});
  t.push_back({"controlnet_cond_embedding.conv_out", fmt::format("input_hint_block.{}", 2 * blocks + 2)});
  return of_blocks(std::move(t), "control_model.");
}

WeightNameMap original_vae_names(const VaeConfig& c) {
  auto aliases_of = [table = vae_blocks(c)](const std::string& name) {
    std::vector<WeightAlias> names;
    if (const std::optional<std::string> original = beginning_respelled(name, table)) {
      const bool projection = name.find(".to_") != std::string::npos && name.ends_with(".weight");  // 1×1 convolutions
      for (const char* prefix : {"first_stage_model.", "", "vae."})
        names.push_back({.prefix = prefix, .name = inner_respelled(*original, kVaeLayer), .ones = projection ? 2 : 0});
    }
    return names;
  };
  // Tensors that only training uses.
  return {.aliases = aliases_of, .unneeded = {"first_stage_model.loss.", "loss.", "model_ema."}};
}

WeightNameMap original_clip_text_names(const ClipTextConfig& c) {
  const std::string text_encoder_prefix = "cond_stage_model.transformer.",
                    two_encoders_prefix = "conditioner.embedders.0.transformer.", open = "cond_stage_model.model.",
                    second = "conditioner.embedders.1.model.", only = "conditioner.embedders.0.model.",  // a refiner's
      of_transformers = of_text_encoder("clip_l");                                                       // FLUX's
  WeightNameMap names;
  names.aliases = [=, projection = c.with_projection](const std::string& name) {
    std::vector<WeightAlias> all;
    if (!projection) {
      for (const std::string& prefix : {text_encoder_prefix, two_encoders_prefix, of_transformers})
        all.push_back({.prefix = prefix, .name = name});
      if (const std::string optional = "text_model."; name.starts_with(optional))
        for (const std::string& prefix : {text_encoder_prefix, of_transformers})
          all.push_back({.prefix = prefix, .name = name.substr(optional.size())});
    }
    if (std::optional<WeightAlias> other = open_clip_name(name)) {
      for (const std::string& prefix : projection ? std::vector{second, only} : std::vector{open}) {
        other->prefix = prefix;
        all.push_back(*other);
      }
    }
    return all;
  };
  // Only OpenCLIP's layers up to the second last are used, and models are built without the last.
  for (const std::string& prefix : {open, second, only}) {
    for (const char* name : {"logit_scale", "text_projection", "attn_mask"}) names.unneeded.push_back(prefix + name);
    names.unneeded.push_back(fmt::format("{}transformer.resblocks.{}.", prefix, c.num_hidden_layers));
  }
  for (const char* name : {"logit_scale", "text_projection"}) names.unneeded.push_back(of_transformers + name);
  return names;
}

}  // namespace md
