// The tokenizer of T5 and its kin (mT5, UMT5): a unigram model over words that begin with '▁'. Source: transformers'
// T5Tokenizer. Where it and SentencePiece's own program disagree (normalization, rare bytes), it is followed.
#pragma once

#include "maxdiffusion/tokenizers/word_tokenizer.h"

namespace md {

class T5Tokenizer final : public WordTokenizer {
 public:
  /// A folder with tokenizer.json, or else spiece.model, and tokenizer_config.json. Throws io naming the file.
  /// files() are those of the folder, as they were. A text becomes tokens <end>.
  static T5Tokenizer from_folder(const std::string& folder);

 private:
  using WordTokenizer::WordTokenizer;
};

}  // namespace md
