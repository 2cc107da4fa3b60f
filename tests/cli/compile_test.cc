// `compile`: what a training step takes on hardware that is not here. Needs libtpu, which `./run test` fetches.
#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kConfig = MD_SOURCE_DIR "/configs/quickstart.yml";

Outcome compile(std::vector<std::string> words) {
  words.insert(words.begin(),
               {"compile", kConfig, "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/emoji",
                "per_device_batch_size=2", "activations_dtype=bfloat16"});
  return maxdiffusion(words);
}

double number_after(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  if (at == text.npos) ADD_FAILURE() << "no '" << words << "' in\n" << text;
  return at == text.npos ? 0 : std::stod(text.substr(at + words.size()));
}

TEST(CompileAhead, SaysWhatAStepTakesOnTpusThatAreNotHere) {
  const Outcome o = compile({"topology=v5p:2x2x1", "ici_data_parallelism=1", "ici_fsdp_parallelism=4"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "topology: 4 × TPU v5")) << o.out;
  EXPECT_TRUE(contains(o.out, "mesh: fsdp 4 (4 devices)")) << o.out;
  EXPECT_TRUE(contains(o.out, " of 95.")) << o.out;  // GiB of a v5p
  // 5,850,020 parameters and two moments of each, f32; most, but not all of them are split in four.
  const double whole = 3 * 4 * 5850020.0 / (1 << 20), held = number_after(o.out, "arguments ");
  EXPECT_GT(held, whole / 4);
  EXPECT_LT(held, whole);
}

TEST(CompileAhead, ATopologyIsNeededAndNothingRunsOnIt) {
  EXPECT_EQ(compile({}).status, 2);
  EXPECT_TRUE(contains(compile({}).err, "topology is empty"));
  Outcome o = compile({"topology=v5p:2x2x1", "ici_data_parallelism=3"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "Number of devices per slice 4 does not match")) << o.err;
  o = maxdiffusion({"train", kConfig, "topology=v5p:2x2x1", "output_dir=/tmp/never"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "nothing can run on it")) << o.err;
}

}  // namespace
}  // namespace md
