// Runs on a machine, in folders and with values that do not fit: the program says so, at once and by name.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "tests/cli/command.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

namespace fs = std::filesystem;

const std::string kQuickstart = MD_SOURCE_DIR "/configs/quickstart.yml";

/// What `maxdiffusion` says, ended after `seconds`.
Outcome within(int seconds, const std::vector<std::string>& words, const std::string& environment = "") {
  return maxdiffusion(words, environment + " timeout " + std::to_string(seconds));
}

std::string fifo(const std::string& path) {
  fs::remove(path);
  EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0) << path;
  return path;
}

TEST(Robustness, AFifoInPlaceOfAFileIsRefusedAtOnce) {
  const TemporaryFolder t;
  const std::string config = fifo(t / "config.yml");
  Outcome o = within(20, {"train", config});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + config + "': not a regular file")) << o.err;
  o = within(20, {"lora", "info", fifo(t / "lora.safetensors")});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "lora.safetensors': not a regular file")) << o.err;
  for (const char* file : {"model_index.json", "unet/config.json", "tokenizer/vocab.json", "vae/model.safetensors"}) {
    const std::string model = t / ("model of " + std::string(file).substr(0, 4));
    write_tiny_model(model);
    const std::string path = fifo(model + "/" + file);
    o = within(20, {"generate", kQuickstart, "pretrained_model_name_or_path=" + model, "output_dir=" + (t / "out"),
                    "prompt=x", "resolution=16", "vae_file=" + (contains(file, "vae/") ? path : "")});
    EXPECT_EQ(o.status, 4) << o.err;
    EXPECT_TRUE(contains(o.err, path + "': not a regular file")) << o.err;
  }
}

}  // namespace
}  // namespace md
