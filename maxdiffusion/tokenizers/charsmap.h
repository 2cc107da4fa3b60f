// SentencePiece's compiled table of text normalization (nmt_nfkc and the like), applied as the tokenizers library does
// it, which is not how SentencePiece does: a grapheme of less than six bytes is replaced as a whole by what the table
// says of its shortest beginning; other text code point by code point. Sources: tokenizers (Precompiled) and its crate
// spm_precompiled; darts-clone (the trie).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace md {

class Charsmap {
 public:
  /// Changes nothing.
  Charsmap() = default;
  /// `bytes`: precompiled_charsmap of a SentencePiece model. Throws io, naming `file`, where it is damaged.
  Charsmap(std::string_view bytes, const std::string& file);
  /// Of the bytes as tokenizer.json writes them. Throws io likewise.
  static Charsmap from_base64(std::string_view text, const std::string& file);
  /// `text`: valid UTF-8. Thread safe.
  std::string apply(std::string_view text) const;

 private:
  std::optional<std::string_view> find(std::string_view part) const;

  std::vector<uint32_t> trie_;  // darts-clone's double array
  std::string values_;          // each ends with a zero byte; the trie's leaves are offsets into it
};

}  // namespace md
