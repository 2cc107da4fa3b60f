// Log lines for people, on stderr. Secrets never go through here.
// Thread safe. The level is set once by apps/main.cc.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace md {

enum class LogLevel { debug, info, warning, error };

void set_log_level(LogLevel level);
/// Whether lines of this level are printed.
bool logs(LogLevel level);
/// Sets a prefix for every later log line: the rank of the process.
void set_log_prefix(std::string prefix);
std::string log_prefix();
void log_line(LogLevel level, std::string_view text);
/// Like log_line, but each text is logged once per process.
void log_line_once(LogLevel level, const std::string& text);
/// A line on stderr without level or time.
void print_line(std::string_view text);
/// Sets the status line at the bottom of the terminal; log lines scroll above it. Empty: removes it. No effect if
/// stderr is not a terminal.
void set_status_line(std::string_view text);

template <class... A>
void log_debug(fmt::format_string<A...> text, A&&... args) {
  log_line(LogLevel::debug, fmt::format(text, std::forward<A>(args)...));
}
template <class... A>
void log_info(fmt::format_string<A...> text, A&&... args) {
  log_line(LogLevel::info, fmt::format(text, std::forward<A>(args)...));
}
template <class... A>
void log_info_once(fmt::format_string<A...> text, A&&... args) {
  log_line_once(LogLevel::info, fmt::format(text, std::forward<A>(args)...));
}
template <class... A>
void log_warning(fmt::format_string<A...> text, A&&... args) {
  log_line(LogLevel::warning, fmt::format(text, std::forward<A>(args)...));
}
template <class... A>
void log_error(fmt::format_string<A...> text, A&&... args) {
  log_line(LogLevel::error, fmt::format(text, std::forward<A>(args)...));
}

}  // namespace md
