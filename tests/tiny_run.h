// For tests that train as a user does: images with captions, and a model folder like SDXL's that compiles in seconds.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/image.h"

namespace md {

/// Writes nine images of `side`² pixels, "0.png" …, each with a caption file.
inline void write_shades(const std::string& folder, int64_t side) {
  make_folders(folder);
  for (int i = 0; i < 9; ++i) {
    HostArray rgb(Shape{DType::u8, {side, side, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    const auto row = static_cast<size_t>(3 * side);
    for (size_t k = 0; k < v.size(); ++k)
      v[k] = static_cast<uint8_t>(29 * i + static_cast<int>(k % 3) * 70 + static_cast<int>(k / row) * 3);
    write_png(fmt::format("{}/{}.png", folder, i), rgb);
    write_file_atomic(fmt::format("{}/{}.txt", folder, i), fmt::format("shade number {}", i));
  }
}

/// Replaces members of a component's config.json.
inline void change_config(const std::string& model, const std::string& component, const nlohmann::json& members) {
  const std::string path = model + "/" + component + "/config.json";
  nlohmann::json config = parse_json(read_file(path));
  config.update(members);
  write_file_atomic(path, config.dump());
}

/// Writes the quickstart's model folder with minimal layers.
inline void write_tiny_model(const std::string& model) {
  std::filesystem::copy(MD_SOURCE_DIR "/configs/models/emoji", model, std::filesystem::copy_options::recursive);
  change_config(model, "unet",
                {{"block_out_channels", {8, 16}},
                 {"down_block_types", {"DownBlock2D", "CrossAttnDownBlock2D"}},
                 {"up_block_types", {"CrossAttnUpBlock2D", "UpBlock2D"}},
                 {"transformer_layers_per_block", {1, 1}},
                 {"attention_head_dim", {1, 2}},
                 {"norm_num_groups", 4},
                 {"cross_attention_dim", 24},
                 {"layers_per_block", 1},
                 {"addition_time_embed_dim", 4},
                 {"in_channels", 4},
                 {"out_channels", 4},
                 {"projection_class_embeddings_input_dim", 40}});
  change_config(model, "vae",
                {{"block_out_channels", {8, 8}},
                 {"norm_num_groups", 4},
                 {"latent_channels", 4},
                 {"layers_per_block", 1},
                 {"down_block_types", {"DownEncoderBlock2D", "DownEncoderBlock2D"}},
                 {"up_block_types", {"UpDecoderBlock2D", "UpDecoderBlock2D"}}});
  for (const auto& [name, width] : {std::pair{"text_encoder", 8}, {"text_encoder_2", 16}})
    change_config(model, name,
                  {{"hidden_size", width},
                   {"intermediate_size", 16},
                   {"num_attention_heads", 1},
                   {"num_hidden_layers", 2},
                   {"projection_dim", width}});
}

}  // namespace md
