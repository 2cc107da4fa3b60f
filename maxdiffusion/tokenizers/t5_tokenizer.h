// The tokenizer of T5, mT5 and UMT5: a unigram model over words that begin with '▁'. Source: transformers' T5Tokenizer.
// It takes precedence where SentencePiece differs (normalization, rare bytes).
#pragma once

#include "maxdiffusion/tokenizers/word_tokenizer.h"

namespace md {

class T5Tokenizer final : public WordTokenizer {
 public:
  /// A folder with tokenizer.json, or else spiece.model, and tokenizer_config.json. Throws io naming the file. files()
  /// are the unchanged files of the folder. A text becomes tokens END.
  static T5Tokenizer from_folder(const std::string& folder);

 private:
  using WordTokenizer::WordTokenizer;
};

}  // namespace md
