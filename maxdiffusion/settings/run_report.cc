#include "maxdiffusion/settings/run_report.h"

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/config/config.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::string> config_of_run(const std::string& folder, std::vector<std::string>& notes) {
  std::map<std::string, std::string> config;
  const std::string file = folder + "/config.yml";
  if (!exists(file)) {
    notes.emplace_back("found no config.yml");
    return config;
  }
  try {
    const ConfigSource source = ConfigSource::load(file, {});
    for (const auto& [key, value] : source.values()) config[key] = value.is_null ? "null" : value.text;
  } catch (const Error& e) {
    notes.push_back(e.message());
  }
  return config;
}

}  // namespace

std::vector<std::string> run_folders(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code ec;
  if (exists(folder + "/metrics.jsonl")) found.push_back(folder);
  for (const auto& f : fs::directory_iterator(folder, ec))
    if (exists(f.path() / "metrics.jsonl")) found.push_back(f.path());
  std::ranges::sort(found);
  return found;
}

ReportRun read_run(const std::string& folder, const ReportOptions& options) {
  ReportRun run = read_report_run(folder, options);
  run.config = config_of_run(folder, run.notes);
  return run;
}

}  // namespace md
