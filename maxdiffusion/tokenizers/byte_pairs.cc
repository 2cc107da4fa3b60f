#include "maxdiffusion/tokenizers/byte_pairs.h"

#include <algorithm>
#include <queue>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"

namespace md {

BytePairs::BytePairs(std::unordered_map<std::string, int32_t> ids,
                     const std::vector<std::pair<std::string, std::string>>& merges, BytePairOptions options,
                     const std::string& file)
    : ids_(std::move(ids)), options_(std::move(options)) {
  for (const auto& [token, id] : ids_) size_ = std::max(size_, int64_t{id} + 1);
  if (!options_.unknown.empty()) {
    unknown_ = find(options_.unknown);
    check(unknown_ >= 0, Code::io, "{}: the unknown token '{}' is not in the vocabulary", file, options_.unknown);
  }
  merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    check(right.size() >= options_.continuation_prefix.size(), Code::io,
          "{}: merge {} ('{}' '{}') lacks the prefix '{}'", file, rank, left, right, options_.continuation_prefix);
    const std::string whole = left + right.substr(options_.continuation_prefix.size());
    const int32_t l = find(left), r = find(right), id = find(whole);
    check(l >= 0 && r >= 0 && id >= 0, Code::io, "{}: merge {} ('{}' '{}'): '{}' is not in the vocabulary", file, rank,
          left, right,
          l < 0   ? left
          : r < 0 ? right
                  : whole);
    merges_[key(l, r)] = {static_cast<int32_t>(rank), id};
  }
}

int32_t BytePairs::find(const std::string& token) const {
  const auto it = ids_.find(token);
  return it == ids_.end() ? -1 : it->second;
}

std::vector<int32_t> BytePairs::characters(std::string_view word) const {
  std::vector<int32_t> out;
  out.reserve(word.size());
  bool after_unknown = false;
  for_each_code_point(word, [&](char32_t, size_t from, size_t to) {
    std::string c(word.substr(from, to - from));
    if (from > 0) c.insert(0, options_.continuation_prefix);
    if (to == word.size()) c += options_.end_suffix;
    const int32_t id = find(c);
    if (id >= 0) {
      out.push_back(id);
      after_unknown = false;
      return;
    }
    if (options_.byte_fallback) {
      std::vector<int32_t> bytes;
      for (const char b : c) bytes.push_back(find(fmt::format("<0x{:02X}>", static_cast<uint8_t>(b))));
      if (std::ranges::all_of(bytes, [](int32_t b) { return b >= 0; })) {
        out.insert(out.end(), bytes.begin(), bytes.end());
        after_unknown = false;
        return;
      }
    }
    if (unknown_ < 0 || (after_unknown && options_.fuse_unknown)) return;
    out.push_back(unknown_);
    after_unknown = true;
  });
  return out;
}

void BytePairs::append(std::string_view word, std::vector<int32_t>& ids) const {
  if (word.empty()) return;
  if (options_.ignore_merges)
    if (const int32_t id = find(std::string(word)); id >= 0) return ids.push_back(id);
  struct Symbol {
    int32_t id, before, behind;
  };
  struct Candidate {
    int32_t rank, at, id;
    bool operator<(const Candidate& o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
  };
  const std::vector<int32_t> first = characters(word);
  const auto n = static_cast<int32_t>(first.size());
  std::vector<Symbol> symbols;
  symbols.reserve(first.size());
  for (int32_t i = 0; i < n; ++i) symbols.push_back({first[static_cast<size_t>(i)], i - 1, i + 1 == n ? -1 : i + 1});
  const auto at = [&](int32_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  const auto merge_at = [&](int32_t i) -> const Merge* {
    if (at(i).behind < 0) return nullptr;
    const auto it = merges_.find(key(at(i).id, at(at(i).behind).id));
    return it == merges_.end() ? nullptr : &it->second;
  };
  std::priority_queue<Candidate> queue;
  const auto offer = [&](int32_t i) {
    if (i < 0) return;
    if (const Merge* m = merge_at(i)) queue.push({m->rank, i, m->id});
  };
  for (int32_t i = 0; i + 1 < n; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    Symbol& left = at(c.at);
    if (left.id < 0) continue;  // merged with its left neighbour
    const Merge* m = merge_at(c.at);
    if (!m || m->id != c.id) continue;  // the pair has changed since it was queued
    Symbol& right = at(left.behind);
    left.id = c.id;
    left.behind = right.behind;
    right.id = -1;
    if (left.behind >= 0) at(left.behind).before = c.at;
    offer(left.before);
    offer(c.at);
  }
  for (const Symbol& s : symbols)
    if (s.id >= 0) ids.push_back(s.id);
}

const std::array<std::string, 256>& byte_letters() {
  static const std::array<std::string, 256> all = [] {
    std::array<std::string, 256> text;
    char32_t moved = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool prints = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      append_utf8(text[b], prints ? b : moved++);
    }
    return text;
  }();
  return all;
}

}  // namespace md
