#include "maxdiffusion/families/clip_encoder.h"

namespace md {

TextEncoderSpec clip_encoder_spec(const ModelFolder& folder, const std::string& component,
                                  const std::string& tokenizer) {
  const auto& clip = folder.config<ClipTextConfig>(component);
  const std::vector<Placeholder> placeholders = folder.placeholders(component);
  return {.component = component,
          .tokenizer = with_placeholders(folder.tokenizer(tokenizer), placeholders, clip.vocab_size),
          .max_tokens = clip.max_position_embeddings,
          .embedding_width = clip.hidden_size,
          .placeholders = placeholders};
}

ClipTextConfig clip_config(const ModelFolder& folder, const TextEncoderSpec& spec) {
  ClipTextConfig config = folder.config<ClipTextConfig>(spec.component);
  config.added_tokens = ids_of(spec.placeholders);
  return config;
}

}  // namespace md
