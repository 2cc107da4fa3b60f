// A family defined as another program would: a class-conditional transformer that learns small images in pixel space by
// flow matching (Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", without adaptive norms). It is
// the model for future families: all its code is in this folder.
#pragma once

#include <string>
#include <vector>

namespace md {

/// Class names used as captions; any other caption means no class.
inline const std::vector<std::string> kToyClasses = {"red", "green", "blue"};

/// Registers "ToyTransformer" and "ToyPipeline".
void add_toy_family();
/// Writes a model folder without weights for images of 8×8 pixels.
void write_toy_folder(const std::string& folder);

}  // namespace md
