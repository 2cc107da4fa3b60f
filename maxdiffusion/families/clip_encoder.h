// CLIP text encoders of a model folder, with the learned embeddings of its words (textual inversion).
#pragma once

#include <string>

#include "maxdiffusion/families/family_spec.h"
#include "maxdiffusion/model_folder/model_folder.h"
#include "maxdiffusion/models/clip_text.h"

namespace md {

TextEncoderSpec clip_encoder_spec(const ModelFolder& folder, const std::string& component,
                                  const std::string& tokenizer);
/// The encoder's config, with rows for the placeholders of `spec`.
ClipTextConfig clip_config(const ModelFolder& folder, const TextEncoderSpec& spec);

}  // namespace md
