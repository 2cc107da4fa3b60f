// Rules for the captions of a folder: added text, trigger words, shuffled and dropped tags, random choices. Source of
// the rules: kohya's sd-scripts (docs/config_README-en.md), ai-toolkit's trigger words.
#pragma once

#include <cstdint>
#include <string>

namespace md {

struct CaptionRules {
  enum class Lines { all, first, any };  // use of a caption's lines: all of them; the first; a random one
  std::string prefix, suffix;            // joined to the caption by a blank; shuffled and dropped as parts of it
  /// Replaces [trigger]; with add_trigger it is prepended to captions that lack it.
  std::string trigger;
  bool add_trigger = false;
  Lines lines = Lines::all;
  /// {a|b} selects one; {{ and }} are literal braces (folders/dynamic_prompts.h).
  bool wildcards = false;
  double dropout = 0;  // probability of the empty caption
  // For tags, the parts of a caption between separators.
  std::string separator = ",";
  bool shuffle = false;
  int64_t keep_tokens = 0;          // number of leading tags that stay in place
  std::string keep_separator;       // "a, b ||| c, d ||| e": a, b and e stay; replaces keep_tokens. Empty: none
  std::string secondary_separator;  // "a;;;b" is one tag and becomes "a" separator "b". Empty: none
  double tag_dropout = 0;           // probability for each tag that need not stay
};

/// Whether the text of a caption that is not dropped depends on random bits.
bool varies(const CaptionRules& rules, const std::string& text);
/// Whether these bits drop the caption.
bool drops_caption(const CaptionRules& rules, uint64_t bits);
/// The caption that the rules and random bits make of a text, without dropout. Tags are joined by ", " if they are
/// shuffled or dropped. Throws invalid_config, naming `name`, as DynamicPrompts does.
std::string applied(const CaptionRules& rules, const std::string& text, uint64_t bits, const std::string& name);

}  // namespace md
