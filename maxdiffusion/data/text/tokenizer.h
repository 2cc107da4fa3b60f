// CLIP's byte-pair tokenizer. Source: transformers' CLIPTokenizer; the vocabulary files of a model folder
// (vocab.json, merges.txt) or the merges list that the open_clip_torch wheel ships (bpe_simple_vocab_16e6.txt.gz).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace md {

class ClipTokenizer {
 public:
  /// A folder with vocab.json and merges.txt, or with tokenizer.json alone (as transformers 5 writes it), and
  /// tokenizer_config.json. Throws io naming the file.
  static ClipTokenizer from_folder(const std::string& folder);
  /// The gzip'd merges list of OpenAI's release.
  static ClipTokenizer from_bpe(const std::string& file);
  ~ClipTokenizer();
  ClipTokenizer(ClipTokenizer&&) noexcept;

  /// <start> tokens <end>, padded to `length` with the pad token; truncated texts keep <end>. Same ids as
  /// transformers' CLIPTokenizer for any UTF-8 text. `truncated` (optional) tells whether tokens were dropped.
  std::vector<int32_t> encode(std::string_view text, int64_t length = 77, bool* truncated = nullptr) const;
  int32_t pad_id() const;
  int32_t end_id() const;
  int64_t size() const;
  void set_pad_id(int32_t id);
  /// vocab.json, merges.txt, tokenizer_config.json and special_tokens_map.json as transformers reads them: name → text.
  std::map<std::string, std::string> files() const;
  /// Writes files() into a folder.
  void save(const std::string& folder) const;

 private:
  struct Impl;
  explicit ClipTokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
