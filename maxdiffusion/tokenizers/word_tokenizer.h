// The common pipeline of tokenizers: match added tokens, normalize the rest, split it into words, map each word to ids.
// Each class of tokenizer reads its files and sets these parts.
#pragma once

#include <optional>

#include "maxdiffusion/tokenizers/special_tokens.h"
#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

struct WordTokenizerParts {
  std::function<std::string(std::string_view)> normalize;  // input: valid UTF-8
  /// Calls visit for each word of a normalized text. `first`: it is at the start of the text.
  std::function<void(std::string_view text, bool first, const std::function<void(std::string_view)>& visit)> cut;
  std::function<void(std::string_view word, std::vector<int32_t>& ids)> append;  // appends a word's cached ids
  SpecialTokens specials = {};
  std::vector<int32_t> before = {}, behind = {};  // ids around every text
  /// Whether the words at the start of a text do not depend on text a megabyte later; that part is then not read.
  bool is_local = false;
  std::optional<int32_t> end = {}, pad = {};
  int64_t size = 0;
  std::map<std::string, std::string> files = {};  // Tokenizer::files
  std::string config = {};                        // the file that names end and pad, for messages
};

class WordTokenizer : public Tokenizer {
 public:
  ~WordTokenizer() override;
  WordTokenizer(WordTokenizer&&) noexcept;

  std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated = nullptr) const final;
  /// Throws io if the files name no pad_token.
  int32_t pad_id() const final;
  /// Throws io if the files name no eos_token.
  int32_t end_id() const final;
  int64_t size() const final { return parts_.size; }
  std::map<std::string, std::string> files() const override { return parts_.files; }

 protected:
  explicit WordTokenizer(WordTokenizerParts parts);
  WordTokenizerParts parts_;

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;  // word → ids
};

}  // namespace md
