// Runs `accelerator_check` with tiny sizes on the CPU, so that an hour on a device is not wasted on bugs of the check.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "tests/cli/command.h"

namespace md {
namespace {

TEST(AcceleratorCheck, WritesItsReportWithTinySizesOnTheCpu) {
  const TemporaryFolder t;
  const Outcome o = maxdiffusion({"accelerator_check", "sizes=tiny", "minutes=10", "hardware=cpu",
                                  "output=" + t / "out", "python=/nonexistent/python"});
  ASSERT_EQ(o.status, 0) << o.err;
  const auto report = parse_json(read_file(t / "out/report.json"));
  const std::string text = read_file(t / "out/report.md");
  for (const auto& step : report.at("steps")) EXPECT_TRUE(step.at("well")) << step << "\n" << o.err;
  for (const char* title : {"## 1. ", "## 2. ", "## 3. ", "## 4. ", "## 5. ", "`/nonexistent/python` has no torch"})
    EXPECT_TRUE(contains(text, title)) << title;
  EXPECT_FALSE(contains(text, "ended early")) << text;
  for (const auto& [kind, tests] : report.at("tests").items()) {
    EXPECT_GT(tests.at("passed"), 0) << kind;
    EXPECT_TRUE(tests.at("failed").empty()) << tests;
  }
  EXPECT_GT(report.at("deviations").size(), 5u);
  const auto& images = report.at("quickstarts").at("images");
  EXPECT_EQ(images.at("cpu").size(), 4u);
  EXPECT_EQ(images.at("cpu"), images.at("device"));
  for (const auto& [run, files] : report.at("resumed").items()) {
    EXPECT_GT(files.at("files"), 0) << run;
    EXPECT_EQ(files.at("files"), files.at("same_files")) << run;
  }
  EXPECT_EQ(report.at("resumed").size(), 2u) << text;
  const auto& speed = report.at("speed").at("quickstart 48");
  EXPECT_GT(speed.at("step_s"), 0);
  EXPECT_GT(speed.at("planned_gib"), 0);
  ASSERT_EQ(speed.at("variants").size(), 1u) << text;
  EXPECT_EQ(speed.at("variants")[0].at("keys"), "remat_policy=FULL");
  EXPECT_GT(speed.at("variants")[0].at("step_s"), 0);
  EXPECT_GE(speed.at("sampling").at("warm").at("step_s"), 0) << text;  // logged in hundredths of a second
  EXPECT_EQ(report.at("trace").at("steps"), 10);
  EXPECT_GE(report.at("trace").at("kernels").size(), 3u);
  EXPECT_TRUE(exists(t / "out/images/loss_images.png"));
  EXPECT_TRUE(exists(t / "out/images/samples_images_cpu.png"));
  EXPECT_FALSE(std::filesystem::is_empty(t / "out/traces"));
}

TEST(AcceleratorCheck, EndsInItsTimeWhateverIsLeft) {
  const TemporaryFolder t;
  const auto start = std::chrono::steady_clock::now();
  const Outcome o =
      maxdiffusion({"accelerator_check", "sizes=tiny", "minutes=0.2", "hardware=cpu", "output=" + t / "out"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_TRUE(contains(read_file(t / "out/report.md"), "## 5. "));
  EXPECT_TRUE(contains(read_file(t / "out/report.md"), "no time was left"));
}

}  // namespace
}  // namespace md
