// `report`: the report page of runs, through the program.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "tests/cli/command.h"

namespace md {
namespace {

nlohmann::json page_data(const std::string& file) {
  static const std::string begin = R"(<script id="data" type="application/json">)";
  const std::string page = read_file(file);
  const size_t from = page.find(begin) + begin.size();
  return parse_json(page.substr(from, page.find("</script>", from) - from));
}

class ReportCommand : public testing::Test {
 protected:
  ReportCommand() {
    for (const std::string run : {"x/run", "y/run"}) {
      make_folders(t / run);
      write_file_atomic(t / (run + "/metrics.jsonl"), "{\"step\": 1, \"loss\": 0.125}\n");
    }
    write_file_atomic(t / "x/run/config.yml", "learning_rate: 1.0e-3\nprompt: [\"a\", \"b\"]\nseed: null\n");
    write_file_atomic(t / "y/run/config.yml", "learning_rate: 2.0e-3\n");
  }
  TemporaryFolder t;
  const std::string page = t / "new/page.html";
};

TEST_F(ReportCommand, WritesRunsWithTheirConfigsUnderNamesThatDiffer) {
  const Outcome o = maxdiffusion({"report", t / "x/run", t / "y/run", "-o", page});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, page + ": ")) << o.out;
  const nlohmann::json runs = page_data(page)["runs"];
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0]["name"], "x/run");
  EXPECT_EQ(runs[1]["name"], "y/run");
  EXPECT_EQ(runs[0]["metrics"]["loss"][0], 0.125);
  EXPECT_EQ(runs[0]["config"]["learning_rate"], "1.0e-3");
  EXPECT_EQ(runs[1]["config"]["learning_rate"], "2.0e-3");
  EXPECT_EQ(runs[0]["config"]["seed"], "null");
  EXPECT_FALSE(runs[1]["config"].contains("prompt"));
  EXPECT_EQ(maxdiffusion({"report", t / "x/run", "--output", page, "points=5"}).status, 0);
  EXPECT_EQ(page_data(page)["runs"][0]["name"], "run");
}

TEST_F(ReportCommand, SaysWhatIsNoRunAndWhatIsDamaged) {
  Outcome o = maxdiffusion({"report", t / "x/run", "outptu=" + page});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "there is no key `outptu`\n  did you mean `output`?")) << o.err;
  o = maxdiffusion({"report", t / "x", "-o", page});
  EXPECT_EQ(o.status, 4);
  EXPECT_EQ(o.err, "error: '" + (t / "x") +
                       "': found no metrics.jsonl; expected the folder of a training run\n  try: report " +
                       (t / "x/run") + "\n");
  EXPECT_FALSE(exists(page));
  EXPECT_EQ(maxdiffusion({"report"}).err, "error: report: found no run; expected folders of runs: report runs/mine\n");

  write_file_atomic(t / "x/run/metrics.jsonl", "");
  o = maxdiffusion({"report", t / "x/run", "-o", page});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "error: '" + (t / "x/run") + "/metrics.jsonl': found no step")) << o.err;
  // A run without steps is shown as it is, next to one with steps.
  write_file_atomic(t / "x/run/config.yml", "a: [1");
  o = maxdiffusion({"report", t / "x/run", t / "y/run", "-o", page});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "metrics.jsonl has no step yet")) << o.err;
  EXPECT_EQ(page_data(page)["runs"][0]["notes"].size(), 2u);
}

}  // namespace
}  // namespace md
