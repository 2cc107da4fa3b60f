// Runs as one HTML page, written by `report`. The page holds the values of metrics.jsonl as JSON in its element `data`
// and does smoothing and axes itself. It loads nothing from other places.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace md {

/// One training run.
struct ReportRun {
  std::string name;  // name in the legend
  std::string folder;
  std::vector<std::string> notes;  // damaged or missing parts
  std::vector<double> steps;
  /// One value per step; NaN if a line has none or it is not finite.
  std::map<std::string, std::vector<double>> metrics;
  int64_t every = 1;                                       // one of `every` steps of the file is included
  std::vector<std::map<std::string, std::string>> starts;  // entries of starts.jsonl, in order
  std::map<std::string, std::string> config;               // key → YAML
  struct Sample {
    int64_t step = 0;
    std::string source;  // data: URL or relative path
    bool is_video = false;
  };
  std::vector<Sample> samples;  // by step
};

struct ReportOptions {
  int64_t points = 20000;   // maximum number of steps per run, evenly spaced and including the last
  bool embed = true;        // samples inside the page; false: paths relative to `page_folder`
  std::string page_folder;  // folder of the page; empty: the working folder
};

/// Reads metrics, starts and samples of a run's folder; the caller sets `config`. Skips lines that are not JSON objects
/// with a step, with a note. Adds goodput: for each step the seconds spent in steps so far, divided by those since the
/// first start or since the run's autoencoder was trained. Throws io if there is no metrics.jsonl.
ReportRun read_report_run(const std::string& folder, const ReportOptions& options);
/// The whole page. `live`: path of a server that answers with report_data of the same runs, which the page fetches
/// again, and below whose folder `files/` it finds samples that are not embedded; empty: the page stays as it is.
std::string report_page(const std::vector<ReportRun>& runs, const std::string& live = "");
/// What the page shows, as JSON.
std::string report_data(const std::vector<ReportRun>& runs, const std::string& live = "");

}  // namespace md
