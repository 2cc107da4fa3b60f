// Prompts with alternatives and wildcards, in the syntax of the web UI extension sd-dynamic-prompts, expanded to plain
// prompts.
//
//   {red|green|blue}   one of the alternatives, without surrounding blanks; they may be nested
//   {3:: red|blue}     red three times as often; the default weight is 1
//   {2$$red|green|blue}       two different ones in any order, joined by ", "; all before one is repeated
//   {1-2$$ and $$red|green}   one or two, joined by " and "
//   __colours/warm__   a line of wildcards_dir/colours/warm.txt, expanded likewise; lines that begin with # are skipped
//   \{ \} \|           literal characters
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/data/folders/named_files.h"

namespace md {

class DynamicPrompts {
 public:
  explicit DynamicPrompts(const std::string& wildcards_dir) : files_("wildcards_dir", wildcards_dir, ".txt") {}
  /// Expands brackets only: __ is plain text.
  static DynamicPrompts without_wildcards() {
    DynamicPrompts out("");
    out.only_brackets_ = true;
    return out;
  }
  /// The prompt that seed and number of an image select, equal on every machine. Selections with different `stream` are
  /// independent. Throws invalid_config, naming `key`, for brackets that do not close, weights that leave no
  /// alternative, unknown or empty wildcards, unsupported syntax of the extension (${…}), and recursion.
  std::string chosen(const std::string& key, const std::string& prompt, uint64_t seed, int64_t image, uint64_t stream);
  /// Whether a prompt has alternatives or wildcards.
  static bool has_choices(const std::string& prompt);

 private:
  struct Choice;
  std::string expanded(const std::string& text, Choice& choice, int depth);
  /// `count` of the alternatives, joined.
  std::string some_of(const std::vector<std::string>& alternatives, int64_t count, const std::string& separator,
                      Choice& choice, int depth);
  std::string of_bracket(std::vector<std::string> alternatives, Choice& choice, int depth);
  const std::vector<std::string>& lines(const std::string& name, const Choice& choice);

  bool only_brackets_ = false;
  NamedFiles files_;
  std::map<std::string, std::vector<std::string>> lines_;  // by path
};

}  // namespace md
