// Text → token ids. The class that a model folder names selects the implementation.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace md {

/// Immutable, apart from caches; thread safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// The ids of a text with its start and end tokens, at most `length`: a longer text is truncated before the end
  /// token, and sets `truncated` (optional). Same ids as transformers' class of the same name for any UTF-8 text;
  /// invalid bytes are read as U+FFFD. Throws invalid_config if `length` is less than the number of start and end
  /// tokens.
  virtual std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated = nullptr) const = 0;
  /// tokens(), padded to `length` with the pad token.
  std::vector<int32_t> encode(std::string_view text, int64_t length, bool* truncated = nullptr) const;
  virtual int32_t pad_id() const = 0;
  virtual int32_t end_id() const = 0;
  /// Vocabulary size: the largest id plus one.
  virtual int64_t size() const = 0;
  /// Number of ids, from `id` on, that belong together: more than 1 for the first id of a placeholder of several
  /// (placeholders.h).
  virtual int64_t together(int32_t /*id*/) const { return 1; }
  /// The files of a folder that transformers reads as this tokenizer: name → bytes.
  virtual std::map<std::string, std::string> files() const = 0;
  /// Writes files() into a folder.
  void save(const std::string& folder) const;
};

/// For implementations: `encode(text)`, or of a prefix with many more tokens than `enough`, so that the time does not
/// grow with megabytes of text.
std::vector<int32_t> tokens_of_beginning(std::string_view text, size_t enough,
                                         const std::function<std::vector<int32_t>(std::string_view)>& encode);

/// "CLIPTokenizer", …: the classes of open_tokenizer.
std::vector<std::string> tokenizer_class_names();
bool is_tokenizer_class(const std::string& name);
/// Throws io naming the file if the folder is corrupt, invalid_config for an unknown class.
std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& class_name, const std::string& folder);

}  // namespace md
