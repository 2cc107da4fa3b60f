// Tokenizers of the tokenizers library: tokenizer.json holds the normalizer, the pre-tokenizer, the model (BPE or
// Unigram), the post-processor and the added tokens, so that Qwen's, Llama's, GPT-2's and others are data. Source:
// tokenizers 0.23 and transformers 5 (TokenizersBackend).
#pragma once

#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

class JsonTokenizer final : public Tokenizer {
 public:
  /// A folder with tokenizer.json and tokenizer_config.json. `steps`: for folders that hold vocab.json and merges.txt
  /// instead, the tokenizer.json of the class without its vocabulary (model, normalizer, pre_tokenizer,
  /// post_processor); empty: such folders are refused. Throws io, naming the file, for a damaged folder or a step that
  /// is not known.
  static JsonTokenizer from_folder(const std::string& folder, std::string_view steps = "");
  ~JsonTokenizer() override;
  JsonTokenizer(JsonTokenizer&&) noexcept;

  std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated = nullptr) const override;
  /// Throws io where tokenizer_config.json names no pad_token.
  int32_t pad_id() const override;
  /// Of eos_token. Throws io where tokenizer_config.json names none.
  int32_t end_id() const override;
  int64_t size() const override;
  /// Those of the folder, as they were.
  std::map<std::string, std::string> files() const override;

 private:
  struct Impl;
  explicit JsonTokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
