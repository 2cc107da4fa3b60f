// Expressions for names of layers, as the keys of PEFT's rank_pattern and alpha_pattern.
#pragma once

#include <optional>
#include <regex>
#include <string>

namespace md {

/// PEFT matches it as a regular expression against the end of a module's name, beginning at a dot; with ^ against the
/// whole name. Most are plain names.
class LayerPattern {
 public:
  /// Throws std::regex_error.
  explicit LayerPattern(const std::string& text) : text_(text) {
    const size_t begin = text.starts_with('^') ? 1 : 0;
    anchored_ = begin == 1;
    plain_ = text.substr(begin);
    if (plain_.find_first_of("\\*+?()[]{}|$^") != std::string::npos) regex_ = std::regex("(.*\\.)?(" + text + ")");
  }
  bool matches(const std::string& module) const {
    if (regex_) return std::regex_match(module, *regex_);
    return module == plain_ || (!anchored_ && module.ends_with("." + plain_));
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  bool anchored_ = false;
  std::string plain_;
  std::optional<std::regex> regex_;
};

}  // namespace md
