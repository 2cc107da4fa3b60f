// `report`: training runs as one HTML page.
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/settings/run_report.h"

namespace md {
namespace {

namespace fs = std::filesystem;

struct ReportKeys {
  std::string output = "report.html";
  bool embed_samples = true;
  int64_t points = 20000;
  template <class V>
  void visit(V&& v) {
    v("output", output, "the page; also -o FILE", KeyPath::output);
    v("embed_samples", embed_samples, "samples are in the page; false: the page reads them from the runs' folders");
    v("points", points, "most steps of a run that the page holds, evenly spaced; held-out losses are all there",
      at_least(1));
  }
};

/// Short distinct names: the last components of the paths, as many as needed.
std::vector<std::string> names_of(const std::vector<std::string>& folders) {
  std::vector<std::vector<std::string>> parts;
  for (const std::string& folder : folders) {
    auto& of = parts.emplace_back();
    for (const fs::path& part : fs::absolute(folder).lexically_normal())
      if (!part.empty() && part != "/") of.push_back(part);
  }
  for (size_t take = 1;; ++take) {
    std::vector<std::string> names;
    bool further = false;
    for (const auto& of : parts) {
      const size_t n = std::min(take, of.size());
      further = further || n < of.size();
      names.push_back(fmt::format("{}", fmt::join(of.end() - static_cast<long>(n), of.end(), "/")));
    }
    if (!further || std::set<std::string>(names.begin(), names.end()).size() == names.size()) return names;
  }
}

void report(const Words& words) {
  Words long_words;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] != "-o") {
      long_words.push_back(words[i]);
      continue;
    }
    check(++i < words.size(), Code::invalid_config, "report: -o: found no file after it; expected -o FILE");
    long_words.push_back("output=" + words[i]);
  }
  ReportKeys keys;
  const Words folders = take_keys(long_words, keys);
  for (const std::string& word : folders)
    if (word.starts_with('-') || word.find('=') != word.npos) assign({word}, 0, keys);  // throws: no such key
  check(!folders.empty(), Code::invalid_config, "report: found no run; expected folders of runs: report runs/mine");
  check(!keys.output.empty(), Code::invalid_config, "output: is empty; expected a file");

  const ReportOptions options{
      .points = keys.points, .embed = keys.embed_samples, .page_folder = fs::path(keys.output).parent_path().string()};
  const std::vector<std::string> names = names_of(folders);
  std::vector<ReportRun> runs;
  bool any = false;
  for (size_t i = 0; i < folders.size(); ++i) {
    try {
      runs.push_back(read_run(folders[i], options));
    } catch (Error& e) {
      if (const auto below = run_folders(folders[i]); !below.empty())
        e.note(fmt::format("try: report {}", fmt::join(below, " ")));
      throw;
    }
    ReportRun& run = runs.back();
    run.name = names[i];
    for (const std::string& note : run.notes) log_warning("{}: {}", folders[i], note);
    any = any || !run.steps.empty();
  }
  check(any, Code::io, "'{}/metrics.jsonl': found no step; expected a run that has done one", folders[0]);
  if (const fs::path folder = fs::path(keys.output).parent_path(); !folder.empty()) make_folders(folder);
  const std::string page = report_page(runs);
  write_file_atomic(keys.output, page);
  fmt::print("{}: {:.1f} MB\n", keys.output, static_cast<double>(page.size()) / 1e6);
}

}  // namespace

Command report_command() {
  return {"report", "RUN … [-o report.html] [key=value …]",
          "write curves, samples, config and environment of training runs, side by side, as one HTML page", report,
          [](const KeyPrinter& print) { print_command_keys<ReportKeys>(print); }};
}

}  // namespace md
