// CLIP's byte-pair tokenizer. Source: transformers' CLIPTokenizer; the vocabulary files of a model folder
// (vocab.json, merges.txt) or the merges list that the open_clip_torch wheel ships (bpe_simple_vocab_16e6.txt.gz).
#pragma once

#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

class ClipTokenizer final : public Tokenizer {
 public:
  /// A folder with vocab.json and merges.txt, or with tokenizer.json alone (as transformers 5 writes it), and
  /// tokenizer_config.json. Throws io naming the file.
  static ClipTokenizer from_folder(const std::string& folder);
  /// The gzip'd merges list of OpenAI's release.
  static ClipTokenizer from_bpe(const std::string& file);
  ~ClipTokenizer() override;
  ClipTokenizer(ClipTokenizer&&) noexcept;

  /// <start> tokens <end>.
  std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated = nullptr) const override;
  int32_t pad_id() const override;
  int32_t end_id() const override;
  int64_t size() const override;
  /// vocab.json, merges.txt, tokenizer_config.json and special_tokens_map.json.
  std::map<std::string, std::string> files() const override;
  void set_pad_id(int32_t id);

 private:
  struct Impl;
  explicit ClipTokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
