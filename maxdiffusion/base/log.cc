#include "maxdiffusion/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "maxdiffusion/base/warning_sink.h"

namespace md {
namespace {

std::mutex mutex;  // serializes all output of this file
std::string line_prefix;
std::string status_line;  // current status line of the terminal

thread_local WarningSink* sinks = nullptr;  // the innermost of this thread

constexpr const char* kEraseLine = "\r\x1b[K";

void erase_status() {
  if (!status_line.empty()) std::fputs(kEraseLine, stderr);
}
void print_status() {
  if (!status_line.empty()) std::fputs(status_line.c_str(), stderr);
  std::fflush(stderr);
}

spdlog::logger& logger() {
  static std::shared_ptr<spdlog::logger> l = [] {
    auto created = spdlog::stderr_color_mt("md");
    created->set_pattern("%^%L%$ %H:%M:%S %v");
    return created;
  }();
  return *l;
}

spdlog::level::level_enum level_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::warning: return spdlog::level::warn;
    case LogLevel::error: return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

WarningSink::WarningSink(std::vector<std::string>& texts, bool quiet) : texts_(texts), quiet_(quiet), outer_(sinks) {
  sinks = this;
}

WarningSink::~WarningSink() { sinks = outer_; }

bool WarningSink::add(std::string_view text) {
  bool logged = true;
  for (const WarningSink* s = sinks; s; s = s->outer_) {
    if (std::ranges::find(s->texts_, text) == s->texts_.end()) s->texts_.emplace_back(text);
    logged &= !s->quiet_;
  }
  return logged;
}

void set_log_level(LogLevel level) { logger().set_level(level_of(level)); }

bool logs(LogLevel level) { return logger().should_log(level_of(level)); }

void set_log_prefix(std::string prefix) {
  std::lock_guard lock(mutex);
  line_prefix = std::move(prefix);
}

std::string log_prefix() {
  std::lock_guard lock(mutex);
  return line_prefix;
}

void log_line(LogLevel level, std::string_view text) {
  if (level == LogLevel::warning && !WarningSink::add(text)) return;
  std::lock_guard lock(mutex);
  if (!logger().should_log(level_of(level))) return;
  erase_status();
  const std::string line = line_prefix + std::string(text);
  logger().log(level_of(level), spdlog::string_view_t(line.data(), line.size()));
  print_status();
}

void log_line_once(LogLevel level, const std::string& text) {
  static std::mutex guard;
  static std::set<std::string> logged;
  if (level == LogLevel::warning && !WarningSink::add(text)) return;
  {
    std::lock_guard lock(guard);
    if (!logged.insert(text).second) return;
  }
  log_line(level, text);
}

void print_line(std::string_view text) {
  std::lock_guard lock(mutex);
  erase_status();
  fmt::print(stderr, "{}\n", text);
  print_status();
}

void set_status_line(std::string_view text) {
  std::lock_guard lock(mutex);
  erase_status();
  status_line = text;
  print_status();
}

}  // namespace md
