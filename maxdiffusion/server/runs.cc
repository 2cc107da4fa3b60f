// Training runs of a folder as the report, which fetches new steps: /runs, /runs/page, /runs/data,
// /runs/files/… Nothing is written. A client names runs and files of lists; it cannot form a path.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/percent_encoding.h"
#include "maxdiffusion/server/service.h"
#include "maxdiffusion/settings/run_report.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Opens the page, with the server's key if it has one.
constexpr const char* kLoader = R"html(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Training runs</title></head><body><p id="says">loading</p><script>
'use strict';
(async () => {
  const send = () => fetch('/runs/page' + location.search,
    {headers: sessionStorage.key_ ? {Authorization: 'Bearer ' + sessionStorage.key_} : {}});
  let answer = await send();
  if (answer.status === 401) {
    const key = window.prompt('API key of this server');
    if (key) { sessionStorage.key_ = key; answer = await send(); }
  }
  const text = await answer.text();
  if (!answer.ok) { document.getElementById('says').textContent = text; return; }
  document.open(); document.write(text); document.close();
})();
</script></body></html>
)html";

constexpr const char* kPolicy =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data: blob:; media-src "
    "data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
constexpr size_t kMostRuns = 20;
/// What is read of a run.
constexpr const char* kParts[] = {"metrics.jsonl", "starts.jsonl", "config.yml", "samples", "vae/metrics.jsonl"};

/// Whether a file or folder lies below `folder`, links followed.
bool is_below(const std::string& folder, const fs::path& path) {
  std::error_code ec;
  const fs::path whole = fs::weakly_canonical(folder, ec), its = fs::weakly_canonical(path, ec);
  return !ec && std::ranges::mismatch(whole, its).in1 == whole.end();
}

std::string name_of(const std::string& run) {
  const fs::path path = fs::path(run).lexically_normal();
  return path.filename().empty() ? path.parent_path().filename() : path.filename();
}

/// The runs that a call requests: those of the field `runs`, names with commas, or those that changed last.
std::vector<std::string> runs_of(const std::string& folder, const HttpCall& call) {
  std::vector<std::string> all = run_folders(folder);
  std::erase_if(all, [&](const std::string& run) {
    return std::ranges::any_of(kParts, [&](const char* part) { return !is_below(folder, fs::path(run) / part); });
  });
  if (const auto requested = call.query.find("runs"); requested != call.query.end()) {
    const std::string names = "," + requested->second + ",";
    std::erase_if(all, [&](const std::string& run) { return names.find("," + name_of(run) + ",") == names.npos; });
  } else if (all.size() > kMostRuns) {
    const auto changed = [](const std::string& run) {
      std::error_code ec;
      return fs::last_write_time(run + "/metrics.jsonl", ec);
    };
    std::ranges::sort(all, std::ranges::greater(), changed);
    all.resize(kMostRuns);
    std::ranges::sort(all);
  }
  if (all.empty()) throw Refusal(404, "there is no run with metrics.jsonl in the folder that the server's runs names");
  return all;
}

/// A text that changes when a run does.
std::string state_of(const std::vector<std::string>& runs) {
  std::string state;
  std::error_code ec;
  for (const std::string& run : runs)
    for (const char* part : kParts) {
      const fs::path path = fs::path(run) / part;
      state += fmt::format("{} {} {}\n", path.string(), fs::is_regular_file(path, ec) ? fs::file_size(path, ec) : 0,
                           fs::last_write_time(path, ec).time_since_epoch().count());
    }
  return '"' + content_hash(state) + '"';
}

std::vector<ReportRun> read_runs(const std::string& folder, const std::vector<std::string>& folders) {
  constexpr int64_t kPoints = 4000;
  std::vector<ReportRun> runs;
  for (const std::string& run : folders) {
    runs.push_back(read_run(run, {.points = kPoints, .embed = false, .page_folder = folder}));
    runs.back().name = runs.back().folder = name_of(run);
  }
  return runs;
}

/// A sample: its path must be one of those that the page names.
HttpReply sample(const std::string& folder, const std::string& path) {
  for (const std::string& run : run_folders(folder)) {
    const fs::path samples = (fs::path(run) / "samples").lexically_normal();
    std::error_code ec;
    for (const auto& file : fs::directory_iterator(samples, ec)) {
      const std::string relative = fs::absolute(file.path())
                                       .lexically_normal()
                                       .lexically_relative(fs::absolute(folder).lexically_normal()),
                        ending = file.path().extension();
      if (relative != path || (ending != ".png" && ending != ".mp4") || !is_below(folder, file.path())) continue;
      return {.type = ending == ".png" ? "image/png" : "video/mp4",
              .body = read_file(file.path()),
              .headers = {{"Cache-Control", "private, max-age=60"}}};
    }
  }
  throw Refusal(404, "there is no such sample");
}

HttpReply runs_reply(Service& service, const HttpCall& call) {
  const std::string& folder = service.keys.runs;
  if (folder.empty()) throw Refusal(404, "no runs are served; start the server with runs=FOLDER");
  if (call.method != "GET" && call.method != "HEAD")
    throw Refusal(404, fmt::format("{} {} is not served", call.method, call.path.substr(0, 100)));
  constexpr std::string_view kFiles = "/runs/files/";
  const std::map<std::string, std::string> page = {{"Content-Security-Policy", kPolicy}, {"Cache-Control", "no-cache"}};
  if (call.path == "/runs" || call.path == "/runs/")
    return {.type = "text/html; charset=utf-8", .body = kLoader, .headers = page};
  if (call.path.starts_with(kFiles)) return sample(folder, call.path.substr(kFiles.size()));
  const std::vector<std::string> folders = runs_of(folder, call);
  std::string live = "/runs/data";
  if (const auto requested = call.query.find("runs"); requested != call.query.end())
    live += "?runs=" + percent_encoded(requested->second);
  if (call.path == "/runs/page")
    return {.type = "text/html; charset=utf-8", .body = report_page(read_runs(folder, folders), live), .headers = page};
  if (call.path != "/runs/data")
    throw Refusal(404, fmt::format("{} {} is not served", call.method, call.path.substr(0, 100)));
  const std::string state = state_of(folders);
  const std::map<std::string, std::string> headers = {{"ETag", state}, {"Cache-Control", "no-cache"}};
  if (const auto known = call.headers.find("if-none-match"); known != call.headers.end() && known->second == state)
    return {.status = 304, .body = "", .headers = headers};
  return {.body = report_data(read_runs(folder, folders), live), .headers = headers};
}

}  // namespace

Interface runs_interface() {
  return {[](const std::string& path) { return path == "/runs" || path.starts_with("/runs/"); }, runs_reply,
          [](int, const std::string& message) -> json {
            return {{"error", message}};
          }};
}

}  // namespace md
