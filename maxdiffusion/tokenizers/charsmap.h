// SentencePiece's compiled table of text normalization (nmt_nfkc and the like), applied as the tokenizers library does
// it, which differs from SentencePiece: a grapheme of less than six bytes is replaced by the entry of its shortest
// prefix; other text is replaced by code point. Sources: tokenizers (Precompiled) and its crate spm_precompiled;
// darts-clone (the trie).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace md {

class Charsmap {
 public:
  /// The identity.
  Charsmap() = default;
  /// `bytes`: precompiled_charsmap of a SentencePiece model. Throws io, naming `file`, if it is corrupt.
  Charsmap(std::string_view bytes, const std::string& file);
  /// From base64, as in tokenizer.json. Throws io as above.
  static Charsmap from_base64(std::string_view text, const std::string& file);
  /// `text`: valid UTF-8. Thread safe.
  std::string apply(std::string_view text) const;

 private:
  std::optional<std::string_view> find(std::string_view part) const;

  std::vector<uint32_t> trie_;  // darts-clone's double array
  std::string values_;          // each ends with a zero byte; the trie's leaves are offsets into it
};

}  // namespace md
