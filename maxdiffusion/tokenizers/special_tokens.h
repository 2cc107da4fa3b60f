// Tokens that are matched before a text is split into words: "<|endoftext|>", "<extra_id_0>". Source: the tokenizers
// library, AddedVocabulary.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace md {

struct SpecialToken {
  std::string text;
  int32_t id = 0;
  bool normalized = false;                         // matched in the normalized text instead of the raw one
  bool strips_left = false, strips_right = false;  // adjacent white space is part of it
};

class SpecialTokens {
 public:
  SpecialTokens() = default;
  explicit SpecialTokens(std::vector<SpecialToken> tokens);
  /// Longest first.
  const std::vector<SpecialToken>& tokens() const { return tokens_; }
  /// Calls text(part) and special(id) for the parts of s in order: the leftmost longest of the tokens with this
  /// `normalized`, and the nonempty text between them.
  void cut(std::string_view s, bool normalized, const std::function<void(std::string_view)>& text,
           const std::function<void(int32_t)>& special) const;

 private:
  std::vector<SpecialToken> tokens_;
};

}  // namespace md
