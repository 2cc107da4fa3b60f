// Tokenizers of the tokenizers library: tokenizer.json holds the normalizer, the pre-tokenizer, the model (BPE or
// Unigram), the post-processor and the added tokens, as those of Qwen, Llama and GPT-2. Source: tokenizers 0.23 and
// transformers 5 (TokenizersBackend).
#pragma once

#include "maxdiffusion/tokenizers/word_tokenizer.h"

namespace md {

class JsonTokenizer final : public WordTokenizer {
 public:
  /// A folder with tokenizer.json and tokenizer_config.json. `steps`: for folders that hold vocab.json and merges.txt
  /// instead, the tokenizer.json of the class without its vocabulary (model, normalizer, pre_tokenizer,
  /// post_processor); empty: refuses such folders. Throws io, naming the file, for a corrupt folder or an unknown step.
  /// files() are the unchanged files of the folder.
  static JsonTokenizer from_folder(const std::string& folder, std::string_view steps = "");

 private:
  using WordTokenizer::WordTokenizer;
};

}  // namespace md
