// Tokenizers of the tokenizers library: tokenizer.json holds the normalizer, the pre-tokenizer, the model (BPE or
// Unigram), the post-processor and the added tokens, so that Qwen's, Llama's, GPT-2's and others are data. Source:
// tokenizers 0.23 and transformers 5 (TokenizersBackend).
#pragma once

#include "maxdiffusion/tokenizers/word_tokenizer.h"

namespace md {

class JsonTokenizer final : public WordTokenizer {
 public:
  /// A folder with tokenizer.json and tokenizer_config.json. `steps`: for folders that hold vocab.json and merges.txt
  /// instead, the tokenizer.json of the class without its vocabulary (model, normalizer, pre_tokenizer,
  /// post_processor); empty: such folders are refused. Throws io, naming the file, for a damaged folder or a step that
  /// is not known. files() are those of the folder, as they were.
  static JsonTokenizer from_folder(const std::string& folder, std::string_view steps = "");

 private:
  using WordTokenizer::WordTokenizer;
};

}  // namespace md
