// Byte-pair encoding: a word starts as its characters, and the adjacent pair with the lowest rank in the list of merges
// is merged until no pair is in the list. Sources: Sennrich et al. 2016; the tokenizers library, models/bpe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace md {

struct BytePairOptions {
  std::string unknown;              // token of characters that the vocabulary lacks; empty: they are dropped
  std::string continuation_prefix;  // before every character of a word but the first, as "##"
  std::string end_suffix;           // after the last character of a word, as "</w>"
  bool fuse_unknown = false;        // neighbouring unknown characters are one token
  bool byte_fallback = false;       // an unknown character becomes its bytes' tokens <0x00> … <0xFF>, where all exist
  bool ignore_merges = false;       // a word in the vocabulary is one token
};

/// Immutable and thread safe.
class BytePairs {
 public:
  /// `ids`: token → id. `merges`: by rank; of a pair listed twice the last rank counts. Throws io, naming `file` and
  /// the merge, if one of its tokens, the merged token or `unknown` is not in `ids`.
  BytePairs(std::unordered_map<std::string, int32_t> ids,
            const std::vector<std::pair<std::string, std::string>>& merges, BytePairOptions options,
            const std::string& file);
  /// Appends the ids of a word, valid UTF-8; n·log n in its length.
  void append(std::string_view word, std::vector<int32_t>& ids) const;
  /// −1: not a token.
  int32_t find(const std::string& token) const;
  /// Vocabulary size: the largest id plus one.
  int64_t size() const { return size_; }

 private:
  struct Merge {
    int32_t rank, id;
  };
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  /// The characters of a word as ids.
  std::vector<int32_t> characters(std::string_view word) const;

  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<uint64_t, Merge> merges_;
  BytePairOptions options_;
  int32_t unknown_ = -1;
  int64_t size_ = 0;
};

/// Byte-level BPE's letter for each byte: printable Latin-1 characters map to themselves, other bytes to U+0100 and up.
const std::array<std::string, 256>& byte_letters();

}  // namespace md
