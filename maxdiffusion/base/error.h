// The one exception type, and the two ways to throw it. Message form: "operation: found vs expected";
// notes carry where it happened and what to try. Caught in one place, apps/main.cc.
#pragma once

#include <fmt/core.h>

#include <exception>
#include <string>
#include <vector>

namespace md {

enum class Code { invalid_config, invalid_graph, io, device, out_of_memory, internal };

/// Name as printed to people: "invalid config", "io", …
const char* to_string(Code code);

class Error : public std::exception {
 public:
  Error(Code code, std::string message);

  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  /// Lines printed under the message, in order of arrival ("at <path>", "in <file>", "try: …").
  const std::vector<std::string>& notes() const { return notes_; }
  Error& note(std::string line);
  /// Message and notes, one per line.
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  Code code_;
  std::string message_, text_;
  std::vector<std::string> notes_;
};

template <class... A>
[[noreturn]] void fail(Code code, fmt::format_string<A...> text, A&&... args) {
  throw Error(code, fmt::format(text, std::forward<A>(args)...));
}

/// Throws an Error unless `ok`; for conditions that the caller must meet. The arguments are only formatted on failure.
template <class... A>
void check(bool ok, Code code, fmt::format_string<A...> text, A&&... args) {
  if (!ok) [[unlikely]]
    throw Error(code, fmt::format(text, std::forward<A>(args)...));
}

}  // namespace md
