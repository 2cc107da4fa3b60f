#include "maxdiffusion/models/wan_weight_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace md {
namespace {

struct Respelling {
  std::string_view diffusers, original;
};
constexpr Respelling kOfModel[] = {
    {"condition_embedder.time_embedder.linear_1", "time_embedding.0"},
    {"condition_embedder.time_embedder.linear_2", "time_embedding.2"},
    {"condition_embedder.time_proj", "time_projection.1"},
    {"condition_embedder.text_embedder.linear_1", "text_embedding.0"},
    {"condition_embedder.text_embedder.linear_2", "text_embedding.2"},
    {"condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"},
    {"condition_embedder.image_embedder.norm1", "img_emb.proj.0"},
    {"condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"},
    {"condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"},
    {"condition_embedder.image_embedder.norm2", "img_emb.proj.4"},
    {"scale_shift_table", "head.modulation"},
    {"proj_out", "head.head"},
};
/// After "blocks.N.".
constexpr Respelling kOfBlock[] = {
    {"scale_shift_table", "modulation"},
    {"norm2", "norm3"},
    {"ffn.net.0.proj", "ffn.0"},
    {"ffn.net.2", "ffn.2"},
    {"attn1.to_q", "self_attn.q"},
    {"attn1.to_k", "self_attn.k"},
    {"attn1.to_v", "self_attn.v"},
    {"attn1.to_out.0", "self_attn.o"},
    {"attn1", "self_attn"},
    {"attn2.to_q", "cross_attn.q"},
    {"attn2.to_k", "cross_attn.k"},
    {"attn2.to_v", "cross_attn.v"},
    {"attn2.to_out.0", "cross_attn.o"},
    {"attn2.add_k_proj", "cross_attn.k_img"},
    {"attn2.add_v_proj", "cross_attn.v_img"},
    {"attn2.norm_added_k", "cross_attn.norm_k_img"},
    {"attn2", "cross_attn"},
};

/// After a block of the autoencoder.
constexpr Respelling kOfVaeBlock[] = {{"norm1", "residual.0"},
                                      {"conv1", "residual.2"},
                                      {"norm2", "residual.3"},
                                      {"conv2", "residual.6"},
                                      {"conv_shortcut", "shortcut"}};

bool begins_with(std::string_view name, std::string_view beginning) {
  return name.starts_with(beginning) && (name.size() == beginning.size() || name[beginning.size()] == '.');
}

/// `name` with its prefix replaced by the first table row that matches up to a dot.
template <size_t N>
std::string respelled(std::string_view name, const Respelling (&table)[N]) {
  for (const auto& [diffusers, original] : table)
    if (begins_with(name, diffusers)) return std::string(original).append(name.substr(diffusers.size()));
  return std::string(name);
}

/// Blocks of the autoencoder under diffusers' and the original program's names. Version 2.1 has all blocks of a side in
/// one list, 2.2 one list per level.
std::vector<std::pair<std::string, std::string>> vae_blocks(const WanVaeConfig& c) {
  std::vector<std::pair<std::string, std::string>> t = {{"quant_conv", "conv1"}, {"post_quant_conv", "conv2"}};
  for (const std::string side : {"encoder.", "decoder."})
    for (const auto& [diffusers, original] : std::initializer_list<Respelling>{{"conv_in", "conv1"},
                                                                               {"mid_block.resnets.0", "middle.0"},
                                                                               {"mid_block.attentions.0", "middle.1"},
                                                                               {"mid_block.resnets.1", "middle.2"},
                                                                               {"norm_out", "head.0"},
                                                                               {"conv_out", "head.2"}})
      t.emplace_back(side + std::string(diffusers), side + std::string(original));
  const auto levels = std::ssize(c.dim_mult);
  for (int64_t level = 0; level < levels; ++level) {
    for (const bool up : {false, true}) {
      const std::string diffusers = fmt::format("{}_blocks.{}", up ? "decoder.up" : "encoder.down", level),
                        list = up ? "upsamples" : "downsamples",
                        original = fmt::format("{}.{}", up ? "decoder" : "encoder", list);
      if (!up && !c.is_residual) continue;
      const int64_t resnets = c.num_res_blocks + (up ? 1 : 0);
      auto block = [&](int64_t k) {
        return c.is_residual ? fmt::format("{}.{}.{}.{}", original, level, list, k)
                             : fmt::format("{}.{}", original, level * (resnets + 1) + k);
      };
      for (int64_t k = 0; k < resnets; ++k) t.emplace_back(fmt::format("{}.resnets.{}", diffusers, k), block(k));
      t.emplace_back(diffusers + (!up             ? ".downsampler"
                                  : c.is_residual ? ".upsampler"
                                                  : ".upsamplers.0"),
                     block(resnets));
    }
  }
  const int64_t most = c.is_residual ? 0 : levels * (2 * c.num_res_blocks + 1);  // with an attention after every resnet
  for (int64_t i = 0; i < most; ++i)
    t.emplace_back(fmt::format("encoder.down_blocks.{}", i), fmt::format("encoder.downsamples.{}", i));
  return t;
}

}  // namespace

std::string original_wan_name(const std::string& name) {
  const std::string blocks = "blocks.";
  if (!name.starts_with(blocks)) return respelled(name, kOfModel);
  const size_t number = name.find('.', blocks.size());
  if (number == std::string::npos) return name;
  return name.substr(0, number + 1) + respelled(std::string_view(name).substr(number + 1), kOfBlock);
}

WeightNameMap original_wan_names(const WanTransformerConfig&) {
  return {.aliases =
              [](const std::string& name) {
                std::vector<WeightAlias> names;
                for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model."})
                  names.push_back({.prefix = prefix, .name = original_wan_name(name)});
                return names;
              },
          .architecture = "wan"};
}

WeightNameMap original_wan_vae_names(const WanVaeConfig& c) {
  return {.aliases = [blocks = vae_blocks(c)](const std::string& name) {
    std::vector<WeightAlias> names;
    for (const auto& [diffusers, original] : blocks) {
      if (!begins_with(name, diffusers)) continue;
      std::string_view rest = std::string_view(name).substr(diffusers.size());
      if (!rest.empty()) rest.remove_prefix(1);
      for (const char* prefix : {"", "first_stage_model.", "vae."})
        names.push_back({.prefix = prefix, .name = original + "." + respelled(rest, kOfVaeBlock)});
      break;
    }
    return names;
  }};
}

}  // namespace md
