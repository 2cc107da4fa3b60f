#include "maxdiffusion/tokenizers/tokenizer.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/tokenizers/clip_tokenizer.h"
#include "maxdiffusion/tokenizers/json_tokenizer.h"
#include "maxdiffusion/tokenizers/t5_tokenizer.h"

namespace md {
namespace {

template <class T>
std::shared_ptr<const Tokenizer> from_folder(const std::string& folder) {
  return std::make_shared<T>(T::from_folder(folder));
}

// For Qwen's folders with vocab.json and merges.txt. Source: transformers, Qwen2Tokenizer.
constexpr const char* kQwen2Steps = R"json({
  "model": {"type": "BPE"},
  "normalizer": {"type": "NFC"},
  "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Isolated", "pattern": {"Regex":
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}
})json";

std::shared_ptr<const Tokenizer> qwen2(const std::string& folder) {
  return std::make_shared<JsonTokenizer>(JsonTokenizer::from_folder(folder, kQwen2Steps));
}
std::shared_ptr<const Tokenizer> any_json(const std::string& folder) {
  return std::make_shared<JsonTokenizer>(JsonTokenizer::from_folder(folder));
}

struct TokenizerClass {
  const char* name;
  std::shared_ptr<const Tokenizer> (*open)(const std::string& folder);
};
constexpr TokenizerClass kClasses[] = {
    {"CLIPTokenizer", from_folder<ClipTokenizer>},
    {"CLIPTokenizerFast", from_folder<ClipTokenizer>},
    {"T5Tokenizer", from_folder<T5Tokenizer>},
    {"T5TokenizerFast", from_folder<T5Tokenizer>},
    {"Qwen2Tokenizer", qwen2},
    {"Qwen2TokenizerFast", qwen2},
    {"PreTrainedTokenizerFast", any_json},
    {"TokenizersBackend", any_json},
};

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text, int64_t length, bool* truncated) const {
  std::vector<int32_t> out = tokens(text, length, truncated);
  out.resize(static_cast<size_t>(length), pad_id());
  return out;
}

void Tokenizer::save(const std::string& folder) const {
  make_folders(folder);
  for (const auto& [name, bytes] : files()) write_file_atomic(folder + "/" + name, bytes);
}

std::vector<int32_t> tokens_of_beginning(std::string_view text, size_t enough,
                                         const std::function<std::vector<int32_t>(std::string_view)>& of) {
  // Tokens near the end of a prefix differ from those of the whole text, but those of its first half do not.
  for (size_t size = size_t{1} << 16; size < text.size(); size *= 4) {
    size_t end = size;
    while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80 && end > size - 4) --end;  // inside a character
    if (std::vector<int32_t> ids = of(text.substr(0, end)); ids.size() > 2 * enough) return ids;
  }
  return of(text);
}

std::vector<std::string> tokenizer_class_names() {
  std::vector<std::string> names;
  for (const TokenizerClass& c : kClasses) names.emplace_back(c.name);
  return names;
}

bool is_tokenizer_class(const std::string& name) {
  return std::ranges::any_of(kClasses, [&](const TokenizerClass& c) { return c.name == name; });
}

std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& class_name, const std::string& folder) {
  for (const TokenizerClass& c : kClasses)
    if (c.name == class_name) return c.open(folder);
  fail(Code::invalid_config, "tokenizer '{}': the class '{}' is not one of: {}", folder, class_name,
       nearest_first(class_name, tokenizer_class_names()));
}

}  // namespace md
