// Words of a text that mean new token ids: names of learned embeddings (textual inversion).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

struct Placeholder {
  std::string text;   // "<cat-toy>"; not empty
  int64_t count = 1;  // ids that it means
};
/// Number of ids of all.
int64_t ids_of(const std::vector<Placeholder>& placeholders);

/// A CLIP tokenizer with placeholders, whose ids follow one another from `first` on. They are found in a text whatever
/// the case of ASCII letters, the longest first; one that begins or ends with a letter, a digit or _ is not found
/// within a word. The text between them is tokenized by `base`, whose files() it has. Without placeholders: `base`.
std::shared_ptr<const Tokenizer> with_placeholders(std::shared_ptr<const Tokenizer> base,
                                                   const std::vector<Placeholder>& placeholders, int64_t first);

}  // namespace md
