// A unigram language model of pieces: a word is split so that the sum of its pieces' log-probabilities is largest.
// Sources: Kudo 2018 (Subword Regularization), section 3; the tokenizers library, Unigram.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace md {

class Unigram {
 public:
  struct Piece {
    std::string text;
    double score = 0;  // log-probability
  };

  /// Ids are positions; of equal pieces the last counts. `unknown` must be one of them.
  Unigram(std::vector<Piece> pieces, int32_t unknown);
  /// Appends the ids of a word, valid UTF-8. A code point that is not a piece is `unknown`, less probable than any
  /// piece; consecutive ones are one. Ties: the first split from the left.
  void append(std::string_view word, std::vector<int32_t>& ids) const;
  /// −1: not a piece.
  int32_t find(std::string_view piece) const;
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::vector<Piece> pieces_;
  std::vector<int32_t> sorted_;  // ids by text, bytewise; one of equal pieces
  int32_t unknown_;
  double unknown_score_;
};

}  // namespace md
