// CLIP's byte-pair tokenizer. Source: transformers' CLIPTokenizer; the vocabulary files of a model folder
// (vocab.json, merges.txt) or the merges list that the open_clip_torch wheel ships (bpe_simple_vocab_16e6.txt.gz).
#pragma once

#include "maxdiffusion/tokenizers/word_tokenizer.h"

namespace md {

/// A text becomes `<start> tokens <end>`.
class ClipTokenizer final : public WordTokenizer {
 public:
  /// A folder with vocab.json and merges.txt, or with tokenizer.json alone (as transformers 5 writes it), and
  /// tokenizer_config.json. Throws io naming the file.
  static ClipTokenizer from_folder(const std::string& folder);
  /// The gzip'd merges list of OpenAI's release.
  static ClipTokenizer from_bpe(const std::string& file);
  ~ClipTokenizer() override;
  ClipTokenizer(ClipTokenizer&&) noexcept;

  /// vocab.json, merges.txt, tokenizer_config.json and special_tokens_map.json.
  std::map<std::string, std::string> files() const override;
  void set_pad_id(int32_t id);
  /// Sets model_max_length of the saved folder: a folder's own, or 77.
  void set_max_length(int64_t tokens);

 private:
  struct Vocabulary;
  explicit ClipTokenizer(std::unique_ptr<Vocabulary> v);
  std::unique_ptr<Vocabulary> vocabulary_;
};

}  // namespace md
