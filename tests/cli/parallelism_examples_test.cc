// The examples of MaxDiffusion's page on parallelism, with the sizes from its text: compiles a small model's step on
// their meshes for TPUs that this machine does not have. Needs libtpu, which `./run test` fetches.
#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "tests/cli/command.h"
#include "tests/cli/flux_model.h"

namespace md {
namespace {

/// A Wan model with one block of 8 heads, head_dim 16.
Outcome compile_video(std::vector<std::string> words) {
  const TemporaryFolder folder;
  std::filesystem::copy(MD_SOURCE_DIR "/configs/models/moving_emoji", folder.path(),
                        std::filesystem::copy_options::recursive);
  write_file_atomic(folder / "transformer/config.json", R"({"_class_name": "WanTransformer3DModel",
    "num_attention_heads": 8, "attention_head_dim": 16, "in_channels": 8, "out_channels": 8, "text_dim": 64,
    "freq_dim": 32, "ffn_dim": 256, "num_layers": 1})");
  words.insert(words.begin(),
               {"compile", MD_SOURCE_DIR "/configs/quickstart_video.yml",
                "pretrained_model_name_or_path=" + folder.path(), "activations_dtype=float32", "ema_decay=0",
                "attention=flash", "flash_min_seq_length=0", "optimizer=adamw", "optimizer_args=[]"});
  return maxdiffusion(words);
}

/// An SDXL model with one level and a transformer.
Outcome compile_images(std::vector<std::string> words) {
  const TemporaryFolder folder;
  std::filesystem::copy(MD_SOURCE_DIR "/configs/models/emoji", folder.path(), std::filesystem::copy_options::recursive);
  write_file_atomic(folder / "unet/config.json", R"({"_class_name": "UNet2DConditionModel", "sample_size": 16,
    "in_channels": 4, "out_channels": 4, "block_out_channels": [64], "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D"], "mid_block_type": null, "up_block_types": ["UpBlock2D"],
    "transformer_layers_per_block": [1], "attention_head_dim": [2], "cross_attention_dim": 192,
    "use_linear_projection": true, "addition_embed_type": "text_time", "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 320})");
  words.insert(words.begin(), {"compile", MD_SOURCE_DIR "/configs/quickstart.yml",
                               "pretrained_model_name_or_path=" + folder.path(), "ema_decay=0"});
  return maxdiffusion(words);
}

/// A FLUX.1 model with one block of each type and 8 heads, head_dim 16.
Outcome compile_flux(std::vector<std::string> words) {
  const TemporaryFolder folder;
  words.insert(words.begin(), {"compile", MD_SOURCE_DIR "/configs/base_flux_dev.yml", "train_new_flux=true",
                               flux_model(folder, {8, 16, "4, 6, 6", 1}), "resolution=64", "max_sequence_length=32",
                               "topology=v5p:2x2x1"});
  return maxdiffusion(words);
}

// S1-41, S1-42
TEST(ParallelismExamples, FluxSplitsTheBatchAndTheWeights) {
  const Outcome o = compile_flux({"ici_data_parallelism=2", "ici_fsdp_parallelism=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "mesh: data 2 × fsdp 2 (4 devices)")) << o.out;
  EXPECT_TRUE(contains(o.out, "reduce over data")) << o.out;
  EXPECT_TRUE(contains(o.out, "all-gather over fsdp")) << o.out;
}

// S1-30
TEST(ParallelismExamples, FourSlicesOfEight) {
  const Outcome o = compile_video({"topology=v6e:2x4", "compile_topology_num_slices=4", "dcn_data_parallelism=4",
                                   "ici_data_parallelism=2", "ici_context_parallelism=2", "ici_tensor_parallelism=2",
                                   "per_device_batch_size=0.5"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "topology: 32 × TPU v6")) << o.out;
  EXPECT_TRUE(contains(o.out, "mesh: data 8 × context 2 × tensor 2 (32 devices)")) << o.out;
  // Gradients are reduce-scattered within slices, then summed across slices.
  const auto reported = [&](const std::string& kind) {
    const size_t at = o.out.find(kind + " over data: "), end = o.out.find(';', at);
    return at == o.out.npos ? "" : o.out.substr(at, end - at);
  };
  EXPECT_TRUE(reported("reduce-scatter").ends_with(" MiB (ICI)")) << o.out;
  EXPECT_TRUE(reported("all-reduce").ends_with(" MiB (DCN)")) << o.out;
}

// S1-43, S1-44
TEST(ParallelismExamples, WanSplitsSequencesAndHeadsAndTakesABatchOfOneOnFourDevices) {
  const Outcome o = compile_video({"topology=v5p:2x2x1", "ici_data_parallelism=1", "ici_context_parallelism=2",
                                   "ici_tensor_parallelism=2", "per_device_batch_size=0.25"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "mesh: context 2 × tensor 2 (4 devices)")) << o.out;
  EXPECT_TRUE(contains(o.out, "\nall-reduce over tensor: ")) << o.out;
}

// S1-40
TEST(ParallelismExamples, ImagesOnOneHostTakeDataByItself) {
  const Outcome o = compile_images({"topology=v6e:2x4", "ici_data_parallelism=-1", "per_device_batch_size=1"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "mesh: data 8 (8 devices)")) << o.out;
  EXPECT_FALSE(contains(o.out, "all-gather")) << o.out;
}

// S1-55
TEST(ParallelismExamples, DataFsdpAndTensorTogether) {
  const Outcome o = compile_images({"topology=v6e:2x4", "ici_data_parallelism=2", "ici_fsdp_parallelism=2",
                                    "ici_tensor_parallelism=2", "per_device_batch_size=1"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.out, "mesh: data 2 × fsdp 2 × tensor 2 (8 devices)")) << o.out;
  EXPECT_TRUE(contains(o.out, "all-gather over fsdp")) << o.out;
  EXPECT_TRUE(contains(o.out, "\nall-reduce over tensor: ")) << o.out;
}

}  // namespace
}  // namespace md
