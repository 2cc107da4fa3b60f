// Prompts whose text differs between the steps of an image, as AUTOMATIC1111's web UI reads them:
//   [from:to:when]   `from` in the first `when` steps, then `to`
//   [to:when], [from::when]   nothing before, nothing after
//   [a|b|c]   the one in the first step, the other in the second, …
// when: a number of steps, or with a decimal point a part of all (0.5). They may be nested, and in round brackets.
// Other brackets are left as they are, and all of them where a | is outside of brackets.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace md {

/// One of several prompts of one image, and the weight of its guidance.
struct PartOfPrompt {
  std::string text;
  double weight = 1;
};
/// "cat :1.2 AND dog": the texts around the word AND with their weights, as AUTOMATIC1111's web UI reads them. One
/// part, the whole prompt, if there is no AND.
std::vector<PartOfPrompt> parts_of_prompt(const std::string& prompt);

class PromptSchedule {
 public:
  explicit PromptSchedule(const std::string& prompt);
  ~PromptSchedule();
  /// Whether the text may differ between steps.
  bool changes() const;
  /// The text of step `step`, from 0, of `steps`. Those of a second pass have the next numbers; there [a|b] begins with
  /// `a` again.
  std::string at(int64_t step, int64_t steps) const;

  struct Part;

 private:
  std::string prompt_;
  std::unique_ptr<const Part> whole_;  // null: the text is the same in all steps
};

}  // namespace md
