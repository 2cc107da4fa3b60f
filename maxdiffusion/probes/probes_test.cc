// Conclusions of the probes from their findings; tests/cli/doctor_test.cc tests the command on broken machines.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/probes/child.h"
#include "maxdiffusion/probes/finding.h"
#include "maxdiffusion/probes/plugin_probe.h"

namespace md {
namespace {

TEST(Finding, IsALineWithItsCureBelow) {
  const Finding f = error("disk", "it is\nfull", "rm -r x", Code::io);
  EXPECT_EQ(describe(f), "error    disk               it is full\n                            try: rm -r x");
  EXPECT_EQ(to_json(f),
            (nlohmann::json{{"status", "error"}, {"name", "disk"}, {"found", "it is\nfull"}, {"try", "rm -r x"}}));
  EXPECT_EQ(describe(ok("a", "b")), "ok       a                  b");
}

TEST(Finding, OfAnErrorTakesItsCureFromItsNotes) {
  const Finding f =
      from_error("x", Error(Code::io, "no plugin").note("looked for y").note("try: z").note("try: w"), "v");
  EXPECT_EQ(f.found, "no plugin; looked for y");
  EXPECT_EQ(f.cure, "z");
  EXPECT_EQ(f.code, Code::io);
  EXPECT_EQ(from_error("x", Error(Code::io, "no plugin"), "v").cure, "v");
}

ChildResult sh(const std::string& script, const ChildOptions& options = {}) {
  return run_child({"/bin/sh", "-c", script}, options);
}

TEST(Child, SaysHowItEnded) {
  const ChildResult well = sh("echo out; echo err >&2; cat");
  EXPECT_TRUE(well.well());
  EXPECT_EQ(well.out, "out\n");
  EXPECT_EQ(well.err, "err\n");
  EXPECT_EQ(well.last_words(), "err");
  EXPECT_GT(well.peak_bytes, 0);
  EXPECT_EQ(sh("exit 7").end(), "exit status 7");
  EXPECT_EQ(sh("kill -ABRT $$").end(), "signal 6 (Aborted)");
  EXPECT_EQ(run_child({"/nowhere/program"}, {}).status, 127);
}

TEST(Child, IsKilledWithAllThatItHasStartedWhenItsTimeIsOver) {
  const TemporaryFolder t;
  const ChildResult r = sh("(sleep 3; touch " + t / "late) & echo started; sleep 60", {.seconds = 0.3});
  EXPECT_TRUE(r.timed_out);
  EXPECT_EQ(r.out, "started\n");
  EXPECT_LT(r.seconds, 20);
  sh("sleep 3.2");
  EXPECT_FALSE(exists(t / "late"));
  EXPECT_EQ(sh("sleep 60 & echo x").out, "x\n");  // keeps the pipe open
}

TEST(Child, HasTheEnvironmentThatItIsGiven) {
  ::setenv("PMI_RANK", "3", 1);
  const TemporaryFolder t;
  EXPECT_EQ(sh("echo $A$PMI_RANK", {.environment = {{"A", "b"}}, .without = {"PMI_"}, .log = t / "log"}).out, "b\n");
  ::unsetenv("PMI_RANK");
  EXPECT_EQ(read_file(t / "log"), "/bin/sh -c echo $A$PMI_RANK \nb\n");
}

TEST(GpuDriver, IsReadAndComparedWithWhatThePluginWants) {
  const char* text =
      "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder)\nGCC version: "
      "12\n";
  EXPECT_EQ(driver_version(text), "550.54.15");
  EXPECT_EQ(driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27\n"), "580.82.07");
  EXPECT_EQ(driver_version("nothing"), "");
  const std::string plugin = "/x/jax_plugins/xla_cuda13/xla_cuda_plugin.so";
  const Finding old = check_driver("550.54.15", plugin);
  EXPECT_EQ(old.status, Finding::Status::error);
  EXPECT_EQ(old.found, "550.54.15; the plugin '" + plugin + "' needs 580 or newer");
  EXPECT_NE(old.cure.find("nvidia-driver-580"), std::string::npos);
  EXPECT_EQ(check_driver("580.82.07", plugin).status, Finding::Status::ok);
  EXPECT_EQ(check_driver("550.54.15", "/x/xla_cuda12/p.so").status, Finding::Status::ok);
  EXPECT_EQ(check_driver("", plugin).status, Finding::Status::warning);
}

TEST(Plugin, OfDevicesThatAreNotThereIsNotOpened) {
  const TemporaryFolder root;
  for (const char* hardware : {"gpu", "tpu"}) {
    const Findings f = probe_plugin({.hardware = hardware, .required = false, .root = root.path()});
    ASSERT_EQ(f.size(), 1u);
    EXPECT_EQ(f[0].status, Finding::Status::ok);
    EXPECT_NE(f[0].found.find("this machine has no"), std::string::npos) << f[0].found;
  }
  EXPECT_TRUE(probe_gpu_driver({.hardware = "gpu", .root = root.path()}).empty());
}

}  // namespace
}  // namespace md
