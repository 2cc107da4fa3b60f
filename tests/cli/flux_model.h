// A FLUX.1 model of a size of one's own, without weights of the denoiser: for programs that are only compiled.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {

struct FluxSize {
  int heads, head_dim;
  const char* axes;  // axes_dims_rope, whose sum is head_dim
  int blocks;        // of two streams, and as many of one
};

/// Writes the model to `folder`; returns the word of a command line that names it.
inline std::string flux_model(const TemporaryFolder& folder, const FluxSize& size) {
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/flux/dev", folder.path(),
                        std::filesystem::copy_options::recursive);
  std::filesystem::remove(folder / "transformer/diffusion_pytorch_model.safetensors");
  write_file_atomic(
      folder / "transformer/config.json",
      fmt::format(R"({{"_class_name": "FluxTransformer2DModel", "num_attention_heads": {}, "attention_head_dim": {},
    "axes_dims_rope": [{}], "num_layers": {}, "num_single_layers": {}, "in_channels": 64, "joint_attention_dim": 12,
    "pooled_projection_dim": 16, "guidance_embeds": true}})",
                  size.heads, size.head_dim, size.axes, size.blocks, size.blocks));
  return "pretrained_model_name_or_path=" + folder.path();
}

}  // namespace md
