// `doctor` on broken machines, as far as they can be simulated here: it names the cause and the fix, and never crashes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "tests/cli/command.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

namespace fs = std::filesystem;

const std::string kPlugins = MD_BINARY_DIR "/test_plugins/", kDoctor = MD_BINARY_DIR "/maxdiffusion doctor ";

/// Expects that a run reported `cause` in an error of this name, printed its fix, and exited with this status.
void expect_error(const Outcome& o, const std::string& name, const std::string& cause, const std::string& cure,
                  int status) {
  EXPECT_EQ(o.status, status) << o.out << o.err;
  const size_t line = o.out.find("error    " + name + " ");
  ASSERT_NE(line, std::string::npos) << o.out;
  const std::string found = o.out.substr(line, o.out.find('\n', o.out.find('\n', line) + 1) - line);
  EXPECT_TRUE(contains(found, cause)) << found;
  EXPECT_TRUE(contains(found, "try: ") && contains(found, cure)) << found;
}

TEST(Doctor, FindsNothingWrongHere) {
  const TemporaryFolder t;
  const Outcome o = shell("cd " + t.path() + " && " + kDoctor);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  for (const char* name : {"system", "processor", "memory", "open files", "cpu plugin", "cpu devices", "gpu plugin",
                           "tpu plugin", "outputs", "program cache", "hub", "mpi", "clocks"})
    EXPECT_TRUE(contains(o.out, std::string("  ") + name + " ")) << name << "\n" << o.out;
  EXPECT_TRUE(contains(o.out, "PJRT API 0.")) << o.out;
  EXPECT_TRUE(contains(o.out, "a product is right")) << o.out;
  EXPECT_FALSE(exists(t / "runs"));
}

TEST(Doctor, PrintsJson) {
  const TemporaryFolder t;
  const Outcome o = shell("cd " + t.path() + " && HF_TOKEN=hf_secret " + kDoctor + "--json");
  const auto j = parse_json(o.out);
  EXPECT_EQ(j.at("errors"), 0);
  std::set<std::string> names;
  for (const auto& f : j.at("findings")) {
    EXPECT_TRUE(f.at("status") == "ok" || f.at("status") == "warning") << f;
    names.insert(f.at("name"));
  }
  EXPECT_TRUE(names.contains("cpu devices"));
  EXPECT_TRUE(contains(o.out, "a token is given"));
  EXPECT_FALSE(contains(o.out + o.err, "hf_secret"));
}

TEST(Doctor, NamesAPluginThatIsMissing) {
  expect_error(shell("MAXDIFFUSION_PLUGIN_DIR=/nonexistent " + kDoctor), "cpu plugin", "no plugin under '/nonexistent'",
               "unset MAXDIFFUSION_PLUGIN_DIR", 4);
}

TEST(Doctor, NamesAPluginOfAnotherVersionAndAFileThatIsNone) {
  expect_error(shell(kDoctor + "plugin=" + kPlugins + "old_api.so"), "cpu plugin",
               "implements PJRT API 0.29; expected 0.57", "a newer build", 5);
  expect_error(shell(kDoctor + "plugin=" + kPlugins + "not_a_plugin.so"), "cpu plugin", "exports no GetPjrtApi",
               "no plugin=", 5);
}

TEST(Doctor, OutlivesAPluginThatHangsOrAborts) {
  expect_error(shell(kDoctor + "probe_seconds=3 plugin=" + kPlugins + "hanging.so"), "cpu plugin",
               "no answer after 3 s while the library was loaded", "no plugin=", 5);
  const Outcome o = shell(kDoctor + "plugin=" + kPlugins + "aborting.so");
  expect_error(o, "cpu plugin", "ended its process by signal 6 (Aborted) while the library was loaded",
               "no plugin=", 5);
  EXPECT_TRUE(contains(o.out, "a driver that it cannot take")) << o.out;
}

TEST(Doctor, NamesALimitOnMemory) {
  if (!kAddressSpaceCanBeLimited) GTEST_SKIP() << "the sanitizer reserves more than this test allows";
  expect_error(shell("ulimit -v 2000000; " + kDoctor), "memory", "of address space", "ulimit -v unlimited", 6);
}

TEST(Doctor, NamesACacheThatCannotBeRead) {
  const TemporaryFolder t;
  fs::create_symlink("loop", t / "loop");
  expect_error(shell(kDoctor + "jax_cache_dir=" + t / "loop"), "program cache", "Too many levels of symbolic links",
               "jax_cache_dir=FOLDER", 4);
  write_file_atomic(t / "file", "");
  expect_error(shell("HF_HUB_CACHE=" + t / "file " + kDoctor), "hub cache", "Not a directory", "HF_HUB_CACHE=FOLDER",
               4);
  if (::getuid() != 0) return;  // root may read everything
  fs::create_directory(t / "closed");
  fs::permissions(t / "closed", fs::perms::none);
  fs::permissions(t.path(), fs::perms::all);
  expect_error(shell("setpriv --reuid 65534 --regid 65534 --clear-groups " + kDoctor +
                     "output_dir=/tmp jax_cache_dir=" + t / "closed"),
               "program cache", "Permission denied", "sudo chown", 4);
}

TEST(Doctor, NamesADiskThatIsFull) {
  const TemporaryFolder t;
  expect_error(shell("ulimit -f 100; " + kDoctor + "output_dir=" + t.path()), "outputs", "a file cannot be written",
               "ulimit -f unlimited", 4);
  // A disk of 1 MiB, if this machine allows creating one.
  const std::string mount = "mount -t tmpfs -o size=1m none " + t.path() + " && ";
  if (shell("unshare -rm sh -c '" + mount + "true'").status != 0) return;
  const Outcome o = shell("unshare -rm sh -c '" + mount + "head -c 1m /dev/zero >" + t / "all; " + kDoctor +
                          "output_dir=" + t.path() + "'");
  expect_error(o, "outputs", "No space left on device; 0.0 MiB are free",
               "which shows what uses it; or output_dir=", 4);
}

TEST(Doctor, SaysWhatAConfigTakes) {
  const TemporaryFolder t;
  write_tiny_model(t / "model");
  write_shades(t / "data", 32);
  write_file_atomic(t / "run.yml", fmt::format("pretrained_model_name_or_path: {}\ndataset_type: image_folder\n"
                                               "train_data_dir: {}\nrandom_text_encoder: true\ntrain_new_unet: true\n"
                                               "train_new_vae: true\nresolution: 32\nrun_name: tiny\noutput_dir: {}\n",
                                               t / "model", t / "data", t.path()));
  const Outcome o = shell(kDoctor + t / "run.yml per_device_batch_size=2");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "run.yml: a step takes ")) << o.out;
  expect_error(shell(kDoctor + t / "run.yml pretrained_model_name_or_path=" + t / "none"), "plan", "none", "", 4);
  expect_error(shell(kDoctor + t / "run.yml max_train_stops=3"), "config", "max_train_stops", "max_train_steps", 2);
}

TEST(Doctor, ComparesTheClocksOfProcesses) {
  const Outcome o = shell("mpiexec.mpich -n 2 " + kDoctor);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "the clocks of 2 processes are 0.0")) << o.out;
}

}  // namespace
}  // namespace md
