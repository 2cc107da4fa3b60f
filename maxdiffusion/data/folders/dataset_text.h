// TOML, YAML and JSON as one tree with line numbers, and a reader of tables that reports every unread key.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace md {

struct DatasetMember;
struct DatasetValue {
  enum class Kind { null, boolean, number, text, list, table };
  Kind kind = Kind::null;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<DatasetValue> items;
  std::vector<DatasetMember> members;
  int64_t line = 0;

  const DatasetValue* find(const std::string& key) const;
  /// Shortened, for messages.
  std::string shown() const;
};
struct DatasetMember {
  std::string key;
  DatasetValue value;
};
/// Parses a .toml, .json, .yaml or .yml file's text. Throws invalid_config with file and line if it is invalid.
DatasetValue parse_dataset_text(const std::string& text, const std::string& file);
/// Parses a .toml file's text.
DatasetValue parse_toml(const std::string& text, const std::string& file);

/// Reads the keys of a table; a missing key is looked up in the enclosing tables. Every getter throws invalid_config,
/// with file and line, for a value of another type or out of range.
class DatasetReader {
 public:
  /// `levels`: from the innermost table to the outermost.
  DatasetReader(std::string file, std::vector<const DatasetValue*> levels);
  /// "FILE:LINE" of a key, or of the table if it lacks the key.
  std::string where(const std::string& key = "") const;
  /// The value, which is then marked as read; null if it is missing or YAML's null.
  const DatasetValue* value(const std::string& key);
  bool flag(const std::string& key, bool otherwise);
  int64_t whole(const std::string& key, int64_t otherwise, int64_t least);
  double number(const std::string& key, double otherwise, double least, double most);
  std::string text(const std::string& key, const std::string& otherwise = "");
  /// Must be one of `words`.
  std::string word(const std::string& key, const std::string& otherwise, const std::vector<std::string>& words);
  /// Accepts a number for a square, or [width, height].
  std::optional<std::pair<int64_t, int64_t>> size(const std::string& key);
  std::vector<int64_t> wholes(const std::string& key);
  std::vector<std::string> texts(const std::string& key);
  /// Keys without effect here: warns with the reason if they are present.
  void ignore(const std::vector<std::string>& keys, const std::string& why);
  /// Keys that would change training: throws unless the value is null, false, 0, empty or `usual`.
  void refuse(const std::string& key, const std::string& why, const std::string& usual = "");
  /// Throws invalid_config for any key of the tables that was not read.
  void finish() const;

 private:
  [[noreturn]] void fail_value(const std::string& key, const DatasetValue& v, const std::string& expected) const;
  std::string file_;
  std::vector<const DatasetValue*> levels_;
  std::set<std::string> known_;
};

}  // namespace md
