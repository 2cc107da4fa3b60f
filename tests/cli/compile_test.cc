// `compile` and `plan`: memory and time of a training step, also on hardware that this machine does not have. Needs
// libtpu, which `./run test` fetches.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <sstream>

#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kConfig = MD_SOURCE_DIR "/configs/quickstart_video.yml";
const std::string kModel = "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/moving_emoji";

Outcome compile(std::vector<std::string> words, const char* command = "compile") {
  words.insert(words.begin(), {command, kConfig, kModel, "activations_dtype=float32", "per_device_batch_size=2",
                               "scan_layers=true", "optimizer=adamw", "optimizer_args=[]"});
  return maxdiffusion(words);
}

double number_after(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  if (at == text.npos) ADD_FAILURE() << "no '" << words << "' in\n" << text;
  return at == text.npos ? 0 : std::stod(text.substr(at + words.size()));
}

TEST(CompileAhead, SaysWhatAStepTakesOnTpusThatAreNotHere) {
  const TemporaryFolder folder;
  const Outcome o =
      compile({"topology=v5p:2x2x1", "ici_data_parallelism=1", "ici_fsdp_parallelism=2", "ici_context_parallelism=2",
               "attention=ring", "flash_min_seq_length=0", "remat_policy=HIDDEN_STATE_WITH_OFFLOAD",
               "libtpu_flags=wan_light", "aot_cache_dir=" + folder.path()},
              "plan");  // which prints all that compile prints
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "topology: 4 × TPU v5")) << o.out;
  EXPECT_TRUE(contains(o.out, "mesh: fsdp 2 × context 2 (4 devices)")) << o.out;
  EXPECT_TRUE(contains(o.out, " of 95.73 GiB")) << o.out;
  // Inputs of the blocks and results of their two attentions for a device's queries, in f32, with one log-sum-exp per
  // query and head.
  const double tokens = 5 * 4 * 4, samples = 8, width = 192, heads = 6, blocks = 6;
  const double offloaded = blocks * samples * tokens * (3 * width + 2 * heads) * 4 / 4 / (1 << 20);
  EXPECT_GE(number_after(o.out, "in the host's memory for each device: "), 0.9 * offloaded) << o.out;
  // Parameters, two moments of each and averages, in f32. Most are sharded over fsdp and context; small ones are
  // replicated and padded to the TPU's tiles.
  const Outcome params = maxdiffusion({"inspect", "params", kConfig, kModel, "scan_layers=true"});
  const double whole = 4 * 4 * number_after(params.out, "\ntransformer: ") / (1 << 20),
               held = number_after(o.out, "arguments ");
  EXPECT_GT(held, whole / 4);
  EXPECT_LT(held, 0.5 * whole);
  // Weights are gathered before use; keys are passed around the ring.
  EXPECT_TRUE(contains(o.out, "all-gather over fsdp × context: ")) << o.out;
  EXPECT_TRUE(contains(o.out, "collective-permute over context: ")) << o.out;
  // The parts of the memory, and the lower bound of the time.
  const double parts = number_after(o.out, "arguments: weights ") + number_after(o.out, ", moments ") +
                       number_after(o.out, ", averages ") + number_after(o.out, ", batch ") +
                       number_after(o.out, ", padding ");
  EXPECT_NEAR(number_after(o.out, ", moments ") / number_after(o.out, "arguments: weights "), 2, 0.05);
  EXPECT_NEAR(parts / number_after(o.out, "on each device: arguments "), 1, 0.02);
  EXPECT_LT(number_after(o.out, ", padding ") / parts, 0.25);  // narrow layers are padded to tiles of 8 × 128
  // Peak 459 TFLOP/s.
  const double work = number_after(o.out, "work of a step: ");
  EXPECT_NEAR(number_after(o.out, "(products "), work / 459, 1e-4);
  EXPECT_GE(number_after(o.out, "at least "), number_after(o.out, ", memory "));
  // The executable, to copy to machines with such devices.
  const std::string saved_file = o.out.substr(o.out.find(folder.path()));
  EXPECT_GT(std::filesystem::file_size(saved_file.substr(0, saved_file.find('\n'))), 1'000'000U) << o.out;
}

TEST(CompileAhead, WhatDoesNotFitIsAnErrorWithBothNumbers) {
  const Outcome o = compile({"topology=v5p:2x2x1", "ici_data_parallelism=4", "per_device_batch_size=20000"});
  EXPECT_EQ(o.status, 6) << o.err;
  EXPECT_TRUE(contains(o.err, "exceeds available HBM (95.73G)")) << o.err;
}

TEST(Plan, SaysWhatWouldMakeAStepFit) {
  if (!kAddressSpaceCanBeLimited) GTEST_SKIP() << "the sanitizer reserves more than this test allows";
  // Needs 6.5 GiB, nearly all of it activations saved for the backward pass.
  const Outcome o = shell("ulimit -v 5000000; " MD_BINARY_DIR "/maxdiffusion plan " + kConfig + " " + kModel +
                          " activations_dtype=float32 scan_layers=true per_device_batch_size=600 "
                          "xla_flags=--xla_backend_optimization_level=0");
  EXPECT_EQ(o.status, 6) << o.err;
  EXPECT_TRUE(contains(o.err, " GiB on each device, which has 4.77 GiB")) << o.err;
  EXPECT_TRUE(contains(o.err, "try: remat_policy=FULL")) << o.err;
  EXPECT_TRUE(contains(o.out, "with remat_policy=FULL: it fits, ")) << o.out;
}

TEST(Plan, ItsKeyStandsBeforeTheConfigAndAfterIt) {
  const std::string config = MD_SOURCE_DIR "/configs/quickstart.yml";
  for (const auto& words : std::vector<std::vector<std::string>>{{"plan", "--fit", "8 apples", config},
                                                                 {"plan", config, "--fit=8 apples"},
                                                                 {"plan", config, "fit=8 apples"}}) {
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, "fit is '8 apples'; expected a size such as 24GB")) << o.err;
  }
}

TEST(Plan, FitGivesKeysThatTheCompilerConfirms) {
  std::vector<std::string> words = {"plan",
                                    MD_SOURCE_DIR "/configs/base_xl.yml",
                                    "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/emoji",
                                    "run_name=fit",
                                    "train_lora=true",
                                    "resolution=64",
                                    "per_device_batch_size=2"};
  const auto planned = [&](const std::vector<std::string>& more_words) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more_words.begin(), more_words.end());
    return maxdiffusion(all);
  };
  const auto mib = [](const Outcome& o) { return number_after(o.out, "\ntogether "); };
  Outcome o = planned({});
  ASSERT_EQ(o.status, 0) << o.err;
  const double configured = mib(o);
  // No combination fits the last size.
  o = planned({fmt::format("fit={:.0f}MiB,{:.1f}MiB,1MB", configured + 1, 0.85 * configured)});
  EXPECT_EQ(o.status, 6);
  EXPECT_TRUE(contains(o.err, "fit=1MB: no combination takes at most 1.0 MiB; the smallest takes ")) << o.err;
  // All output but the results is comments; the first size needs no changes, so it has no keys.
  EXPECT_EQ(number_after(o.out, fmt::format("# fit={:.0f}MiB: ", configured + 1)), configured) << o.out;
  const size_t second = o.out.rfind("# fit=");
  const double promised = number_after(o.out.substr(second), "MiB: ");
  EXPECT_LT(promised, 0.85 * configured);
  std::vector<std::string> keys;
  std::istringstream lines(o.out);
  for (std::string line; std::getline(lines, line);)
    if (!line.starts_with("#")) keys.push_back(line.replace(line.find(": "), 2, "="));
  EXPECT_FALSE(keys.empty());
  o = planned(keys);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NEAR(mib(o), promised, 0.051);  // the same program; both values are printed to 0.1
  EXPECT_TRUE(contains(planned({"fit=24"}).err, "fit is '24'; expected a size such as 24GB or 22.5GiB"));
}

TEST(Plan, SaysWhatSamplingTakes) {
  const Outcome o = maxdiffusion({"plan", kConfig, kModel, "compile_target=sampling", "per_device_batch_size=1",
                                  "prompt=a red heart", "xla_flags=--xla_backend_optimization_level=0"});
  ASSERT_EQ(o.status, 0) << o.err;
  const double parameters = number_after(o.out, "transformer: ");
  EXPECT_TRUE(contains(o.out, " parameters, of which 0 are trained")) << o.out;
  EXPECT_NEAR(number_after(o.out, "trained and "), parameters * 4 / (1 << 20), 0.06);  // frozen, MiB
  // One step of one video with guidance: two times five frames of 4 × 4 tokens through the products of all but the text
  // layers.
  EXPECT_NEAR(number_after(o.out, "work of a step: "), 2 * parameters * 2 * 80 / 1e12, 2e-4);
}

TEST(Plan, CompilesTheProgramThatARunLoads) {
  const TemporaryFolder t;
  auto program = [&](const char* command, const std::string& folder) {
    const Outcome o = maxdiffusion({command, MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                    "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/sd",
                                    "compile_target=sampling", "prompt=a heart", "num_images_per_prompt=1",
                                    "num_inference_steps=2", "resolution=16", "aot_cache_dir=" + (t / folder),
                                    "output_dir=" + (t / "out"), "xla_flags=--xla_backend_optimization_level=0"});
    EXPECT_EQ(o.status, 0) << o.err;
    std::set<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(t / folder))
      if (file.path().extension() == ".pjrt") names.insert(file.path().filename());
    return names;
  };
  const std::set<std::string> planned = program("plan", "planned"), ran = program("generate", "ran");
  ASSERT_EQ(planned.size(), 1U);
  EXPECT_TRUE(ran.contains(*planned.begin()));
}

TEST(CompileAhead, SettingsThatCannotBeAreRefused) {
  EXPECT_EQ(compile({}).status, 2);
  EXPECT_TRUE(contains(compile({}).err, "topology is empty"));
  Outcome o = compile({"topology=v5p:2x2x1", "ici_data_parallelism=3"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "Number of devices per slice 4 does not match")) << o.err;
  o = compile({"topology=v5p:2x2x1", "libtpu_flags=wan"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "'wan' is not one of wan_v5p_train, wan_light, multihost, ulysses")) << o.err;
  o = compile({"topology=v5p:2x2x1", "compile_target=both"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "compile_target is `both`, expected one of: training, sampling")) << o.err;
  const TemporaryFolder folder;
  o = maxdiffusion({"train", kConfig, kModel, "topology=v5p:2x2x1", "output_dir=" + folder.path()});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "programs run on attached hardware only")) << o.err;
}

}  // namespace
}  // namespace md
