#include "maxdiffusion/models/wan_names.h"

#include <string_view>

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
/// Behind "blocks.N.".
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

/// `name` with the first row that it begins with, up to a whole part, respelled.
template <size_t N>
std::string respelled(std::string_view name, const Respelling (&table)[N]) {
  for (const auto& [diffusers, original] : table)
    if (name.starts_with(diffusers) && (name.size() == diffusers.size() || name[diffusers.size()] == '.'))
      return std::string(original).append(name.substr(diffusers.size()));
  return std::string(name);
}

}  // namespace

std::string original_wan_name(const std::string& name) {
  const std::string blocks = "blocks.";
  if (!name.starts_with(blocks)) return respelled(name, kOfModel);
  const size_t number = name.find('.', blocks.size());
  if (number == std::string::npos) return name;
  return name.substr(0, number + 1) + respelled(std::string_view(name).substr(number + 1), kOfBlock);
}

OtherNames original_wan_names(const WanTransformerConfig&) {
  return {.of = [](const std::string& name) {
    std::vector<OtherName> names;
    for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model."})
      names.push_back({.prefix = prefix, .name = original_wan_name(name)});
    return names;
  }};
}

}  // namespace md
