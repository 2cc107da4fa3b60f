// Training runs shown live by `serve runs=FOLDER`: figures, samples, and nothing outside of the folder.
#include <filesystem>
#include <fstream>

#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"
#include "tests/server/server.h"

namespace md {
namespace {

namespace fs = std::filesystem;

class ServedRuns : public testing::Test {
 protected:
  ServedRuns() {
    write_run("mine", 3);
    write_run("other run", 2);
    make_folders(t / "runs/empty");
    write_file_atomic(t / "secret.png", encode_png(HostArray(Shape{DType::u8, {4, 4, 3}})));
    write_file_atomic(t / "secret.jsonl", "{\"step\":1,\"loss\":42.5}\n");
    make_folders(t / "elsewhere/samples");
    write_file_atomic(t / "elsewhere/metrics.jsonl", "{\"step\":1,\"loss\":42.5}\n");
  }
  void write_run(const std::string& name, int steps) {
    const std::string folder = t / ("runs/" + name);
    make_folders(folder + "/samples");
    std::string lines;
    for (int i = 1; i <= steps; ++i) lines += fmt::format("{{\"step\":{},\"loss\":{}}}\n", i, 1.0 / i);
    write_file_atomic(folder + "/metrics.jsonl", lines);
    write_file_atomic(folder + "/config.yml", "run_name: " + name + "\n");
    write_png(folder + "/samples/step_000002.png", HostArray(Shape{DType::u8, {6, 8, 3}}));
  }
  TemporaryFolder t;
};

TEST_F(ServedRuns, AreTheReportWithTheNewestSteps) {
  const TestServer server({"runs=" + (t / "runs")});
  EXPECT_TRUE(contains(server.get("/").head, "Location: /runs"));
  const Answer loader = server.get("/runs");
  EXPECT_EQ(loader.status, 200);
  EXPECT_TRUE(contains(loader.head, "Content-Security-Policy: default-src 'none'"));
  const Answer page = server.get("/runs/page");
  EXPECT_EQ(page.status, 200);
  EXPECT_TRUE(contains(page.body, R"("live":"/runs/data")"));
  const Answer data = server.get("/runs/data");
  const json runs = data.value()["runs"];
  ASSERT_EQ(runs.size(), 2u) << data.body;
  EXPECT_EQ(runs[0]["name"], "mine");
  EXPECT_EQ(runs[0]["metrics"]["loss"], (json{1.0, 0.5, 1.0 / 3}));
  EXPECT_EQ(runs[1]["folder"], "other run");  // not where it lies
  EXPECT_EQ(runs[1]["config"]["run_name"], "other run");
  EXPECT_EQ(server.get("/runs/data?runs=other%20run").value()["runs"].size(), 1u);
  EXPECT_EQ(server.get("/runs/data?runs=none").status, 404);
  // Samples, as the page names them.
  const std::string source = runs[1]["samples"][0]["src"];
  EXPECT_EQ(source, "other%20run/samples/step_000002.png");
  const Answer sample = server.get("/runs/files/" + source);
  EXPECT_EQ(sample.status, 200);
  EXPECT_TRUE(sample.body == read_file(t / "runs/other run/samples/step_000002.png"));
  // Unchanged, then a step longer.
  const size_t at = data.head.find("ETag: ") + 6;
  const std::string tag = data.head.substr(at, data.head.find("\r\n", at) - at);
  EXPECT_EQ(server.get("/runs/data", {"If-None-Match: " + tag}).status, 304);
  std::ofstream(t / "runs/mine/metrics.jsonl", std::ios::app) << "{\"step\":4,\"loss\":0.25}\n";
  const Answer longer = server.get("/runs/data", {"If-None-Match: " + tag});
  ASSERT_EQ(longer.status, 200);
  EXPECT_EQ(longer.value()["runs"][0]["metrics"]["loss"][3], 0.25);
  // Nothing is written or generated.
  for (const char* path : {"/runs", "/runs/data", "/runs/page", "/runs/files/mine/samples/step_000002.png"})
    EXPECT_EQ(server.post(path, {{"a", 1}}).status, 404) << path;
  EXPECT_EQ(server.post("/v1/images/generations", {{"prompt", "x"}}).status, 404);
  EXPECT_EQ(server.post("/api/generate", {{"prompt", "x"}}).status, 404);
}

TEST_F(ServedRuns, AreNoWayToOtherFiles) {
  fs::create_symlink(t / "secret.png", t / "runs/mine/samples/step_000003.png");
  fs::create_directory_symlink(t / "elsewhere", t / "runs/linked");
  make_folders(t / "runs/half");
  fs::create_symlink(t / "secret.jsonl", t / "runs/half/metrics.jsonl");
  const TestServer server({"runs=" + (t / "runs")});
  const Answer data = server.get("/runs/data");
  EXPECT_EQ(data.value()["runs"].size(), 2u) << data.body;
  EXPECT_FALSE(contains(data.body, "42.5"));
  for (const char* path :
       {"mine/samples/step_000003.png", "../secret.png", "mine/../../secret.png", "mine/samples/../../../secret.png",
        "..%2fsecret.png", "%2e%2e/secret.png", "mine/samples/%2e%2e/%2e%2e/%2e%2e/secret.png", "mine/metrics.jsonl",
        "mine/config.yml", "/etc/passwd", "%2fetc%2fpasswd", "linked/samples/a.png", "linked/metrics.jsonl", "mine", "",
        ".", "..", "mine/samples/", "mine/samples/step_000002.png%00.png"}) {
    const Answer a = server.get(std::string("/runs/files/") + path);
    EXPECT_NE(a.status, 200) << path;
    EXPECT_FALSE(contains(a.body, t.path())) << a.body;
  }
  for (const char* runs : {"..", "../elsewhere", "/etc", "%2e%2e", "linked", "half", ",", ""})
    EXPECT_EQ(server.get(std::string("/runs/data?runs=") + runs).status, 404) << runs;
  EXPECT_EQ(server.get("/runs/files/mine/samples/step_000002.png").status, 200);
}

TEST_F(ServedRuns, NeedTheKeyAndAFolder) {
  const TestServer server({"runs=" + (t / "runs"), "api_key=secret"});
  EXPECT_EQ(server.get("/runs").status, 200);  // holds nothing
  for (const char* path : {"/runs/page", "/runs/data", "/runs/files/mine/samples/step_000002.png"}) {
    EXPECT_EQ(server.get(path).status, 401) << path;
    EXPECT_EQ(server.get(path, {"Authorization: Bearer secret"}).status, 200) << path;
  }
  EXPECT_EQ(server.get("/runs/data", {"Host: evil.example"}).status, 403);
  Outcome o = maxdiffusion({"serve", "runs=" + (t / "nowhere"), "port=0"});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "/nowhere' is not a folder; expected one with the folders of training runs")) << o.err;
  o = maxdiffusion({"serve", "runs=" + (t / "runs"), "port=0", "height=16"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "height is given without a model")) << o.err;
}

}  // namespace
}  // namespace md
