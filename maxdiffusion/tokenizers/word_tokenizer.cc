#include "maxdiffusion/tokenizers/word_tokenizer.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/utf8.h"

namespace md {
namespace {

using Ids = std::vector<int32_t>;

constexpr size_t kMaxCachedWords = 1 << 16, kMaxCachedBytes = 256;

}  // namespace

struct WordTokenizer::Cache {
  std::shared_mutex mutex;
  std::unordered_map<std::string, Ids> ids;

  void append(const WordTokenizerParts& parts, std::string_view text, Ids& out) {
    const std::string word(text);
    {
      const std::shared_lock lock(mutex);
      if (const auto it = ids.find(word); it != ids.end()) {
        out.insert(out.end(), it->second.begin(), it->second.end());
        return;
      }
    }
    Ids word_ids;
    parts.append(word, word_ids);
    out.insert(out.end(), word_ids.begin(), word_ids.end());
    if (word.size() > kMaxCachedBytes) return;
    const std::unique_lock lock(mutex);
    if (ids.size() < kMaxCachedWords) ids.emplace(word, std::move(word_ids));
  }
};

WordTokenizer::WordTokenizer(WordTokenizerParts parts) : parts_(std::move(parts)), cache_(std::make_unique<Cache>()) {}
WordTokenizer::WordTokenizer(WordTokenizer&&) noexcept = default;
WordTokenizer::~WordTokenizer() = default;

std::vector<int32_t> WordTokenizer::tokens(std::string_view text, int64_t length, bool* truncated) const {
  const auto around = static_cast<int64_t>(parts_.before.size() + parts_.behind.size());
  check(length >= around, Code::invalid_config,
        "tokenizer: length {}; expected at least {}, for the tokens around a text", length, around);
  const auto ids_of = [this](std::string_view beginning) {
    Ids ids = parts_.before;
    const auto special = [&](int32_t id) { ids.push_back(id); };
    const auto word = [&](std::string_view w) { cache_->append(parts_, w, ids); };
    const std::string valid = valid_utf8(beginning);
    const char* start = nullptr;  // of the normalized text; null: it starts with an added token
    parts_.specials.cut(
        valid, false,
        [&](std::string_view raw) {
          const std::string normalized = parts_.normalize(raw);
          start = raw.data() == valid.data() ? normalized.data() : nullptr;
          parts_.specials.cut(
              normalized, true, [&](std::string_view part) { parts_.cut(part, part.data() == start, word); }, special);
        },
        special);
    return ids;
  };
  Ids out = parts_.is_local ? tokens_of_beginning(text, static_cast<size_t>(length), ids_of) : ids_of(text);
  const auto room = static_cast<size_t>(length) - parts_.behind.size();
  if (truncated) *truncated = out.size() > room;
  if (out.size() > room) out.resize(room);
  out.insert(out.end(), parts_.behind.begin(), parts_.behind.end());
  return out;
}

int32_t WordTokenizer::pad_id() const {
  check(parts_.pad.has_value(), Code::io, "{}: no pad_token", parts_.config);
  return *parts_.pad;
}
int32_t WordTokenizer::end_id() const {
  check(parts_.end.has_value(), Code::io, "{}: no eos_token", parts_.config);
  return *parts_.end;
}

}  // namespace md
