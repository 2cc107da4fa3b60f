#include "maxdiffusion/metrics/jsonl_writer.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/this_machine.h"

namespace md {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr size_t kLineFlushBytes = 1 << 16;
constexpr auto kFlushInterval = std::chrono::seconds(5);

/// Complete lines of steps 1 … `last` in `text`; also appends their objects to `objects`.
std::string kept_lines(const std::string& text, int64_t last, std::vector<Json>& objects) {
  std::string retained;
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    Json j = parse_json_or_discard(std::string_view(text).substr(at, end - at));
    if (!j.is_object() || !j.contains("step") || !j["step"].is_number()) continue;
    if (const double step = j["step"].get<double>(); step < 1 || step > static_cast<double>(last)) continue;
    retained.append(text, at, end + 1 - at);
    objects.push_back(std::move(j));
  }
  return retained;
}

}  // namespace

struct JsonlWriter::Impl {
  std::vector<Json> retained;
  std::unique_ptr<FileWriter> file;
  std::string waiting;
  Clock::time_point flushed_at = Clock::now();
};

JsonlWriter::JsonlWriter(const std::string& path, int64_t keep_through_step) : impl_(std::make_unique<Impl>()) {
  if (auto folder = std::filesystem::path(path).parent_path().string(); !folder.empty()) make_folders(folder);
  if (exists(path)) {
    const std::string text = read_file(path);
    const std::string retained = kept_lines(text, keep_through_step, impl_->retained);
    if (retained.size() != text.size()) write_file_atomic(path, retained);
  }
  impl_->file = std::make_unique<FileWriter>(path, FileWriter::Open::append);
}

JsonlWriter::~JsonlWriter() {
  try {
    flush();
  } catch (const Error& e) {
    log_warning("metrics: {}", e.what());
  }
}

void JsonlWriter::write(int64_t step, const std::map<std::string, double>& values, const std::string& run_name) {
  auto out = std::back_inserter(impl_->waiting);
  const double time = seconds_since_1970();
  fmt::format_to(out, "{{\"step\": {}, \"run_name\": {}, \"time\": {:.3f}", step, Json(run_name).dump(), time);
  for (const auto& [key, value] : values) {
    // Nine digits distinguish any two f32.
    fmt::format_to(out, ", {}: {}", Json(key).dump(), std::isfinite(value) ? fmt::format("{:.9g}", value) : "null");
  }
  impl_->waiting += "}\n";
  if (impl_->waiting.size() > kLineFlushBytes || Clock::now() - impl_->flushed_at > kFlushInterval) flush();
}

void JsonlWriter::flush() {
  impl_->flushed_at = Clock::now();
  if (impl_->waiting.empty()) return;
  std::string out = std::exchange(impl_->waiting, {});
  impl_->file->write(out.data(), out.size());
}

std::vector<std::pair<int64_t, std::map<std::string, double>>> JsonlWriter::retained() const {
  std::vector<std::pair<int64_t, std::map<std::string, double>>> out;
  for (const Json& j : impl_->retained) {
    auto& values =
        out.emplace_back(static_cast<int64_t>(j["step"].get<double>()), std::map<std::string, double>{}).second;
    for (const auto& [key, value] : j.items())
      if (value.is_number() && key != "step") values[key] = value;
  }
  return out;
}

}  // namespace md
