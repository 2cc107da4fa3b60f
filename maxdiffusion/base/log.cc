#include "maxdiffusion/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace md {
namespace {

std::mutex mutex;  // orders everything that this file prints
std::string line_prefix;
std::string status_line;  // current status line of the terminal

constexpr const char* kEraseLine = "\r\x1b[K";

void erase_status() {
  if (!status_line.empty()) std::fputs(kEraseLine, stderr);
}
void draw_status() {
  if (!status_line.empty()) std::fputs(status_line.c_str(), stderr);
  std::fflush(stderr);
}

spdlog::logger& logger() {
  static std::shared_ptr<spdlog::logger> l = [] {
    auto made = spdlog::stderr_color_mt("md");
    made->set_pattern("%^%L%$ %H:%M:%S %v");
    return made;
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
  std::lock_guard lock(mutex);
  if (!logger().should_log(level_of(level))) return;
  erase_status();
  const std::string line = line_prefix + std::string(text);
  logger().log(level_of(level), spdlog::string_view_t(line.data(), line.size()));
  draw_status();
}

void log_line_once(LogLevel level, const std::string& text) {
  static std::mutex guard;
  static std::set<std::string> said;
  {
    std::lock_guard lock(guard);
    if (!said.insert(text).second) return;
  }
  log_line(level, text);
}

void print_line(std::string_view text) {
  std::lock_guard lock(mutex);
  erase_status();
  fmt::print(stderr, "{}\n", text);
  draw_status();
}

void set_status_line(std::string_view text) {
  std::lock_guard lock(mutex);
  erase_status();
  status_line = text;
  draw_status();
}

}  // namespace md
