#include "maxdiffusion/models/flux_weight_names.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/models/original_weight_names.h"

namespace md {
namespace {

struct Respelling {
  std::string_view diffusers, original;
  std::vector<int64_t> part = {0};
  int64_t parts = 1;
};
using Table = std::vector<Respelling>;

const Table& of_model() {
  static const Table t = {
      {"x_embedder", "img_in"},
      {"context_embedder", "txt_in"},
      {"time_text_embed.timestep_embedder.linear_1", "time_in.in_layer"},
      {"time_text_embed.timestep_embedder.linear_2", "time_in.out_layer"},
      {"time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer"},
      {"time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer"},
      {"time_text_embed.text_embedder.linear_1", "vector_in.in_layer"},
      {"time_text_embed.text_embedder.linear_2", "vector_in.out_layer"},
      {"norm_out.linear", "final_layer.adaLN_modulation.1", {1, 0}, 2},  // shift and scale are swapped there
      {"proj_out", "final_layer.linear"},
  };
  return t;
}

/// After "transformer_blocks.N." and "double_blocks.N.".
const Table& of_double_block() {
  static const Table t = {
      {"norm1.linear", "img_mod.lin"},
      {"norm1_context.linear", "txt_mod.lin"},
      {"attn.to_q", "img_attn.qkv", {0}, 3},
      {"attn.to_k", "img_attn.qkv", {1}, 3},
      {"attn.to_v", "img_attn.qkv", {2}, 3},
      {"attn.add_q_proj", "txt_attn.qkv", {0}, 3},
      {"attn.add_k_proj", "txt_attn.qkv", {1}, 3},
      {"attn.add_v_proj", "txt_attn.qkv", {2}, 3},
      {"attn.norm_q.weight", "img_attn.norm.query_norm.scale"},
      {"attn.norm_k.weight", "img_attn.norm.key_norm.scale"},
      {"attn.norm_added_q.weight", "txt_attn.norm.query_norm.scale"},
      {"attn.norm_added_k.weight", "txt_attn.norm.key_norm.scale"},
      {"attn.to_out.0", "img_attn.proj"},
      {"attn.to_add_out", "txt_attn.proj"},
      {"ff.net.0.proj", "img_mlp.0"},
      {"ff.net.2", "img_mlp.2"},
      {"ff_context.net.0.proj", "txt_mlp.0"},
      {"ff_context.net.2", "txt_mlp.2"},
  };
  return t;
}

/// After "single_transformer_blocks.N." and "single_blocks.N.". The first layer computes queries, keys, values and the
/// hidden layer of the feed-forward network, which is four times as wide.
const Table& of_single_block() {
  static const Table t = {
      {"norm.linear", "modulation.lin"},
      {"attn.to_q", "linear1", {0}, 7},
      {"attn.to_k", "linear1", {1}, 7},
      {"attn.to_v", "linear1", {2}, 7},
      {"proj_mlp", "linear1", {3, 4, 5, 6}, 7},
      {"proj_out", "linear2"},
      {"attn.norm_q.weight", "norm.query_norm.scale"},
      {"attn.norm_k.weight", "norm.key_norm.scale"},
  };
  return t;
}

/// XLabs' attention processors: processor 1 of the image, processor 2 of the text, with the word "processor" removed.
const Table& of_double_processors() {
  static const Table t = {
      {"attn.to_q", "qkv_lora1", {0}, 3},       {"attn.to_k", "qkv_lora1", {1}, 3},
      {"attn.to_v", "qkv_lora1", {2}, 3},       {"attn.add_q_proj", "qkv_lora2", {0}, 3},
      {"attn.add_k_proj", "qkv_lora2", {1}, 3}, {"attn.add_v_proj", "qkv_lora2", {2}, 3},
      {"attn.to_out.0", "proj_lora1"},          {"attn.to_add_out", "proj_lora2"},
  };
  return t;
}
const Table& of_single_processors() {
  static const Table t = {
      {"attn.to_q", "qkv", {0}, 3}, {"attn.to_k", "qkv", {1}, 3}, {"attn.to_v", "qkv", {2}, 3}, {"proj_out", "proj"}};
  return t;
}

// ---- FLUX.2

const Table& of_second_model() {
  static const Table t = {
      {"x_embedder", "img_in"},
      {"context_embedder", "txt_in"},
      {"time_guidance_embed.timestep_embedder.linear_1", "time_in.in_layer"},
      {"time_guidance_embed.timestep_embedder.linear_2", "time_in.out_layer"},
      {"time_guidance_embed.guidance_embedder.linear_1", "guidance_in.in_layer"},
      {"time_guidance_embed.guidance_embedder.linear_2", "guidance_in.out_layer"},
      {"double_stream_modulation_img.linear", "double_stream_modulation_img.lin"},
      {"double_stream_modulation_txt.linear", "double_stream_modulation_txt.lin"},
      {"single_stream_modulation.linear", "single_stream_modulation.lin"},
      {"norm_out.linear", "final_layer.adaLN_modulation.1", {1, 0}, 2},  // shift and scale are swapped there
      {"proj_out", "final_layer.linear"},
  };
  return t;
}

/// As for FLUX.1, except modulation, which all blocks share, and feed-forward layers.
const Table& of_second_double_block() {
  static const Table t = [] {
    Table all = {{"ff.linear_in", "img_mlp.0"},
                 {"ff.linear_out", "img_mlp.2"},
                 {"ff_context.linear_in", "txt_mlp.0"},
                 {"ff_context.linear_out", "txt_mlp.2"}};
    for (const Respelling& r : of_double_block())
      if (r.diffusers.starts_with("attn.")) all.push_back(r);
    return all;
  }();
  return t;
}

const Table& of_second_single_block() {
  static const Table t = {
      {"attn.to_qkv_mlp_proj", "linear1"},
      {"attn.to_out", "linear2"},
      {"attn.norm_q.weight", "norm.query_norm.scale"},
      {"attn.norm_k.weight", "norm.key_norm.scale"},
  };
  return t;
}

/// `name` with its prefix replaced by the table row that matches up to a dot.
std::optional<WeightAlias> respelled(std::string_view name, const Table& table) {
  for (const Respelling& r : table)
    if (name.starts_with(r.diffusers) && (name.size() == r.diffusers.size() || name[r.diffusers.size()] == '.'))
      return WeightAlias{
          .name = std::string(r.original).append(name.substr(r.diffusers.size())), .part = r.part, .parts = r.parts};
  return std::nullopt;
}

/// The name without a prefix, after a block's number.
std::optional<WeightAlias> in_block(const std::string& name, std::string_view diffusers, std::string_view original,
                                    const Table& table) {
  const size_t number = diffusers.size(), dot = name.find('.', number);
  if (!name.starts_with(diffusers) || dot == std::string::npos) return std::nullopt;
  std::optional<WeightAlias> out = respelled(std::string_view(name).substr(dot + 1), table);
  if (out) out->name = std::string(original).append(name, number, dot + 1 - number) + out->name;
  return out;
}

struct Tables {
  const Table &model, &double_block, &single_block;
};

/// The name in a double-stream or single-stream block.
std::optional<WeightAlias> in_blocks(const std::string& name, const Table& of_double, const Table& of_single) {
  const std::optional<WeightAlias> out = in_block(name, "transformer_blocks.", "double_blocks.", of_double);
  return out ? out : in_block(name, "single_transformer_blocks.", "single_blocks.", of_single);
}

std::vector<WeightAlias> names_of(const std::string& name, const Tables& tables) {
  std::optional<WeightAlias> original = in_blocks(name, tables.double_block, tables.single_block);
  if (!original) original = respelled(name, tables.model);
  std::vector<WeightAlias> names;
  if (original)
    for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model."}) {
      original->prefix = prefix;
      names.push_back(*original);
    }
  return names;
}

}  // namespace

WeightNameMap original_flux_names(const FluxTransformerConfig&) {
  return {.aliases =
              [](const std::string& name) {
                std::vector<WeightAlias> names = names_of(name, {of_model(), of_double_block(), of_single_block()});
                if (!name.ends_with(".weight")) return names;
                if (const auto processor = in_blocks(name, of_double_processors(), of_single_processors()))
                  names.push_back(*processor);
                return names;
              },
          .architecture = "flux"};
}

WeightNameMap original_flux2_names(const Flux2TransformerConfig&) {
  return {.aliases =
              [](const std::string& name) {
                return names_of(name, {of_second_model(), of_second_double_block(), of_second_single_block()});
              },
          .architecture = "flux"};
}

WeightNameMap original_flux2_vae_names(const Flux2VaeConfig& c) {
  WeightNameMap names = original_vae_names(c.encoder);
  names.aliases = [of = names.aliases](const std::string& name) {
    std::vector<WeightAlias> all = of(name);
    // Black Forest Labs' files have these inside the encoder and the decoder.
    for (const auto& [conv, half] : {std::pair{"quant_conv.", "encoder."}, {"post_quant_conv.", "decoder."}})
      if (name.starts_with(conv)) all.push_back({.name = half + name});
    return all;
  };
  names.unneeded.emplace_back("bn.num_batches_tracked");
  return names;
}

}  // namespace md
