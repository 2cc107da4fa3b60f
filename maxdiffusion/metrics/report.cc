#include "maxdiffusion/metrics/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/percent_encoding.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/utf8.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/metrics/report_page.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr const char* kTime = "time";

/// The objects with a number `key` in a file of one object per line, and a description of invalid lines.
struct Lines {
  std::vector<json> objects;
  std::vector<std::string> notes;
};
Lines read_lines(const std::string& path, const char* key) {
  Lines lines;
  const std::string text = read_file(path), name = fs::path(path).filename();
  int64_t number = 0, damaged = 0, first = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    ++number;
    at = end + 1;
    if (line.find_first_not_of(" \r\t") == line.npos) continue;
    json j = parse_json_or_discard(line);
    if (j.is_object() && j.contains(key) && j[key].is_number()) {
      lines.objects.push_back(std::move(j));
    } else if (end == text.size()) {
      lines.notes.push_back(fmt::format("{}: the last line is cut, and left out", name));
    } else if (damaged++ == 0) {
      first = number;
    }
  }
  if (damaged > 0)
    lines.notes.push_back(fmt::format("{}: {} not JSON objects with \"{}\", and left out; the first is line {}", name,
                                      damaged == 1 ? "1 line is" : fmt::format("{} lines are", damaged), key, first));
  return lines;
}

double finite_or_none(const json& value) {
  if (!value.is_number()) return kNone;
  const double v = value;
  return std::isfinite(v) ? v : kNone;
}

/// Keeps every k-th step counted from the last, and those with a held-out loss.
void thin_out(ReportRun& run, int64_t most) {
  const size_t count = run.steps.size(), points = static_cast<size_t>(most);
  run.every = static_cast<int64_t>(std::max<size_t>(1, (count + points - 1) / points));
  if (run.every == 1) return;
  std::vector<bool> retained(count);
  for (size_t i = 0; i < count; ++i) retained[i] = (count - 1 - i) % static_cast<size_t>(run.every) == 0;
  for (const auto& [name, values] : run.metrics)
    for (size_t i = 0; i < count && name.starts_with("eval_"); ++i)
      retained[i] = retained[i] || std::isfinite(values[i]);
  const auto thin = [&](std::vector<double>& all) {
    size_t n = 0;
    for (size_t i = 0; i < count; ++i)
      if (retained[i]) all[n++] = all[i];
    all.resize(n);
  };
  thin(run.steps);
  for (auto& [name, values] : run.metrics) thin(values);
  run.notes.push_back(fmt::format("one of {} steps is in this page; points=N keeps more", run.every));
}

/// The last time in a metrics file; kNone if there is none.
double last_time(const std::string& path) {
  if (!exists(path)) return kNone;
  double last = kNone;
  for (const json& j : read_lines(path, "step").objects)
    if (j.contains(kTime)) last = finite_or_none(j[kTime]);
  return last;
}

/// For each step: seconds spent in steps / seconds since `begun`.
std::vector<double> goodput(const ReportRun& run, double begun) {
  const auto& times = run.metrics.at(kTime);
  const auto& seconds = run.metrics.at("step_time_seconds");
  std::vector<double> out;
  double good = 0;
  for (size_t i = 0; i < times.size(); ++i) {
    if (std::isfinite(seconds[i])) good += seconds[i];
    const double passed = times[i] - begun;
    out.push_back(passed > 0 ? std::min(1.0, good / passed) : kNone);
  }
  return out;
}

/// Samples by step: step_000100.png of the loop, and 100-train_steps-….png or .mp4 of evaluations. The image if a step
/// has both an image and a video.
std::vector<ReportRun::Sample> samples_of(const std::string& folder, const ReportOptions& options) {
  static const std::regex name_of(R"((?:step_(\d+)|(\d+)-train_steps-.*)\.(png|mp4))");
  std::map<int64_t, std::string> files;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(fs::path(folder) / "samples", ec)) {
    const std::string name = entry.path().filename();
    std::smatch m;
    if (!entry.is_regular_file(ec) || !std::regex_match(name, m, name_of) || name.size() > 250) continue;
    const std::string digits = m[1].matched ? m[1] : m[2];
    if (digits.size() > 15) continue;
    std::string& file = files[std::stoll(digits)];
    if (file.empty() || m[1].matched) file = entry.path();
  }
  std::vector<ReportRun::Sample> out;
  for (const auto& [step, file] : files) {
    const bool video = file.ends_with(".mp4");
    std::string source;
    if (options.embed) {
      source = fmt::format("data:{};base64,{}", video ? "video/mp4" : "image/png", to_base64(read_file(file)));
    } else {
      const fs::path page = fs::absolute(options.page_folder.empty() ? "." : options.page_folder);
      source =
          percent_encoded(fs::absolute(file).lexically_normal().lexically_relative(page.lexically_normal()).string());
    }
    out.push_back({step, std::move(source), video});
  }
  return out;
}

std::string text_of(const json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

json numbers(const std::vector<double>& values) {
  json all = json::array();
  for (const double v : values) all.push_back(std::isfinite(v) ? json(v) : json());
  return all;
}

}  // namespace

ReportRun read_report_run(const std::string& folder, const ReportOptions& options) {
  ReportRun run;
  run.folder = folder;
  const std::string path = folder + "/metrics.jsonl";
  check(exists(path), Code::io, "'{}': found no metrics.jsonl; expected the folder of a training run", folder);
  Lines lines = read_lines(path, "step");
  run.notes = std::move(lines.notes);
  if (lines.objects.empty()) run.notes.emplace_back("metrics.jsonl has no step yet");
  std::stable_sort(lines.objects.begin(), lines.objects.end(),
                   [](const json& a, const json& b) { return a["step"].get<double>() < b["step"].get<double>(); });
  int64_t broken = 0;
  for (const json& j : lines.objects) {
    for (const auto& [name, value] : j.items()) {
      if (name == "step" || !(value.is_number() || value.is_null())) continue;
      auto& values = run.metrics[name];
      values.resize(run.steps.size(), kNone);
      values.push_back(finite_or_none(value));
      broken += std::isfinite(values.back()) ? 0 : 1;
    }
    run.steps.push_back(j["step"]);
  }
  for (auto& [name, values] : run.metrics) values.resize(run.steps.size(), kNone);
  if (broken > 0)
    run.notes.push_back(fmt::format("metrics.jsonl: {} not finite: gaps of the curves",
                                    broken == 1 ? "1 value is" : fmt::format("{} values are", broken)));

  if (const std::string starts = folder + "/starts.jsonl"; exists(starts)) {
    Lines found = read_lines(starts, kTime);
    run.notes.insert(run.notes.end(), found.notes.begin(), found.notes.end());
    for (const json& j : found.objects) {
      auto& start = run.starts.emplace_back();
      for (const auto& [name, value] : j.items()) start[name] = text_of(value);
    }
    if (!found.objects.empty() && run.metrics.contains(kTime) && run.metrics.contains("step_time_seconds")) {
      double begun = found.objects.front()[kTime];
      if (const double encoder = last_time(folder + "/vae/metrics.jsonl"); encoder > begun) begun = encoder;
      run.metrics["goodput"] = goodput(run, begun);
    }
  }
  thin_out(run, options.points);
  run.samples = samples_of(folder, options);
  return run;
}

std::string report_data(const std::vector<ReportRun>& runs, const std::string& live) {
  json all = json::array();
  for (const ReportRun& run : runs) {
    json metrics = json::object(), samples = json::array();
    for (const auto& [name, values] : run.metrics) metrics[valid_utf8(name)] = numbers(values);
    for (const auto& s : run.samples) samples.push_back({{"step", s.step}, {"src", s.source}, {"video", s.is_video}});
    json config = json::object();
    for (const auto& [key, value] : run.config) config[valid_utf8(key)] = valid_utf8(value);
    json notes = json::array();
    for (const std::string& note : run.notes) notes.push_back(valid_utf8(note));
    all.push_back({{"name", valid_utf8(run.name)},
                   {"folder", valid_utf8(run.folder)},
                   {"notes", notes},
                   {"steps", numbers(run.steps)},
                   {"metrics", metrics},
                   {"every", run.every},
                   {"starts", run.starts},
                   {"config", config},
                   {"samples", samples}});
  }
  return json{{"version", version()}, {"runs", all}, {"live", live}}.dump();
}

std::string report_page(const std::vector<ReportRun>& runs, const std::string& live) {
  const std::string data = report_data(runs, live);
  // Escapes '<', so that the data cannot close the script element.
  std::string escaped;
  for (const char c : data) c == '<' ? escaped += "\\u003c" : escaped += c;
  std::string page = kReportPage;
  constexpr std::string_view kMark = "@DATA@";
  return page.replace(page.find(kMark), kMark.size(), escaped);
}

}  // namespace md
