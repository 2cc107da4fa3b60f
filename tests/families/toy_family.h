// A family as another program would add one: a class-conditional transformer that learns small images themselves, by
// flow matching (Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", without its adaptive norms). It
// stands in for all that comes: everything it needs is in this folder.
#pragma once

#include <string>
#include <vector>

namespace md {

/// Class names that captions are made of; any other caption is no class at all.
inline const std::vector<std::string> kToyClasses = {"red", "green", "blue"};

/// Makes "ToyTransformer" and "ToyPipeline" known.
void add_toy_family();
/// Writes a model folder without weights: images of 8×8 pixels.
void write_toy_folder(const std::string& folder);

}  // namespace md
