#include "maxdiffusion/metrics/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/metrics/jsonl_writer.h"

namespace md {
namespace {

using nlohmann::json;

/// The JSON data in a page, extracted as a browser does.
json data_of(const std::string& page) {
  static const std::string begin = R"(<script id="data" type="application/json">)";
  const size_t from = page.find(begin) + begin.size();
  return json::parse(page.substr(from, page.find("</script>", from) - from));
}

json page_of(const std::string& folder, const ReportOptions& options = {}) {
  return data_of(report_page({read_report_run(folder, options)})).at("runs").at(0);
}

TEST(Report, HoldsTheFiguresOfMetricsJsonl) {
  TemporaryFolder t;
  {
    JsonlWriter w(t / "metrics.jsonl", 0);
    for (int64_t step = 1; step <= 300; ++step) {
      std::map<std::string, double> values = {{"loss", 1.0 / static_cast<double>(step) + 0.1234567},
                                              {"grad_norm", std::sqrt(static_cast<double>(step))},
                                              {"step_time_seconds", 0.25}};
      if (step % 100 == 0) values["eval_loss"] = 3.0 / static_cast<double>(step);
      w.write(step, values, "a</script>");
    }
  }
  const json run = page_of(t.path());
  std::ifstream lines(t / "metrics.jsonl");
  size_t i = 0;
  for (std::string line; std::getline(lines, line); ++i) {
    const json written = json::parse(line);
    EXPECT_EQ(run["steps"][i], written["step"]);
    for (const char* name : {"loss", "grad_norm", "step_time_seconds", "time", "eval_loss"})
      EXPECT_EQ(run["metrics"][name][i], written.value(name, json())) << name << " of step " << i + 1;
  }
  EXPECT_EQ(i, 300u);
  EXPECT_EQ(run["metrics"]["loss"].size(), i);
  EXPECT_TRUE(run["notes"].empty()) << run["notes"];
  EXPECT_FALSE(run["metrics"].contains("goodput"));  // no file holds the start time
}

TEST(Report, ShowsWhatIsDamagedAsGapsAndSaysSo) {
  TemporaryFolder t;
  std::ofstream(t / "metrics.jsonl") << R"({"step": 1, "loss": 0.5}
not json
{"step": 2, "loss": null}
{"step": 3, "loss": NaN, "grad_norm": 2}
[1]
{"step": 4, "loss": 0.25}
{"step": 5, "lo)";
  const json run = page_of(t.path());
  EXPECT_EQ(run["steps"], json::parse("[1, 2, 3, 4]"));
  EXPECT_EQ(run["metrics"]["loss"], json::parse("[0.5, null, null, 0.25]"));
  EXPECT_EQ(run["metrics"]["grad_norm"], json::parse("[null, null, 2, null]"));
  EXPECT_EQ(run["notes"], (json{"metrics.jsonl: the last line is cut, and left out",
                                "metrics.jsonl: 2 lines are not JSON objects with \"step\", and left out; the first is "
                                "line 2",
                                "metrics.jsonl: 2 values are not finite: gaps of the curves"}));

  std::ofstream(t / "metrics.jsonl", std::ios::trunc).flush();
  EXPECT_EQ(page_of(t.path())["notes"], json{"metrics.jsonl has no step yet"});
  std::filesystem::remove(t / "metrics.jsonl");
  try {
    read_report_run(t.path(), {});
    FAIL() << "a folder without metrics";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("found no metrics.jsonl; expected the folder of a training run"), std::string::npos);
  }
}

TEST(Report, GoodputIsTimeInStepsSinceTheStartOrTheAutoencoder) {
  TemporaryFolder t;
  // Started at 100; steps of 2 s end at 110, 112 and, after a second start, 132.
  std::ofstream(t / "starts.jsonl") << "{\"time\": 100, \"version\": \"1\"}\n{\"time\": 120, \"version\": \"2\"}\n";
  std::ofstream(t / "metrics.jsonl") << R"({"step": 1, "time": 110, "step_time_seconds": 2}
{"step": 2, "time": 112, "step_time_seconds": 2}
{"step": 3, "time": 132, "step_time_seconds": 2}
)";
  json run = page_of(t.path());
  EXPECT_EQ(run["metrics"]["goodput"], (json{2.0 / 10, 4.0 / 12, 6.0 / 32}));
  EXPECT_EQ(run["starts"][1]["version"], "2");

  std::filesystem::create_directory(t / "vae");
  std::ofstream(t / "vae/metrics.jsonl") << "{\"step\": 1, \"time\": 104}\n{\"step\": 2, \"time\": 106}\n";
  run = page_of(t.path());
  EXPECT_EQ(run["metrics"]["goodput"], (json{2.0 / 4, 4.0 / 6, 6.0 / 26}));
}

TEST(Report, LongRunsKeepTheLastStepAndEveryHeldOutLoss) {
  TemporaryFolder t;
  {
    JsonlWriter w(t / "metrics.jsonl", 0);
    for (int64_t step = 1; step <= 1000; ++step) {
      std::map<std::string, double> values = {{"loss", static_cast<double>(step)}};
      if (step % 333 == 0) values["eval_loss"] = 1;
      w.write(step, values, "a");
    }
  }
  const json run = page_of(t / "", {.points = 100});
  EXPECT_EQ(run["every"], 10);
  EXPECT_EQ(run["steps"].size(), 103u);
  EXPECT_EQ(run["steps"].back(), 1000);
  EXPECT_EQ(run["metrics"]["loss"], run["steps"]);
  int64_t held_out = 0;
  for (const json& v : run["metrics"]["eval_loss"]) held_out += v.is_null() ? 0 : 1;
  EXPECT_EQ(held_out, 3);
}

TEST(Report, SamplesAreInThePageOrPathsFromIt) {
  TemporaryFolder t;
  std::ofstream(t / "metrics.jsonl") << "{\"step\": 1, \"loss\": 1}\n";
  make_folders(t / "samples");
  for (const char* name : {"step_000100.png", "step_000020.png", "20-train_steps-x.mp4", "30-train_steps-a b.mp4"})
    std::ofstream((t / "samples/") + name) << "M" << name[5];
  std::ofstream(t / "samples/grid.png") << "not of a step";
  const json in = page_of(t.path())["samples"];
  ASSERT_EQ(in.size(), 3u);
  EXPECT_EQ(in[0], (json{{"step", 20}, {"src", "data:image/png;base64,TTA="}, {"video", false}}));
  EXPECT_EQ(in[1], (json{{"step", 30}, {"src", "data:video/mp4;base64,TWE="}, {"video", true}}));
  EXPECT_EQ(in[2]["step"], 100);
  const json linked = page_of(t / "", {.embed = false, .page_folder = t / "pages"})["samples"];
  EXPECT_EQ(linked[0]["src"], "../samples/step_000020.png");
  EXPECT_EQ(linked[1]["src"], "../samples/30-train_steps-a%20b.mp4");
}

TEST(Report, LinksToNothingOutside) {
  ReportRun run;
  run.name = "</script><script>alert(1)</script>";
  const std::string page = report_page({run});
  EXPECT_EQ(data_of(page)["runs"][0]["name"], run.name);
  EXPECT_EQ(page.find("alert(1)</script>"), std::string::npos);
  static const std::regex link(R"((src|href)\s*=\s*["']|@import|url\(["']?(https?:)?//)");
  EXPECT_FALSE(std::regex_search(page, link));
  // The only address is SVG's namespace, which is never fetched.
  size_t addresses = 0;
  for (size_t at = 0; (at = page.find("://", at)) != std::string::npos; ++at) ++addresses;
  EXPECT_EQ(addresses, 1u);
}

}  // namespace
}  // namespace md
