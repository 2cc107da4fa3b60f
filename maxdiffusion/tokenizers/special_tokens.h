// Tokens that are looked for in a text before it is cut into words: "<|endoftext|>", "<extra_id_0>". Source: the
// tokenizers library, AddedVocabulary.
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
  bool normalized = false;                         // looked for in the normalized text instead of the raw one
  bool strips_left = false, strips_right = false;  // white space beside it is part of it
};

class SpecialTokens {
 public:
  SpecialTokens() = default;
  explicit SpecialTokens(std::vector<SpecialToken> tokens);
  /// Longest first.
  const std::vector<SpecialToken>& tokens() const { return tokens_; }
  /// Calls text(piece) and special(id) for the parts of s in order: the leftmost longest of the tokens with this
  /// `normalized`, and what stands between them, which is never empty.
  void cut(std::string_view s, bool normalized, const std::function<void(std::string_view)>& text,
           const std::function<void(int32_t)>& special) const;

 private:
  std::vector<SpecialToken> tokens_;
};

}  // namespace md
