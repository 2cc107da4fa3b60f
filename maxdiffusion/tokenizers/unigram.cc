#include "maxdiffusion/tokenizers/unigram.h"

#include <algorithm>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"

namespace md {
namespace {

constexpr double kUnknownPenalty = 10;  // relative to the least probable piece

}  // namespace

Unigram::Unigram(std::vector<Piece> pieces, int32_t unknown)
    : pieces_(std::move(pieces)), sorted_(pieces_.size()), unknown_(unknown) {
  check(unknown >= 0 && unknown < static_cast<int32_t>(pieces_.size()), Code::io,
        "unigram model: the unknown token {} is not one of the {} tokens", pieces_.size(), unknown);
  const auto text = [this](int32_t id) -> const std::string& { return pieces_[static_cast<size_t>(id)].text; };
  std::iota(sorted_.begin(), sorted_.end(), 0);
  std::ranges::sort(sorted_, [&](int32_t a, int32_t b) { return text(a) != text(b) ? text(a) < text(b) : a > b; });
  const auto same_text = [&](int32_t a, int32_t b) { return text(a) == text(b); };
  sorted_.erase(std::unique(sorted_.begin(), sorted_.end(), same_text), sorted_.end());
  unknown_score_ = std::ranges::min(pieces_, {}, &Piece::score).score - kUnknownPenalty;
}

int32_t Unigram::find(std::string_view piece) const {
  const auto text = [this](int32_t id) -> std::string_view { return pieces_[static_cast<size_t>(id)].text; };
  const auto at = std::ranges::lower_bound(sorted_, piece, {}, text);
  return at != sorted_.end() && text(*at) == piece ? *at : -1;
}

void Unigram::append(std::string_view word, std::vector<int32_t>& ids) const {
  struct Node {  // the best split of the prefix that ends here
    double score = 0;
    int32_t id = 0;
    int64_t from = -1;  // start of that piece; −1: no split yet
  };
  std::vector<Node> best(word.size() + 1);
  for_each_code_point(word, [&](char32_t, size_t at, size_t next) {
    const double before = best[at].score;
    const auto offer = [&](size_t to, double score, int32_t id) {
      Node& n = best[to];
      if (n.from < 0 || before + score > n.score) n = {before + score, id, static_cast<int64_t>(at)};
    };
    bool alone = false;  // whether the code point is a piece
    // Pieces that begin with word[at, to) are a range of sorted_, which shrinks with every byte.
    auto first = sorted_.begin(), last = sorted_.end();
    for (size_t depth = 0; at + depth < word.size() && first != last; ++depth) {
      const auto byte = [&](int32_t id) {
        const std::string& t = pieces_[static_cast<size_t>(id)].text;
        return t.size() > depth ? static_cast<int>(static_cast<uint8_t>(t[depth])) : -1;
      };
      const auto next_byte = static_cast<int>(static_cast<uint8_t>(word[at + depth]));
      last = std::ranges::upper_bound(first, last, next_byte, {}, byte);
      first = std::ranges::lower_bound(first, last, next_byte, {}, byte);
      if (first == last || pieces_[static_cast<size_t>(*first)].text.size() != depth + 1) continue;
      const size_t to = at + depth + 1;
      offer(to, pieces_[static_cast<size_t>(*first)].score, *first);
      alone |= to == next;
    }
    if (!alone) offer(next, unknown_score_, unknown_);
  });
  const size_t start = ids.size();
  for (size_t at = word.size(); at > 0; at = static_cast<size_t>(best[at].from))
    if (best[at].id != unknown_ || ids.size() == start || ids.back() != unknown_) ids.push_back(best[at].id);
  std::reverse(ids.begin() + static_cast<int64_t>(start), ids.end());
}

}  // namespace md
