// `compile` and `plan` for GPUs that this machine does not have. Needs the CUDA plugin and its PTX compiler, which
// `./run test` fetches; tests are skipped with a message if they are missing.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/cli/command.h"
#include "tests/cli/flux_model.h"

namespace md {
namespace {

const std::string kConfig = MD_SOURCE_DIR "/configs/quickstart.yml";

/// The quickstart's model with a one-level UNet of `channels` channels whose first block is a `down`.
std::string small_model(const TemporaryFolder& folder, int channels, const char* down) {
  std::filesystem::copy(MD_SOURCE_DIR "/configs/models/emoji", folder.path(), std::filesystem::copy_options::recursive);
  write_file_atomic(folder / "unet/config.json",
                    fmt::format(R"({{"_class_name": "UNet2DConditionModel", "sample_size": 16, "in_channels": 4,
    "out_channels": 4, "block_out_channels": [{}], "layers_per_block": 1, "norm_num_groups": 16,
    "down_block_types": ["{}"], "mid_block_type": null, "up_block_types": ["UpBlock2D"],
    "transformer_layers_per_block": [1], "attention_head_dim": [2], "cross_attention_dim": 192,
    "use_linear_projection": true, "addition_embed_type": "text_time", "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 320}})",
                                channels, down));
  return "pretrained_model_name_or_path=" + folder.path();
}

/// The default has a transformer: 1.0 M parameters, head_dim 40.
Outcome on_eight_h100(std::vector<std::string> words, int channels = 80, const char* down = "CrossAttnDownBlock2D") {
  const TemporaryFolder folder;
  words.insert(words.begin() + 1, {kConfig, small_model(folder, channels, down), "hardware=gpu", "topology=1x1x8",
                                   "gpu_type=h100", "activations_dtype=bfloat16", "ema_decay=0", "attention=flash",
                                   "optimizer=adamw", "optimizer_args=[]"});
  return maxdiffusion(words);
}

bool is_without_compiler(const Outcome& o) { return contains(o.err, "hardware: gpu: no plugin under"); }
#define MD_SKIP_WITHOUT_COMPILER(outcome) \
  if (is_without_compiler(outcome))       \
  GTEST_SKIP() << "jax-cuda13-pjrt is not there (cmake/wheels_gpu.txt); no step is compiled for GPUs"

double number_after(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  if (at == text.npos) ADD_FAILURE() << "no '" << words << "' in\n" << text;
  return at == text.npos ? 0 : std::stod(text.substr(at + words.size()));
}

// S0-100, S4-5, S4-61
TEST(CompileAheadForGpus, SaysWhatAStepTakesOnEightThatAreNotHere) {
  const Outcome o = on_eight_h100({"plan", "ici_data_parallelism=1", "ici_fsdp_parallelism=8", "resolution=64",
                                   "per_device_batch_size=2", "flash_min_seq_length=0"});
  MD_SKIP_WITHOUT_COMPILER(o);
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "topology: 8 × NVIDIA H100 80GB HBM3")) << o.out;
  EXPECT_TRUE(contains(o.out, "mesh: fsdp 8 (8 devices)")) << o.out;
  EXPECT_TRUE(contains(o.out, " of 79.11 GiB")) << o.out;
  // cuDNN computes self and cross attention, forward and backward, and nothing is communicated for them.
  EXPECT_TRUE(contains(o.out, "custom calls of __cudnn$fmhaSoftmax: 2 operations")) << o.out;
  EXPECT_TRUE(contains(o.out, "custom calls of __cudnn$fmhaSoftmaxBackward: 2 operations")) << o.out;
  // Sharded: 3×3 convolutions from 4, 80 and 160 channels and 1×1 ones; self attention and cross attention to 192
  // values per token; the projections around them; the feed-forward layer. Replicated: embeddings of timesteps and
  // sizes, biases, norms and the last convolution.
  const double mib = 1 << 20, all = number_after(o.out, "unet: "),
               split = 80 * (9 * (4 + 2 * 80 + 2 * 160 + 2 * 80) + 2 * 160) + 80 * (4 * 80 + 2 * 80 + 2 * 192) +
                       2 * 80 * 80 + 80 * (2 * 320 + 320),
               weights = 4 * (all - split + split / 8) / mib;
  // Two images: mean and deviation of the latents, 32 tokens and the pooled text; both text embeddings also of the
  // empty prompt, for dropout.
  const double batch = 4.0 * (2 * 16 * 16 * 8 + 3 * (32 * 192 + 128)) / mib;
  const double printed = 0.05 + 1e-6;  // one digit
  EXPECT_NEAR(number_after(o.out, "arguments: weights "), weights, printed) << o.out;
  EXPECT_NEAR(number_after(o.out, "moments "), 2 * weights, printed) << o.out;
  EXPECT_NEAR(number_after(o.out, "temporary: gradients "), weights, printed) << o.out;
  EXPECT_NEAR(number_after(o.out, "arguments "), 3 * weights + batch, printed) << o.out;
  EXPECT_NEAR(number_after(o.out, "together "), number_after(o.out, "arguments ") + number_after(o.out, "temporary "),
              3 * printed);
  // Sharded weights are gathered once in bf16, and their gradients reduced once, also in bf16.
  EXPECT_NEAR(number_after(o.out, "all-gather over fsdp: 1 operations, 1 runs, "), 2 * split / mib, 0.005 + 1e-6);
  EXPECT_NEAR(number_after(o.out, "reduce-scatter over fsdp: 1 operations, 1 runs, "), 2 * split / mib, 0.005 + 1e-6);
  EXPECT_FALSE(contains(o.out, "all-to-all")) << o.out;
  // Peak 989 TFLOP/s.
  EXPECT_NEAR(number_after(o.out, "(products "), number_after(o.out, "work of a step: ") / 989, 1e-4);
}

TEST(CompileAheadForGpus, WhatDoesNotFitTheCardIsAnErrorWithBothNumbers) {
  const Outcome o = on_eight_h100(
      {"compile", "ici_data_parallelism=8", "resolution=64", "per_device_batch_size=800000"}, 16, "DownBlock2D");
  MD_SKIP_WITHOUT_COMPILER(o);
  EXPECT_EQ(o.status, 6) << o.err;
  EXPECT_TRUE(contains(o.err, " GiB on each device, which has 79.11 GiB")) << o.err;
  EXPECT_GT(number_after(o.out, "together "), 79.11);
  // The report is still complete: gradients are all-reduced over all devices, and nothing is gathered.
  EXPECT_TRUE(contains(o.out, "all-reduce over data: ")) << o.out;
  EXPECT_FALSE(contains(o.out, "all-gather")) << o.out;
}

// Two blocks of both types, 1536 wide, all in the host's memory.
TEST(CompileAheadForGpus, ThePlanCountsTheTimeOfCopiesOfSwappedBlocks) {
  const TemporaryFolder folder;
  const Outcome o =
      maxdiffusion({"plan", MD_SOURCE_DIR "/configs/base_flux_dev.yml", flux_model(folder, {12, 128, "16, 56, 56", 2}),
                    "train_lora=true", "lora_rank=4", "weights_dtype=bfloat16", "scan_layers=true", "blocks_to_swap=4",
                    "resolution=64", "max_sequence_length=32", "hardware=gpu", "topology=1x1x1", "gpu_type=h200"});
  MD_SKIP_WITHOUT_COMPILER(o);
  ASSERT_EQ(o.status, 0) << o.err;
  // Of two streams eight projections of the attention, two feed-forward layers and two modulations; of one stream
  // three projections, the layer into and out of both, and a modulation. In bf16; two loops for each type copy three
  // rows, of which one is not read, at 63 GB/s.
  const double two = 8 + 2 * 8 + 2 * 6, one = 3 + 4 + 5 + 3, bytes = 2 * 1536.0 * 1536 * (two + one);
  EXPECT_NEAR(number_after(o.out, "copies from the host's memory "), 2 * 3 * bytes / 63e9, 1e-4) << o.out;
  EXPECT_GE(number_after(o.out, "predicted step time: at least "),
            number_after(o.out, "copies from the host's memory "));
}

TEST(CompileAheadForGpus, KeysOfGpusAndOfTpusAreNotMixed) {
  auto refusal = [](std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"compile", kConfig, "pretrained_model_name_or_path=" MD_SOURCE_DIR "/configs/models/emoji"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 2) << o.err;
    return o.err;
  };
  EXPECT_TRUE(contains(refusal({"topology=v5p:2x2x1", "gpu_type=h100"}), "gpu_type is 'h100' and hardware is cpu"));
  EXPECT_TRUE(contains(refusal({"hardware=gpu", "gpu_type=h100"}), "topology is empty"));
  EXPECT_TRUE(contains(refusal({"hardware=gpu", "gpu_type=h100", "topology=v5p:2x2x1"}),
                       "topology is 'v5p:2x2x1'; expected numbers such as 1x1x8"));
  EXPECT_TRUE(
      contains(refusal({"hardware=gpu", "topology=1x1x8"}), "gpu_type is ''; expected one of: b200, h200, h100, a100"));
  EXPECT_TRUE(contains(refusal({"hardware=gpu", "gpu_type=h100", "topology=1x1x8", "compile_topology_num_slices=2"}),
                       "compile_topology_num_slices is 2; expected 1: of GPUs"));
}

}  // namespace
}  // namespace md
