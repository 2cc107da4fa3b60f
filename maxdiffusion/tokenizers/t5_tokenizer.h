// The tokenizer of T5 and its kin (mT5, UMT5): a unigram model over words that begin with '▁'. Source: transformers'
// T5Tokenizer. Where it and SentencePiece's own program disagree (normalization, rare bytes), it is followed.
#pragma once

#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

class T5Tokenizer final : public Tokenizer {
 public:
  /// A folder with tokenizer.json, or else spiece.model, and tokenizer_config.json. Throws io naming the file.
  static T5Tokenizer from_folder(const std::string& folder);
  ~T5Tokenizer() override;
  T5Tokenizer(T5Tokenizer&&) noexcept;

  /// tokens <end>.
  std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated = nullptr) const override;
  int32_t pad_id() const override;
  int32_t end_id() const override;
  int64_t size() const override;
  /// Those of the folder, as they were.
  std::map<std::string, std::string> files() const override;

 private:
  struct Impl;
  explicit T5Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
