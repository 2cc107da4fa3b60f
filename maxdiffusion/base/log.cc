#include "maxdiffusion/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace md {
namespace {

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
void log_line(LogLevel level, std::string_view text) {
  logger().log(level_of(level), spdlog::string_view_t(text.data(), text.size()));
}

}  // namespace md
