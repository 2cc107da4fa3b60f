// Training runs as the report shows them, with the keys of their config.yml.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/metrics/report.h"

namespace md {

/// Folders of runs, those with metrics.jsonl: `folder` itself, and those directly in it, by name.
std::vector<std::string> run_folders(const std::string& folder);
/// read_report_run, with the keys of config.yml; a note if there is none, or it cannot be read.
ReportRun read_run(const std::string& folder, const ReportOptions& options);

}  // namespace md
