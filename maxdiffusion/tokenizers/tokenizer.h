// Text → token ids. A tokenizer is opened by the class that a model folder names; what is special about one stands in
// its own file.
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
  /// The ids of a text with the tokens that the model wants before and behind it, `length` at most: a longer text is
  /// cut before its end token, and `truncated` (optional) tells so. Same ids as transformers' class of the same name
  /// for any UTF-8 text; other bytes are read as U+FFFD. Throws invalid_config for a length that those tokens alone
  /// exceed.
  virtual std::vector<int32_t> tokens(std::string_view text, int64_t length, bool* truncated = nullptr) const = 0;
  /// tokens(), padded to `length` with the pad token.
  std::vector<int32_t> encode(std::string_view text, int64_t length, bool* truncated = nullptr) const;
  virtual int32_t pad_id() const = 0;
  virtual int32_t end_id() const = 0;
  /// One more than the largest id.
  virtual int64_t size() const = 0;
  /// The files of a folder that transformers reads as this tokenizer: name → bytes.
  virtual std::map<std::string, std::string> files() const = 0;
  /// Writes files() into a folder.
  void save(const std::string& folder) const;
};

/// For tokenizers: `of(text)`, or of a beginning that has many more tokens than `enough`, so that a text of megabytes
/// takes no longer than its beginning.
std::vector<int32_t> tokens_of_beginning(std::string_view text, size_t enough,
                                         const std::function<std::vector<int32_t>(std::string_view)>& of);

/// "CLIPTokenizer", …: what open_tokenizer takes.
std::vector<std::string> tokenizer_class_names();
bool is_tokenizer_class(const std::string& name);
/// Throws io naming the file where the folder is damaged, invalid_config for an unknown class.
std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& class_name, const std::string& folder);

}  // namespace md
