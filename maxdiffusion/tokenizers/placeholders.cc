#include "maxdiffusion/tokenizers/placeholders.h"

#include <algorithm>
#include <cctype>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

char lowered(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }
std::string lowered(std::string text) {
  std::ranges::transform(text, text.begin(), [](char c) { return lowered(c); });
  return text;
}
bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || (c & 0x80) != 0; }

class WithPlaceholders final : public Tokenizer {
 public:
  WithPlaceholders(std::shared_ptr<const Tokenizer> base, const std::vector<Placeholder>& placeholders, int64_t first)
      : base_(std::move(base)), size_(first) {
    for (const Placeholder& p : placeholders) {
      found_.push_back({lowered(p.text), static_cast<int32_t>(size_), p.count});
      size_ += p.count;
    }
    std::ranges::stable_sort(found_, std::ranges::greater(), [](const Found& f) { return f.text.size(); });
  }

  std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated) const override {
    const std::vector<int32_t> around = base_->tokens("", length);
    check(around.size() == 2, Code::internal, "placeholders: the tokenizer puts {} tokens around a text; expected 2",
          around.size());
    std::vector<int32_t> ids = {around[0]};
    const auto enough = static_cast<size_t>(length);
    auto add = [&](std::string_view part) {
      if (part.empty() || ids.size() > enough) return;
      const std::vector<int32_t> words = base_->tokens(part, length + 2);
      ids.insert(ids.end(), words.begin() + 1, words.end() - 1);
    };
    size_t from = 0;
    for (size_t at = 0; at < text.size() && ids.size() <= enough;) {
      const Found* hit = found_at(text, at);
      if (!hit) {
        ++at;
        continue;
      }
      add(text.substr(from, at - from));
      for (int64_t i = 0; i < hit->count; ++i) ids.push_back(hit->id + static_cast<int32_t>(i));
      from = at += hit->text.size();
    }
    add(text.substr(from));
    const size_t room = enough - 1;
    if (truncated) *truncated = ids.size() > room;
    if (ids.size() > room) ids.resize(room);
    ids.push_back(around[1]);
    return ids;
  }
  int32_t pad_id() const override { return base_->pad_id(); }
  int32_t end_id() const override { return base_->end_id(); }
  int64_t size() const override { return size_; }
  int64_t together(int32_t id) const override {
    const auto found = std::ranges::find(found_, id, &Found::id);
    return found == found_.end() ? 1 : found->count;
  }
  std::map<std::string, std::string> files() const override { return base_->files(); }

 private:
  struct Found {
    std::string text;  // in lower case
    int32_t id;        // the first of `count`
    int64_t count;
  };
  const Found* found_at(std::string_view text, size_t at) const {
    for (const Found& f : found_) {
      const size_t end = at + f.text.size();
      if (end > text.size() || lowered(text[at]) != f.text[0]) continue;
      if (is_word(f.text.front()) && at > 0 && is_word(text[at - 1])) continue;
      if (is_word(f.text.back()) && end < text.size() && is_word(text[end])) continue;
      if (std::ranges::equal(text.substr(at, f.text.size()), f.text, {}, [](char c) { return lowered(c); })) return &f;
    }
    return nullptr;
  }

  std::shared_ptr<const Tokenizer> base_;
  std::vector<Found> found_;  // longest first
  int64_t size_;
};

}  // namespace

int64_t ids_of(const std::vector<Placeholder>& placeholders) {
  int64_t n = 0;
  for (const Placeholder& p : placeholders) n += p.count;
  return n;
}

std::shared_ptr<const Tokenizer> with_placeholders(std::shared_ptr<const Tokenizer> base,
                                                   const std::vector<Placeholder>& placeholders, int64_t first) {
  if (placeholders.empty() || !base) return base;
  return std::make_shared<WithPlaceholders>(std::move(base), placeholders, first);
}

}  // namespace md
